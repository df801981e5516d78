"""Figures of the pair on rooms that training never shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.home.answers import MAX_TOKENS, Decision, answer, read
from collab_llm_lab.home.requests import Kind
from collab_llm_lab.home.wording import HELD_OUT, PLAIN
from collab_llm_lab.training.nav.asks import Ask
from collab_llm_lab.training.nav.batches import WORDS, dense_words
from collab_llm_lab.training.nav.models import answers
from collab_llm_lab.training.nav.pictures import Pictures, write_shard
from collab_llm_lab.training.nav.questions import (
    WAY_QUESTION,
    draw_name,
    found,
    question,
    short_answer,
)
from collab_llm_lab.training.nav.sources import room_poses
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import COLOURS, HELD_OUT_PAIRS, SHAPES, Style
from collab_llm_nodes.sim.view import DIRECTIONS, way

HELD_OUT_SEEDS = 500_000
"""First room seed of the held-out pictures; below it are the rooms that are driven."""
_ROOMS, _PAIR_ROOMS = 40, 40
_INVALID = Decision("")
_PAIRS = tuple(" ".join(pair) for pair in sorted(HELD_OUT_PAIRS))


def held_out_pictures(data: Path, name: str, rooms: int, style: Style) -> Pictures:
    """Return pictures of rooms that no training shard has; rendered on first use."""
    shard = data / f"held-out-{name}-{rooms}"
    if not shard.exists():
        renderer = Renderer()
        seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + rooms)
        made = [room_poses(renderer, seed, style) for seed in seeds]
        pictures = [picture for of_room, _ in made for picture in of_room]
        write_shard(shard, pictures, [a for _, asks in made for a in asks])
        renderer.close()
    return Pictures([shard])


def sight_figures(words: Callable[[Tensor], Tensor], data: Path) -> dict[str, float]:
    """Return ``colour`` and ``shape``: shares of image tokens that name those of what they show.

    Tokens count that show things of one colour, or of one shape, in held-out pictures.

    Args:
        words: returns the logits of ``WORDS`` [B, T, W] of uint8 pictures.
    """
    pictures = held_out_pictures(data, "trained", _ROOMS, Style())
    right: dict[str, list[bool]] = {"colour": [], "shape": []}
    for first in range(0, len(pictures), 64):
        part = range(first, min(first + 64, len(pictures)))
        logits = words(torch.from_numpy(np.stack([pictures.image(i) for i in part]))).numpy()
        true = np.stack([dense_words(pictures, i, flip=False) for i in part])
        for kind, names in (("colour", COLOURS), ("shape", SHAPES)):
            at = slice(WORDS.index(names[0]), WORDS.index(names[-1]) + 1)
            only = true[..., at].sum(-1) == 1
            agree = logits[..., at].argmax(-1) == true[..., at].argmax(-1)
            right[kind] += agree[only].tolist()
    return {kind: share(values) for kind, values in right.items()}


def seeing_figures(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, data: Path
) -> dict[str, float]:
    """Return shares of short questions about held-out pictures that are answered right.

    ``direction`` and ``exact``: of things in view, the direction word and the whole answer.
    ``unseen``: of things not in view. ``pair_direction``: of pairs of colour and shape never
    trained on, in view. ``way``: the free way.
    """
    rng = np.random.default_rng(0)
    asked: list[tuple[np.ndarray, str, str, str]] = []  # image, kind, question, answer
    pictures = held_out_pictures(data, "trained", _ROOMS, Style())
    for index in range(len(pictures)):
        view, image = pictures.view(index), pictures.image(index)
        name, where = draw_name(view, rng)
        kind = "unseen" if where[0] == len(DIRECTIONS) else "seen"
        asked.append((image, kind, question(name), short_answer(where)))
        if index % 2 == 0:
            asked.append((image, "way", WAY_QUESTION, way(view.free)))
    pictures = held_out_pictures(data, "pairs", _PAIR_ROOMS, Style(pairs="held_out"))
    for index in range(len(pictures)):
        view = pictures.view(index)
        names = [s.name for s in view.things if s.name in _PAIRS and s.in_view]
        where_is = [(name, found(view, name)) for name in names]
        for name, at in where_is:
            if at is not None:
                asked.append((pictures.image(index), "pair", question(name), short_answer(at)))
    said: list[str] = []
    for first in range(0, len(asked), 128):
        part = asked[first : first + 128]
        images = np.stack([image for image, *_ in part])
        said += answers(model, tokenizer, images, [a[2] for a in part], max_tokens=10)
    results = [(kind, got, wanted) for (_, kind, _, wanted), got in zip(asked, said, strict=True)]

    def direction_right(kind: str) -> float:
        return share(
            got.split(",")[0] == wanted.split(",")[0] for k, got, wanted in results if k == kind
        )

    def exact(kind: str) -> float:
        return share(got == wanted for k, got, wanted in results if k == kind)

    return {
        "direction": direction_right("seen"),
        "exact": exact("seen"),
        "unseen": exact("unseen"),
        "pair_direction": direction_right("pair"),
        "way": exact("way"),
    }


def answering_figures(
    model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, data: Path
) -> dict[str, float]:
    """Return shares of requests at held-out pictures that are answered right, by greedy answers.

    ``exact``: the whole answer. ``action``: the action. ``direction``: the direction word of what
    is asked for, if it is in view. ``unseen``: said not to be in view, if it is not. ``replies``:
    whole answers to what wants no motion. ``held_out``: the action, in words never trained on.
    """
    rng = np.random.default_rng(0)
    pictures = held_out_pictures(data, "trained", _ROOMS, Style())
    rows: list[tuple[int, str, Ask, bool]] = []  # picture, prompt, ask, in plain words
    for index, asks in enumerate(pictures.asks):
        ask = asks[int(rng.integers(len(asks)))]
        rows.append((index, ask.prompt(PLAIN.draw(rng, ask.kind, ask.about)), ask, True))
        if ask.kind is Kind.GO:
            text = HELD_OUT["frame"].draw(rng, ask.kind, ask.about)
            rows.append((index, ask.prompt(text), ask, False))
    said: list[str] = []
    for first in range(0, len(rows), 128):
        part = rows[first : first + 128]
        images = np.stack([pictures.image(index) for index, *_ in part])
        said += answers(model, tokenizer, images, [prompt for _, prompt, *_ in part], MAX_TOKENS)
    plain, other = (
        [(a.decision, t) for (*_, a, p), t in zip(rows, said, strict=True) if p is kind]
        for kind in (True, False)
    )
    moves = [(wanted, read(text) or _INVALID) for wanted, text in plain if not wanted.reply]
    return {
        "exact": share(text == answer(wanted) for wanted, text in plain),
        "action": share(wanted.action == got.action for wanted, got in moves),
        "direction": share(
            wanted.report.direction == got.report.direction
            for wanted, got in moves
            if wanted.report.in_view and wanted.report.direction
        ),
        "unseen": share(
            bool(got.report.name) and not got.report.in_view
            for wanted, got in moves
            if wanted.report.name and not wanted.report.in_view
        ),
        "replies": share(text == answer(wanted) for wanted, text in plain if wanted.reply),
        "held_out": share(
            wanted.action == (read(text) or _INVALID).action for wanted, text in other
        ),
    }


def share(values: Iterable[bool]) -> float:
    """Return the share that is true; 0 of none."""
    all_values = list(values)
    return sum(all_values) / max(1, len(all_values))
