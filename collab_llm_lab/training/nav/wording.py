"""Questions and answers in words: the form of a sentence depends on the picture.

With a fixed template a blind draft model would guess most tokens, which would flatter speculative
decoding. Here direction, distance and the instruction's verb together choose among sentence forms,
so even the first word depends on the picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collab_llm_lab.training.text import phrasebook
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.expert import (
    ACTIONS,
    DIRECTIONS,
    DISTANCES,
    Sight,
    action_for,
    direction,
    distance,
    search,
)

VERBS = ("find", "go to", "walk to", "look for", "move to", "approach")
"""The plain verbs: each has sentence forms of its own, and the tokenizer knows their words."""
_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
OTHER_VERBS, FRAMES = _BOOK["verbs"].texts, _BOOK["frames"].texts
HELD_OUT_VERBS, HELD_OUT_FRAMES = _BOOK["held-out verbs"].texts, _BOOK["held-out frames"].texts
"""Never trained on: ``eval nav`` asks with words that were not learnt."""
ARTICLES = ("the ", "the ", "the ", "a ", "that ", "")
MARKS = ("", "", ".", "!", "?")

_PLACES = {
    "far left": "on the far left",
    "left": "on the left",
    "ahead": "straight ahead",
    "right": "on the right",
    "far right": "on the far right",
}
_FORMS = (
    "the {name} is {place} and {distance}",
    "i see the {name} {place}, {distance}",
    "{distance} and {place} there is the {name}",
    "{place} stands the {name}, {distance}",
)
_UNSEEN_FORMS = (
    "i cannot see the {name}, so i search to the {side}",
    "the {name} is not in view, i look to the {side}",
    "no {name} in sight, i keep looking to the {side}",
)
_UNSEEN = re.compile(r"cannot see|not in view|in sight")
_DIRECTION = re.compile(r"\b(far left|far right|left|right|ahead)\b")

WORDS = _BOOK["dense words"].words
"""Words that image tokens learn to predict for the things they show (dense supervision)."""


@dataclass(frozen=True)
class Wording:
    """Wording of an instruction: a verb in a frame, an article or none, a mark, a capital."""

    verb: str
    frame: str = FRAMES[0]
    article: str = ARTICLES[0]
    mark: str = ""
    capital: bool = False

    def text(self, name: str) -> str:
        """Return the instruction: ``"Could you go to the red ball, please?"``."""
        said = self.frame.format(verb=self.verb, thing=f"{self.article}{name}") + self.mark
        return said[0].upper() + said[1:] if self.capital else said

    @property
    def form(self) -> int:
        """Number of the plain verb whose sentence forms the answer has; 0 for all other words."""
        plain = "{verb}" in self.frame and self.verb in VERBS
        return VERBS.index(self.verb) if plain else 0


class Wordings:
    """Verbs and frames to draw wordings from."""

    def __init__(self, verbs: Sequence[str], frames: Sequence[str]) -> None:
        self.verbs, self.frames = tuple(verbs), tuple(frames)

    def draw(self, rng: np.random.Generator) -> Wording:
        """Return a random wording; equal generators give equal wordings."""
        return Wording(
            verb=str(rng.choice(self.verbs)),
            frame=str(rng.choice(self.frames)),
            article=str(rng.choice(ARTICLES)),
            mark=str(rng.choice(MARKS)),
            capital=bool(rng.random() < 0.5),
        )

    def every(self) -> Iterator[Wording]:
        """Yield every verb in every frame with every article."""
        for verb in self.verbs:
            for frame in dict.fromkeys(self.frames):
                for article in dict.fromkeys(ARTICLES):
                    yield Wording(verb, frame, article)


TRAINED = Wordings((*VERBS, *OTHER_VERBS), (FRAMES[0],) * (len(FRAMES) // 4) + FRAMES)
"""Wordings of the wording stage; a verb alone is the commonest frame."""
HELD_OUT = {
    "verb": Wordings(HELD_OUT_VERBS, [frame for frame in FRAMES if "{verb}" in frame]),
    "frame": Wordings(TRAINED.verbs, HELD_OUT_FRAMES),
    "both": Wordings(HELD_OUT_VERBS, HELD_OUT_FRAMES),
}
"""Wordings with a verb, a frame or both that training never shows."""


def instruction(name: str, verb: int) -> str:
    """Return the plain wording: ``"go to the red ball"``."""
    return Wording(VERBS[verb]).text(name)


def reason_seen(name: str, direction_word: str, distance_word: str, verb: int) -> str:
    """Return the reason for a thing in view."""
    side = {"a": 0, "l": 1, "r": 2}[direction_word.split()[-1][0]]
    far = max(0, DISTANCES.index(distance_word) - 2)
    form = _FORMS[(side + far + verb) % len(_FORMS)]
    return form.format(name=name, place=_PLACES[direction_word], distance=distance_word)


def reason_unseen(name: str, history: Sequence[str], verb: int) -> str:
    """Return the reason for a thing not in view."""
    side = "right" if "right" in search(history) else "left"
    return _UNSEEN_FORMS[verb % len(_UNSEEN_FORMS)].format(name=name, side=side)


def answer(name: str, sight: Sight | None, history: Sequence[str], verb: int) -> str:
    """Return the expert's answer; ``sight`` is None for a thing that is not there."""
    if sight is None or not sight.in_view:
        reason, action = reason_unseen(name, history, verb), search(history)
    else:
        words = direction(sight.bearing), distance(sight.range)
        reason, action = reason_seen(name, *words, verb), action_for(*words)
    return f"{reason}. the next action is {action}."


def direction_said(text: str) -> str | None:
    """Return the direction word of an answer's reason, "unseen" if it says so, or None."""
    reason = text.split(". the next action is ")[0]
    if _UNSEEN.search(reason):
        return "unseen"
    found = _DIRECTION.search(reason)
    return found.group(1) if found else None


def action_said(text: str) -> str | None:
    """Return the action of an answer if it is one of the expert's ten, else None."""
    action = text.rpartition("the next action is ")[2].rstrip(".")
    return action if action in ACTIONS else None


def corpus() -> list[str]:
    """Return a sentence of every kind, to train the tokenizer on."""
    from collab_llm_nodes.sim.renderer import KINDS  # imports MuJoCo

    texts = []
    for number, (colour, shape) in enumerate(KINDS):
        name = f"{colour} {shape}"
        for verb in range(len(VERBS)):
            for i, action in enumerate(ACTIONS):
                history = [ACTIONS[(i + number + verb) % len(ACTIONS)], action][: (i % 4) + 1]
                texts.append(user_text(instruction(name, verb), history if i % 5 else []))
                texts.append(
                    reason_unseen(name, [action], verb) + f". the next action is {action}."
                )
            for d in DIRECTIONS:
                for r in DISTANCES:
                    action = action_for(d, r)
                    reason = reason_seen(name, d, r, verb)
                    texts.append(f"{reason}. the next action is {action}.")
    return texts
