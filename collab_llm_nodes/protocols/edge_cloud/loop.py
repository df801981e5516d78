"""The one decoding loop of edge-cloud speculation; every front end runs this.

A loop owns one answer. Whatever happens elsewhere (exits, verdicts, cached drafts, failures,
cancellation) is posted to its inbox from any thread and handled by the thread that runs the loop,
so the state machines inside have a single owner and need no locks. While a draft is being verified
the loop works ahead: it drafts for likely outcomes and sends those drafts before their round has
come. Between two forward passes it looks whether a verdict has made that needless.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.errors import Cancelled, CollabError, DeadlineExceeded
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Failure,
    Opened,
    ServerMessage,
    Verdict,
    error_of,
)
from collab_llm_nodes.protocols.edge_cloud.outlook import Outlook
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import Answer, PreDraftConfig


@dataclass(frozen=True)
class PreDraftRequest:
    """A cache outside the loop wants a pre-draft; ``reply`` gets it, or None if it is too late."""

    round: int
    outcome: tuple[int, ...]
    reply: Callable[[Draft | None], None]
    due: float = math.inf  # time.monotonic


@dataclass(frozen=True)
class Cancel:
    """Give the answer up."""


Event = ServerMessage | Draft | PreDraftRequest | Cancel


class EdgeLoop:
    """Runs Algorithm 1 of paper 003 for one answer.

    Args:
        client, drafter: state and draft model of this answer.
        send: passes a draft on to the verifier; must not block.
        predraft: queue and budget of what is drafted while the verifier works.
        ahead: what goes into that queue beside early exits, and what is sent ahead.
        exits: whether early exits are pre-drafted for here; False when another node queues them
            and posts ``PreDraftRequest`` and cached ``Draft`` events.
        profile: learns how long everything takes and how often guesses are right.
        preempt: a verdict stops needless work (real time). False completes the round's pre-drafts
            first, as if the draft model were fast enough (deterministic, for runs without a clock).
        on_tokens: called with each verdict's new tokens.
        on_under_way: called when a round's draft is under way, with the time of a verification to
            spend on what no draft should wait for.
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
        exits: bool = True,
        preempt: bool = True,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
        on_under_way: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self._drafter = drafter
        self._send = send
        self._profile = profile or Profile()
        self._outlook = Outlook(
            client,
            drafter,
            send,
            predraft or PreDraftConfig(),
            ahead or AheadConfig(),
            self._profile,
        )
        drafter.on_pass = self._on_pass
        self._passed = False  # the draft model has read something
        self._exits = exits
        self._preempt = preempt
        self._on_tokens = on_tokens
        self._on_under_way = on_under_way
        self._inbox: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._requests: deque[PreDraftRequest] = deque()
        self._early: list[tuple[float, Event]] = []  # of later rounds
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0  # when it came; all times are time.monotonic
        self._external: Draft | None = None  # a draft that another node has sent already
        self._taken_off = 0.0  # when this round's draft was under way
        self._asked = False  # its draft was sent by this loop when its round had come
        self._suggested: dict[Answer, float] = {}  # outcomes of this round's exits, and when
        self._failure: CollabError | None = None
        self._ended = False
        self._deadline = math.inf

    def post(self, event: Event) -> None:
        """Hand an event to the loop; callable from any thread.

        Every ``PreDraftRequest`` is answered exactly once, also when the loop has ended.
        """
        self._inbox.put((time.monotonic(), event))
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
        try:
            while not self.client.finished:
                self._take_off()
                self._on_under_way()
                self._catch_up()
                verdict = self._await_verdict()
                self._learn(verdict)
                tokens = self.client.on_verdict(verdict)
                if metrics.rounds == 1:
                    metrics.time_to_first_token_s = time.monotonic() - started
                metrics.total_s = time.monotonic() - started
                self._on_tokens(tokens)
                self._outlook.advance(tuple(self.client.generated))
        finally:
            self._ended = True
            self._refuse_requests()
            metrics.total_s = time.monotonic() - started

    def _take_off(self) -> None:
        """Get this round's draft under way, unless it is so already; count whether it was ready."""
        client = self.client
        job = client.next_draft()
        draft, ready = client.in_flight, True
        self._asked = draft is None
        if draft is None:
            draft = self._outlook.draft_for(job.prefix)
            ready = draft is not None
            if draft is None:
                started = time.monotonic()
                draft = self._drafter.draft(job, stop=lambda: self._poll() or self._has_external())
                self._check()
                client.metrics.draft_s += time.monotonic() - started
            if self._has_external():
                draft, ready, self._asked = self._external, True, False
            assert draft is not None
            if client.on_sent(draft) and draft is not self._external:
                self._send(draft)
        self._taken_off = time.monotonic()
        self._suggested.clear()
        if job.round and client.speculates:
            client.metrics.cache_lookups += 1
            client.metrics.cache_hits += ready
        self._profile.on_draft(len(draft.tokens), job.gamma)
        self._outlook.take_off(job, draft)

    def _learn(self, verdict: Verdict) -> None:
        """Tell the profile what this round has shown."""
        draft = self.client.in_flight
        assert draft is not None
        waited = self._verdict_at - self._taken_off
        self.client.metrics.wait_s += waited
        self._profile.on_verdict(draft, verdict)
        if self._asked:
            self._profile.on_round_trip(waited, verdict)
        if draft.tokens:
            heard = self._suggested.get((*self.client.generated, *verdict.tokens))
            trip = self._profile.rtt.value if self._asked else 0.0
            exit_s = None if heard is None else heard - self._taken_off - trip
            self._outlook.learn(verdict, exit_s)

    def _await_verdict(self) -> Verdict:
        """Work ahead until the verdict on the draft in flight is in.

        It may be in already: a cached draft and its verdict can arrive in one poll.
        """
        while True:
            self._poll()
            if self._verdict is None:
                self._check()  # a verdict that came before a failure counts
                if not self._work_ahead():
                    self._wait()
            elif self._preempt or not self._work_ahead():
                verdict, self._verdict = self._verdict, None
                self._profile.under_way.add(time.monotonic() - self._verdict_at)
                return verdict

    def _work_ahead(self) -> bool:
        """One forward pass for what may come; False if idle."""
        while self._requests:
            request = self._requests.popleft()
            stale = request.round != self.client.round or time.monotonic() > request.due
            if stale:
                request.reply(None)
            else:
                self._outlook.demand(request.outcome, request.reply)
        self._passed = False
        started = time.monotonic()
        worked = self._outlook.step()
        took_s = time.monotonic() - started
        self.client.metrics.predraft_s += took_s
        if self._passed:
            self._profile.step.add(took_s)
        return worked

    def _on_pass(self, tokens: int, seconds: float) -> None:
        self._passed = True
        self._profile.on_pass(tokens, seconds)

    def _has_external(self) -> bool:
        return self._external is not None and self._external.round == self.client.round

    def _poll(self) -> bool:
        """Handle what the inbox holds; True when the loop must end."""
        while True:
            try:
                self._handle(*self._inbox.get_nowait())
            except queue.Empty:
                if time.monotonic() >= self._deadline and self._failure is None:
                    self._failure = self._late()
                return self._failure is not None

    def _wait(self) -> None:
        """Block until something happens or the deadline passes."""
        try:
            self._handle(*self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic())))
        except queue.Empty:
            self._failure = self._late()

    def _catch_up(self) -> None:
        """Handle what was early: a draft sent ahead or by another node can be verified before this
        loop has even handled the verdict that made it the next one."""
        early, self._early = self._early, []
        for at, event in early:
            self._handle(at, event)

    def _handle(self, at: float, event: Event) -> None:
        if isinstance(event, Verdict | EarlyExit | PreDraftRequest) and self._is_early(event.round):
            self._early.append((at, event))
        elif isinstance(event, Verdict):
            if event.round == self.client.round:
                self._verdict, self._verdict_at = event, at
        elif isinstance(event, EarlyExit):
            if self.client.on_early_exit(event) and not event.finished:
                self._suggested.setdefault((*self.client.generated, *event.tokens), at)
                if self._exits:
                    self._outlook.expect(event.tokens, event.confidence)
        elif isinstance(event, PreDraftRequest):
            self._requests.append(event)
        elif isinstance(event, Draft):
            # The cache's owner may see a verdict before this loop has handled it.
            if event.round in (self.client.round, self.client.round + 1):
                self._external = event
        elif isinstance(event, Failure):
            self._failure = error_of(event)
        elif isinstance(event, Cancel):
            self._failure = Cancelled("the caller gave the answer up")
        else:
            assert isinstance(event, Opened)

    def _is_early(self, round_: int) -> bool:
        return round_ > self.client.round

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse_requests(self) -> None:
        self._outlook.close()
        for event in (*self._requests, *(event for _, event in self._early)):
            if isinstance(event, PreDraftRequest):
                event.reply(None)
        self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        """Also called by threads that post too late: takes from the queue and touches no more."""
        while True:
            try:
                _, event = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, PreDraftRequest):
                event.reply(None)

    def _late(self) -> CollabError:
        return DeadlineExceeded(
            "the answer was not complete within its deadline",
            field="deadline_s",
            remedy="raise deadline_s, lower max_tokens, or check the link",
        )
