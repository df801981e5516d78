"""The one decoding loop of edge-cloud speculation; every front end runs this.

A loop owns one answer. Whatever happens elsewhere (exits, verdicts, cached drafts, failures,
cancellation) is posted to its inbox from any thread and handled by the thread that runs the loop,
so the state machines inside have a single owner and need no locks. While a draft is being
verified the loop pre-drafts; a verdict preempts that between two forward passes.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_nodes.edge_cloud.client import EdgeClient
from collab_llm_nodes.edge_cloud.drafter import Drafter
from collab_llm_nodes.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Failure,
    Opened,
    ServerMessage,
    Verdict,
    error_of,
)
from collab_llm_nodes.edge_cloud.predraft import PreDraftCache
from collab_llm_nodes.errors import Cancelled, CollabError, DeadlineExceeded


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
        cache: pre-draft cache inside this loop; None when another node keeps it and posts
            ``PreDraftRequest`` and cached ``Draft`` events.
        preempt: a verdict stops pre-drafting (real time). False completes the round's pre-drafts
            first, as if the draft model were fast enough (deterministic, for runs without a clock).
        on_tokens: called with each verdict's new tokens.
    """

    def __init__(
        self,
        client: EdgeClient,
        drafter: Drafter,
        send: Callable[[Draft], None],
        *,
        cache: PreDraftCache[Draft] | None = None,
        preempt: bool = True,
        on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
    ) -> None:
        self.client = client
        self._drafter = drafter
        self._send = send
        self._cache = cache
        self._preempt = preempt
        self._on_tokens = on_tokens
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._requests: deque[PreDraftRequest] = deque()
        self._early: list[Verdict | EarlyExit | PreDraftRequest] = []  # of the next round
        self._verdict: Verdict | None = None
        self._external: Draft | None = None  # a draft that the cache's owner has sent already
        self._carried: Draft | None = None  # pre-drafted for a verdict that came meanwhile
        self._external_rounds: set[int] = set()
        self._failure: CollabError | None = None
        self._ended = False
        self._deadline = math.inf

    def post(self, event: Event) -> None:
        """Hand an event to the loop; callable from any thread.

        Every ``PreDraftRequest`` is answered exactly once, also when the loop has ended.
        """
        self._inbox.put(event)
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
        draft: Draft | None = None
        try:
            while not self.client.finished:
                if draft is None:
                    draft = self._draft()
                sent = time.monotonic()
                if self.client.on_sent(draft) and draft is not self._external:
                    self._send(draft)
                if self._cache is not None:
                    self._cache.begin(draft.round)
                self._catch_up()
                verdict = self._await_verdict()
                metrics.wait_s += time.monotonic() - sent
                if self._cache is None and draft.round > 0:
                    metrics.cache_lookups += 1
                    hit = draft is self._carried or draft.round in self._external_rounds
                    metrics.cache_hits += hit
                tokens = self.client.on_verdict(verdict)
                if metrics.rounds == 1:
                    metrics.time_to_first_token_s = time.monotonic() - started
                metrics.total_s = time.monotonic() - started
                self._on_tokens(tokens)
                draft = self._look_up(verdict)
        finally:
            self._ended = True
            self._refuse_requests()
            metrics.total_s = time.monotonic() - started

    def _draft(self) -> Draft:
        """Draft for the current round, unless a cached draft of another node comes first."""
        if self._carried is not None and self._carried.round == self.client.round:
            return self._carried
        started = time.monotonic()
        job = self.client.next_draft()
        draft = self._drafter.draft(job, stop=lambda: self._poll() or self._has_external())
        self._check()
        if draft is None:
            assert self._external is not None
            draft = self._external
        self.client.metrics.draft_s += time.monotonic() - started
        return draft

    def _await_verdict(self) -> Verdict:
        """Pre-draft until the verdict of the draft in flight is in.

        It may be in already: a cached draft and its verdict can arrive in one poll.
        """
        while True:
            self._poll()
            self._check()
            if self._verdict is not None and (self._preempt or not self._predraft_next()):
                verdict, self._verdict = self._verdict, None
                return verdict
            if self._verdict is None and not self._predraft_next():
                self._wait()

    def _predraft_next(self) -> bool:
        """Make one pre-draft; False when there is none to make."""
        request: PreDraftRequest | None = None
        if self._cache is not None:
            outcome = self._cache.pop()
        else:
            request = self._requests.popleft() if self._requests else None
            outcome = request.outcome if request else None
        if outcome is None:
            return False
        started = time.monotonic()
        job = self.client.predraft(outcome)
        stale = request is not None and request.round != self.client.round
        due = request.due if request is not None else math.inf
        made = None
        if job is not None and not stale:
            made = self._drafter.draft(
                job,
                cached=True,
                stop=lambda: self._preempted(outcome) or time.monotonic() > due,
            )
        if self._cache is not None and made is not None:
            self._cache.store(outcome, made)
        elif made is not None and self._verdict is not None and self._verdict.tokens == outcome:
            self._carried = made  # its verdict came while it was made: no cache could serve it
        if request is not None:
            request.reply(made)
        self.client.metrics.predraft_s += time.monotonic() - started
        return True

    def _look_up(self, verdict: Verdict) -> Draft | None:
        if self._cache is None or self.client.finished:
            return None
        found = self._cache.lookup(verdict.round, verdict.tokens)
        self.client.metrics.cache_lookups += 1
        self.client.metrics.cache_hits += found is not None
        return found

    def _preempted(self, outcome: tuple[int, ...]) -> bool:
        """Whether to stop pre-drafting for ``outcome``: unless it has just come true."""
        if not self._preempt:
            return False
        return self._poll() or (self._verdict is not None and self._verdict.tokens != outcome)

    def _has_external(self) -> bool:
        return self._external is not None and self._external.round == self.client.round

    def _poll(self) -> bool:
        """Handle what the inbox holds; True when the loop must end."""
        while True:
            try:
                self._handle(self._inbox.get_nowait())
            except queue.Empty:
                if time.monotonic() >= self._deadline and self._failure is None:
                    self._failure = self._late()
                return self._failure is not None

    def _wait(self) -> None:
        """Block until something happens or the deadline passes."""
        try:
            self._handle(self._inbox.get(timeout=max(0.0, self._deadline - time.monotonic())))
        except queue.Empty:
            self._failure = self._late()

    def _catch_up(self) -> None:
        """Handle what was early: another node's cached draft can be verified before this loop has
        even seen the verdict that made it the next one."""
        early, self._early = self._early, []
        for event in early:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Verdict | EarlyExit | PreDraftRequest) and self._is_early(event.round):
            self._early.append(event)
        elif isinstance(event, Verdict):
            if event.round == self.client.round:
                self._verdict = event
        elif isinstance(event, EarlyExit):
            if self.client.on_early_exit(event) and self._cache is not None:
                self._cache.push(event)
        elif isinstance(event, PreDraftRequest):
            self._requests.append(event)
        elif isinstance(event, Draft):
            # The cache's owner may see a verdict before this loop has handled it.
            if event.round in (self.client.round, self.client.round + 1):
                self._external = event
                self._external_rounds.add(event.round)
        elif isinstance(event, Failure):
            self._failure = error_of(event)
        elif isinstance(event, Cancel):
            self._failure = Cancelled("the caller gave the answer up")
        else:
            assert isinstance(event, Opened)

    def _is_early(self, round_: int) -> bool:
        return round_ == self.client.round + 1

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse_requests(self) -> None:
        for event in (*self._requests, *self._early):
            if isinstance(event, PreDraftRequest):
                event.reply(None)
        self._refuse_inbox()

    def _refuse_inbox(self) -> None:
        """Also called by threads that post too late: takes from the queue and touches no more."""
        while True:
            try:
                event = self._inbox.get_nowait()
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
