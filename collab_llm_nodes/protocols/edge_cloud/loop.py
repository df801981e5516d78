"""The decoding loop of edge-cloud speculation, for all front ends.

A loop owns one answer and every draft for it. Events (exits, verdicts, requests for pre-drafts,
failures, cancellation) are posted to its inbox from any thread and handled by the thread that runs
the loop, so the state machines inside have a single owner and need no locks. While a draft is being
verified, the loop drafts for likely outcomes, keeps those drafts, and sends some of them before
their round has come. It checks the inbox between two forward passes.

A draft that is ready when its verdict arrives does not wait for the end of a pass: the thread that
posts the verdict finds it in ``ReadyDrafts`` and sends it.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.errors import Cancelled, CollabError, DeadlineExceeded, InvalidInput
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob, EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.lookahead import Lookahead, Reply
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import Answer, PreDraftConfig, ReadyDrafts
from collab_llm_nodes.transport.wire import Failure


@dataclass(frozen=True)
class PreDraftRequest:
    """A request to draft for ``outcome`` of the given round with priority.

    Attributes:
        reply: called once: None when the draft is ready, else the reason why there is none. It may
            be called in any thread.
        due: ``time.monotonic()`` after which the request is refused.
    """

    round: int
    outcome: tuple[int, ...]
    reply: Reply
    due: float = math.inf


@dataclass(frozen=True)
class Cancel:
    """Cancel the answer."""


@dataclass(frozen=True)
class Resume:
    """Check ``may_run`` again."""


Event = ServerMessage | PreDraftRequest | Cancel | Resume


@dataclass(frozen=True)
class _Arrival:
    """A posted event.

    Attributes:
        at: ``time.monotonic()`` of its arrival.
        sent: the next round's draft, if the event is a verdict upon which it was sent.
    """

    event: Event
    at: float
    sent: Draft | None = None


class EdgeLoop:
    """Runs Algorithm 1 of paper 003 for one answer.

    Args:
        client, drafter: state and draft model of this answer.
        send: sends a draft to the verifier; must not block. Called by the thread that runs the loop
            and by those that post verdicts.
        predraft: queue and budget of drafting while the verifier works.
        ahead: settings of prediction and push-ahead.
        exits: pre-draft for early exits; False if another node ranks them and posts a
            ``PreDraftRequest`` for each.
        profile: records durations and how often predictions are right.
        co_located: draft tokens a round that the verifier's own draft model proposes; 0: none.
        preempt: a verdict stops needless work, and a ready draft is sent at once (real time). False
            completes the round's pre-drafts first, as if the draft model were fast enough
            (deterministic, for runs without a clock).
        on_tokens: called with each verdict's new tokens.
        on_under_way: called once this round's draft has been sent; slow work belongs here.
        may_run: called before each forward pass. While it is false, the loop handles events but
            does not use the draft model. Post ``Resume`` when it may be true again.

    Attributes:
        paused: ``may_run`` was false at times, so this answer's durations are not representative.
    """

    def __init__(
        self,
        client: EdgeClient,
        drafter: Drafter,
        send: Callable[[Draft], None],
        *,
        predraft: PreDraftConfig | None = None,
        ahead: AheadConfig | None = None,
        profile: Profile | None = None,
        co_located: int = 0,
        exits: bool = True,
        preempt: bool = True,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
        on_under_way: Callable[[], None] = lambda: None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self.client = client
        self._drafter = drafter
        self._send = send
        self._last_round = -1  # of the drafts that were sent
        self._profile = profile or Profile()
        self._ready = ReadyDrafts()
        self._lookahead = Lookahead(
            client,
            drafter,
            self._transmit,
            self._ready,
            predraft or PreDraftConfig(),
            ahead or AheadConfig(),
            self._profile,
        )
        drafter.on_pass = self._on_pass
        drafter.between_pieces = self._between_pieces
        self._passed = False  # the draft model has read something
        self._exits = exits
        self._co_located = co_located
        self._preempt = preempt
        self._on_tokens = on_tokens
        self._on_under_way = on_under_way
        self._may_run = may_run
        self.paused = False
        self._inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._early: list[_Arrival] = []  # events of rounds that the loop has not reached
        self._decided: _Arrival | None = None  # the verdict on the draft in flight
        self._left_at = 0.0  # when this round's draft left; all times are time.monotonic
        self._asked = False  # it was sent when its round had come, not ahead
        self._suggested: dict[Answer, float] = {}  # outcomes of this round's exits, and when
        self._failure: CollabError | None = None
        self._ended = False
        self._deadline = math.inf

    def post(self, event: Event) -> None:
        """Post an event, from any thread.

        If the next draft is ready when its verdict is posted, it is sent at once. Every
        ``PreDraftRequest`` is answered exactly once, also after the loop has ended.
        """
        at, sent = time.monotonic(), None
        if self._preempt and isinstance(event, Verdict):
            sent = self._ready.on_verdict(event)
            if sent is not None:
                self._transmit(sent)
        self._inbox.put(_Arrival(event, at, sent))
        if self._ended:
            self._refuse_inbox()

    def run(self, deadline_s: float, *, asked_at: float | None = None) -> None:
        """Decode until the answer is complete.

        Args:
            deadline_s: from now.
            asked_at: ``time.monotonic()`` of the request, for the metrics; now by default.

        Raises:
            DeadlineExceeded: not complete within ``deadline_s`` seconds.
            Cancelled: a ``Cancel`` was posted.
            CollabError: the verifier's typed failure.
        """
        self._deadline = time.monotonic() + deadline_s
        started = asked_at if asked_at is not None else time.monotonic()
        metrics = self.client.metrics
        before: _Arrival | None = None  # the verdict that began this round
        try:
            while not self.client.finished:
                self._send_draft(before)
                self._on_under_way()
                self._catch_up()
                before = self._await_verdict()
                verdict = self._learn(before)
                tokens = self.client.on_verdict(verdict)
                if before.sent is not None:
                    self.client.on_sent(before.sent)
                if metrics.rounds == 1:
                    metrics.time_to_first_token_s = time.monotonic() - started
                metrics.total_s = time.monotonic() - started
                self._on_tokens(tokens)
                self._lookahead.advance(tuple(self.client.generated))
        finally:
            self.close()
            metrics.total_s = time.monotonic() - started

    def _send_draft(self, before: _Arrival | None) -> None:
        """Send this round's draft, unless that was done ahead or upon the verdict ``before``.

        Counts whether it was ready.
        """
        client = self.client
        job = client.next_draft()
        draft = client.in_flight or self._ready.lookup(job.prefix)
        ready = draft is not None
        if draft is None:
            draft = self._draft(job)
        self._asked = client.on_sent(draft)
        if self._asked:
            self._transmit(draft)
        self._left_at = time.monotonic()
        if before is not None and before.sent is not None:
            self._asked, self._left_at = True, before.at
        self._suggested.clear()
        if job.round and client.speculates and not job.autoregressive_rounds:
            client.metrics.cache_lookups += 1
            client.metrics.cache_hits += ready
        self._profile.on_draft(self._drafter.chosen(job.prefix, draft.tokens), job.gamma)
        self._lookahead.start_round(job, draft)

    def _draft(self, job: DraftJob) -> Draft:
        """Draft now, while nothing is being verified."""
        started = time.monotonic()
        draft = self._drafter.draft(job, stop=self._wait_to_run)
        self._check()
        assert draft is not None
        self.client.metrics.draft_s += time.monotonic() - started
        return draft

    def _learn(self, decided: _Arrival) -> Verdict:
        """Record this round in the profile; return its verdict."""
        draft, verdict = self.client.in_flight, decided.event
        assert draft is not None
        assert isinstance(verdict, Verdict)
        waited = decided.at - self._left_at
        self.client.metrics.wait_s += waited
        forced = self._forced(draft, verdict)
        if self._co_located:
            self._profile.on_co_located(self._co_located, verdict, forced[1])
            return verdict
        self._profile.on_verdict(draft, verdict, forced)
        if self._asked:
            self._profile.on_round_trip(waited, verdict)
        if draft.tokens:
            heard = self._suggested.get((*self.client.generated, *verdict.tokens))
            trip = self._profile.rtt.value if self._asked else 0.0
            exit_s = None if heard is None else heard - self._left_at - trip
            self._lookahead.learn(verdict, exit_s)
        return verdict

    def _forced(self, draft: Draft, verdict: Verdict) -> tuple[int, int]:
        """Return how many tokens of the draft, and how many accepted ones, the guide forced."""
        answer, accepted = tuple(self.client.generated), verdict.tokens[: verdict.accepted]
        drafted = len(draft.tokens) - self._drafter.chosen(answer, draft.tokens)
        return drafted, len(accepted) - self._drafter.chosen(answer, accepted)

    def _await_verdict(self) -> _Arrival:
        """Work ahead until the verdict on the draft in flight has arrived."""
        while True:
            self._poll()
            if self._decided is None:
                self._check()  # after the verdict: one that came before a failure counts
                if not self._may_run():
                    self._pause()
                elif not self._work_ahead():
                    self._wait()
            elif self._preempt or not self._work_ahead():
                decided, self._decided = self._decided, None
                self._profile.under_way.add(time.monotonic() - decided.at)
                return decided

    def _wait_to_run(self) -> bool:
        """Wait until a forward pass may be made; return True if the loop must end."""
        while not self._poll():
            if self._may_run():
                return False
            self._pause()
        return True

    def _between_pieces(self) -> None:
        if self._wait_to_run():
            self._check()

    def _pause(self) -> None:
        """Wait for the next event while another answer uses the draft model."""
        self.paused = True
        # predraft_cache has one request open at a time, for all answers: do not keep it waiting.
        self._lookahead.refuse_requests(_motion_first())
        for arrival in self._early:
            _refuse(arrival, _motion_first())
        self._early = [a for a in self._early if not isinstance(a.event, PreDraftRequest)]
        self._wait()

    def _work_ahead(self) -> bool:
        """Make one forward pass for likely outcomes; return False if there is none."""
        self._passed = False
        started = time.monotonic()
        worked = self._lookahead.step()
        took_s = time.monotonic() - started
        self.client.metrics.predraft_s += took_s
        if self._passed:
            self._profile.step.add(took_s)
        return worked

    def _on_pass(self, tokens: int, seconds: float) -> None:
        self._passed = True
        self._profile.on_pass(tokens, seconds)

    def _poll(self) -> bool:
        """Handle all events in the inbox; return True if the loop must end."""
        while True:
            try:
                self._handle(self._inbox.get_nowait())
            except queue.Empty:
                if time.monotonic() >= self._deadline and self._failure is None:
                    self._failure = self._late()
                return self._failure is not None

    def _wait(self) -> None:
        """Block until an event arrives or the deadline passes."""
        try:
            self._handle(self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic())))
        except queue.Empty:
            self._failure = self._late()

    def _catch_up(self) -> None:
        """Handle early events of this round.

        A draft that was sent ahead, or upon its verdict's arrival, may be verified before the loop
        has handled that verdict.
        """
        early, self._early = self._early, []
        for arrival in early:
            self._handle(arrival)

    def _handle(self, arrival: _Arrival) -> None:
        event, round_ = arrival.event, self.client.round
        if isinstance(event, PreDraftRequest) and not self._may_run():
            event.reply(_motion_first())
        elif isinstance(event, PreDraftRequest):
            self._on_request(event, arrival)
        elif isinstance(event, Verdict | EarlyExit) and event.round > round_:
            self._early.append(arrival)
        elif isinstance(event, Verdict):
            if event.round == round_:
                self._decided = arrival
        elif isinstance(event, EarlyExit):
            if self.client.on_early_exit(event) and not event.finished:
                self._suggested.setdefault((*self.client.generated, *event.tokens), arrival.at)
                if self._exits:
                    self._lookahead.expect(event.tokens, event.confidence)
        elif isinstance(event, Failure):
            self._failure = event.error()
        elif isinstance(event, Cancel):
            self._failure = Cancelled("the caller gave the answer up")
        else:
            assert isinstance(event, Opened | Resume)

    def _on_request(self, request: PreDraftRequest, arrival: _Arrival) -> None:
        """Pre-draft for the requested round, now or when the loop has reached it."""
        if request.round > self._last_round:
            request.reply(
                InvalidInput(
                    f"no draft for round {request.round} has been sent",
                    field="round",
                    remedy="name the round that is being verified",
                )
            )
        elif request.round > self.client.round:
            self._early.append(arrival)
        elif request.round < self.client.round:
            request.reply(Cancelled("the verdict came first"))
        elif time.monotonic() > request.due:
            request.reply(DeadlineExceeded("the draft was not ready in time", field="deadline_s"))
        else:
            self._lookahead.demand(request.outcome, request.reply)

    def _transmit(self, draft: Draft) -> None:
        """Send a draft, after which requests may name its round. Called by any thread."""
        self._last_round = max(self._last_round, draft.round)
        self._send(draft)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Send nothing more, and refuse all requests, later ones included."""
        if self._ended:
            return
        self._ended = True
        self._ready.close()
        self._lookahead.close()
        for arrival in self._early:
            _refuse(arrival, _ended())
        self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        """Empty the inbox. Threads that post too late call this too: it changes nothing else."""
        while True:
            try:
                _refuse(self._inbox.get_nowait(), _ended())
            except queue.Empty:
                return

    def _late(self) -> CollabError:
        others = "; answers for motion went first" if self.paused else ""
        return DeadlineExceeded(
            f"the answer was not complete within its deadline{others}",
            field="deadline_s",
            remedy="raise deadline_s, lower max_tokens, or check the link",
        )


def _refuse(arrival: _Arrival, why: CollabError) -> None:
    if isinstance(arrival.event, PreDraftRequest):
        arrival.event.reply(why)


def _ended() -> Cancelled:
    return Cancelled("the answer has ended")


def _motion_first() -> Cancelled:
    return Cancelled("an answer for motion uses the draft model")
