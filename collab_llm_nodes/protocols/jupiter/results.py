"""Validation of a result against its pass: the last worker is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Result, Step, Want, WorkerInfo

_MOST_HEADS = 64


def check_result(result: Result, steps: Sequence[Step], workers: int, info: WorkerInfo) -> None:
    """Refuse a result that no correct worker returns for ``steps``.

    Raises:
        ProtocolError: ``field`` names the invalid field.
    """
    if len(result.outcomes) != len(steps) or len(result.spans) != workers:
        raise ProtocolError(
            f"{len(result.outcomes)} outcomes and {len(result.spans)} times, not {len(steps)} and"
            f" {workers}",
            field="outcomes",
        )
    for outcome, step in zip(result.outcomes, steps, strict=True):
        _check_outcome(outcome, step, info)


def _check_outcome(outcome: Outcome, step: Step, info: WorkerInfo) -> None:
    if step.want is Want.VERDICT:
        _check_verdict(outcome, step, info)
    elif outcome.path or outcome.guesses or outcome.next >= 0:
        raise ProtocolError("an unexpected verdict", field="outcomes")
    _check_logits(outcome.logits, step.rows if step.want is Want.LOGITS else 0, info.vocab_size)


def _check_verdict(outcome: Outcome, step: Step, info: WorkerInfo) -> None:
    draft = step.ids[len(step.ids) - step.rows + 1 :]
    parents, before = step.parents or range(len(draft)), 0
    for row in outcome.path:
        if not before < row <= len(draft) or parents[row - 1] != before:
            raise ProtocolError("a verdict on another draft", field="outcomes.path")
        before = row
    ended = outcome.next < 0
    if ended and not (before and draft[before - 1] in info.eos):
        raise ProtocolError("a verdict without a token", field="outcomes.next")
    if max(outcome.next, *outcome.guesses, 0) >= info.vocab_size:
        raise ProtocolError("a token outside the vocabulary", field="outcomes")
    most = _MOST_HEADS * step.guesses
    if len(outcome.guesses) > most or (most and len(outcome.guesses) % step.guesses):
        raise ProtocolError(f"{len(outcome.guesses)} guesses", field="outcomes.guesses")


def _check_logits(logits: bytes, rows: int, vocab_size: int) -> None:
    if len(logits) != 4 * rows * vocab_size:
        raise ProtocolError(
            f"{len(logits)} bytes of logits, not {4 * rows * vocab_size}", field="outcomes.logits"
        )
    # Single tokens may have a logit of -inf.
    if not np.isfinite(np.frombuffer(logits, "<f4").reshape(rows, vocab_size).max(axis=1)).all():
        raise ProtocolError("logits that are not finite", field="outcomes.logits")
