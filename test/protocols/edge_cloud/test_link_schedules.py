"""The whole protocol under a virtual clock: no schedule of the link changes the answer."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from fake_models import FakeEngine, as_engine, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from session_links import GREEDY, OPEN, PATIENT, PROMPT

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link import (
    Action,
    Connect,
    Deliver,
    Disconnect,
    Send,
    SessionLink,
)
from collab_llm_nodes.protocols.edge_cloud.lookahead import Lookahead
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig, ReadyDrafts
from collab_llm_nodes.protocols.edge_cloud.target import TargetSession
from collab_llm_nodes.transport.wire import Failure

LAWS = [GREEDY, SamplingConfig(1.0, seed=5), SamplingConfig(1.0, law="coupled", seed=5)]


@dataclass
class Weather:
    """Effects of the link on messages; all draws are from one source, so a case can be repeated."""

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
        self.client = EdgeClient(EdgeClientConfig(self.gamma, self.max_tokens))
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
@settings(max_examples=40)
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
