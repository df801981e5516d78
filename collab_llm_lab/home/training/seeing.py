"""Batches of the first stage: short questions about pictures, and dense words of image tokens.

The model learns to see before it learns to act: where named things are, and how far the way is
free. Colour and shape are words of their own, so that pairs never shown can be named too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.home.rooms import COLOURS, FURNITURE, HELD_OUT_PAIRS, SHAPES
from collab_llm_lab.home.training.pictures import GRID, MOST_SIGHTS, NAMES, Pictures
from collab_llm_lab.home.view import (
    DIRECTION_EDGES,
    DIRECTIONS,
    DISTANCE_EDGES,
    DISTANCES,
    Sight,
    View,
    direction,
    distance,
    way,
)
from collab_llm_lab.training.nav.batches import Batch
from collab_llm_lab.training.nav.encoding import Encoder

WORDS = (
    *COLOURS,
    *SHAPES,
    *FURNITURE,
    *("far", "left", "ahead", "right"),
    *("very", "close", "near", "some", "distant"),
)
"""Words that image tokens learn to predict for the things they show (dense supervision)."""
KNOWN = tuple(
    name for name in NAMES if name != "person" and tuple(name.split()) not in HELD_OUT_PAIRS
)
"""Names that training asks for."""
TEXT_LENGTH, ANSWER_LENGTH, NAME_LENGTH = 20, 8, 6
NAMES_PER_PICTURE = 12
"""Names looked up per picture besides the questions: cheap, and each contrasts with the others."""
QUESTIONS = 3
"""Questions with answers per picture."""
_WAY_SHARE, _UNSEEN_SHARE, _LIKE_SHARE = 0.15, 0.4, 0.6
WAY_QUESTION = "how far is the way free?"


def found(view: View, name: str) -> tuple[int, int] | None:
    """Return the numbers of direction and distance of the nearest thing of this name.

    They are one past the last if none is in view; None if a borderline one makes that uncertain.
    """
    named = [s for s in (*view.things, *view.furniture) if s.name == name]
    if any(sight.borderline for sight in named):
        return None
    seen = [sight for sight in named if sight.in_view]
    if not seen:
        return len(DIRECTIONS), len(DISTANCES)
    nearest = min(seen, key=lambda sight: sight.range)
    return DIRECTIONS.index(direction(nearest.bearing)), DISTANCES.index(distance(nearest.range))


def question(name: str) -> str:
    """Return the short question for a thing."""
    return f"where is the {name}?"


def short_answer(where: tuple[int, int]) -> str:
    """Return the answer to it: "far left, near"."""
    if where[0] == len(DIRECTIONS):
        return "not in view"
    return f"{DIRECTIONS[where[0]]}, {DISTANCES[where[1]]}"


def draw_name(view: View, rng: np.random.Generator) -> tuple[str, tuple[int, int]]:
    """Return a name to ask for and where it is: in view, or like something that is."""
    sights: list[Sight] = [s for s in (*view.things, *view.furniture) if s.name in KNOWN]
    while True:
        seen = [s.name for s in sights if s.in_view]
        if seen and rng.random() >= _UNSEEN_SHARE:
            name = seen[int(rng.integers(len(seen)))]
        else:
            among: Sequence[str] = KNOWN
            if seen and rng.random() < _LIKE_SHARE:
                like = set(seen[int(rng.integers(len(seen)))].split())
                among = [name for name in KNOWN if like & set(name.split())]
            name = among[int(rng.integers(len(among)))]
        where = found(view, name)
        if where is not None:
            return name, where


class SeeingBatches:
    """Makes batch ``step`` from pictures; equal seeds and pictures give equal batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._encoder = Encoder(tokenizer)
        self._seed = seed

    def make(self, pictures: Pictures, count: int, step: int) -> Batch:
        """Return the batch of a step, of ``count`` pictures."""
        rng = np.random.default_rng([self._seed, step])
        images, dense, asked, named = [], [], [], []
        for index in rng.integers(len(pictures), size=count):
            flip = bool(rng.random() < 0.5)
            view = pictures.view(int(index), flip)
            for _ in range(QUESTIONS):
                if rng.random() < _WAY_SHARE:
                    asked.append((WAY_QUESTION, way(view.free)))
                else:
                    name, where = draw_name(view, rng)
                    asked.append((question(name), short_answer(where)))
            named += [draw_name(view, rng) for _ in range(NAMES_PER_PICTURE)]
            dense.append(dense_words(pictures, int(index), flip))
            image = pictures.image(int(index))
            images.append(image[:, ::-1] if flip else image)
        texts, at, labels = self._encoder.pairs(asked, TEXT_LENGTH, ANSWER_LENGTH)
        names, name_at = self._encoder.names([f"find the {n}" for n, _ in named], NAME_LENGTH)
        return Batch(
            torch.from_numpy(np.stack(images)),
            texts,
            at,
            labels,
            torch.from_numpy(np.stack(dense)),
            names,
            name_at,
            torch.tensor([where for _, where in named]),
        )


def dense_words(pictures: Pictures, index: int, flip: bool) -> np.ndarray:
    """Return float32 [T, W]: the words that are true of what each image token shows."""
    name = pictures.name[index]
    bearing = np.degrees(pictures.bearing[index]) * (-1 if flip else 1)
    d = (bearing[:, None] <= np.array(DIRECTION_EDGES)).sum(-1)
    r = (pictures.range[index][:, None] >= np.array(DISTANCE_EDGES)).sum(-1)
    bits = pictures.shows[index].reshape(GRID.rows, GRID.columns)
    bits = (bits[:, ::-1] if flip else bits).reshape(-1, 1)
    shown = ((bits >> np.arange(MOST_SIGHTS, dtype=np.uint32)) & 1).astype(bool) & (name >= 0)
    words = np.where(shown[..., None], _TABLE[name, d, r], 0.0)
    return words.max(axis=1).astype(np.float32)


def _dense_table() -> np.ndarray:
    """Return float32 [names, directions, distances, W]: the dense words of each appearance."""
    table = np.zeros((len(NAMES), len(DIRECTIONS), len(DISTANCES), len(WORDS)), np.float32)
    for (n, name), (d, where), (r, far) in itertools.product(
        enumerate(NAMES), enumerate(DIRECTIONS), enumerate(DISTANCES)
    ):
        true = {*name.split(), *where.split(), *far.split()}
        table[n, d, r] = [word in true for word in WORDS]
    return table


_TABLE = _dense_table()
