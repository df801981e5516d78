"""Verification of drafts by the last stage (paper 004, figure 8), and what its heads guess next.

A draft only proposes: the token that stands at a position is always the model's own, drawn from its
distribution by the random number of that position. So an answer depends neither on the drafter nor
on where the layers are, and a lost answer can be gone on with elsewhere. For a proposal that is
certain this is the rejection law (accept with p(token), else draw from the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution, most_likely
from collab_llm_nodes.engine.kernels import Head
from collab_llm_nodes.models.heads import MedusaHeads


def walk(
    own: Callable[[int, int], int],
    draft: Sequence[int],
    parents: Sequence[int],
    eos: frozenset[int],
) -> tuple[tuple[int, ...], int]:
    """Follow the model's own tokens through a tree of drafts.

    Args:
        own: the token that the model says after a row, as ``own(row, depth)``; row 0 is the token
            that stands, row i + 1 is ``draft[i]``.
        draft: tokens.
        parents: of each draft token, the row that it follows.
        eos: end tokens.

    Returns:
        Rows of the drafts that stand, ascending, and the token that follows them; -1 if the last of
        them is an end token.
    """
    path: list[int] = []
    row = 0
    while True:
        token = own(row, len(path))
        children = (i for i, parent in enumerate(parents) if parent == row)
        child = next((i for i in children if draft[i] == token), None)
        if child is None:
            return tuple(path), token
        row = child + 1
        path.append(row)
        if token in eos:
            return tuple(path), -1


def judge(
    logits: Tensor,
    draft: Sequence[int],
    parents: Sequence[int],
    sampling: SamplingConfig,
    position: int,
    eos: frozenset[int],
) -> tuple[tuple[int, ...], int]:
    """Return what :func:`walk` finds for ``logits`` [1 + drafts, V].

    Args:
        position: of the first draft token in the answer.

    Raises:
        ModelError: the logits are not finite.
    """
    if sampling.greedy:
        tokens = most_likely(logits)
        return walk(lambda row, depth: tokens[row], draft, parents, eos)

    def own(row: int, depth: int) -> int:
        return own_token(distribution(logits[row], sampling), sampling, position + depth)

    return walk(own, draft, parents, eos)


@torch.inference_mode()
def guess(heads: MedusaHeads, head: Head, state: Tensor, count: int) -> tuple[int, ...]:
    """Return the ``count`` best tokens of each Medusa head in turn, for one ``state`` [width]."""
    best = head(heads(state)).topk(count, dim=-1).indices
    found: list[int] = best.flatten().tolist()
    return tuple(found)
