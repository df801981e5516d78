"""Texts that the tokenizer of the home's pair is trained on."""

from __future__ import annotations

import numpy as np

from collab_llm_lab.home.requests import SIDES, About, Kind
from collab_llm_lab.home.wording import ANSWER_WORDS, NOUNS, START_WORDS, TRAINED
from collab_llm_nodes.sim.rooms import COLOURS, FURNITURE, NAMED_FURNITURE, SHAPES

_WEIGHT = 500
"""Times that each word of an answer counts beside the requests."""
_REQUESTS = 2000
"""Number of requests of each kind."""


def corpus() -> list[str]:
    """Return texts for ``train_tokenizer``: the words of answers, and trained requests.

    Each word of an answer becomes one token after a space, and so does a word that texts begin
    with, without one. The texts follow from wording.txt, so
    save the tokenizer with its model: a training cannot go on with another one.
    """
    words = [f" {word}" for word in (*COLOURS, *SHAPES, *FURNITURE, *ANSWER_WORDS)]
    rng = np.random.default_rng(0)
    requests = [
        TRAINED.draw(rng, kind, about).lower()
        for kind in Kind
        for about in (_about(rng, kind) for _ in range(_REQUESTS))
    ]
    return [*words, *START_WORDS] * _WEIGHT + requests


def _about(rng: np.random.Generator, kind: Kind) -> About:
    """Return a subject that a request of this kind may have."""
    if kind is Kind.UNKNOWN:
        return About(str(rng.choice(NOUNS)))
    colour, shape = str(rng.choice(COLOURS)), str(rng.choice(SHAPES))
    if kind is Kind.HOW_MANY:
        return About(str(rng.choice((colour, shape, ""))))
    furniture = str(rng.choice(NAMED_FURNITURE))
    related = About(shape, str(rng.choice(SIDES)), furniture)
    return (About(f"{colour} {shape}"), About(shape), About(furniture), related)[rng.integers(4)]
