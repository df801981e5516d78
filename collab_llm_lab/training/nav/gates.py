"""``python -m collab_llm_lab.training.nav.gates``: what the pair can do in rooms never shown.

Every room is below ``evaluate.HELD_OUT_SEEDS``, so none was trained on; all answers are greedy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from collab_llm_lab.home.answers import Decision, answer, read
from collab_llm_lab.home.asking import draw_for_view
from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.requests import NOTHING, About, Kind, Request
from collab_llm_lab.home.wording import HELD_OUT, TRAINED, Wordings
from collab_llm_lab.training import loop
from collab_llm_lab.training.nav.driving import Answer, Episode, begin, drive, take_picture
from collab_llm_lab.training.nav.encoding import Encoder
from collab_llm_lab.training.nav.figures import held_out_pictures, share
from collab_llm_lab.training.nav.forward import FastForward
from collab_llm_lab.training.nav.models import MAX_TOKENS, answers, prefix_ids
from collab_llm_lab.training.nav.models import read as read_model
from collab_llm_lab.training.nav.questions import KNOWN
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.sim.jpeg import from_jpeg
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import Style, make_room
from collab_llm_nodes.sim.view import Sight, direction, look

PERTURBED = {
    "height_low": Style(camera_height=(0.25, 0.25)),
    "height_low_beyond": Style(camera_height=(0.2, 0.2)),
    "height_high": Style(camera_height=(0.45, 0.45)),
    "height_high_beyond": Style(camera_height=(0.54, 0.54)),
    "pitch_low": Style(camera_pitch=(7.0, 7.0)),
    "pitch_low_beyond": Style(camera_pitch=(5.6, 5.6)),
    "pitch_high": Style(camera_pitch=(17.0, 17.0)),
    "pitch_high_beyond": Style(camera_pitch=(20.4, 20.4)),
    "fov_narrow": Style(fov=(76.5, 76.5)),
    "fov_narrow_beyond": Style(fov=(61.2, 61.2)),
    "yellow_walls": Style(walls="yellow"),
    "late": Style(late=1.0),
}
"""Rooms at the ends of the ranges of training, and a fifth beyond them."""
_GAMMA = 4
"""Tokens drafted per round."""
_TAU_ROOMS = 50
_BATCH = 64
_ARRIVED = ("reached", "wrong place")

Report = Callable[[int, int], None]
"""Called with (done, total)."""


def going(seed: int, style: Style, wordings: Wordings = TRAINED) -> Episode:
    """Return the episode of a room in which the first thing is asked for."""
    room = make_room(seed, style)
    about = About(room.things[0].name)
    return begin(room, _request(seed, Kind.GO, about, wordings))


def absent(seed: int) -> Episode:
    """Return the episode of a room in which something is asked for that it lacks."""
    room, rng = make_room(seed), np.random.default_rng([seed, 0xAB5])
    there = {thing.name for thing in room.things} | {piece.name for piece in room.furniture}
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
    return begin(room, draw_for_view(room, look(room, room.start), rng, TRAINED))


def _request(seed: int, kind: Kind, about: About, wordings: Wordings) -> Request:
    rng = np.random.default_rng([seed, 0x3015])
    return Request(kind, wordings.draw(rng, kind, about), about)


class Gates:
    """The figures of one target, with its draft for tau."""

    def __init__(self, target: Path, draft: Path, rooms: int, seed: int, data: Path) -> None:
        self.rooms, self.seed, self._data = rooms, seed, data
        self._model, self._tokenizer = read_model(target)
        self._draft, _ = read_model(draft)
        self._answer: Answer = partial(answers, self._model, self._tokenizer, max_tokens=MAX_TOKENS)
        self.invalid = self.answered = 0
        """Answers whose action is none, and all answers, of what was driven so far."""

    def figures(self) -> dict[str, Callable[[Report], Any]]:
        """Return how each figure is measured, by its key."""
        reached = partial(self._share, ("reached",))
        return {
            "wording.trained": partial(reached, lambda seed: going(seed, Style())),
            **{
                f"wording.held_out.{part}": partial(
                    reached, lambda seed, words=words: going(seed, Style(), words)
                )
                for part, words in HELD_OUT.items()
            },
            "held_out_pairs": partial(reached, lambda seed: going(seed, Style(pairs="held_out"))),
            "blocked": partial(reached, lambda seed: going(seed, Style(blocked=True))),
            "large": partial(reached, lambda seed: going(seed, Style(size=(8.0, 12.0)))),
            **{
                f"perturbed.{name}": partial(reached, lambda seed, style=style: going(seed, style))
                for name, style in PERTURBED.items()
            },
            "absent": self._absent,
            "unknown_false_arrival": partial(self._share, _ARRIVED, unknown),
            "stop_words": partial(self._share, _ARRIVED, stopping),
            "questions": self._questions,
            "perception": self._perception,
            "tau": self._tau,
        }

    def _drive(self, start: Callable[[int], Episode], report: Report) -> list[Episode]:
        seeds = range(self.seed, self.seed + self.rooms)
        done = drive(
            self._answer, map(start, seeds), report=lambda count: report(count, self.rooms)
        )
        self.answered += sum(len(episode.asked) for episode in done)
        self.invalid += sum(episode.outcome == "invalid" for episode in done)
        return done

    def _share(
        self, outcomes: Sequence[str], start: Callable[[int], Episode], report: Report
    ) -> float:
        return share(episode.outcome in outcomes for episode in self._drive(start, report))

    def _absent(self, report: Report) -> dict[str, float]:
        done = self._drive(absent, report)
        return {
            "not_found": share(episode.outcome == "given up" for episode in done),
            "false_arrival": share(episode.outcome in _ARRIVED for episode in done),
        }

    def _questions(self, report: Report) -> float:
        """Return the share of questions whose whole answer is the expert's."""
        done = self._drive(questioning, report)
        return share(e.asked[0][1] == _expected(e) for e in done)

    def _perception(self, report: Report) -> dict[str, float]:
        """Return the shares of right direction words on held-out pictures.

        ``in_view_direction``: of what is in view; ``not_in_view``: said not to be, of what is not;
        ``borderline``: direction or not in view, of what is between the two.
        """
        pictures = held_out_pictures(self._data, "gates", self.rooms, Style(late=0.0))
        rng = np.random.default_rng(self.seed)
        rows: list[tuple[int, str, Sight | None]] = []
        for index in range(len(pictures)):
            view = pictures.view(index)
            named = [s for s in (*view.things, *view.furniture) if s.name in KNOWN]
            single = [s for s in named if sum(t.name == s.name for t in named) == 1]
            sight = single[int(rng.integers(len(single)))] if single else None
            name = sight.name if sight else str(rng.choice(KNOWN))
            rows.append((index, name, sight))
        right: dict[str, list[bool]]
        right = {"in_view_direction": [], "not_in_view": [], "borderline": []}
        for first in range(0, len(rows), _BATCH):
            part = rows[first : first + _BATCH]
            prompts = [
                user_text(f"find the {name}", (), SEARCH_TEMPLATE, search=SearchMemory().text)
                for _, name, _ in part
            ]
            images = np.stack([pictures.image(index) for index, *_ in part])
            for (_, _, sight), text in zip(part, self._answer(images, prompts), strict=True):
                where = direction(sight.bearing) if sight is not None and sight.in_view else ""
                key = "in_view_direction" if where else "not_in_view"
                if sight is not None and sight.borderline:
                    key = "borderline"
                said = read(text)
                right[key].append(said is not None and _seen(said) == where)
            report(first + len(part), len(rows))
        return {key: share(values) for key, values in right.items()}

    def _tau(self, report: Report) -> dict[str, float]:
        """Return tokens per verification when both decode greedily, over driven steps.

        ``tau_grey``: the draft sees pictures without colour; ``tau_blind``: one even grey.
        """
        frames: list[np.ndarray] = []
        asked: list[tuple[str, str]] = []
        seeds = range(self.seed, self.seed + min(_TAU_ROOMS, self.rooms))

        def visit(episode: Episode, renderer: Renderer) -> bytes:
            jpeg = take_picture(episode, renderer)
            frames.append(from_jpeg(jpeg))
            return jpeg

        def remembered(images: np.ndarray, prompts: Sequence[str]) -> list[str]:
            said = self._answer(images, prompts)
            asked.extend(zip(prompts, said, strict=True))
            return said

        done = drive(remembered, (going(seed, Style()) for seed in seeds), visit)
        report(len(done), len(done))
        images = np.stack(frames)
        grey = images.mean(-1, keepdims=True).repeat(3, -1).astype(np.uint8)
        return {
            "tau": tau(self._draft, self._tokenizer, images, asked),
            "tau_grey": tau(self._draft, self._tokenizer, grey, asked),
            "tau_blind": tau(self._draft, self._tokenizer, np.full_like(images, 128), asked),
        }


def _seen(decision: Decision) -> str:
    """Return the direction word of what is asked for; empty if it is not in view."""
    return decision.report.direction if decision.report.in_view else ""


def _expected(episode: Episode) -> str:
    room, pose = episode.room, episode.room.start
    expert = Expert(room, episode.request)
    return answer(expert.decide(look(room, pose), pose, (), SearchMemory()))


@torch.no_grad()
def tau(
    draft: Any,
    tokenizer: PreTrainedTokenizerBase,
    images: np.ndarray,
    asked: Sequence[tuple[str, str]],
    gamma: int = _GAMMA,
) -> float:
    """Return tokens per verification of a greedy draft, given the target's greedy answers.

    A round accepts the draft's tokens up to the first that differs and adds one of the target's,
    so one pass of the draft over the target's answers tells every round.
    """
    encoder = Encoder(tokenizer)
    fast = FastForward(draft.eval(), prefix_ids(tokenizer))
    tokens = rounds = 0
    for first in range(0, len(asked), _BATCH):
        part = asked[first : first + _BATCH]
        longest = max(len(encoder.ids(said)) for _, said in part) + 1
        texts, at, labels = encoder.pairs(part, 0, longest)
        pictures = torch.from_numpy(images[first : first + _BATCH])
        hidden = fast(pictures, texts, 1).layers[-1].flatten(0, 1)
        index = at[..., None].expand(-1, -1, hidden.shape[-1])
        agree = fast.logits(torch.gather(hidden, 1, index)).argmax(-1) == labels
        for row, wanted in zip(agree.tolist(), labels.tolist(), strict=True):
            length = sum(label >= 0 for label in wanted)
            tokens += length
            rounds += _rounds(row[:length], gamma)
    return tokens / max(1, rounds)


def _rounds(agree: Sequence[bool], gamma: int) -> int:
    """Return the verifications of an answer whose drafted tokens agree or not, one by one."""
    done = rounds = 0
    while done < len(agree):
        accepted = 0
        while accepted < gamma and done + accepted < len(agree) and agree[done + accepted]:
            accepted += 1
        done += accepted + 1
        rounds += 1
    return rounds


def measure(gates: Gates, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each figure with its key as soon as it is known, and at the end the invalid actions."""
    measured, held_out = gates.figures(), list[float]()
    with loop.show_progress((), every=60.0) as show:
        for key in keys:
            value = measured[key](loop.report_counts(show(key), "episodes"))
            yield key, value
            if key.startswith("wording.held_out."):
                held_out.append(value)
    if held_out:
        yield "wording.held_out", sum(held_out) / len(held_out)
    yield "invalid_actions", gates.invalid
    yield "answers", gates.answered


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a pair and write the figures as JSON."""
    parser = argparse.ArgumentParser(description="Measure the home's pair.")
    parser.add_argument("--target", type=Path, required=True, help="folder of the model")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the model")
    parser.add_argument("--rooms", type=int, default=200, help="for each figure")
    parser.add_argument("--seed", type=int, default=0, help="first room")
    parser.add_argument("--data", type=Path, required=True, help="folder for held-out pictures")
    parser.add_argument("--json", type=Path, required=True, help="file of the figures")
    parser.add_argument("--only", default="", help="keys or their beginnings, with spaces between")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # models this small are slower on more
    transformers_logging.disable_progress_bar()
    gates = Gates(options.target, options.draft, options.rooms, options.seed, options.data)
    keys = [
        key
        for key in gates.figures()
        if not options.only or key.startswith(tuple(options.only.split()))
    ]
    figures: dict[str, Any] = {}
    for key, value in measure(gates, keys):
        figures[key] = value
        print(f"{key}: {value}", flush=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
