"""Do two models fit together as draft and target? The answer by their files alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from collab_llm_nodes.engine.inspection import Inspection, Reason, inspect_model
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.vocabulary import shared_size


@dataclass(frozen=True)
class TokenDifference:
    """The lowest id that the two models read differently; None: one of them has no such token."""

    id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True)
class PairReport:
    """Findings about a pair.

    Attributes:
        reasons: why the two do not fit together; each side has reasons of its own.
        first_difference: of their vocabularies.
        same_chat: both render a question alike; None if one of them renders none.
        notes: what a user should know besides.
    """

    target: Inspection
    draft: Inspection
    reasons: tuple[Reason, ...]
    first_difference: TokenDifference | None
    same_chat: bool | None
    notes: tuple[str, ...]

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        """Every reason for which the pair cannot be used."""
        return (*self.target.reasons, *self.draft.reasons, *self.reasons)

    @property
    def fits(self) -> bool:
        """The pair can be used."""
        return not self.all_reasons

    def refused(self, error: CollabError) -> PairReport:
        """Return the report with a fault that only loading the models has shown."""
        return replace(self, reasons=(*self.reasons, Reason.of(error)))

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        difference = self.first_difference
        return {
            "fits": self.fits,
            "target": self.target.as_json(),
            "draft": self.draft.as_json(),
            "reasons": [asdict(reason) for reason in self.all_reasons],
            "first_difference": difference and asdict(difference),
            "same_chat": self.same_chat,
            "notes": self.notes,
        }


def check_pair(target: ModelConfig, draft: ModelConfig) -> PairReport:
    """Compare two models by their files; every fault becomes a reason of the report."""
    sides = inspect_model(target, "target"), inspect_model(draft, "draft")
    both = [side.chat for side in sides if side.chat is not None]
    return PairReport(
        *sides,
        reasons=tuple(Reason.of(error) for error in _misfits(*sides)),
        first_difference=_first_difference(*sides),
        same_chat=both[0] == both[1] if len(both) == 2 else None,
        notes=tuple(_notes(*sides)),
    )


def _misfits(target: Inspection, draft: Inspection) -> Iterator[CollabError]:
    if target.vocabulary and draft.vocabulary:
        try:
            shared_size(
                draft.vocabulary.hash,
                target.shared,
                draft=draft.config.path,
                target=target.config.path,
            )
        except CollabError as error:
            yield error
    if target.sees is not None and draft.sees is not None and target.sees != draft.sees:
        blind = "draft" if target.sees else "target"
        yield ConfigError(
            f"the {blind} reads text only, the other sees: requests with pictures are refused",
            field="pictures",
            remedy=f"take a {blind} that sees, or two models that read text only",
        )


def _first_difference(target: Inspection, draft: Inspection) -> TokenDifference | None:
    if not (target.tokens and draft.tokens):
        return None
    ours, theirs = ({i: token for token, i in side.tokens.items()} for side in (target, draft))
    ids = sorted(ours.keys() | theirs.keys())
    found = (TokenDifference(i, ours.get(i), theirs.get(i)) for i in ids)
    return next((each for each in found if each.target != each.draft), None)


def _notes(target: Inspection, draft: Inspection) -> Iterator[str]:
    if target.chat and draft.chat and target.chat != draft.chat:
        yield (
            "the chat templates differ: each model reads a request in its own form, which costs"
            " acceptance, never exactness"
        )
    if draft.vocabulary and (shared := target.shared.get(draft.vocabulary.hash)):
        further = [token for token, i in target.tokens.items() if i >= shared]
        if further:
            yield (
                f"the draft lacks {len(further)} added tokens of the target, such as"
                f" {min(further, key=target.tokens.__getitem__)!r}: an answer that uses one ends"
                " with VOCABULARY_MISMATCH"
            )
    if target.context and draft.context and draft.context < target.context:
        yield f"beyond {draft.context} tokens the verifier decodes alone"
    if target.parameters and draft.parameters and draft.parameters >= target.parameters:
        yield "the draft is no smaller than the target: it saves no time"
    if target.backend and not target.backend.batches:
        yield "the verifier serves its sessions one by one: the target has no layer loop here"
    if draft.backend and not draft.backend.trees:
        yield "the draft has sliding windows: it drafts for one outcome at a time"
    if target.vocabulary and not target.exits:
        yield "the target has no early exits: predictions are the draft's own"
