"""The weighted majority of several drafts (paper 002, section 3.2), and its verification.

The drafts of one request are merged into a tree. A node weighs what the models weigh whose drafts
pass through it, and the walk from the root always takes the heaviest child:

    model  weight  draft
      0     0.6    I like apple         I (1.8) ─┬─ like (1.1) ─┬─ apple (0.6)  ◀ voted, model 0
      1     0.5    I like pear                   │              └─ pear  (0.5)
      2     0.7    I likes it                    └─ likes (0.7) ── it    (0.7)

Of children that weigh the same, the one wins that the heaviest single model proposes, then the one
of the model that is named first. The path is always one model's whole draft. Several models may
have drafted it: the heaviest of them, then the first, counts as the voted model.

The voted path is a function of the drafts, so it is no longer distributed as the voted model's own
q: to accept with min(1, p/q), as the paper prints it, changes the output law. It is a
deterministic proposal instead, whose q is 1 at the voted token: accepted with p(token), else
replaced by a draw from p without it, which leaves the target's law exactly. ``verify_chain`` does
both at once: the target draws its own token, and the voted one is accepted if it is the same. So a
seed gives one answer, whatever the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution

Draft = Sequence[int]


@dataclass(frozen=True)
class Vote:
    """The majority's path.

    Attributes:
        tokens: the path from the root, as long as the voted model's draft.
        model: index of the voted model; -1 if there was no draft.
    """

    tokens: tuple[int, ...]
    model: int


def vote(drafts: Sequence[Draft | None], weights: Sequence[float]) -> Vote:
    """Return the weighted majority's path through the drafts of one request, in O(k s).

    A path that ends early (with an end token) loses to any that goes on after it.

    Args:
        drafts: [k] drafts of up to s token ids; None where a model gave none.
        weights: [k] weights >= 0. A model of weight 0 has no say.
    """
    voters = [
        model for model, draft in enumerate(drafts) if draft is not None and weights[model] > 0
    ]
    # Heaviest first: in a tie, the first child seen is the one that the rule above asks for.
    voters.sort(key=lambda model: -weights[model])
    tokens: list[int] = []
    leader = voters[0] if voters else -1
    while children := _children(drafts, voters, len(tokens)):
        mass = {token: sum(weights[m] for m in own) for token, own in children.items()}
        heaviest = max(mass, key=mass.__getitem__)
        tokens.append(heaviest)
        voters = children[heaviest]
        leader = voters[0]
    return Vote(tuple(tokens), leader)


def deciding(models: set[int], weights: Sequence[float]) -> set[int]:
    """Return those of ``models`` whose drafts can change the vote.

    One that outweighs all others together wins whatever they draft.
    """
    for model in models:
        if weights[model] > sum(weights[other] for other in models - {model}):
            return {model}
    return models


def proposes_likeliest(config: SamplingConfig) -> bool:
    """Return True where a voter proposes its likeliest token, whatever is sampled later.

    A voted path is a certain proposal. Under the coupled law a voter proposes the token that it
    would emit itself: the target shares its noise.
    """
    return config.greedy or config.sends_probabilities


def proposal(tokens: Draft, config: SamplingConfig) -> tuple[SparseDistribution, ...] | None:
    """Return the distributions of which a voted path is drawn, as ``verify_chain`` wants them.

    Each is certain of its token. None under the laws that judge without them.
    """
    if not config.sends_probabilities:
        return None
    return tuple(_certain(token) for token in tokens)


@lru_cache(maxsize=4096)
def _certain(token: int) -> SparseDistribution:
    return SparseDistribution(np.array([token], np.int32), np.array([1.0], np.float32))


def _children(
    drafts: Sequence[Draft | None], voters: Sequence[int], depth: int
) -> dict[int, list[int]]:
    """Return the voters of each token at ``depth``, in the order of ``voters``."""
    children: dict[int, list[int]] = {}
    for model in voters:
        draft = drafts[model]
        if draft is not None and depth < len(draft):
            children.setdefault(draft[depth], []).append(model)
    return children
