"""The edge-cloud state machines: no schedule of the link may change an answer or hang a session."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from fake_models import FakeEngine, as_engine, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.ahead import MAX_AHEAD, AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import ClientConfig, EdgeClient, Source
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link import (
    Action,
    Connect,
    Deliver,
    Disconnect,
    LinkConfig,
    Send,
    SessionLink,
)
from collab_llm_nodes.protocols.edge_cloud.lookahead import Lookahead
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Failure,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import (
    OutcomeQueue,
    PreDraftConfig,
    ReadyDrafts,
)
from collab_llm_nodes.protocols.edge_cloud.server import (
    EarlyExitQueue,
    ExitConfig,
    VerifierSession,
    argmax_rows,
)
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession

GREEDY = SamplingConfig()
LAWS = [GREEDY, SamplingConfig(1.0, seed=5), SamplingConfig(1.0, law="coupled", seed=5)]
PROMPT = Prompt("go to the red box")
OPEN = Open(PROMPT.text, (), GREEDY, 24, "")
PATIENT = LinkConfig(verdict_deadline_s=600, backoff_initial_s=0.1)


# --- The whole protocol under a virtual clock ---------------------------------------------------


@dataclass
class Weather:
    """What the link does to messages; all draws from one source, so a case can be repeated."""

    draws: random.Random
    breaks: int = 0  # so many times the stream dies, with everything in flight
    refusals: int = 0  # so many attempts to connect fail
    duplicates: float = 0.0  # share of messages that come twice
    evictions: int = 0  # so many times the verifier lets go of the session
    window: int = 16  # drafts that may be ahead
    delay_s: float = 0.0  # delays are uniform up to this; early exits overtake and are overtaken

    def delay(self) -> float:
        return self.draws.uniform(0, self.delay_s)

    def copies(self) -> int:
        return 1 + (self.draws.random() < self.duplicates)

    def breaks_now(self) -> bool:
        if self.breaks and self.draws.random() < 0.15:
            self.breaks -= 1
            return True
        return False

    def evicts(self) -> bool:
        if self.evictions and self.draws.random() < 0.1:
            self.evictions -= 1
            return True
        return False

    def refuses(self) -> bool:
        if self.refusals and self.draws.random() < 0.5:
            self.refusals -= 1
            return True
        return False


@dataclass(eq=False)
class Stream:
    alive: bool = True
    busy_until: float = 0.0  # messages to the server keep their order, as on a gRPC stream,
    verdict_due: float = 0.0  # and so do verdicts
    target: TargetSession | None = None


@dataclass
class Simulation:
    """Edge client, ready drafts, link and verifier; every delay and loss is the weather's."""

    sampling: SamplingConfig
    weather: Weather
    max_tokens: int = 24
    gamma: int = 4
    target: FakeEngine = field(default_factory=lambda: FakeEngine(1))
    now: float = 0.0

    def __post_init__(self) -> None:
        opened = replace(OPEN, sampling=self.sampling, max_tokens=self.max_tokens)
        self.client = EdgeClient(ClientConfig(self.gamma, self.max_tokens))
        draft = FakeEngine(1, noise=0.5)
        self.drafter = Drafter(as_engine(draft), encode(PROMPT), self.sampling)
        ahead = AheadConfig(predictions=4, min_probability=0.0, push_window=self.weather.window)
        self.ready = ReadyDrafts()
        self.lookahead = Lookahead(
            self.client,
            self.drafter,
            self._transmit,
            self.ready,
            PreDraftConfig(),
            ahead,
            Profile(),
        )
        self.link = SessionLink(opened, PATIENT)
        self.stream: Stream | None = None
        self.streams = 0
        self.failure: Failure | None = None
        self.verdicts: list[int] = []
        self.hits = 0
        self.pushed_hits = 0
        self.instant_hits = 0
        self._heard = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def run(self) -> tuple[int, ...]:
        self._perform(self.link.start(self.now))
        self._send_draft(self.drafter.draft(self.client.next_draft()))
        for _ in range(20_000):
            if not self._events:
                break
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert self.client.finished, f"stuck at {self.now} s: {self.failure}"
        assert self.link.done
        assert self.verdicts == sorted(set(self.verdicts)), "a verdict was delivered twice"
        return tuple(self.client.generated)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                self._connect()
            elif isinstance(action, Send):
                self._to_server(action.message)
            elif isinstance(action, Deliver):
                self._deliver(action.message)
            elif isinstance(action, Disconnect) and self.stream is not None:
                self.stream.alive = False
        if self.link.next_tick is not None:
            self._at(max(self.now, self.link.next_tick), self._tick)

    def _tick(self) -> None:
        due = self.link.next_tick
        if due is not None and self.now >= due:
            self._perform(self.link.on_tick(self.now))

    # The link.

    def _connect(self) -> None:
        if self.stream is not None:
            self.stream.alive = False  # its late messages must not reach the new one
        stream = self.stream = Stream()
        self.streams += 1
        if self.weather.refuses():
            self._at(self.now + self.weather.delay(), lambda: self._lost(stream))
        else:
            self._at(self.now + self.weather.delay(), lambda: self._connected(stream))

    def _connected(self, stream: Stream) -> None:
        if stream is self.stream and stream.alive:
            self._perform(self.link.on_connected(self.now))

    def _lost(self, stream: Stream) -> None:
        stream.alive = False
        if stream is self.stream:
            self._perform(self.link.on_disconnected("broken", self.now))

    def _break(self, stream: Stream) -> None:
        stream.alive = False
        self._at(self.now + self.weather.delay(), lambda: self._lost(stream))

    def _to_server(self, message: ClientMessage) -> None:
        stream = self.stream
        assert stream is not None
        for _ in range(self.weather.copies() if isinstance(message, Draft) else 1):
            stream.busy_until = max(stream.busy_until, self.now + self.weather.delay())
            self._at(stream.busy_until, lambda: self._serve(stream, message))
        if stream.alive and self.weather.breaks_now():
            self._break(stream)

    def _to_client(self, stream: Stream, message: ServerMessage) -> None:
        def arrive() -> None:
            if stream is self.stream and stream.alive:
                self._perform(self.link.on_message(message, self.now))

        for _ in range(self.weather.copies()):
            when = self.now + self.weather.delay()
            if isinstance(message, Verdict):
                when = stream.verdict_due = max(when, stream.verdict_due)
            self._at(when, arrive)

    # The verifier.

    def _serve(self, stream: Stream, message: ClientMessage) -> None:
        if not stream.alive:
            return
        if isinstance(message, Open):
            prompt = encode(Prompt(message.text, message.images))
            stream.target = TargetSession(as_engine(self.target), prompt, message)
            stream.target.prefill()
            self._to_client(stream, Opened("session", len(prompt.ids)))
        elif isinstance(message, Draft) and stream.target is not None:
            if self.weather.evicts():
                self._to_client(stream, Failure("REPLAY", "let go"))
                stream.target = None
                return
            stream.target.offer(message)
            self._verify_next(stream)
        if stream.alive and self.weather.breaks_now():
            self._break(stream)

    def _verify_next(self, stream: Stream) -> None:
        """One verification after the other, while drafts are due; each takes its time."""
        if not stream.alive or stream.target is None:
            return
        verdict = stream.target.verify_next(lambda e: self._to_client(stream, e))
        if verdict is not None:
            self._to_client(stream, verdict)
            self._at(self.now + self.weather.delay(), lambda: self._verify_next(stream))

    # The edge client.

    def _send_draft(self, draft: Draft | None) -> None:
        assert draft is not None
        if self.client.on_sent(draft):
            self._transmit(draft)
            self._taken_off()

    def _transmit(self, draft: Draft) -> None:
        for _ in range(self.weather.copies()):
            self._perform(self.link.on_draft(draft, self.now))

    def _taken_off(self) -> None:
        assert self.client.in_flight is not None
        self.lookahead.start_round(self.client.next_draft(), self.client.in_flight)
        self._at(self.now + self.weather.delay(), self._step)

    def _step(self) -> None:
        if not self.client.finished and self.lookahead.step():
            self._at(self.now + self.weather.delay(), self._step)

    def _deliver(self, message: ServerMessage) -> None:
        """A ready draft leaves now; the loop hears of the message later, in the same order."""
        sent = self.ready.on_verdict(message) if isinstance(message, Verdict) else None
        if sent is not None:
            self._transmit(sent)
        self._heard = max(self._heard, self.now + self.weather.delay())
        self._at(self._heard, lambda: self._on_message(message, sent))

    def _on_message(self, message: ServerMessage, sent: Draft | None) -> None:
        if isinstance(message, Failure):
            self.failure = message
        elif isinstance(message, EarlyExit):
            if self.client.on_early_exit(message) and not message.finished:
                self.lookahead.expect(message.tokens, message.confidence)
                self._at(self.now + self.weather.delay(), self._step)
        elif isinstance(message, Verdict):
            self.verdicts.append(message.round)
            self.client.on_verdict(message)
            if self.client.finished:
                return
            answer = tuple(self.client.generated)
            self.lookahead.advance(answer)
            if self.client.in_flight is not None:
                self.pushed_hits += 1
                self._taken_off()
                return
            if sent is not None:
                self.instant_hits += 1
                assert self.client.on_sent(sent)
                self._taken_off()
                return
            found = self.ready.lookup(answer)
            self.hits += found is not None
            draft = found or self.drafter.draft(self.client.next_draft())
            self._at(self.now + self.weather.delay(), lambda: self._send_draft(draft))


@pytest.mark.parametrize("sampling", LAWS, ids=["greedy", "rejection", "coupled"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    breaks=st.integers(0, 8),
    refusals=st.integers(0, 4),
    duplicates=st.sampled_from([0.0, 0.3, 0.9]),
    evictions=st.integers(0, 4),
    window=st.sampled_from([0, 3, 48]),
    delay_s=st.sampled_from([0.0, 0.01, 1.0]),
    gamma=st.sampled_from([4, 0]),
)
def test_no_schedule_of_the_link_changes_the_answer(
    sampling: SamplingConfig,
    seed: int,
    breaks: int,
    refusals: int,
    duplicates: float,
    evictions: int,
    window: int,
    delay_s: float,
    gamma: int,
) -> None:
    calm = Simulation(sampling, Weather(random.Random(0)), gamma=gamma).run()
    weather = Weather(random.Random(seed), breaks, refusals, duplicates, evictions, window, delay_s)
    assert Simulation(sampling, weather, gamma=gamma).run() == calm
    if sampling.greedy or sampling.law == "coupled":
        assert calm == FakeEngine(1).answer(encode(PROMPT), sampling, 24)


def test_the_simulated_link_is_rough() -> None:
    """The property above would hold trivially on a link that never breaks."""
    instant = pushed = 0
    for seed in range(3, 6):
        weather = Weather(random.Random(seed), breaks=8, refusals=4, evictions=3, delay_s=0.1)
        rough = Simulation(GREEDY, weather)
        rough.run()
        assert rough.streams > 4
        assert rough.client.metrics.early_exits > 3
        assert weather.evictions < 3
        pushed += rough.pushed_hits
        waiting = Simulation(GREEDY, Weather(random.Random(seed), window=0, delay_s=0.1))
        waiting.run()
        instant += waiting.instant_hits
    assert pushed > 0
    assert instant > 0


def test_a_client_that_ignores_replay_would_be_caught() -> None:
    """Mutation of the link: reopen without the confirmed tokens."""

    class Forgetful(SessionLink):
        def on_connected(self, now: float) -> list[Action]:
            actions = super().on_connected(now)
            return [
                Send(replace(a.message, replay=()))
                if isinstance(a, Send) and isinstance(a.message, Open)
                else a
                for a in actions
            ]

    def outcome(seed: int) -> str:
        weather = Weather(random.Random(seed), breaks=4, delay_s=0.1)
        simulation = Simulation(GREEDY, weather)
        simulation.link = Forgetful(replace(OPEN, max_tokens=24), PATIENT)
        try:
            return "same" if simulation.run() == calm else "differs"
        except (ProtocolError, AssertionError):  # it is refused, or never answered
            return "refused"

    calm = Simulation(GREEDY, Weather(random.Random(0))).run()
    assert "refused" in {outcome(seed) for seed in range(5)}


# --- The link alone -----------------------------------------------------------------------------

DRAFT = Draft(0, 0, (5, 6, 7, 8))
VERDICT = Verdict(0, (5, 6, 9), 2, False, 0.01)


def opened_link(config: LinkConfig = PATIENT) -> SessionLink:
    link = SessionLink(OPEN, config)
    assert link.start(0.0) == [Connect(config.connect_deadline_s)]
    assert link.on_connected(0.0) == [Send(OPEN)]
    return link


def failure_in(actions: list[Action]) -> Failure:
    found = [a.message for a in actions if isinstance(a, Deliver)]
    assert len(found) == 1
    assert isinstance(found[0], Failure)
    assert actions[-1] == Disconnect()
    return found[0]


def test_a_lost_stream_is_reopened_with_the_confirmed_tokens_and_the_outstanding_draft() -> None:
    link = opened_link()
    assert link.on_draft(DRAFT, 0.1) == [Send(DRAFT)]
    assert link.on_message(VERDICT, 0.2) == [Deliver(VERDICT)]
    second = Draft(1, 3, (1, 2))
    assert link.on_draft(second, 0.3) == [Send(second)]
    assert link.on_disconnected("reset", 0.4) == []
    assert link.next_tick == pytest.approx(0.5)
    assert link.on_tick(0.49) == []
    assert link.on_tick(0.5) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(0.6) == [
        Send(replace(OPEN, replay=(5, 6, 9), round=1)),
        Send(second),
    ]


def test_a_draft_made_while_connecting_goes_out_behind_open() -> None:
    link = SessionLink(OPEN, PATIENT)
    link.start(0.0)
    assert link.on_draft(DRAFT, 0.1) == []
    assert link.on_connected(0.2) == [Send(OPEN), Send(DRAFT)]


def test_a_stream_lost_between_rounds_is_made_again_by_the_next_draft_only() -> None:
    link = opened_link()
    link.on_message(Opened("s", 7), 0.1)
    assert link.on_disconnected("idle too long", 50.0) == []
    assert link.next_tick is None
    assert link.on_draft(DRAFT, 99.0) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(99.1) == [Send(OPEN), Send(DRAFT)]


def test_back_off_doubles_up_to_its_limit_and_starts_anew_after_an_answer() -> None:
    config = LinkConfig(verdict_deadline_s=600, backoff_initial_s=0.1, backoff_max_s=0.3)
    link = SessionLink(OPEN, config)
    link.start(0.0)
    now, pauses = 0.0, []
    for _ in range(4):
        link.on_disconnected("refused", now)
        assert link.next_tick is not None
        pauses.append(link.next_tick - now)
        now = link.next_tick
        assert link.on_tick(now) == [Connect(config.connect_deadline_s)]
    assert pauses == pytest.approx([0.1, 0.2, 0.3, 0.3])
    link.on_connected(now)
    link.on_draft(DRAFT, now)
    link.on_message(Opened("s", 7), now)
    link.on_disconnected("reset", now)
    assert link.next_tick == pytest.approx(now + 0.1)
    assert link.reconnects == 4


def test_a_refusal_and_the_end_of_its_stream_count_as_one_loss() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.0)
    link.on_message(Failure("UNAVAILABLE", "no room"), 1.0)
    link.on_disconnected("the verifier ended the stream", 1.01)
    assert link.next_tick == pytest.approx(1.1)
    assert link.on_tick(1.1) == [Connect(PATIENT.connect_deadline_s)]


@pytest.mark.parametrize("connected", [False, True])
def test_a_refusal_that_no_retry_cures_ends_the_session(connected: bool) -> None:
    link = SessionLink(OPEN, PATIENT)
    link.start(0.0)
    if connected:
        link.on_connected(0.0)
    refusal = Failure("UNAUTHENTICATED", "wrong token", "token", "give the right one")
    assert failure_in(link.on_message(refusal, 0.1)) == refusal
    assert link.done
    assert link.next_tick is None
    assert link.on_draft(DRAFT, 0.2) == link.on_tick(9e9) == link.close() == []


def test_silence_on_an_open_stream_is_deadline_exceeded() -> None:
    link = opened_link(LinkConfig(verdict_deadline_s=5))
    link.on_draft(DRAFT, 1.0)
    assert link.next_tick == 6.0
    assert link.on_tick(5.99) == []
    failure = failure_in(link.on_tick(6.0))
    assert failure.code == "DEADLINE_EXCEEDED"
    assert failure.remedy


def test_no_stream_before_the_deadline_is_unavailable_and_says_why() -> None:
    link = SessionLink(OPEN, LinkConfig(verdict_deadline_s=1, backoff_initial_s=0.4))
    link.start(0.0)
    link.on_disconnected("connection refused", 0.1)
    link.on_tick(0.5)
    link.on_disconnected("connection refused", 0.6)
    failure = failure_in(link.on_tick(1.0))
    assert failure.code == "UNAVAILABLE"
    assert "connection refused" in failure.message


def test_stale_and_repeated_messages_are_dropped() -> None:
    link = opened_link()
    assert link.on_message(VERDICT, 0.1) == []  # nothing was asked
    link.on_draft(DRAFT, 0.2)
    assert link.on_draft(DRAFT, 0.2) == []
    assert link.on_draft(Draft(7, 0, (1,)), 0.2) == []
    assert link.on_message(replace(VERDICT, round=3), 0.3) == []
    link.on_message(VERDICT, 0.4)
    assert link.on_message(VERDICT, 0.5) == []
    assert link.on_message(EarlyExit(0, 1, (5,), 0, False, 0.5), 0.6) == []


def test_a_draft_pushed_ahead_becomes_the_outstanding_one_and_survives_a_lost_stream() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    hit = Draft(1, 3, (1, 2), after=(5, 6, 9))
    miss = Draft(1, 3, (3, 4), after=(5, 6, 7))
    deeper = Draft(2, 6, (4,), after=(1, 2, 3))
    for draft in (hit, miss, deeper):
        assert link.on_draft(draft, 0.3) == [Send(draft)]
    assert link.on_message(VERDICT, 0.4) == [Deliver(VERDICT)]
    assert link.next_tick == 0.4 + PATIENT.verdict_deadline_s, "its verdict is awaited now"
    link.on_disconnected("reset", 0.5)
    link.on_tick(0.6)
    reopened = Send(replace(OPEN, replay=(5, 6, 9), round=1))
    assert link.on_connected(0.6) == [reopened, Send(hit), Send(deeper)]
    assert link.on_draft(Draft(1, 3, (8,)), 0.7) == [], "the round has its draft"


def test_a_push_that_comes_after_its_verdict_is_the_rounds_draft() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    link.on_message(VERDICT, 0.3)
    late = Draft(1, 3, (1, 2), after=(5, 6, 9))
    assert link.on_draft(replace(late, after=(5, 6, 8)), 0.4) == []
    assert link.on_draft(late, 0.4) == [Send(late)]
    assert link.next_tick == 0.4 + PATIENT.verdict_deadline_s


def test_solo_rounds_each_have_their_deadline_and_are_asked_for_again_after_a_loss() -> None:
    link = opened_link()
    link.on_draft(Draft(0, 0, (), autoregressive_rounds=2), 0.0)
    link.on_message(Verdict(0, (4,), 0, False), 1.0)
    assert link.next_tick == 1.0 + PATIENT.verdict_deadline_s
    link.on_disconnected("reset", 1.5)
    link.on_tick(1.6)
    assert link.on_connected(1.6)[1:] == [Send(Draft(1, 1, (), autoregressive_rounds=1))]


def test_an_evicted_session_is_opened_again_at_once_but_not_in_a_loop() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    evicted = Failure("REPLAY", "let go")
    assert link.on_message(evicted, 0.3) == [Connect(PATIENT.connect_deadline_s)]
    assert link.on_connected(0.3) == [Send(OPEN), Send(DRAFT)]
    assert link.on_message(evicted, 0.4) == []
    assert link.next_tick == 0.4 + PATIENT.backoff_initial_s
    idle = opened_link()
    idle.on_message(Opened("s", 7), 0.1)
    assert idle.on_message(evicted, 0.3) == []
    assert idle.on_draft(DRAFT, 9.0) == [Connect(PATIENT.connect_deadline_s)]


def test_the_last_verdict_ends_the_session() -> None:
    link = opened_link()
    link.on_draft(DRAFT, 0.2)
    last = replace(VERDICT, finished=True)
    assert link.on_message(last, 0.3) == [Deliver(last), Disconnect()]
    assert link.done


def test_close_tells_the_verifier_if_there_is_a_stream() -> None:
    assert opened_link().close() == [Send(Close()), Disconnect()]
    assert SessionLink(OPEN, PATIENT).close() == [Disconnect()]


OPERATIONS = st.sampled_from(
    ["connected", "disconnected", "draft", "opened", "exit", "verdict", "busy", "fatal", "tick"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(OPERATIONS, st.floats(0, 2)), max_size=40))
def test_whatever_happens_the_link_neither_hangs_nor_sends_without_a_stream(
    steps: list[tuple[str, float]],
) -> None:
    config = LinkConfig(verdict_deadline_s=5.0, backoff_initial_s=0.1)
    link = SessionLink(OPEN, config)
    now, start, round_ = 0.0, 0, 0
    stream = False
    waiting_since: float | None = 0.0
    actions = link.start(now)
    assert actions == [Connect(config.connect_deadline_s)]
    for operation, pause in steps:
        done = link.done
        if link.next_tick is not None:
            now = min(now + pause, link.next_tick)  # the driver's promise
        else:
            now += pause
        if operation == "connected":
            actions = link.on_connected(now)
            stream = stream or bool(actions)
        elif operation == "disconnected":
            actions = link.on_disconnected("lost", now)
            stream = False
        elif operation == "draft":
            actions = link.on_draft(Draft(round_, start, (1, 2)), now)
            if not done and waiting_since is None:
                waiting_since = now
        elif operation == "opened":
            actions = link.on_message(Opened("s", 7), now)
        elif operation == "exit":
            actions = link.on_message(EarlyExit(round_, 1, (1,), 1, False, 0.5), now)
        elif operation == "verdict":
            actions = link.on_message(Verdict(round_, (1, 2, 3), 2, False), now)
        elif operation == "busy":
            actions = link.on_message(Failure("UNAVAILABLE", "no room"), now)
            stream = False
        elif operation == "fatal":
            actions = link.on_message(Failure("INTERNAL", "broken"), now)
        else:
            actions = link.on_tick(now)
        if done:
            assert actions == []
        for action in actions:
            if isinstance(action, Connect):
                stream = False
            if isinstance(action, Send):
                assert stream, f"{action} without a stream"
            if isinstance(action, Deliver) and isinstance(action.message, Verdict):
                round_, start, waiting_since = round_ + 1, start + 3, None
        if not link.done and link._outstanding is not None:
            assert link.next_tick is not None, "waiting without a deadline"
            assert link.next_tick <= now + config.verdict_deadline_s
    for _ in range(1000):  # silence
        if link.next_tick is None:
            break
        now = link.next_tick
        link.on_tick(now)
        link.on_disconnected("lost", now)
    assert link.done or link._outstanding is None


# --- Pre-draft cache, exit queue, edge client, verifier session ----------------------------------


def exit_(tokens: tuple[int, ...], confidence: float, round_: int = 0, layer: int = 1) -> EarlyExit:
    return EarlyExit(round_, layer, tokens, len(tokens) - 1, False, confidence)


def test_the_queue_gives_the_most_confident_outcome_first_within_its_budget() -> None:
    waiting = OutcomeQueue(PreDraftConfig(max_predrafts=2))
    for tokens, confidence in [((1,), 0.2), ((2,), 0.9), ((3,), 0.5), ((2,), 0.99)]:
        waiting.push(tokens, confidence)
    assert waiting.best == 0.99
    assert [waiting.pop(), waiting.pop(), waiting.pop()] == [(2,), (3,), None]
    assert waiting.best == 0.0


def test_the_fifo_queue_keeps_the_order_of_arrival() -> None:
    waiting = OutcomeQueue(PreDraftConfig(queue="fifo"))
    waiting.push((1,), 0.2)
    waiting.push((2,), 0.9)
    assert [waiting.pop(), waiting.pop()] == [(1,), (2,)]


def test_a_ready_draft_is_found_by_the_answer_it_continues() -> None:
    ready = ReadyDrafts()
    made = Draft(1, 3, (7,), cached=True)
    ready.store((5, 6, 9), made)
    assert ready.lookup((5, 6, 9)) is made
    assert ready.lookup((5, 6)) is None
    ready.advance((5, 6, 9))
    assert ready.lookup((5, 6, 9)) is made
    ready.advance((5, 6, 9, 1))
    assert ready.lookup((5, 6, 9)) is None


def test_a_verdict_gives_the_draft_that_is_ready_for_it_once() -> None:
    """Verdicts may be several rounds ahead of the loop, repeated, or answered by a pushed draft."""
    ready = ReadyDrafts()
    second, pushed = Draft(1, 2, (7,)), Draft(2, 4, (8,), after=(7, 3))
    for answer, draft in [((5, 6), second), ((5, 6, 7, 3), pushed), ((5, 9), Draft(1, 2, (1,)))]:
        ready.store(answer, draft)
    assert ready.on_verdict(Verdict(0, (5, 6), 1, False)) is second
    assert ready.on_verdict(Verdict(0, (5, 6), 1, False)) is None, "a repetition"
    assert ready.on_verdict(Verdict(1, (7, 3), 1, False)) is None, "the verifier has it"
    ready.store((5, 6, 7, 3, 4), Draft(3, 5, (2,)))
    assert ready.on_verdict(Verdict(2, (4,), 0, True)) is None, "the answer is complete"
    over = ReadyDrafts()
    over.store((5,), Draft(1, 1, (7,)))
    over.close()
    assert over.on_verdict(Verdict(0, (5,), 0, False)) is None, "the loop has ended"


def test_what_a_verdict_has_not_made_void_stays_and_is_worth_more() -> None:
    waiting = OutcomeQueue(PreDraftConfig(max_predrafts=2))
    for answer, probability in [((1,), 0.5), ((1, 2), 0.4), ((4,), 0.3), ((4, 5), 0.2)]:
        waiting.push(answer, probability)
    assert [waiting.pop(), waiting.pop()] == [(1,), (1, 2)]
    waiting.advance((4,), 0.3)
    assert waiting.best == pytest.approx(0.2 / 0.3), "the budget is the round's"
    assert [waiting.pop(), waiting.pop()] == [(4, 5), None]
    waiting.push((1, 9), 0.9)
    assert waiting.pop() is None, "void"


def test_an_exit_that_is_surer_raises_what_was_predicted() -> None:
    waiting = OutcomeQueue(PreDraftConfig())
    for answer, probability in [((1,), 0.02), ((2,), 0.1), ((1,), 0.95), ((1,), 0.5)]:
        waiting.push(answer, probability)
    assert waiting.best == 0.95
    assert [waiting.pop(), waiting.pop(), waiting.pop()] == [(1,), (2,), None]
    waiting.push((1,), 0.99)
    assert waiting.pop() is None, "it was popped"


TOKENS = st.lists(st.integers(1, 2), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["advance", "push", "pop"]), TOKENS),
        max_size=40,
    )
)
def test_the_queue_never_gives_what_cannot_come(
    steps: list[tuple[str, tuple[int, ...]]],
) -> None:
    waiting = OutcomeQueue(PreDraftConfig(queue="random"))
    answer: tuple[int, ...] = ()
    for step, tokens in steps:
        if step == "advance":
            answer += tokens
            waiting.advance(answer)
        elif step == "push":
            waiting.push(tokens, 0.5)
        else:
            popped = waiting.pop()
            assert popped is None or (popped[: len(answer)] == answer and popped != answer)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["verdict", "advance", "store"]), TOKENS),
        max_size=40,
    )
)
def test_no_ready_draft_is_given_for_another_answer(
    steps: list[tuple[str, tuple[int, ...]]],
) -> None:
    """The loop may handle a verdict long after it was received, and fill the table meanwhile."""
    ready = ReadyDrafts()
    answers: list[tuple[int, ...]] = [()]  # after each verdict that was received
    handled, stored = 0, set[tuple[int, ...]]()
    for step, tokens in steps:
        if step == "verdict":
            answers.append(answers[-1] + tokens)
            found = ready.on_verdict(Verdict(len(answers) - 2, tokens, 0, False))
            assert found is None or found.tokens == answers[-1]
        elif step == "advance":
            handled = min(handled + 1, len(answers) - 1)
            now = answers[handled]
            ready.advance(now)
            void = [answer for answer in stored if answer[: len(now)] != now]
            assert not any(ready.lookup(answer) for answer in void)
        else:
            answer = answers[handled] + tokens
            stored.add(answer)
            ready.store(answer, Draft(handled + 1, len(answer), answer))
            kept = ready.lookup(answer)
            assert kept is not None
            assert kept.tokens == answer


def test_tops_are_those_of_each_row_and_a_row_that_says_nothing_spoils_no_other() -> None:
    nan, inf = math.nan, math.inf
    first = torch.tensor([[0.0, 2.0, 2.0], [1.0, -inf, 0.0]])
    second = torch.tensor([[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf]])
    third = torch.tensor([[-inf, 3.0, -inf]])
    parts = first, second, third
    for part, tops in zip(parts, argmax_rows(parts, probabilities=True), strict=True):
        assert tops.tokens == part.argmax(dim=-1).tolist()
        assert tops.sound == (part is not second)
        expected = part.softmax(dim=-1).amax(dim=-1)
        np.testing.assert_allclose(tops.probabilities, expected)
        assert argmax_rows([part]) == [tops._replace(probabilities=[])]
    for row in second:
        assert not argmax_rows([row[None]])[0].sound
    assert argmax_rows([]) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=20))
def test_the_verifier_sends_distinct_outcomes_in_order_of_confidence(
    exits: list[tuple[int, float]],
) -> None:
    queue = EarlyExitQueue(ExitConfig())
    for token, confidence in exits:
        queue.push(exit_((token,), confidence))
    sent = list(iter(queue.pop, None))
    first = dict(reversed(exits))
    assert {e.tokens[0]: e.confidence for e in sent} == first
    assert [e.confidence for e in sent] == sorted((e.confidence for e in sent), reverse=True)
    queue.push(exit_((1,), 0.5))
    queue.reset()
    assert queue.pop() is None


def test_the_edge_client_takes_one_draft_per_round_and_one_verdict() -> None:
    client = EdgeClient(ClientConfig(gamma=4, max_tokens=8))
    assert client.on_sent(DRAFT)
    assert not client.on_sent(DRAFT)
    assert client.on_verdict(VERDICT) == (5, 6, 9)
    assert client.on_verdict(VERDICT) == ()
    assert client.sources == [Source.ACCEPTED, Source.ACCEPTED, Source.RECOVERED]
    assert not client.on_sent(DRAFT)
    assert client.next_draft().prefix == (5, 6, 9)
    assert client.next_draft().gamma == 4
    assert client.on_sent(Draft(1, 3, (1, 2, 3, 4)))
    assert client.on_verdict(Verdict(1, (1, 2, 3, 4, 5), 4, False)) == (1, 2, 3, 4, 5)
    assert client.sources[-1] is Source.BONUS
    assert client.finished  # max_tokens


def test_the_edge_client_pushes_drafts_and_knows_which_one_is_due() -> None:
    client = EdgeClient(ClientConfig(gamma=4, max_tokens=24))
    client.on_sent(DRAFT)
    hit, miss = client.predraft((5, 6, 9)), client.predraft((5, 1))
    assert hit is not None
    assert miss is not None
    deeper = client.predraft((1, 2), of=hit)
    assert deeper is not None
    assert (deeper.round, deeper.prefix) == (2, (5, 6, 9, 1, 2))
    sent = [
        client.push(job, Draft(job.round, len(job.prefix), (3,)), 3) for job in (hit, miss, deeper)
    ]
    assert [d and d.after for d in sent] == [(5, 6, 9), (5, 1), (5, 6, 9, 1, 2)]
    assert client.push(hit, DRAFT, 3) is None, "the window is full"
    client.on_verdict(VERDICT)
    assert client.in_flight == sent[0]
    assert client.push(miss, Draft(1, 2, (3,)), 3) is None, "void"
    client.on_verdict(Verdict(1, (1,), 0, False))
    assert client.in_flight is None, "deeper expected (1, 2)"
    assert client.metrics.pushed == 3


def test_without_drafts_the_edge_client_lets_the_verifier_stream() -> None:
    client = EdgeClient(ClientConfig(gamma=0, max_tokens=3))
    job = client.next_draft()
    assert (job.gamma, job.autoregressive_rounds) == (0, 2)
    client.on_sent(Draft(0, 0, (), autoregressive_rounds=2))
    for round_ in range(3):
        assert client.in_flight is not None
        assert client.predraft((1,)) is None
        client.on_verdict(Verdict(round_, (7,), 0, False))
    assert client.finished


def test_the_edge_client_never_drafts_past_the_limit() -> None:
    client = EdgeClient(ClientConfig(gamma=4, max_tokens=5))
    client.on_sent(DRAFT)
    job = client.predraft((5, 6, 9))
    assert job is not None
    assert job.gamma == 1
    assert client.predraft((5, 6, 7, 8, 9)) is None
    assert client.predraft(()) is None


@pytest.mark.parametrize(
    "verdict",
    [Verdict(0, (1,) * 6, 5, False), Verdict(0, (1,) * 4, 2, False), Verdict(0, (1,), 2, False)],
)
def test_the_edge_client_refuses_a_verdict_that_does_not_fit_its_draft(verdict: Verdict) -> None:
    client = EdgeClient(ClientConfig())
    client.on_sent(DRAFT)
    with pytest.raises(ProtocolError, match="accepted"):
        client.on_verdict(verdict)


def verifier(sampling: SamplingConfig = GREEDY, **changes: object) -> VerifierSession:
    opened = replace(OPEN, sampling=sampling, **changes)  # type: ignore[arg-type]
    return VerifierSession(opened, eos=frozenset({0}), vocab_size=24)


@pytest.mark.parametrize(
    ("draft", "error", "field_name"),
    [
        (Draft(1, 0, (1,)), ProtocolError, "round"),
        (Draft(0, 3, (1,)), ProtocolError, "start"),
        (Draft(0, 0, (24,)), InvalidInput, "tokens"),
        (Draft(0, 0, (-1,)), InvalidInput, "tokens"),
        (Draft(0, 0, (1,) * 24), InvalidInput, "tokens"),
    ],
)
def test_the_verifier_refuses_what_does_not_fit_its_state(
    draft: Draft, error: type[Exception], field_name: str
) -> None:
    with pytest.raises(error) as caught:
        verifier().offer(draft)
    assert caught.value.field == field_name  # type: ignore[attr-defined]


def test_the_verifier_needs_probabilities_under_the_rejection_law() -> None:
    with pytest.raises(InvalidInput, match="distribution"):
        verifier(SamplingConfig(1.0)).offer(Draft(0, 0, (1,)))


def test_the_verifier_ignores_a_repeated_or_past_draft() -> None:
    session = verifier(round=2)
    assert not session.offer(Draft(1, 0, (1,)))
    assert session.offer(Draft(2, 0, (1,)))
    assert not session.offer(Draft(2, 0, (2,)))
    assert session.begin() == (1,)
    assert session.begin() is None
    assert not session.offer(Draft(2, 0, (2,)))


def logits_for(*tokens: int) -> torch.Tensor:
    """Logits [n, 24] whose greedy choices are ``tokens``."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 24).float()


def test_a_draft_pushed_ahead_is_begun_when_the_answer_grows_as_it_expects() -> None:
    session = verifier()
    assert session.offer(Draft(0, 0, (1, 2)))
    assert session.begin() == (1, 2)
    assert session.offer(Draft(1, 3, (4, 5), after=(1, 2, 3)))
    assert session.offer(Draft(1, 2, (6, 7), after=(1, 9)))
    assert session.offer(Draft(2, 6, (8,), after=(1, 2, 3, 4, 5, 7)))
    assert session.begin() is None, "a round is under verification"
    session.conclude(logits_for(1, 2, 3), 0.0)
    assert session.begin() == (4, 5)
    session.conclude(logits_for(4, 5, 6), 0.0)
    assert session.begin() is None, "the answer grew otherwise: 6 instead of 7"
    assert session.generated == [1, 2, 3, 4, 5, 6]
    assert session.offer(Draft(2, 6, (8,), after=(6,))), "late, but what is expected holds"
    assert session.begin() == (8,)


def test_a_void_draft_is_ignored_and_does_not_block_its_round() -> None:
    session = verifier(replay=(1, 2), round=3)
    assert not session.offer(Draft(3, 2, (5,), after=(9,)))
    assert not session.offer(Draft(4, 2, (5,), after=(2,))), "the answer grows with every round"
    assert not session.offer(Draft(3, 4, (5,), after=(2, 3)))
    assert session.offer(Draft(3, 2, (6,)))
    assert session.begin() == (6,)


def test_alone_the_verifier_decodes_as_many_tokens_as_asked() -> None:
    session = verifier()
    assert session.offer(Draft(0, 0, (), autoregressive_rounds=2))
    for token in (3, 4, 5):
        assert session.begin() == ()
        session.conclude(logits_for(token), 0.0)
    assert session.begin() is None
    assert session.generated == [3, 4, 5]
    assert session.round == 3


def test_drafts_ahead_are_bounded() -> None:
    session = verifier()
    for token in range(MAX_AHEAD):
        assert session.offer(Draft(1, 2, (token % 24,), after=(1, token % 24)))
    with pytest.raises(ProtocolError, match="ahead"):
        session.offer(Draft(1, 2, (1,), after=(1, 2)))


@pytest.mark.parametrize(
    ("draft", "field_name"),
    [
        (Draft(1, 1, (1,), after=(1, 2)), "after"),
        (Draft(1, 1, (1,), after=(24,)), "after"),
        (Draft(0, 0, (), autoregressive_rounds=25), "tokens"),
    ],
)
def test_drafts_ahead_and_solo_rounds_are_checked(draft: Draft, field_name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        verifier().offer(draft)
    assert caught.value.field == field_name


def test_the_verifier_refuses_a_replay_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="24"):
        verifier(replay=(24,))
    with pytest.raises(InvalidInput, match="replay"):
        verifier(replay=(1,) * 24)


@pytest.mark.parametrize(
    "build",
    [
        lambda: LinkConfig(verdict_deadline_s=0),
        lambda: LinkConfig(backoff_initial_s=2, backoff_max_s=1),
        lambda: ClientConfig(gamma=65),
        lambda: ClientConfig(max_tokens=0),
        lambda: PreDraftConfig(queue="lifo"),
        lambda: ExitConfig(confidence="mean"),
    ],
)
def test_settings_out_of_range_are_errors(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        build()
