"""Requests at pictures, with the expert's decisions: what the second stage learns from.

Texts are made when a batch is, so that new words need no new pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from collab_llm_lab.home.answers import Decision, answer
from collab_llm_lab.home.requests import About, Kind
from collab_llm_lab.home.wording import LEARNT, PLAIN
from collab_llm_lab.training.nav.encoding import CUT
from collab_llm_nodes.robot.prompt import HISTORY_LENGTH, SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import Report

FILE = "asks.json"
_CUT_TEXTS, _CUT_WORDS = 0.3, 0.3
"""Shares of the reworded requests, and of the words in them, that are cut in two."""
_MIRROR = {"left": "right", "right": "left"}


def mirrored(text: str) -> str:
    """Return a text as it is in a mirror."""
    return " ".join(
        _MIRROR.get(word.rstrip(",."), word.rstrip(",.")) + word[len(word.rstrip(",.")) :]
        for word in text.split()
    )


@dataclass(frozen=True)
class Ask:
    """One request at one picture, with what the robot remembers and what the expert decides."""

    kind: Kind
    about: About
    history: tuple[str, ...]
    """The last actions, oldest first."""
    search: str
    """Text of the ``SearchMemory``."""
    decision: Decision

    def mirror(self) -> Ask:
        """Return the same in a mirror; a search without a turn to go on with begins to the left."""
        decision, report = self.decision, self.decision.report
        about = replace(self.about, side=mirrored(self.about.side))
        begins = not report.direction and not decision.reply
        if begins and not any("turn" in action for action in self.history):
            return replace(self, about=about)
        turned = replace(report, direction=mirrored(report.direction), leg=mirrored(report.leg))
        return Ask(
            self.kind,
            about,
            tuple(map(mirrored, self.history)),
            mirrored(self.search),
            replace(
                decision,
                action=mirrored(decision.action),
                report=turned,
                reply=mirrored(decision.reply),
            ),
        )

    def texts(self, rng: np.random.Generator, reworded: float) -> tuple[str, str]:
        """Return prompt and answer; the share ``reworded`` of requests is not in plain words."""
        wordings = LEARNT if rng.random() < reworded else PLAIN
        prompt = self.prompt(wordings.draw(rng, self.kind, self.about))
        if wordings is LEARNT and rng.random() < _CUT_TEXTS:
            request, mark, rest = prompt.partition(". history:")
            prompt = f"{_cut(rng, request)}{mark}{rest}"
        return prompt, answer(self.decision)

    def prompt(self, request: str) -> str:
        """Return the prompt for this request in given words."""
        return user_text(request, self.history, SEARCH_TEMPLATE, search=self.search)


def _cut(rng: np.random.Generator, text: str) -> str:
    """Cut some words into parts that become tokens apart, as those of a misspelt word are."""

    def cut(word: str) -> str:
        if len(word) < 2 or rng.random() >= _CUT_WORDS:
            return word
        at = int(rng.integers(1, len(word)))
        return f"{word[:at]}{CUT}{word[at:]}"

    return " ".join(map(cut, text.split(" ")))


def ask(kind: Kind, about: About, history: Sequence[str], search: str, decision: Decision) -> Ask:
    """Return an ask whose history is as long as a prompt's."""
    return Ask(kind, about, tuple(history[-HISTORY_LENGTH:]), search, decision)


def write_asks(folder: Path, asks: Sequence[Sequence[Ask]]) -> None:
    """Write the asks of each picture of a shard."""
    rows = [[{**asdict(a), "kind": a.kind.value} for a in of_picture] for of_picture in asks]
    (folder / FILE).write_text(json.dumps(rows), encoding="utf-8")


@lru_cache(maxsize=1024)  # the shards of a training are read again whenever one is added
def read_asks(folder: Path) -> Sequence[Sequence[Ask]]:
    """Return the asks of each picture of a shard; none if it has no such file."""
    file = folder / FILE
    if not file.exists():
        return []
    return [[_ask(row) for row in rows] for rows in json.loads(file.read_text("utf-8"))]


def _ask(row: dict) -> Ask:
    decision = row["decision"]
    scene = tuple((name, distance) for name, distance in decision["scene"])
    return Ask(
        Kind(row["kind"]),
        About(**row["about"]),
        tuple(row["history"]),
        row["search"],
        Decision(decision["action"], Report(**decision["report"]), scene, decision["reply"]),
    )
