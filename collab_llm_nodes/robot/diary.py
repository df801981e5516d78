"""Episodes made of a robot's topics: poses, the model's answers, executed steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timezone, tzinfo

from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.robot.episodes import EpisodeConfig, EpisodeLog
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction

_MOVED_M = 0.02
_TURNED = math.radians(2.0)
"""The robot has not moved if it is nearer than this to where it was [m], [rad]."""
_WORD = re.compile(r"\w+")
_I_SEE = re.compile(r"i see\s+", re.IGNORECASE)
_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_ARTICLES = frozenset({"a", "an", "the", "that", "this"})
# fmt: off
_ENDS_A_NAME = frozenset({
    "and", "at", "behind", "beside", "but", "by", "for", "from", "here", "if", "immediately", "in",
    "is", "it", "me", "near", "next", "now", "of", "on", "or", "over", "please", "quickly", "so",
    "thank", "thanks", "then", "there", "to", "under", "where", "which", "will", "with", "would",
    "you",
})
# fmt: on
_DIRECTIONS = frozenset({"ahead", "back", "front", "left", "middle", "right", "side", "straight"})
_MOST_WORDS = 100  # of an instruction
_DENIAL = re.compile(r"\b(?:no|not|nothing|cannot)\b|n['\N{RIGHT SINGLE QUOTATION MARK}]t\b", re.I)


def sighting(action: ParsedAction) -> str:
    """Return what the answer of ``action`` sees, in its words.

    Empty if it sees nothing, or says that a thing is not there: a question about a thing must not
    find the places where it was not. A reply may say anything, so it is no sighting.
    """
    observes = action.kind.moves or action.kind is Kind.STOP
    return action.words if observes and not _DENIAL.search(action.words) else ""


def thing_of(instruction: str, said: str) -> str:
    """Return the thing that an instruction and a sighting both name, without article, or "".

    A name is the whole phrase after an article in the instruction: "the red ball" is not named by
    "the blue ball". Without an article it is the end of a phrase. The longest name counts.
    """
    names = list[str]()
    phrase, whole = list[str](), False
    for word in [*_WORD_OR_MARK.findall(instruction.lower())[:_MOST_WORDS], "."]:
        if word in _ARTICLES or word in _ENDS_A_NAME or not _WORD.fullmatch(word):
            begins = range(min(len(phrase), 1)) if whole else range(len(phrase))
            names += [" ".join(phrase[begin:]) for begin in begins]
            phrase, whole = [], word in _ARTICLES
        else:
            phrase.append(word)
    words = f" {' '.join(_WORD.findall(said.lower()))} "
    named = [n for n in names if f" {n} " in words and not _DIRECTIONS.issuperset(n.split())]
    return max(named, key=len, default="")


@dataclass(frozen=True)
class _Step:
    session: str
    action: ParsedAction
    begun: Pose2D


class Diary:
    """Episodes under way. Not thread-safe; times are seconds since 1970.

    An episode ends with its instruction at the latest, so that a question finds the last one.
    Nothing is recorded before the first pose, since its place would be unknown.

    Args:
        zone: of the times in the sentences.
    """

    def __init__(self, config: EpisodeConfig, zone: tzinfo = timezone.utc) -> None:
        self._log = EpisodeLog(config, zone)
        self._pose: Pose2D | None = None
        self._step: _Step | None = None
        self._over = False
        self._instruction = ""
        self._sightings: dict[str, Document] = {}  # the last of each thing, not taken yet

    def on_pose(self, pose: Pose2D) -> None:
        """Take the robot's pose from odometry."""
        self._pose = pose

    def on_action(self, session: str, action: ParsedAction, now: float) -> None:
        """Record the sighting in the answer of ``session``, and the step before it, now ended.

        A second reading of the same answer is not recorded.

        Raises:
            InvalidInput: numbers that are not finite.
        """
        if self._pose is None or action.code is not Code.OK:
            return
        if self._step is not None and self._step.session == session:
            return
        self._end_step(now)
        # Without "I see": questions have these words, too, and would find sightings of anything.
        seen = _I_SEE.sub("", sighting(action))
        if seen:
            self._log.said(seen, self._pose, now)
            if thing := thing_of(self._instruction, seen):
                found = self._log.last_sighting(thing, seen, self._pose, now)
                self._sightings[found.name] = found
        self._step = _Step(session, action, self._pose)

    def on_instruction(self, instruction: str, now: float) -> None:
        """Take the instruction that is followed; an empty one means that it has ended."""
        self._instruction = instruction
        if not instruction:
            self._end_step(now)
            self._over = True

    def take(self, now: float, *, all_of_it: bool = False) -> Document | None:
        """Return the episode if it is due; call it after each event and from time to time.

        Args:
            all_of_it: the robot stops, so the episode is due.
        """
        over, self._over = self._over, False
        return self._log.take(now, all_of_it=all_of_it or over)

    def take_sightings(self) -> list[Document]:
        """Return the last sighting of each thing that was seen since the last call."""
        found, self._sightings = list(self._sightings.values()), {}
        return found

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None or self._pose is None:
            return
        begun, here = step.begun, self._pose
        turned = abs(math.remainder(here.yaw - begun.yaw, math.tau))
        if math.hypot(here.x - begun.x, here.y - begun.y) > _MOVED_M or turned > _TURNED:
            self._log.did(step.action, here, now)
