"""Episodes made of a robot's topics: poses, the model's answers, executed steps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timezone, tzinfo

from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.robot.asked_thing import things_in_view
from collab_llm_nodes.robot.episodes import EpisodeConfig, EpisodeLog
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction

_MOVED_M = 0.02
_TURNED = math.radians(2.0)
"""The robot has not moved if it is nearer than this to where it was [m], [rad]."""
_I_SEE = re.compile(r"\bi see\s+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!;])\s+|\n")
# A question for one thing must not find another one named beside it.
_NEXT_THING = re.compile(r"\s+and\s+(?=an?\s)")
# It is about the next step, not about the thing.
_THE_WAY = re.compile(r"(?:,? )?\bthe way is [^.!;]*", re.IGNORECASE)
_DENIAL = re.compile(r"\b(?:no|not|nothing|cannot)\b|n['\N{RIGHT SINGLE QUOTATION MARK}]t\b", re.I)


def sightings(action: ParsedAction) -> list[str]:
    """Return the sentences that say what the answer of ``action`` sees.

    Sentences that say that a thing is not there are left out: a question about a thing must not
    find the places where it was not. A reply may say anything, so it is no sighting.
    """
    if not (action.kind.moves or action.kind is Kind.STOP):
        return []
    sentences = _SENTENCE_END.split(action.words)
    return [said for said in sentences if said and not _DENIAL.search(said)]


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
        for said in sightings(action):
            # Without "I see": questions have these words, too, and would find anything.
            sentence = _THE_WAY.sub("", _I_SEE.sub("", said))
            if not any(map(str.isalnum, sentence)):
                continue
            self._log.said(sentence, self._pose, now)  # each with its own time and place
            for part in _NEXT_THING.split(sentence):
                for thing in things_in_view(part, self._instruction):
                    found = self._log.last_sighting(thing, part, self._pose, now)
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
