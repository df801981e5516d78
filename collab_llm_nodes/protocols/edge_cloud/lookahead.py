"""The edge client's work while the verifier is busy (paper 003, Algorithm 1, lines 9-14; ours).

Likely outcomes are suggested by early exits, predicted by the draft model, or requested by another
node. The likeliest are continued side by side, and their drafts are kept and sent ahead of the
verdicts they depend on. One :meth:`Lookahead.step` is one forward pass of the draft model, so that
the caller can check for a verdict in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from collab_llm_nodes.errors import Cancelled, CollabError, InvalidInput, ModelError
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob, EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter, DraftInProgress
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import (
    Answer,
    OutcomeQueue,
    PreDraftConfig,
    ReadyDrafts,
)

Reply = Callable[[CollabError | None], None]
"""Callback of a request for a draft: None when it is ready, else the reason why there is none."""


@dataclass
class _Future:
    """A possible answer, and the work on its draft.

    Attributes:
        probability: of this answer.
        predicted: the draft model itself predicts it.
        partial: its draft in progress; complete ones are in ``ReadyDrafts``.
        explored: the outcomes of its draft have been predicted, with ``beliefs``.
        beliefs: predicted probability of each of the draft's tokens to be accepted.
        replies: callbacks of requests for the draft.
    """

    job: DraftJob
    probability: float
    predicted: bool = False
    partial: DraftInProgress | None = None
    explored: bool = False
    beliefs: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def reply(self, error: CollabError | None) -> None:
        """Call the callbacks: the draft is ready, or ``error`` is the reason why there is none."""
        for reply in self.replies:
            reply(error)
        self.replies.clear()


class Lookahead:
    """Likely continuations of one answer, and the drafts for them in progress.

    Args:
        client, drafter: state and draft model of this answer.
        send: sends a draft to the verifier.
        ready: the loop's complete drafts, to which this adds.
        predraft: queue and budget.
        ahead: settings of prediction and push-ahead.
        profile: records how often predictions are right.
    """

    def __init__(
        self,
        client: EdgeClient,
        drafter: Drafter,
        send: Callable[[Draft], None],
        ready: ReadyDrafts,
        predraft: PreDraftConfig,
        ahead: AheadConfig,
        profile: Profile,
    ) -> None:
        self._client = client
        self._drafter = drafter
        self._send = send
        self._config = ahead
        self._profile = profile
        if not drafter.branches:
            predraft = replace(predraft, max_predrafts=0)
        self._enabled = predraft.max_predrafts > 0
        self._ordered = predraft.queue == "priority"
        self._queue = OutcomeQueue(predraft)
        self._ready = ready
        self._futures: dict[Answer, _Future] = {}

    def start_round(self, job: DraftJob, draft: Draft) -> None:
        """Begin a round: ``draft``, made for ``job``, is being sent to the verifier."""
        self._future(job, 1.0)
        self._ready.store(job.prefix, draft)

    def expect(self, outcome: Answer, probability: float, of: DraftJob | None = None) -> None:
        """Queue ``outcome`` of the draft for ``of``, or of this round's draft."""
        job = self._client.predraft(outcome, of)
        if job is not None:
            self._future(job, probability)
            self._queue.push(job.prefix, probability)

    def demand(self, outcome: Answer, reply: Reply) -> None:
        """Draft for ``outcome`` of this round with priority; ``reply`` is called once."""
        if not self._drafter.branches:
            reply(ModelError("this draft model reads one continuation at a time"))
            return
        try:
            job = self._job_for(outcome)
        except CollabError as error:
            reply(error)
            return
        future = self._future(job, 1.0)
        future.replies.append(reply)
        if self._ready.lookup(job.prefix) is not None:
            future.reply(None)
        elif future.partial is None:
            self._begin(future)

    def step(self) -> bool:
        """Make one forward pass for the likeliest outcomes; return False if there is none.

        All drafts in progress advance side by side; a new and likelier one replaces another, which
        loses nothing by waiting.
        """
        branches = self._choose_branches()
        tasks = self._choose_tasks(max(1, self._config.batch - len(branches)))
        if not branches and not tasks:
            return False
        partials = [f.partial for f in tasks if f.partial is not None and f.partial.draft is None]
        drafts = [self._ready.lookup(f.job.prefix) for f in branches]
        read = [(*f.job.prefix, *d.tokens) for f, d in zip(branches, drafts, strict=True) if d]
        try:
            self._drafter.step(partials, read)
        except InvalidInput as error:  # an answer that is too long for the draft model
            refused = InvalidInput(str(error.args[0]), field="outcome", remedy=error.remedy)
            self._give_up(tasks + branches, refused)
            return True
        for future in branches:
            self._predict(future)
        for future in tasks:
            if future.partial is not None and future.partial.draft is not None:
                self._finish(future, future.partial.draft)
        return True

    def learn(self, verdict: Verdict, exit_s: float | None) -> None:
        """Record in the profile how the outcome of the round was predicted.

        ``exit_s`` is passed on to ``Profile.on_outcome``.
        """
        answer = tuple(self._client.generated)
        now, then = self._futures.get(answer), self._futures.get((*answer, *verdict.tokens))
        for i, belief in enumerate((now.beliefs if now else [])[: verdict.accepted + 1]):
            self._profile.on_belief(belief, i < verdict.accepted)
        if self._enabled and not verdict.finished:
            predicted = then is not None and then.predicted
            self._profile.on_outcome(predicted=predicted, exit_s=exit_s)

    def advance(self, answer: Answer) -> None:
        """Drop everything that is void now that the answer is ``answer``."""
        come = self._futures.get(answer)
        known = (come.probability if come else 0.0) or 1.0  # continuations are rescaled by 1/known
        futures, self._futures = self._futures, {}
        for prefix, future in futures.items():
            if prefix[: len(answer)] == answer:
                future.probability = min(1.0, future.probability / known)
                self._futures[prefix] = future
            else:
                future.reply(Cancelled("the verdict came first"))
        self._queue.advance(answer, known)
        self._ready.advance(answer)
        self._drafter.advance(answer)

    def refuse_requests(self, why: CollabError) -> None:
        """Refuse all requests for drafts with ``why``; drafts in progress are kept."""
        for future in self._futures.values():
            future.reply(why)

    def close(self) -> None:
        """Drop all work, and refuse all requests."""
        self._give_up(list(self._futures.values()), Cancelled("the answer has ended"))

    def _future(self, job: DraftJob, probability: float) -> _Future:
        future = self._futures.setdefault(job.prefix, _Future(job, probability))
        future.probability = max(future.probability, probability)
        return future

    def _choose_branches(self) -> list[_Future]:
        """Return the drafts whose outcomes to predict: those likelier than all that is queued."""
        if not (self._enabled and self._config.predictions):
            return []
        deepest = self._client.round + (self._config.push_depth if self._config.push_window else 1)
        least = max(self._config.min_probability, self._queue.best)
        found = [
            future
            for answer, future in self._futures.items()
            if not future.explored
            and future.probability >= least
            and future.job.gamma
            and future.job.round < deepest
            and self._ready.lookup(answer) is not None
        ]
        found.sort(key=lambda future: -future.probability)
        return found[: (self._config.batch + 1) // 2]

    def _choose_tasks(self, room: int) -> list[_Future]:
        """Return the ``room`` most urgent pre-drafts, begun or new."""
        tasks = [future for future in self._futures.values() if future.partial is not None]
        self._sort(tasks)
        while len(tasks) < room or (
            self._ordered and self._queue.best > tasks[room - 1].probability
        ):
            answer = self._queue.pop()
            if answer is None:
                break
            future = self._futures[answer]
            if future.partial is None and self._ready.lookup(answer) is None:
                self._begin(future)
                tasks += [future] if future.partial is not None else []
                self._sort(tasks)
        return tasks[:room]

    def _begin(self, future: _Future) -> None:
        """Begin the draft of ``future``, unless the guide takes too much work there."""
        try:
            future.partial = self._drafter.begin(future.job, cached=True)
        except InvalidInput as error:
            self._give_up([future], error)

    def _sort(self, tasks: list[_Future]) -> None:
        """Sort requested tasks first, then the likeliest."""
        tasks.sort(key=lambda f: (not f.replies, -f.probability if self._ordered else 0.0))

    def _predict(self, future: _Future) -> None:
        draft = self._ready.lookup(future.job.prefix)
        assert draft is not None
        prediction = self._drafter.predict(
            future.job, draft, self._config.predictions, self._profile.temperature
        )
        future.explored, future.beliefs = True, prediction.beliefs
        for outcome, probability in prediction.outcomes:
            together = future.probability * probability
            if together >= self._config.min_probability:
                self.expect(outcome, together, future.job)
                expected = self._futures.get((*future.job.prefix, *outcome))
                if expected is not None:
                    expected.predicted = True

    def _finish(self, future: _Future, draft: Draft) -> None:
        """Keep a pre-draft, and send it ahead if it may go."""
        future.partial = None
        pushed = self._client.push(future.job, draft, self._config.push_window)
        if pushed is not None:
            self._send(pushed)
        self._ready.store(future.job.prefix, pushed or draft)
        future.reply(None)

    def _job_for(self, outcome: Answer) -> DraftJob:
        """Return what to draft if ``outcome`` is the verdict of this round.

        Raises:
            InvalidInput: it cannot be the verdict, or no draft would follow it.
            Cancelled: the verifier decodes this round alone, so it needs no draft.
        """
        draft = self._client.in_flight
        if draft is None or draft.autoregressive_rounds:
            raise Cancelled("the verifier decodes this round alone")
        if not 1 <= len(outcome) <= len(draft.tokens) + 1:
            raise InvalidInput(
                f"has {len(outcome)} tokens",
                field="outcome",
                remedy=f"1 to {len(draft.tokens) + 1}: the round's draft has {len(draft.tokens)}",
            )
        self._drafter.check(tuple(self._client.generated), outcome)
        job = self._client.predraft(outcome)
        if job is None:
            raise InvalidInput(
                "the answer would be complete", field="outcome", remedy="needs no draft"
            )
        return job

    def _give_up(self, futures: list[_Future], why: CollabError) -> None:
        for future in futures:
            future.partial, future.explored = None, True
            future.reply(why)
