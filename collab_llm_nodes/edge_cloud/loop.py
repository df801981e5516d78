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
from dataclasses import dataclass, replace

from collab_llm_nodes.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.edge_cloud.client import DraftJob, EdgeClient
from collab_llm_nodes.edge_cloud.drafter import Drafter, Line
from collab_llm_nodes.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Failure,
    Opened,
    ServerMessage,
    Verdict,
    error_of,
)
from collab_llm_nodes.edge_cloud.planner import Profile
from collab_llm_nodes.edge_cloud.predraft import Answer, PreDraftCache, PreDraftConfig
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


@dataclass
class _Task:
    """A pre-draft in the making."""

    probability: float  # that it is needed
    line: Line
    request: PreDraftRequest | None = None  # of another node


@dataclass(frozen=True)
class _Branch:
    """A draft that is under verification or out ahead, and how likely its round comes like that."""

    probability: float
    job: DraftJob
    draft: Draft


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
    ) -> None:
        self.client = client
        self._drafter = drafter
        self._send = send
        predraft = predraft or PreDraftConfig()
        self._config = ahead or AheadConfig()
        self._idle = predraft.max_predrafts == 0
        self._cache: PreDraftCache[Draft] = PreDraftCache(predraft)
        self._profile = profile or Profile()
        drafter.on_pass = self._profile.on_pass
        self._exits = exits
        self._preempt = preempt
        self._on_tokens = on_tokens
        self._inbox: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._requests: deque[PreDraftRequest] = deque()
        self._early: list[tuple[float, Event]] = []  # of later rounds
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0  # when it came; all times are time.monotonic
        self._external: Draft | None = None  # a draft that another node has sent already
        self._jobs: dict[Answer, DraftJob] = {}  # behind the answers in the cache's queue
        self._tasks: list[_Task] = []
        self._branches: dict[Answer, _Branch] = {}  # whose outcomes are still to be predicted
        self._predicted: set[Answer] = set()
        self._foreseen: set[Answer] = set()  # what the draft model expects
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
                self._catch_up()
                verdict = self._await_verdict()
                self._learn(verdict)
                tokens = self.client.on_verdict(verdict)
                if metrics.rounds == 1:
                    metrics.time_to_first_token_s = time.monotonic() - started
                metrics.total_s = time.monotonic() - started
                self._on_tokens(tokens)
                self._advance()
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
            draft = self._cache.lookup(job.prefix)
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
        self._branch_out(1.0, job, draft)

    def _learn(self, verdict: Verdict) -> None:
        """Tell the profile what this round has shown."""
        draft = self.client.in_flight
        assert draft is not None
        waited = self._verdict_at - self._taken_off
        self.client.metrics.wait_s += waited
        self._profile.on_verdict(draft, verdict)
        if self._asked and self.client.round:  # the first verdict also waits for the prefill
            self._profile.on_round_trip(waited, verdict)
        if draft.tokens and not verdict.finished and not self._idle:
            answer = (*self.client.generated, *verdict.tokens)
            heard = self._suggested.get(answer)
            trip = self._profile.rtt.value if self._asked else 0.0
            self._profile.on_outcome(
                predicted=answer in self._foreseen,
                exit_s=None if heard is None else heard - self._taken_off - trip,
            )

    def _advance(self) -> None:
        """The answer has grown: forget what has become void."""
        answer = tuple(self.client.generated)
        known = self._cache.probability(answer) or 1.0
        self._foreseen = {a for a in self._foreseen if a[: len(answer)] == answer}
        self._predicted = {a for a in self._predicted if a[: len(answer)] == answer}
        self._branches = {
            a: replace(branch, probability=min(1.0, branch.probability / known))
            for a, branch in self._branches.items()
            if a[: len(answer)] == answer
        }
        for task in self._tasks:
            task.probability = min(1.0, task.probability / known)
        self._jobs = {a: job for a, job in self._jobs.items() if a[: len(answer)] == answer}
        self._drop_needless(answer)
        self._cache.advance(answer)
        self._drafter.advance(answer)

    def _await_verdict(self) -> Verdict:
        """Work ahead until the verdict on the draft in flight is in.

        It may be in already: a cached draft and its verdict can arrive in one poll.
        """
        while True:
            self._poll()
            self._check()
            if self._verdict is not None and (self._preempt or not self._work_ahead()):
                verdict, self._verdict = self._verdict, None
                return verdict
            if self._verdict is None and not self._work_ahead():
                self._wait()

    def _work_ahead(self) -> bool:
        """One forward pass of what is likeliest to be needed (lines 9-14); False if idle.

        All continuations in the making advance side by side; what is new and likelier takes the
        place of others, which lose nothing by resting.
        """
        started = time.monotonic()
        branches = self._choose_branches()
        tasks = self._choose_tasks(max(1, self._config.batch - len(branches)))
        if not branches and not tasks:
            return False
        read = [(*branch.job.prefix, *branch.draft.tokens) for branch in branches]
        self._drafter.step([task.line for task in tasks], read)
        for branch in branches:
            self._predict(branch)
        for task in tasks:
            if task.line.draft is not None:
                self._finish(task, task.line.draft)
        self.client.metrics.predraft_s += time.monotonic() - started
        return True

    def _choose_tasks(self, room: int) -> list[_Task]:
        """The ``room`` most urgent pre-drafts, begun or new."""
        self._admit_requests()
        while len(self._tasks) < room or self._cache.best > self._tasks[room - 1].probability:
            answer = self._cache.pop()
            if answer is None:
                break
            line = self._drafter.begin(self._jobs.pop(answer), cached=True)
            self._tasks.append(_Task(self._cache.probability(answer), line))
            if self._cache.ordered:
                self._tasks.sort(key=lambda task: -task.probability)
        # A line without room for tokens is complete from the start.
        for task in [t for t in self._tasks if t.line.draft is not None]:
            assert task.line.draft is not None
            self._finish(task, task.line.draft)
        return self._tasks[:room]

    def _finish(self, task: _Task, draft: Draft) -> None:
        """Keep a pre-draft and send it ahead, if it may."""
        self._tasks.remove(task)
        job = task.line.job
        self._cache.store(job.prefix, draft)
        self._branch_out(task.probability, job, draft)
        pushed = self.client.push(job, draft, self._config.push_window)
        if pushed is not None:
            self._send(pushed)
        if task.request is not None:
            task.request.reply(pushed or draft)

    def _drop_needless(self, answer: Answer | None) -> None:
        """Forget pre-drafts that do not continue ``answer``; all of them when that is None."""
        kept = []
        for task in self._tasks:
            prefix = task.line.job.prefix
            if answer is not None and prefix[: len(answer)] == answer:
                kept.append(task)
            elif task.request is not None:
                task.request.reply(None)
        self._tasks = kept

    def _branch_out(self, probability: float, job: DraftJob, draft: Draft) -> None:
        """Have the outcomes of ``draft`` predicted when it is the likeliest thing to do."""
        wanted = self._config.predictions > 0 and job.gamma > 0 and not self._idle
        if wanted and job.prefix not in self._branches and job.prefix not in self._predicted:
            self._branches[job.prefix] = _Branch(probability, job, draft)

    def _choose_branches(self) -> list[_Branch]:
        """The drafts whose outcomes are to be predicted next: likelier than all that waits."""
        deepest = self.client.round + (self._config.push_depth if self._config.push_window else 1)
        least = max(self._config.min_probability, self._cache.best)
        found = [
            branch
            for branch in self._branches.values()
            if branch.job.round < deepest and branch.probability >= least
        ]
        found.sort(key=lambda branch: -branch.probability)
        return found[: (self._config.batch + 1) // 2]

    def _predict(self, branch: _Branch) -> None:
        del self._branches[branch.job.prefix]
        self._predicted.add(branch.job.prefix)
        likely = self._drafter.likely(branch.job, branch.draft, self._config.predictions)
        for outcome, probability in likely:
            together = branch.probability * probability
            if together >= self._config.min_probability:
                self._expect(outcome, together, branch.job)
                self._foreseen.add((*branch.job.prefix, *outcome))

    def _expect(self, outcome: Answer, probability: float, of: DraftJob | None = None) -> None:
        """Queue what to draft if ``outcome`` comes of the draft for ``of``, or of this round's."""
        job = self.client.predraft(outcome, of)
        if job is not None:
            self._cache.push(job.prefix, probability)
            self._jobs.setdefault(job.prefix, job)

    def _admit_requests(self) -> None:
        """What other nodes ask for comes first; what makes no sense any more is refused."""
        while self._requests:
            request = self._requests.popleft()
            job = self.client.predraft(request.outcome)
            stale = request.round != self.client.round or time.monotonic() > request.due
            if job is None or stale:
                request.reply(None)
            else:
                line = self._drafter.begin(job, cached=True)
                self._tasks.insert(0, _Task(1.0, line, request))

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
                    self._expect(event.tokens, event.confidence)
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
        self._drop_needless(None)
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
