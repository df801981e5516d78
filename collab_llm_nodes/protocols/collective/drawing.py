"""One draw: the proposals of the draft models for a batch of requests, and the votes on them."""

from __future__ import annotations

from collections.abc import Sequence

from collab_llm_nodes.decoding.vote import vote
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Proposal
from collab_llm_nodes.protocols.collective.requests import Draft, Job, State


def sends_q(job: Job, paper_faithful: bool) -> bool:
    """Return True if drafts for ``job`` are judged by the draft model's own probabilities."""
    return paper_faithful and job.sampling.sends_probabilities


class Drawing:
    """A draw under way: one step for whole drafts, or one for each token.

    Args:
        number: of the batch.
        drafts: the batch; ``own`` of each names the models that are asked.
        since: time at which it begins [s].
        count: number of all models.
        every_token: vote after each token, and let all models go on from the voted one.
        paper_faithful: have sampled drafts drawn from the models' own probabilities.

    Attributes:
        drafts, since: as given.
        asked_at: time of the last step [s].
        awaited: models whose answer to it is still to come.
    """

    def __init__(
        self,
        number: int,
        drafts: Sequence[Draft],
        since: float,
        count: int,
        eos: frozenset[int],
        *,
        every_token: bool,
        paper_faithful: bool,
    ) -> None:
        self.drafts = drafts
        self.since = since
        self.asked_at = 0.0
        self.awaited: set[int] = set()
        self._number = number
        self._count = count
        self._eos = eos
        self._every_token = every_token
        self._paper_faithful = paper_faithful
        self._step = -1
        self._open: list[Draft] = []  # drafts that this step makes longer
        self._rows: dict[int, list[int]] = {}  # places in it of those that each model is asked for
        self._given: list[list[Proposal | None]] = []  # [open, k]

    @property
    def settled(self) -> bool:
        """True if all proposals of the step have arrived and await the vote."""
        return bool(self._open) and not self.awaited

    def next_step(self, now: float) -> list[Draw]:
        """Return the next draws; none when the drafts are complete, or no model is left."""
        last = self._step == 0 and not self._every_token
        self._open = [] if last else [draft for draft in self.drafts if self._grows(draft)]
        self._given = [[None] * self._count for _ in self._open]
        self._rows = {}
        for row, draft in enumerate(self._open):
            for model in draft.models:
                self._rows.setdefault(model, []).append(row)
        self.awaited = set(self._rows)
        if not self.awaited:
            self._open = []
            return []
        self._step += 1
        self.asked_at = now
        asks = [self._ask(draft) for draft in self._open]
        return [
            Draw(self._number, self._step, model, tuple(asks[row] for row in rows))
            for model, rows in sorted(self._rows.items())
        ]

    def on_proposals(
        self, model: int, batch: int, step: int, proposals: Sequence[Proposal | None]
    ) -> None:
        """Record proposals; those of another step, or of a model that was left out, are dropped."""
        if (batch, step) == (self._number, self._step) and model in self.awaited:
            self.awaited.discard(model)
            for row, proposal in zip(self._rows[model], proposals, strict=True):
                self._given[row][model] = proposal

    def leave_out(self, model: int) -> None:
        """Continue without ``model``, and drop its proposals."""
        self.awaited.discard(model)
        for given in self._given:
            given[model] = None
        for draft in self.drafts:
            draft.own[model] = None

    def vote(self) -> None:
        """Extend the drafts by the tokens that win the vote."""
        for draft, own in zip(self._open, self._given, strict=True):
            self._vote(draft, own)
        self._open = []

    def _vote(self, draft: Draft, given: Sequence[Proposal | None]) -> None:
        paths = [None if each is None else each.tokens for each in given]
        made = vote(paths, draft.request.weights.values)
        for model, path in enumerate(paths):
            own = draft.own[model]
            if own is None:
                continue  # it is not asked, or left out
            if path is None:
                draft.own[model] = None
                draft.request.mute.add(model)
            else:
                own += path
                draft.request.mute.discard(model)
        draft.tokens += made.tokens
        draft.voted = made.model
        voted = given[made.model] if made.model >= 0 else None
        if voted is not None and voted.q is not None:
            draft.q += voted.q
        if not made.tokens:
            draft.wanted = len(draft.tokens)  # no model goes on

    def _grows(self, draft: Draft) -> bool:
        ended = bool(draft.tokens) and draft.tokens[-1] in self._eos
        drafting = draft.request.state is State.DRAFTING
        return drafting and not ended and len(draft.tokens) < draft.wanted

    def _ask(self, draft: Draft) -> Ask:
        job = draft.request.job
        return Ask(
            job.id,
            job.prompt,
            (*draft.request.answer, *draft.tokens),
            1 if self._every_token else draft.wanted,
            job.sampling,
            sends_q(job, self._paper_faithful),
        )
