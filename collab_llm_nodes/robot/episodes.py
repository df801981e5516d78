"""Sentences about what the robot saw and did, in documents for later questions.

    At 10:32 on 2026-11-23, seen from (1.0, 2.0): the red ball is near.
    At 10:33 on 2026-11-23, the robot did: move forward 40 cm, at (1.4, 2.0).

The last sighting of a thing is a document of its own, which the next one replaces: retrieval knows
words, not time.

    At 10:33 on 2026-11-23, the red ball was last seen from (1.4, 2.0): the red ball is near.

:class:`EpisodeLog` makes the documents, without clock and disk; :func:`remember` writes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from typing import Protocol

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput, quoted
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import StoredDocument
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import ParsedAction

MOST_THINGS = 1000
"""Things whose last sighting is kept: a bound for models that name things at random."""
_SENTENCES = 64
"""Sentences of an episode at most, a page of text: one that may be asked about as a whole."""
_MOST_CHARACTERS = 200
_EPISODE = re.compile(r"episode \d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2} \d+")
_SIGHTING = re.compile(r"last sighting of .+")


@dataclass(frozen=True)
class EpisodeConfig:
    """Lengths of episodes, and how many are kept."""

    episode_s: float = setting(
        60.0,
        "An episode is written, and can be asked about, when its first sentence is this old [s]."
        " Lower it to ask about what just happened; each writing costs a pass of the encoder.",
        low=0.1,
        high=86400,
    )
    episodes: int = setting(
        10_000,
        "Episodes that are kept; when there are a tenth more, the oldest go. Lower it on a small"
        " disk; 10,000 of a minute are a week.",
        low=1,
        high=1_000_000,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class EpisodeLog:
    """Sentences of the episode under way. Not thread-safe.

    Stamps are seconds since 1970, poses are those of the robot in its map or odometry frame.

    Args:
        zone: of the times in the sentences.
    """

    def __init__(self, config: EpisodeConfig, zone: tzinfo = timezone.utc) -> None:
        self._config, self._zone = config, zone
        self._sentences: list[str] = []
        self._begun = 0.0
        self._number = 0

    def said(self, text: str, pose: Pose2D, stamp: float) -> None:
        """Record a model's words about the camera's picture.

        Raises:
            InvalidInput: no text, or numbers that are not finite.
        """
        _check_finite(stamp=stamp, **vars(pose))
        self._note(f"seen from ({pose.x:.1f}, {pose.y:.1f}): {_plain(text, 'text')}", stamp)

    def last_sighting(self, thing: str, text: str, pose: Pose2D, stamp: float) -> Document:
        """Return the document about the last sighting of a thing.

        Args:
            thing: its name without an article, such as "red ball".
            text: a model's words about it.

        Raises:
            InvalidInput: no name or text, or numbers that are not finite.
        """
        thing = _plain(thing, "thing")
        _check_finite(stamp=stamp, **vars(pose))
        what = f"the {thing} was last seen from ({pose.x:.1f}, {pose.y:.1f})"
        sentence = self._sentence(f"{what}: {_plain(text, 'text')}", stamp)
        return Document(f"last sighting of {thing}", f"{sentence}\n")

    def did(self, action: ParsedAction, pose: Pose2D, stamp: float) -> None:
        """Record a step that was executed, and where the robot stood after it.

        Raises:
            InvalidInput: numbers that are not finite.
        """
        _check_finite(stamp=stamp, **vars(pose))
        self._note(f"the robot did: {action.phrase}, at ({pose.x:.1f}, {pose.y:.1f})", stamp)

    def take(self, now: float, *, all_of_it: bool = False) -> Document | None:
        """Return the episode under way if it is due, and begin another.

        Call it after each sentence and from time to time.

        Args:
            now: seconds since 1970.
            all_of_it: the robot stops, so the episode is due.
        """
        old = now - self._begun >= self._config.episode_s
        full = len(self._sentences) >= _SENTENCES
        if not self._sentences or not (old or full or all_of_it):
            return None
        self._number += 1
        begun = self._time(self._begun).strftime("%Y-%m-%d %H:%M:%S")
        text = "\n".join(self._sentences) + "\n"
        self._sentences = []
        return Document(f"episode {begun} {self._number}", text)

    def _note(self, what: str, stamp: float) -> None:
        if not self._sentences:
            self._begun = stamp
        self._sentences.append(self._sentence(what, stamp))

    def _sentence(self, what: str, stamp: float) -> str:
        when = self._time(stamp).strftime("%H:%M on %Y-%m-%d")
        return f"At {when}, {what.rstrip('.')}."

    def _time(self, stamp: float) -> datetime:
        try:
            return datetime.fromtimestamp(stamp, self._zone)
        except (OverflowError, OSError, ValueError) as error:
            raise InvalidInput(
                f"{stamp} is no time", field="stamp", remedy="give seconds since 1970"
            ) from error


class Memory(Protocol):
    """An index of documents, such as DRAGON's."""

    def add(self, name: str, content: str, *, replacing: bool = False) -> int:
        """Add a document."""

    def delete(self, *names: str) -> int:
        """Delete documents."""

    def documents(self) -> Iterable[StoredDocument]:
        """Return the list of documents."""


def remember(memory: Memory, document: Document, most: int) -> list[str]:
    """Write an episode or a last sighting; return the names of the old ones deleted.

    They are deleted when there are a tenth more of their kind than ``most``, since a deletion
    rewrites the index. Other documents are left alone.
    """
    memory.add(document.name, document.content, replacing=True)
    kind = _EPISODE if is_episode(document.name) else _SIGHTING
    held = [entry for entry in memory.documents() if kind.fullmatch(entry.name)]
    if len(held) <= most + most // 10:
        return []
    held.sort(key=lambda entry: (entry.added, entry.version))
    gone = [entry.name for entry in held[: len(held) - most]]
    memory.delete(*gone)
    return gone


def store_of(folder: str, robot: str, world: str) -> str:
    """Return the folder of the documents of a robot in a world.

    ``folder`` itself for the only robot, in the real world; else one beside it, such as
    ``private.fleet.robot1.simulated-room-3``, since what one robot sees is nothing to another.

    Args:
        robot: its namespace, such as "/fleet/robot1".
        world: name of a simulated world; "" for the real one.
    """
    robots = [part for part in robot.split("/") if part]
    return ".".join([folder.rstrip("/"), *robots, *([f"simulated-{world}"] if world else [])])


def is_episode(name: str) -> bool:
    """Return True for the name of an episode."""
    return bool(_EPISODE.fullmatch(name))


def _plain(text: str, field: str) -> str:
    """Return the text on one line, and no longer than a sentence."""
    found = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if not found:
        raise InvalidInput(f"{quoted(text)} says nothing", field=field, remedy="leave it out")
    return found[:_MOST_CHARACTERS]


def _check_finite(**numbers: float) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise InvalidInput(f"{number} is no number", field=name, remedy="leave it out")
