"""Batches as a function of (seed, step): pictures, questions about them, dense words of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.nav.encoding import Encoder
from collab_llm_lab.training.nav.forward import GRID
from collab_llm_lab.training.nav.pictures import MOST_SIGHTS, NAMES, Pictures
from collab_llm_lab.training.nav.questions import draw_name
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.sim.rooms import COLOURS, FURNITURE, SHAPES
from collab_llm_nodes.sim.view import DIRECTION_EDGES, DIRECTIONS, DISTANCE_EDGES, DISTANCES

WORDS = (
    *COLOURS,
    *SHAPES,
    *FURNITURE,
    *("far", "left", "ahead", "right"),
    *("very", "close", "near", "some", "distant"),
)
"""Words that image tokens learn to predict for the things they show (dense supervision)."""
NAME_LENGTH = 4
_MOST_DRAWS = 1000
NAMES_PER_PICTURE = 12
"""Names looked up per picture besides the questions: cheap, and each contrasts with the others."""

Shards = Sequence[tuple[Sequence[Path], int]]
"""Folders of shards, and how many pictures to take from them together."""
Ask = Callable[[Pictures, int, bool, np.random.Generator], list[tuple[str, str]]]
"""Returns prompts and answers for a picture; called with its index, and True for its mirror
image."""


@dataclass(frozen=True)
class Lengths:
    """Token ids of the rows of a stage's questions; see ``Encoder.pairs``.

    Longer questions are drawn again: they must be rare.
    """

    text: int
    answer: int


class Batch(NamedTuple):
    """B pictures with K questions each; T image tokens, W dense words, A answer tokens."""

    pictures: Tensor  # uint8 [B, 112, 224, 3]
    texts: Tensor  # int64 [B K, L], right padded
    at: Tensor  # int64 [B K, A]: positions whose next token is an answer token
    labels: Tensor  # int64 [B K, A], -100 where there is none
    dense: Tensor  # float [B, T, W]
    names: Tensor  # int64 [B N, NAME_LENGTH]: requests for a name alone, right padded
    name_at: Tensor  # int64 [B N]: the last token of the name asked for
    found: Tensor  # int64 [B N, 2]: its direction and distance, one past the last word if unseen


class Batches:
    """Makes batch ``step`` from pictures; equal seeds and pictures give equal batches.

    Args:
        ask: gives each picture the same number of questions; None: there are no texts at all.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, ask: Ask | None, lengths: Lengths
    ) -> None:
        self._encoder = Encoder(tokenizer)
        self._seed, self._ask, self._lengths = seed, ask, lengths
        self._loaded: dict[tuple[Path, ...], Pictures] = {}

    def make(self, shards: Shards, step: int) -> Batch:
        """Return the batch of a step."""
        wanted = [(tuple(folders), count) for folders, count in shards]
        self._loaded = {key: self._loaded.get(key) or Pictures(key) for key, _ in wanted}
        rng = np.random.default_rng([self._seed, step])
        images, dense, asked, named = [], [], [], []
        for key, count in wanted:
            pictures = self._loaded[key]
            for _ in range(count):
                index, flip, questions = self._drawn(pictures, rng)
                view = pictures.view(index, flip)
                if questions:
                    asked += questions
                    named += [draw_name(view, rng) for _ in range(NAMES_PER_PICTURE)]
                dense.append(dense_words(pictures, index, flip))
                image = pictures.image(index)
                images.append(image[:, ::-1] if flip else image)
        texts, at, labels = self._encoder.pairs(asked, self._lengths.text, self._lengths.answer)
        names, name_at = self._encoder.names([f"find the {n}" for n, _ in named], NAME_LENGTH)
        return Batch(
            torch.from_numpy(np.stack(images)),
            texts,
            at,
            labels,
            torch.from_numpy(np.stack(dense)),
            names,
            name_at,
            torch.tensor([where for _, where in named], dtype=torch.int64).reshape(-1, 2),
        )

    def _drawn(
        self, pictures: Pictures, rng: np.random.Generator
    ) -> tuple[int, bool, list[tuple[str, str]]]:
        """Return a picture, whether it is mirrored, and questions that fit into the rows.

        All batches have one shape, so the few pictures whose questions are longer are left out.
        """
        for _ in range(_MOST_DRAWS):
            index, flip = int(rng.integers(len(pictures))), bool(rng.random() < 0.5)
            asked = self._ask(pictures, index, flip, rng) if self._ask else []
            lengths = [(self._encoder.question_ids(p), self._encoder.ids(a)) for p, a in asked]
            if all(
                len(a) < self._lengths.answer and len(p) + len(a) <= self._lengths.text
                for p, a in lengths
            ):
                return index, flip, asked
        raise ConfigError(
            f"none of {_MOST_DRAWS} drawn questions fits", field="lengths", remedy="raise them"
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
