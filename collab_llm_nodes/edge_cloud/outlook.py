"""What the edge client does while the verifier works (paper 003, Algorithm 1, lines 9-14; ours).

It expects outcomes (early exits suggest some, the draft model predicts others), continues the
likeliest side by side, and sends those continuations ahead of the verdicts they depend on. One
:meth:`Outlook.step` is one forward pass of the draft model, so that whoever waits for a verdict can
look for it in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from collab_llm_nodes.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.edge_cloud.client import DraftJob, EdgeClient
from collab_llm_nodes.edge_cloud.drafter import Drafter, Line
from collab_llm_nodes.edge_cloud.messages import Draft, Verdict
from collab_llm_nodes.edge_cloud.planner import Profile
from collab_llm_nodes.edge_cloud.predraft import Answer, PreDraftCache, PreDraftConfig

Reply = Callable[[Draft | None], None]


@dataclass
class _Task:
    """A pre-draft in the making."""

    probability: float  # that it is needed
    line: Line
    reply: Reply | None = None  # somebody asked for it


@dataclass(frozen=True)
class _Branch:
    """A draft under verification or out ahead, and how likely its round comes like that."""

    probability: float
    job: DraftJob
    draft: Draft


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
        self.enabled = predraft.max_predrafts > 0
        self._cache: PreDraftCache[Draft] = PreDraftCache(predraft)
        self._jobs: dict[Answer, DraftJob] = {}  # behind the answers in the cache's queue
        self._tasks: list[_Task] = []
        self._branches: dict[Answer, _Branch] = {}  # whose outcomes are still to be predicted
        self._explored: set[Answer] = set()  # answers whose drafts are or were among them
        self._foreseen: set[Answer] = set()  # predicted
        self._beliefs: dict[Answer, list[float]] = {}  # that each token of a draft stands

    def draft_for(self, answer: Answer) -> Draft | None:
        """The pre-draft that continues ``answer``, if it is complete."""
        return self._cache.lookup(answer)

    def learn(self, verdict: Verdict, exit_s: float | None) -> None:
        """This round has ended in ``verdict``; ``exit_s``: as ``Profile.on_outcome`` has it."""
        answer = tuple(self._client.generated)
        believed = self._beliefs.get(answer, [])
        for i, belief in enumerate(believed[: verdict.accepted + 1]):
            self._profile.on_belief(belief, i < verdict.accepted)
        if self.enabled and not verdict.finished:
            foreseen = (*answer, *verdict.tokens) in self._foreseen
            self._profile.on_outcome(predicted=foreseen, exit_s=exit_s)

    def take_off(self, job: DraftJob, draft: Draft) -> None:
        """This round's draft is under way."""
        self._branch_out(1.0, job, draft)

    def expect(
        self, outcome: Answer, probability: float, of: DraftJob | None = None
    ) -> DraftJob | None:
        """``outcome`` may come of the draft for ``of``, or of this round's; what to draft then."""
        job = self._client.predraft(outcome, of)
        if job is not None:
            self._cache.push(job.prefix, probability)
            self._jobs.setdefault(job.prefix, job)
        return job

    def demand(self, outcome: Answer, reply: Reply) -> None:
        """Draft for ``outcome`` before all else; ``reply`` gets the draft, or None if needless."""
        job = self._client.predraft(outcome)
        if job is None:
            reply(None)
        else:
            self._tasks.insert(0, _Task(1.0, self._drafter.begin(job, cached=True), reply))

    def step(self) -> bool:
        """One forward pass of what is likeliest to be needed; False if there is nothing to do.

        All continuations in the making advance side by side; what is new and likelier takes the
        place of others, which lose nothing by resting.
        """
        branches = self._choose_branches()
        tasks = self._choose_tasks(max(1, self._config.batch - len(branches)))
        if not branches and not tasks:
            return False
        read = [(*branch.job.prefix, *branch.draft.tokens) for branch in branches]
        self._drafter.step([t.line for t in tasks if t.line.draft is None], read)
        for branch in branches:
            self._predict(branch)
        for task in tasks:
            if task.line.draft is not None:
                self._finish(task, task.line.draft)
        return True

    def advance(self, answer: Answer) -> None:
        """The answer is ``answer`` now: forget what has become void."""

        def may_come(other: Answer) -> bool:
            return other[: len(answer)] == answer

        known = self._cache.probability(answer) or 1.0  # what was expected after it is likelier now
        self._branches = {
            prefix: replace(branch, probability=min(1.0, branch.probability / known))
            for prefix, branch in self._branches.items()
            if may_come(prefix)
        }
        self._jobs = {prefix: job for prefix, job in self._jobs.items() if may_come(prefix)}
        self._beliefs = {a: beliefs for a, beliefs in self._beliefs.items() if may_come(a)}
        self._explored = {prefix for prefix in self._explored if may_come(prefix)}
        self._foreseen = {prefix for prefix in self._foreseen if may_come(prefix)}
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if may_come(task.line.job.prefix):
                task.probability = min(1.0, task.probability / known)
                self._tasks.append(task)
            elif task.reply is not None:
                task.reply(None)
        self._cache.advance(answer)
        self._drafter.advance(answer)

    def close(self) -> None:
        """Nothing is needed any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task.reply is not None:
                task.reply(None)

    def _choose_branches(self) -> list[_Branch]:
        """The drafts whose outcomes are to be predicted next: likelier than all that waits."""
        deepest = self._client.round + (self._config.push_depth if self._config.push_window else 1)
        least = max(self._config.min_probability, self._cache.best)
        found = [
            branch
            for branch in self._branches.values()
            if branch.job.round < deepest and branch.probability >= least
        ]
        found.sort(key=lambda branch: -branch.probability)
        return found[: (self._config.batch + 1) // 2]

    def _choose_tasks(self, room: int) -> list[_Task]:
        """The ``room`` most urgent pre-drafts, begun or new."""
        ordered = self._cache.ordered
        while len(self._tasks) < room or (
            ordered and self._cache.best > self._tasks[room - 1].probability
        ):
            answer = self._cache.pop()
            if answer is None:
                break
            line = self._drafter.begin(self._jobs.pop(answer), cached=True)
            self._tasks.append(_Task(self._cache.probability(answer), line))
            if ordered:
                self._tasks.sort(key=lambda task: -task.probability)
        return self._tasks[:room]

    def _branch_out(self, probability: float, job: DraftJob, draft: Draft) -> None:
        """Have the outcomes of ``draft`` predicted when that is the likeliest thing to do."""
        wanted = self.enabled and self._config.predictions and job.gamma
        if wanted and job.prefix not in self._explored:
            self._explored.add(job.prefix)
            self._branches[job.prefix] = _Branch(probability, job, draft)

    def _predict(self, branch: _Branch) -> None:
        del self._branches[branch.job.prefix]
        prediction = self._drafter.predict(
            branch.job, branch.draft, self._config.predictions, self._profile.temperature
        )
        self._beliefs[branch.job.prefix] = prediction.accepted
        for outcome, probability in prediction.outcomes:
            together = branch.probability * probability
            if together >= self._config.min_probability:
                job = self.expect(outcome, together, branch.job)
                if job is not None:
                    self._foreseen.add(job.prefix)

    def _finish(self, task: _Task, draft: Draft) -> None:
        """Keep a pre-draft, and send it ahead if it may go."""
        self._tasks.remove(task)
        job = task.line.job
        self._cache.store(job.prefix, draft)
        self._branch_out(task.probability, job, draft)
        pushed = self._client.push(job, draft, self._config.push_window)
        if pushed is not None:
            self._send(pushed)
        if task.reply is not None:
            task.reply(pushed or draft)
