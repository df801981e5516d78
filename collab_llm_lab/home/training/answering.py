"""Questions of the second stage: all requests, with the expert's answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collab_llm_lab.home.training.pictures import Pictures


@dataclass(frozen=True)
class Answering:
    """Draws requests at a picture, in words."""

    count: int
    """Requests drawn of each picture, which has at least as many."""
    reworded: float
    """Share that is not in plain words."""

    def __call__(
        self, pictures: Pictures, index: int, flip: bool, rng: np.random.Generator
    ) -> list[tuple[str, str]]:
        at_hand = pictures.asks[index]
        chosen = [at_hand[int(i)] for i in rng.permutation(len(at_hand))[: self.count]]
        return [(ask.mirror() if flip else ask).texts(rng, self.reworded) for ask in chosen]
