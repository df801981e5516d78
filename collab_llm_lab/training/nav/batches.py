"""Training batches as a function of (seed, step): pictures, questions about them, dense targets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.nav.data import MOST_THINGS, TOKEN_COLUMNS, TOKEN_ROWS, Pictures
from collab_llm_lab.training.nav.encoding import Encoder
from collab_llm_lab.training.nav.wording import (
    TRAINED,
    VERBS,
    WORDS,
    Wording,
    Wordings,
    answer,
)
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.expert import ACTIONS, DIRECTIONS, DISTANCES, Sight, direction, distance
from collab_llm_nodes.sim.renderer import KINDS

TEXT_LENGTH = 46
"""Question and answer tokens of the longest plain pair, less the last one, which is no input."""
ANSWER_LENGTH = 25
NAME_LENGTH = 5
NAMES = 8
"""Names looked up per picture besides the questions: cheap, and each contrasts with the others."""
UNSEEN_SHARE = 0.35

_MIRROR = {"left": "right", "right": "left"}


def mirrored(action: str) -> str:
    """Return an action as seen in a mirror."""
    return " ".join(_MIRROR.get(word, word) for word in action.split())


@dataclass(frozen=True)
class Question:
    """One question about one picture; ``sight`` is None for a thing that is not there."""

    name: str
    sight: Sight | None
    history: tuple[str, ...]
    wording: Wording

    @property
    def prompt(self) -> str:
        return user_text(self.wording.text(self.name), self.history)

    @property
    def found(self) -> tuple[int, int]:
        """Numbers of the words for direction and distance; one past the last if not in view."""
        if self.sight is None or not self.sight.in_view:
            return len(DIRECTIONS), len(DISTANCES)
        d, r = direction(self.sight.bearing), distance(self.sight.range)
        return DIRECTIONS.index(d), DISTANCES.index(r)

    @property
    def answer(self) -> str:
        return answer(self.name, self.sight, self.history, self.wording.form)


class Batch(NamedTuple):
    """B pictures with K questions each; T image tokens, W dense words, A answer tokens."""

    pictures: Tensor  # uint8 [B, 84, 168, 3]
    texts: Tensor  # int64 [B K, L], right padded to TEXT_LENGTH or the longest reworded text
    at: Tensor  # int64 [B K, ANSWER_LENGTH]: positions whose next token is an answer token
    labels: Tensor  # int64 [B K, ANSWER_LENGTH], -100 where there is none
    dense: Tensor  # float [B, T, W]
    names: Tensor  # int64 [B N, NAME_LENGTH]: instructions alone, right padded
    name_at: Tensor  # int64 [B N]: the last token of the name asked for
    found: Tensor  # int64 [B N, 2]: its direction and distance, one past the last word if unseen


def ask(
    pictures: Pictures,
    index: int,
    count: int,
    rng: np.random.Generator,
    flip: bool = False,
    unseen: float = UNSEEN_SHARE,
    reworded: float = 0.0,
    wordings: Wordings = TRAINED,
) -> list[Question]:
    """Return ``count`` questions about picture ``index``: things in view, hidden and absent.

    The share ``reworded`` of them is drawn from ``wordings``; the others have the plain wording.
    """
    sign = -1.0 if flip else 1.0
    sights: dict[int, Sight] = {}
    for i in range(MOST_THINGS):
        if pictures.kind[index, i] >= 0:
            sights[i] = Sight(
                sign * float(pictures.bearing[index, i]),
                float(pictures.range[index, i]),
                float(pictures.visible[index, i]),
            )
    clear = [i for i, s in sights.items() if not s.borderline]
    seen = [i for i in clear if sights[i].in_view]
    history = tuple(ACTIONS[a] for a in pictures.history[index] if a >= 0)
    if flip:
        history = tuple(mirrored(a) for a in history)
    goal = int(pictures.goal[index])
    questions = []
    for number in range(count):
        wording = Wording(VERBS[int(rng.integers(len(VERBS)))])
        if reworded and rng.random() < reworded:
            wording = wordings.draw(rng)
        if number == 0 and goal in clear:
            chosen: int | None = goal
        elif seen and rng.random() > unseen:
            chosen = int(rng.choice(seen))
        else:
            chosen = None
        if chosen is not None:
            kind, sight = int(pictures.kind[index, chosen]), sights[chosen]
        else:
            kind, sight = _unseen_kind(pictures.kind[index], sights, rng), None
        questions.append(Question(" ".join(KINDS[kind]), sight, history, wording))
    return questions


def _unseen_kind(kinds: np.ndarray, sights: dict[int, Sight], rng: np.random.Generator) -> int:
    """Return a kind that is not visible, often one that shares a word with a visible one."""
    visible = {int(kinds[i]) for i, s in sights.items() if s.visible > 0.3}
    free = [k for k in range(len(KINDS)) if k not in visible]
    if visible and rng.random() < 0.6:
        near = [k for k in free if any(set(KINDS[k]) & set(KINDS[v]) for v in visible)]
        free = near or free
    return int(rng.choice(free))


class Batches:
    """Makes batch ``step`` from pictures; equal seeds and pictures give equal batches."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, reworded: float = 0.0
    ) -> None:
        self.encoder = Encoder(tokenizer)
        self._seed = seed
        self._reworded = reworded
        self._words = _dense_table()

    def make(
        self,
        sources: Sequence[tuple[Pictures, int]],
        step: int,
        questions: int,
    ) -> Batch:
        """Return the batch of a step; ``sources`` are pictures and how many of them to take."""
        rng = np.random.default_rng([self._seed, step])
        pictures, dense, asked, named = [], [], [], []
        for source, count in sources:
            chosen = np.sort(rng.integers(len(source), size=count))
            images = source.images(chosen)
            for image, index in zip(images, chosen, strict=True):
                flip = bool(rng.random() < 0.5)
                asked += ask(source, int(index), questions, rng, flip, reworded=self._reworded)
                named += ask(source, int(index), NAMES, rng, flip, unseen=0.6)
                dense.append(self._dense(source, int(index), flip))
                pictures.append(image[:, ::-1] if flip else image)
        texts, at, labels = self.encode(asked)
        names, name_at = self.encoder.names([q.wording.text(q.name) for q in named], NAME_LENGTH)
        return Batch(
            torch.from_numpy(np.stack(pictures)),
            texts,
            at,
            labels,
            torch.from_numpy(np.stack(dense)),
            names,
            name_at,
            torch.tensor([q.found for q in named]),
        )

    def encode(self, asked: Sequence[Question]) -> tuple[Tensor, Tensor, Tensor]:
        """Return texts, answer positions and labels of the questions (see ``Batch``)."""
        pairs = [(q.prompt, q.answer) for q in asked]
        return self.encoder.pairs(pairs, TEXT_LENGTH, ANSWER_LENGTH)

    def _dense(self, source: Pictures, index: int, flip: bool) -> np.ndarray:
        """Return float32 [T, W]: the words that are true of what each image token shows."""
        bits = source.shows[index].reshape(TOKEN_ROWS, TOKEN_COLUMNS)
        bits = (bits[:, ::-1] if flip else bits).reshape(-1)
        target = np.zeros((len(bits), len(WORDS)), np.float32)
        for i in range(MOST_THINGS):
            kind = int(source.kind[index, i])
            shown = (bits >> i) & 1
            if kind >= 0 and shown.any():
                bearing = float(source.bearing[index, i]) * (-1 if flip else 1)
                d = DIRECTIONS.index(direction(bearing))
                r = DISTANCES.index(distance(float(source.range[index, i])))
                np.maximum(target, shown[:, None] * self._words[kind, d, r], out=target)
        return target


def _dense_table() -> np.ndarray:
    """Return float32 [kinds, directions, distances, W]: the dense words of each appearance."""
    table = np.zeros((len(KINDS), len(DIRECTIONS), len(DISTANCES), len(WORDS)), np.float32)
    for (k, kind), (d, where), (r, far) in itertools.product(
        enumerate(KINDS), enumerate(DIRECTIONS), enumerate(DISTANCES)
    ):
        true = {*kind, *where.split(), *far.split()}
        table[k, d, r] = [word in true for word in WORDS]
    return table
