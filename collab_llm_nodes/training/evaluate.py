"""What the models can do: perception on held-out pictures, success in fresh rooms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from collab_llm_nodes.navigation.prompt import user_text
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.renderer import Renderer, from_jpeg, to_jpeg
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room, make_room
from collab_llm_nodes.training import data
from collab_llm_nodes.training.answering import answers
from collab_llm_nodes.training.batches import Question, ask
from collab_llm_nodes.training.wording import VERBS, action_said, direction_said, instruction

HELD_OUT_SEEDS = 500_000
"""Rooms of the held-out pictures; below the training rooms, above the evaluation rooms."""

Answer = Callable[[np.ndarray, Sequence[str]], list[str]]
"""Pictures uint8 [B, 84, 168, 3] and user texts to answers."""


def held_out_pictures(folder: Path, rooms: int = 40) -> data.Pictures:
    """Pictures of rooms that no training shard has; rendered on first use."""
    shard = folder / f"held-out-{rooms}"
    if not shard.exists():
        renderer = Renderer()
        seeds = range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + rooms)
        data.write_shard(shard, [s for k in seeds for s in data.room_snapshots(renderer, k)])
        renderer.close()
    return data.Pictures([shard])


def held_out_figures(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    rooms: int = 40,
    batch: int = 128,
) -> dict[str, float]:
    """Shares of held-out questions answered right, from freely generated greedy answers.

    ``in_view_direction``: the direction word, over things in view. ``not_in_view``: said not to
    be in view, over things that are not. ``exact``: the whole answer. ``action``: the action.
    """
    pictures = held_out_pictures(folder, rooms)
    rng = np.random.default_rng(0)
    indices: list[int] = []
    asked: list[Question] = []
    for i in range(len(pictures)):
        asked += ask(pictures, i, 1, rng)
        indices.append(i)
    said: list[str] = []
    for at in range(0, len(asked), batch):
        chunk = slice(at, at + batch)
        images = pictures.images(np.array(indices[chunk]))
        said += answers(model, tokenizer, images, [q.prompt for q in asked[chunk]])
    seen = [q.sight is not None and q.sight.in_view for q in asked]
    direction = [direction_said(s) == direction_said(q.answer) for s, q in zip(said, asked)]
    return {
        "in_view_direction": _share(d for d, v in zip(direction, seen) if v),
        "not_in_view": _share(d for d, v in zip(direction, seen) if not v),
        "exact": _share(s == q.answer for s, q in zip(said, asked)),
        "action": _share(action_said(s) == action_said(q.answer) for s, q in zip(said, asked)),
    }


def _share(values: object) -> float:
    kept = list(values)  # type: ignore[call-overload]
    return sum(kept) / max(1, len(kept))


@dataclass
class Episode:
    """One room being solved."""

    room: Room
    base: Base
    history: list[str]
    instruction: str
    outcome: str = ""
    """"" while running; reached | wrong place | step limit | invalid."""


def start(seed: int) -> Episode:
    """A fresh episode of room ``seed``; the instruction's verb follows from the seed too."""
    room = make_room(seed)
    return Episode(room, Base(room, seed=2), [], instruction(room.goal.name, seed % len(VERBS)))


def advance(episode: Episode, text: str) -> None:
    """Carry out the action in ``text`` and settle the outcome if the episode is over."""
    action = action_said(text)
    if action is None:
        episode.outcome = "invalid"
    elif action == "stop":
        good = expert.reached(episode.room, episode.base.pose)
        episode.outcome = "reached" if good else "wrong place"
    else:
        episode.base.execute(action)
        episode.history.append(action)
        if len(episode.history) >= expert.MAX_STEPS:
            episode.outcome = "step limit"


def closed_loop(
    answer: Answer,
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    together: int = 64,
) -> list[Episode]:
    """Solve the rooms of ``seeds``, ``together`` at a time in lockstep; returns every episode."""
    renderer = Renderer()
    waiting, running, done = list(seeds), list[Episode](), list[Episode]()
    while waiting or running:
        while waiting and len(running) < together:
            running.append(start(waiting.pop(0)))
        pictures = []
        for episode in running:
            renderer.enter(episode.room)
            pictures.append(from_jpeg(to_jpeg(renderer.picture(episode.base.pose))))
        texts = [user_text(e.instruction, e.history) for e in running]
        for episode, text in zip(running, answer(np.stack(pictures), texts), strict=True):
            advance(episode, text)
        done += [e for e in running if e.outcome]
        running = [e for e in running if not e.outcome]
        if progress is not None:
            progress(len(done), len(seeds))
    renderer.close()
    return done


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success rate, mean steps and the share of each outcome."""
    outcomes = [e.outcome for e in episodes]
    kinds = ("reached", "wrong place", "step limit", "invalid")
    shares = {kind: outcomes.count(kind) / len(outcomes) for kind in kinds}
    return {
        "success_rate": shares["reached"],
        "rooms": len(outcomes),
        "steps": sum(len(e.history) for e in episodes) / len(episodes),
        "wrong_place": shares["wrong place"],
        "step_limit": shares["step limit"],
        "invalid_actions": outcomes.count("invalid"),
    }
