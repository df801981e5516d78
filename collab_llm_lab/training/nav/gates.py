"""``collab-llm eval nav``: what the pair can do in rooms never shown.

Every room is below ``figures.HELD_OUT_SEEDS``, so none was trained on; all answers are greedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from collab_llm_lab.home import expert
from collab_llm_lab.home.answers import MAX_TOKENS, answer, read
from collab_llm_lab.home.asking import draw_for_view
from collab_llm_lab.home.requests import NOTHING, About, Kind, Request
from collab_llm_lab.home.wording import HELD_OUT, TRAINED, Wordings
from collab_llm_lab.training.loop import Progress, ignore_progress, report_counts
from collab_llm_lab.training.nav.driving import (
    Answer,
    Episode,
    as_shown,
    begin,
    drive,
    picture_for_model,
    take_picture,
)
from collab_llm_lab.training.nav.figures import HELD_OUT_SEEDS, share
from collab_llm_lab.training.nav.models import answers
from collab_llm_lab.training.nav.models import read as read_model
from collab_llm_lab.training.nav.pictures import NAMES, random_pose
from collab_llm_lab.training.nav.questions import KNOWN
from collab_llm_lab.training.nav.tau import BlindDraft, compare_sight
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig, load, model_folder
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.robot.stop_words import asks_to_stop
from collab_llm_nodes.sim.jpeg import from_jpeg
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import Style, make_room
from collab_llm_nodes.sim.view import Sight, direction, look

PERTURBED = {
    "height_low": Style(camera_height=(0.25, 0.25)),
    "height_30_cm": Style(camera_height=(0.3, 0.3)),
    "height_high": Style(camera_height=(0.45, 0.45)),
    "pitch_low": Style(camera_pitch=(7.0, 7.0)),
    "pitch_high": Style(camera_pitch=(17.0, 17.0)),
    "fov_narrow": Style(fov=(76.5, 76.5)),
    "sway": Style(sway=(1.0, 1.0)),
    "late": Style(late=1.0),
    "yellow_walls": Style(walls="yellow"),
    "height_low_beyond": Style(camera_height=(0.2, 0.2)),
    "height_high_beyond": Style(camera_height=(0.54, 0.54)),
    "pitch_low_beyond": Style(camera_pitch=(5.6, 5.6)),
    "pitch_high_beyond": Style(camera_pitch=(20.4, 20.4)),
    "fov_narrow_beyond": Style(fov=(61.2, 61.2)),
    "sway_beyond": Style(sway=(1.2, 1.2)),
    "dark_beyond": Style(light=(0.56, 0.56)),
    "bright_beyond": Style(light=(1.38, 1.38)),
}
"""Rooms at the ends of the ranges of training, and a fifth beyond them; all else is drawn as there.

``late``: every picture, but the first, shows the place before the last action.
"""
_TAU_ROOMS = 50
"""Rooms whose steps the pair answers together, too."""
_PICTURES_PER_ROOM = 10
_BATCH = 64
_ARRIVED = ("reached", "wrong place")

Start = Callable[[int], Episode]
"""Returns the episode of a room's seed."""


def going(seed: int, style: Style, wordings: Wordings = TRAINED) -> Episode:
    """Return the episode of a room in which the first thing is asked for."""
    room = make_room(seed, style)
    return begin(room, _request(seed, Kind.GO, About(room.goal.name), wordings))


def absent(seed: int) -> Episode:
    """Return the episode of a room in which something is asked for that it lacks."""
    room, rng = make_room(seed), np.random.default_rng([seed, 0xAB5])
    there = {part.name for part in room.parts}
    lacking = [name for name in KNOWN if name not in there]
    return begin(room, _request(seed, Kind.GO, About(str(rng.choice(lacking))), TRAINED))


def unknown(seed: int) -> Episode:
    """Return the episode of a room in which something is asked for that no model here knows."""
    wordings = HELD_OUT["verb"]
    rng = np.random.default_rng([seed, 0x0B0])
    about = About(str(rng.choice(wordings.nouns)))
    return begin(make_room(seed), _request(seed, Kind.UNKNOWN, about, wordings))


def stopping(seed: int) -> Episode:
    """Return the episode of a room in which the robot is told to stop, in trained words."""
    return begin(make_room(seed), _request(seed, Kind.STOP, NOTHING, TRAINED))


def questioning(seed: int) -> Episode:
    """Return the episode of a room with a question about the view at the start."""
    rng = np.random.default_rng([seed, 0x0E5])
    room = make_room(seed, Style(late=0.0))
    return begin(room, draw_for_view(room, look(as_shown(room), room.start), rng, TRAINED))


def _request(seed: int, kind: Kind, about: About, wordings: Wordings) -> Request:
    rng = np.random.default_rng([seed, 0x3015])
    return Request(kind, wordings.draw(rng, kind, about), about)


STARTS: Mapping[str, Start] = {
    "wording.trained": partial(going, style=Style()),
    **{
        f"wording.held_out_{part}": partial(going, style=Style(), wordings=words)
        for part, words in HELD_OUT.items()
    },
    "held_out_pairs": partial(going, style=Style(pairs="held_out")),
    "blocked": partial(going, style=Style(blocked=True)),
    "large": partial(going, style=Style(size=(8.0, 12.0))),
    **{f"perturbed.{name}": partial(going, style=style) for name, style in PERTURBED.items()},
    "absent": absent,
    "unknown_false_arrival": unknown,
    "stop_words": stopping,
    "questions": questioning,
}
"""The episodes that the target drives, by the keys of their figures."""
_EXPERT = {
    "wording.trained": "reached",
    "blocked": "reached",
    "large": "reached",
    "absent": "given up",
}
"""Ends of the expert that are right; the pair learnt from it."""


def eval_nav(
    rooms: int,
    seed: int,
    report: Progress = ignore_progress,
    *,
    target: str | Path = "nav-target",
    draft: str | Path = "nav-draft",
) -> dict[str, Any]:
    """Return the figures of a pair.

    Shares of ``rooms`` fresh rooms each, but for ``tau`` and what belongs to it (``_TAU_ROOMS``):

    - ``target``, ``draft``: shares of outcomes in the same rooms, each alone;
    - ``expert.*``: rooms that the expert of the training ends as it should;
    - ``wording.trained``, ``wording.held_out`` (the mean over its parts, ``wording.held_out_*``),
      ``held_out_pairs``, ``blocked``, ``large``, ``perturbed.*``: rooms solved;
    - ``absent.not_found``, ``absent.false_arrival``, ``unknown_false_arrival``, ``stop_words``;
    - ``robot.*``: two of these as the robot has them, which reads words for a stop before the model
      does, and checks what each action is about;
    - ``questions``: what is asked for is right; ``questions_exact``: so is the whole answer;
    - ``in_view_direction``, ``not_in_view``, ``borderline``: see ``_perception``;
    - ``answers``, ``invalid_actions``: of all these, and those that the robot's parser refuses;
    - ``tau``, ``tau_grey``, ``tau_blind``: see ``compare_sight``; ``action_mismatches`` of
      ``steps_compared``: steps at which the pair together acts unlike the target alone.

    Args:
        seed: first room.
        target, draft: models by folder or shipped name.

    Raises:
        ConfigError: not all rooms are fresh.
    """
    if rooms < 1 or seed < 0 or seed + rooms > HELD_OUT_SEEDS:
        raise ConfigError(
            f"rooms {seed} to {seed + rooms - 1} are not all fresh",
            field="seed",
            remedy=f"stay within 0 to {HELD_OUT_SEEDS - 1}: the others were trained on",
        )
    torch.set_num_threads(1)  # models this small are slower on more
    transformers_logging.disable_progress_bar()
    target, draft = (model_folder(ModelConfig(str(name))) for name in (target, draft))
    model, tokenizer = read_model(target)
    small, _ = read_model(draft)
    seeds = range(seed, seed + rooms)
    answer_all = partial(answers, model, tokenizer, max_tokens=MAX_TOKENS)
    answer_small = partial(answers, small, tokenizer, max_tokens=MAX_TOKENS)
    driven = _drive(answer_all, STARTS, seeds, report_counts(report, "target alone"))
    plain = "wording.trained"
    alone = _drive(
        answer_small, {plain: STARTS[plain]}, seeds, report_counts(report, "draft alone")
    )
    seen, looked = _perception(answer_all, seeds, report_counts(report, "perception"))
    said = [text for of_key in driven.values() for episode in of_key for _, text in episode.asked]
    steps, images = _steps(answer_all, seeds[:_TAU_ROOMS])
    blind = BlindDraft.of_expert(tokenizer)
    return {
        "rooms": rooms,
        "seed": seed,
        "target": _outcomes(driven[plain]),
        "draft": _outcomes(alone[plain]),
        "expert": _expert(seeds, report_counts(report, "expert")),
        **_shares(driven),
        **seen,
        "answers": len(said) + len(looked),
        "invalid_actions": sum(map(_refused, (*said, *looked))),
        **compare_sight(small, tokenizer, images, [step[1:] for step in steps], blind),
        "action_mismatches": _mismatches(draft, target, steps, report_counts(report, "together")),
        "steps_compared": len(steps),
    }


def _drive(
    answer_all: Answer,
    starts: Mapping[str, Start],
    seeds: Sequence[int],
    report: Callable[[int, int], None],
) -> dict[str, list[Episode]]:
    """Return the driven episodes of each key; they share the model's passes across keys."""
    driven = defaultdict[str, list[Episode]](list)

    def begun() -> Iterator[Episode]:
        for key, start in starts.items():
            for seed in seeds:
                driven[key].append(start(seed))
                yield driven[key][-1]

    total = len(starts) * len(seeds)
    drive(answer_all, begun(), report=lambda done: report(done, total))
    return driven


def _expert(seeds: Sequence[int], report: Callable[[int, int], None]) -> dict[str, float]:
    """Return the shares of rooms that the expert ends as it should, by keys of ``STARTS``."""
    right: dict[str, list[bool]] = {key: [] for key in _EXPERT}
    for number, seed in enumerate(seeds, start=1):
        for key, end in _EXPERT.items():
            begun = STARTS[key](seed)
            right[key].append(expert.drive(begun.room, begun.request).outcome == end)
        report(number, len(seeds))
    return {key: share(values) for key, values in right.items()}


def _robot_arrives(episode: Episode) -> bool:
    """Return True if it ends at something although the robot checks what each action is about."""
    asked = AskedThing(episode.request.text)
    held = any(asked.objection(parse(said)) for _, said in episode.asked)
    return episode.outcome in _ARRIVED and not held


def _outcomes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the shares of outcomes, and the mean number of steps."""
    outcomes = [episode.outcome.replace(" ", "_") for episode in episodes]
    return {
        "success_rate": share(outcome == "reached" for outcome in outcomes),
        "steps": sum(len(episode.history) for episode in episodes) / len(episodes),
        **{name: share(o == name for o in outcomes) for name in sorted({*outcomes} - {"reached"})},
    }


def _shares(driven: Mapping[str, Sequence[Episode]]) -> dict[str, Any]:
    """Return the figures of driven episodes."""

    def of(key: str, *outcomes: str) -> float:
        return share(episode.outcome in outcomes for episode in driven[key])

    held_out = {f"held_out_{part}": of(f"wording.held_out_{part}", "reached") for part in HELD_OUT}
    asked = driven["questions"]
    return {
        "wording": {
            "trained": of("wording.trained", "reached"),
            "held_out": sum(held_out.values()) / len(held_out),
            **held_out,
        },
        **{key: of(key, "reached") for key in ("held_out_pairs", "blocked", "large")},
        "perturbed": {name: of(f"perturbed.{name}", "reached") for name in PERTURBED},
        "absent": {
            "not_found": of("absent", "given up"),
            "false_arrival": of("absent", *_ARRIVED),
        },
        "unknown_false_arrival": of("unknown_false_arrival", *_ARRIVED),
        "stop_words": of("stop_words", *_ARRIVED),
        "robot": {
            "stop_words": share(
                asks_to_stop(e.request.text) or e.outcome in _ARRIVED for e in driven["stop_words"]
            ),
            "unknown_false_arrival": share(
                _robot_arrives(e) for e in driven["unknown_false_arrival"]
            ),
        },
        "questions": share(
            _facts(e.request.kind, e.asked[0][1]) == _facts(e.request.kind, expected(e))
            for e in asked
        ),
        "questions_exact": share(e.asked[0][1] == expected(e) for e in asked),
    }


def expected(episode: Episode) -> str:
    """Return the expert's answer at the start of an episode."""
    room, pose = as_shown(episode.room), episode.room.start
    decide = expert.Expert(room, episode.request).decide
    return answer(decide(look(room, pose), pose, (), SearchMemory()))


def _facts(kind: Kind, said: str) -> object:
    """Return what a question asks for: yes or no, what is in view, or else the whole reply."""
    decision = read(said)
    if decision is None or not decision.reply:
        return None
    if kind is Kind.IS_THERE:
        return decision.reply.split(",")[0]
    if kind is Kind.WHAT_DO_YOU_SEE:
        return {name for name in NAMES if name in decision.reply}
    return decision.reply


def _refused(said: str) -> bool:
    """Return True if an answer is no action to the training's reader or to the robot's parser."""
    return read(said) is None or parse(said).code is not Code.OK


def _perception(
    answer_all: Answer, seeds: Sequence[int], report: Callable[[int, int], None]
) -> tuple[dict[str, float], list[str]]:
    """Return the shares of right direction words from random places, and all answers.

    ``in_view_direction``: of what is in view beyond doubt; ``not_in_view``: said not to be, of
    what is not; ``borderline``: direction or not in view, of what is between the two.
    """
    right: dict[str, list[bool]]
    right = {"in_view_direction": [], "not_in_view": [], "borderline": []}
    answered: list[str] = []
    renderer = Renderer()
    views = [view for seed in seeds for view in _views(seed, renderer)]
    renderer.close()
    for first in range(0, len(views), _BATCH):
        part = views[first : first + _BATCH]
        images = np.stack([from_jpeg(jpeg) for jpeg, *_ in part])
        said = answer_all(images, [_plain_prompt(name) for _, name, _ in part])
        for (_, _, sight), text in zip(part, said, strict=True):
            where = direction(sight.bearing) if sight is not None and sight.in_view else ""
            key = "in_view_direction" if where else "not_in_view"
            if sight is not None and sight.borderline:
                key = "borderline"
            decision = read(text)
            seen = decision.report.direction if decision and decision.report.in_view else ""
            right[key].append(decision is not None and seen == where)
        answered += said
        report(len(answered), len(views))
    return {key: share(values) for key, values in right.items()}, answered


def _views(seed: int, renderer: Renderer) -> list[tuple[bytes, str, Sight | None]]:
    """Return pictures from random places in a room, and what to ask for at each.

    That is something in the room of which there is one, with its sight; else something it lacks.
    """
    room, rng = make_room(seed, Style(late=0.0)), np.random.default_rng([seed, 0x9E2])
    shown = as_shown(room)
    views: list[tuple[bytes, str, Sight | None]] = []
    renderer.enter(room)
    for n in range(_PICTURES_PER_ROOM):
        pose = random_pose(room, rng)
        jpeg = picture_for_model(renderer, room, pose, n)
        view = look(shown, pose)
        sights = [s for s in (*view.things, *view.furniture) if s.name in KNOWN]
        names = [sight.name for sight in sights]
        single = [sight for sight in sights if names.count(sight.name) == 1]
        sight = single[int(rng.integers(len(single)))] if single else None
        lacking = [name for name in KNOWN if name not in names]
        views.append((jpeg, sight.name if sight else str(rng.choice(lacking)), sight))
    return views


def _plain_prompt(name: str) -> str:
    return user_text(f"find the {name}", (), SEARCH_TEMPLATE, search=SearchMemory().text)


def _steps(
    answer_all: Answer, seeds: Sequence[int]
) -> tuple[list[tuple[bytes, str, str]], np.ndarray]:
    """Return picture, prompt and answer of every step of the target; and the decoded pictures."""
    jpegs: list[bytes] = []
    asked: list[tuple[str, str]] = []

    def visit(episode: Episode, renderer: Renderer) -> bytes:
        jpegs.append(take_picture(episode, renderer))
        return jpegs[-1]

    def remembered(images: np.ndarray, prompts: Sequence[str]) -> list[str]:
        said = answer_all(images, prompts)
        asked.extend(zip(prompts, said, strict=True))
        return said

    drive(remembered, map(STARTS["wording.trained"], seeds), visit)
    steps = [(jpeg, *both) for jpeg, both in zip(jpegs, asked, strict=True)]
    return steps, np.stack([from_jpeg(jpeg) for jpeg in jpegs])


def _mismatches(
    draft: Path,
    target: Path,
    steps: Sequence[tuple[bytes, str, str]],
    report: Callable[[int, int], None],
) -> int:
    """Return at how many steps the engine's pair acts unlike the target alone."""
    draft_engine, target_engine = (
        Engine(load(ModelConfig(str(folder)))) for folder in (draft, target)
    )
    runner = plain_runner(draft_engine, target_engine)
    different = 0
    for number, (jpeg, prompt, said) in enumerate(steps, start=1):
        made = read(runner.generate(Prompt(prompt, (jpeg,)), max_tokens=MAX_TOKENS).text)
        alone = read(said)
        different += (made and made.action) != (alone and alone.action)
        report(number, len(steps))
    return different


GOALS: Mapping[str, tuple[str, float]] = {
    "wording.trained": (">=", 0.9),
    "wording.held_out": (">=", 0.85),
    "held_out_pairs": (">=", 0.75),
    "blocked": (">=", 0.75),
    "large": (">=", 0.85),
    **{f"perturbed.{n}": (">=", 0.6 if n.endswith("beyond") else 0.85) for n in PERTURBED},
    "absent.not_found": (">=", 0.9),
    "absent.false_arrival": ("<=", 0.02),
    "unknown_false_arrival": ("<=", 0.1),
    "questions": (">=", 0.9),
    "stop_words": (">=", 1.0),
    "target over draft": (">=", 0.15),
    "invalid_actions": ("<=", 0),
    "action_mismatches": ("<=", 0),
    "tau over tau_grey": (">=", 0.8),
}
"""The figures that a good pair reaches."""


def measured(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return ``figures`` by dotted keys, with the differences that ``GOALS`` names."""
    flat: dict[str, float] = {}
    for key, value in figures.items():
        flat |= (
            {f"{key}.{part}": v for part, v in value.items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
    flat["target over draft"] = flat["target.success_rate"] - flat["draft.success_rate"]
    flat["tau over tau_grey"] = flat["tau"] - flat["tau_grey"]
    return flat


def reached(goal: tuple[str, float], value: float) -> bool:
    """Return True if a figure reaches a goal of ``GOALS``."""
    sign, wanted = goal
    return value >= wanted if sign == ">=" else value <= wanted
