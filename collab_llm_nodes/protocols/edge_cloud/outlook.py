"""What the edge client does while the verifier works (paper 003, Algorithm 1, lines 9-14; ours).

It expects outcomes (early exits suggest some, the draft model predicts others), continues the
likeliest side by side, and sends those continuations ahead of the verdicts they depend on. One
:meth:`Outlook.step` is one forward pass of the draft model, so that whoever waits for a verdict can
look for it in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.client import DraftJob, EdgeClient
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter, Line
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.protocols.edge_cloud.planner import Profile
from collab_llm_nodes.protocols.edge_cloud.predraft import Answer, PreDraftCache, PreDraftConfig

Reply = Callable[[Draft | None], None]


@dataclass
class _Future:
    """An answer that may come, and what is done about it.

    Attributes:
        probability: that the answer comes like that.
        foreseen: the draft model itself expects it.
        line: its draft in the making; complete ones are in the cache.
        explored: the outcomes of its draft have been predicted, with these ``beliefs`` that each
            of its tokens stands.
        replies: who asked for the draft.
    """

    job: DraftJob
    probability: float
    foreseen: bool = False
    line: Line | None = None
    explored: bool = False
    beliefs: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def answer(self, draft: Draft | None) -> None:
        """Tell those who asked."""
        for reply in self.replies:
            reply(draft)
        self.replies.clear()


class Outlook:
    """The likely futures of one answer.

    Args:
        client, drafter: state and draft model of this answer.
        send: passes a draft on to the verifier.
        predraft: queue and budget.
        ahead: what goes into the queue beside early exits, and what is sent ahead.
        profile: learns how often guesses are right.
    """

    def __init__(
        self,
        client: EdgeClient,
        drafter: Drafter,
        send: Callable[[Draft], None],
        predraft: PreDraftConfig,
        ahead: AheadConfig,
        profile: Profile,
    ) -> None:
        self._client = client
        self._drafter = drafter
        self._send = send
        self._config = ahead
        self._profile = profile
        self._enabled = predraft.max_predrafts > 0
        self._ordered = predraft.queue == "priority"
        self._cache: PreDraftCache[Draft] = PreDraftCache(predraft)
        self._futures: dict[Answer, _Future] = {}

    def draft_for(self, answer: Answer) -> Draft | None:
        """The pre-draft that continues ``answer``, if it is complete."""
        return self._cache.lookup(answer)

    def take_off(self, job: DraftJob, draft: Draft) -> None:
        """This round's draft is under way."""
        self._future(job, 1.0)
        self._cache.store(job.prefix, draft)

    def expect(self, outcome: Answer, probability: float, of: DraftJob | None = None) -> None:
        """``outcome`` may come of the draft for ``of``, or of this round's."""
        job = self._client.predraft(outcome, of)
        if job is not None:
            self._future(job, probability)
            self._cache.push(job.prefix, probability)

    def demand(self, outcome: Answer, reply: Reply) -> None:
        """Draft for ``outcome`` before all else; ``reply`` gets the draft, or None if needless."""
        job = self._client.predraft(outcome)
        if job is None:
            reply(None)
            return
        future = self._future(job, 1.0)
        future.replies.append(reply)
        made = self._cache.lookup(job.prefix)
        if made is not None:
            future.answer(made)
        elif future.line is None:
            future.line = self._drafter.begin(job, cached=True)

    def step(self) -> bool:
        """One forward pass of what is likeliest to be needed; False if there is nothing to do.

        All continuations in the making advance side by side; what is new and likelier takes the
        place of others, which lose nothing by resting.
        """
        branches = self._choose_branches()
        tasks = self._choose_tasks(max(1, self._config.batch - len(branches)))
        if not branches and not tasks:
            return False
        lines = [f.line for f in tasks if f.line is not None and f.line.draft is None]
        drafts = [self._cache.lookup(f.job.prefix) for f in branches]
        read = [(*f.job.prefix, *d.tokens) for f, d in zip(branches, drafts, strict=True) if d]
        try:
            self._drafter.step(lines, read)
        except InvalidInput:  # a guess that the draft model cannot continue: no room, no such token
            self._give_up(tasks + branches)
            return True
        for future in branches:
            self._predict(future)
        for future in tasks:
            if future.line is not None and future.line.draft is not None:
                self._finish(future, future.line.draft)
        return True

    def learn(self, verdict: Verdict, exit_s: float | None) -> None:
        """This round has ended in ``verdict``; ``exit_s``: as ``Profile.on_outcome`` has it."""
        answer = tuple(self._client.generated)
        now, then = self._futures.get(answer), self._futures.get((*answer, *verdict.tokens))
        for i, belief in enumerate((now.beliefs if now else [])[: verdict.accepted + 1]):
            self._profile.on_belief(belief, i < verdict.accepted)
        if self._enabled and not verdict.finished:
            foreseen = then is not None and then.foreseen
            self._profile.on_outcome(predicted=foreseen, exit_s=exit_s)

    def advance(self, answer: Answer) -> None:
        """The answer is ``answer`` now: forget what has become void."""
        come = self._futures.get(answer)
        known = (come.probability if come else 0.0) or 1.0  # what follows it is likelier by this
        futures, self._futures = self._futures, {}
        for prefix, future in futures.items():
            if prefix[: len(answer)] == answer:
                future.probability = min(1.0, future.probability / known)
                self._futures[prefix] = future
            else:
                future.answer(None)
        self._cache.advance(answer, known)
        self._drafter.advance(answer)

    def close(self) -> None:
        """Nothing is needed any more."""
        self._give_up(list(self._futures.values()))

    def _future(self, job: DraftJob, probability: float) -> _Future:
        future = self._futures.setdefault(job.prefix, _Future(job, probability))
        future.probability = max(future.probability, probability)
        return future

    def _choose_branches(self) -> list[_Future]:
        """The drafts whose outcomes are to be predicted next: likelier than all that waits."""
        if not (self._enabled and self._config.predictions):
            return []
        deepest = self._client.round + (self._config.push_depth if self._config.push_window else 1)
        least = max(self._config.min_probability, self._cache.best)
        found = [
            future
            for answer, future in self._futures.items()
            if not future.explored
            and future.probability >= least
            and future.job.gamma
            and future.job.round < deepest
            and self._cache.lookup(answer) is not None
        ]
        found.sort(key=lambda future: -future.probability)
        return found[: (self._config.batch + 1) // 2]

    def _choose_tasks(self, room: int) -> list[_Future]:
        """The ``room`` most urgent pre-drafts, begun or new."""
        tasks = [future for future in self._futures.values() if future.line is not None]
        self._sort(tasks)
        while len(tasks) < room or (
            self._ordered and self._cache.best > tasks[room - 1].probability
        ):
            answer = self._cache.pop()
            if answer is None:
                break
            future = self._futures[answer]
            if future.line is None and self._cache.lookup(answer) is None:
                future.line = self._drafter.begin(future.job, cached=True)
                tasks.append(future)
                self._sort(tasks)
        return tasks[:room]

    def _sort(self, tasks: list[_Future]) -> None:
        """What somebody waits for first, then by probability."""
        tasks.sort(key=lambda f: (not f.replies, -f.probability if self._ordered else 0.0))

    def _predict(self, future: _Future) -> None:
        draft = self._cache.lookup(future.job.prefix)
        assert draft is not None
        prediction = self._drafter.predict(
            future.job, draft, self._config.predictions, self._profile.temperature
        )
        future.explored, future.beliefs = True, prediction.accepted
        for outcome, probability in prediction.outcomes:
            together = future.probability * probability
            if together >= self._config.min_probability:
                self.expect(outcome, together, future.job)
                expected = self._futures.get((*future.job.prefix, *outcome))
                if expected is not None:
                    expected.foreseen = True

    def _finish(self, future: _Future, draft: Draft) -> None:
        """Keep a pre-draft, and send it ahead if it may go."""
        future.line = None
        pushed = self._client.push(future.job, draft, self._config.push_window)
        if pushed is not None:
            self._send(pushed)
        self._cache.store(future.job.prefix, pushed or draft)
        future.answer(pushed or draft)

    def _give_up(self, futures: list[_Future]) -> None:
        for future in futures:
            future.line, future.explored = None, True
            future.answer(None)
