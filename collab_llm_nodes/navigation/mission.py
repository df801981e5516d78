"""Following one instruction: observe, think, act, until the model says stop. No I/O, no clock.

Two clocks come in with the events: ``now`` is the robot's [s], possibly simulated, and rules
motion; ``wall`` is the machine's [s, monotonic] and rules liveness, so that a simulator that stands
still cannot make anything wait for ever.

The robot moves in the phase ACT only; every other phase, and every ending, means zero velocity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.navigation.executor import (
    ZERO,
    ExecutorConfig,
    Outcome,
    Pose2D,
    StepExecutor,
)
from collab_llm_nodes.navigation.grammar import REASONS, Code, Kind, ParsedAction

DEADLINE_LIMITS_S = (1.0, 86_400.0)
"""Least and greatest time for a mission."""


@dataclass(frozen=True)
class UnverifiedConfig:
    """Limits of a step whose text the target has not verified, where the parser lets it pass."""

    speed_share: float = setting(0.3, "Share of the top speeds.", low=0.05, high=1.0)
    max_distance: float = setting(
        0.25, "Longest step forward [m]; of a longer one that much is done.", low=0.01, high=10.0
    )
    max_angle: float = setting(
        30.0, "Widest turn [degree]; of a wider one that much is done.", low=1.0, high=180.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class MissionConfig:
    """Limits of one mission."""

    max_steps: int = setting(40, "Actions at most, unless the goal says.", low=1, high=10_000)
    deadline: float = setting(
        300.0,
        "Robot's time for all of it, unless the goal says [s].",
        low=DEADLINE_LIMITS_S[0],
        high=DEADLINE_LIMITS_S[1],
    )
    max_instruction: int = setting(500, "Longest instruction [characters].", low=1, high=10_000)
    observation_timeout: float = setting(
        5.0, "Wait for a camera frame, machine's time [s].", low=0.1, high=600.0
    )
    answer_timeout: float = setting(
        20.0, "Wait for the model's answer, machine's time [s].", low=0.1, high=600.0
    )
    parser_timeout: float = setting(
        2.0, "Wait for the action after the answer, machine's time [s].", low=0.1, high=60.0
    )
    odometry_timeout: float = setting(
        2.0, "Longest silence of odometry, machine's time [s].", low=0.1, high=60.0
    )
    settle: float = setting(
        0.1, "Rest before the next frame counts, robot's time [s].", low=0.0, high=5.0
    )
    retries: int = setting(
        3, "Failed answers in a row before the mission is given up.", low=0, high=100
    )
    retry_pause: float = setting(
        0.5, "Pause after a failed answer, machine's time [s].", low=0.0, high=60.0
    )
    max_blocked: int = setting(
        5, "Steps in a row without any motion before it is given up.", low=1, high=1000
    )
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    unverified: UnverifiedConfig = field(default_factory=UnverifiedConfig)

    def __post_init__(self) -> None:
        check_ranges(self)


class Phase(Enum):
    """What the mission waits for."""

    OBSERVE = "observe"
    THINK = "think"
    ACT = "act"
    ENDED = "ended"


@dataclass(frozen=True)
class Ending:
    """Why it ended: ``code`` is the name of a status constant of ``action/Navigate``."""

    code: str
    message: str = ""


_FATAL = {
    "INVALID_INPUT",
    "VOCABULARY_MISMATCH",
    "UNAUTHENTICATED",
    "MODEL_ERROR",
    "INVALID_CONFIG",
}
"""Failures of an answer that asking again cannot cure."""

_STATUS_OF = {Code.UNVERIFIED: "UNAVAILABLE", Code.STALE: "NO_OBSERVATION"}
"""What too many refusals of one kind mean for the mission; UNREADABLE otherwise."""


def check_instruction(instruction: str, config: MissionConfig) -> None:
    """Raises InvalidInput for an instruction without a letter or digit, or an oversized one."""
    if not any(character.isalnum() for character in instruction):
        raise InvalidInput("empty", field="instruction", remedy="say where to go")
    if len(instruction) > config.max_instruction:
        raise InvalidInput(
            f"{len(instruction)} characters",
            field="instruction",
            remedy=f"at most {config.max_instruction}",
        )


class Mission:
    """See the module docstring. Feed events; read ``phase``, ``velocity`` and ``ending``.

    Attributes:
        velocity: to command now.
        ending: set once, when the mission is over.
        steps: actions carried out, the one under way included.
        action: the one carried out last, as it is carried out.
        history: their texts, oldest first, as the prompt tells them.
        distance, angle: path length [m] and sum of absolute turns [rad] by odometry.
        asked: capture stamp of the frame asked about last [s].
    """

    def __init__(self, config: MissionConfig, now: float, wall: float) -> None:
        self.config = config
        self.phase = Phase.OBSERVE
        self.velocity = ZERO
        self.ending: Ending | None = None
        self.steps = 0
        self.history: list[str] = []
        self.distance = self.angle = 0.0
        self.asked = -math.inf
        self._executor = StepExecutor(config.executor)
        self.action: ParsedAction | None = None
        self._deadline = now + config.deadline
        self._not_before = now  # capture time from which frames count
        self._phase_since = wall
        self._ask_after = wall  # pause after a failure
        self._answering = False  # a generation is under way, asked for at ...
        self._asked_at = wall
        self._answer_ended = wall
        self._failures = self._blocked = 0
        self._pose: Pose2D | None = None
        self._pose_seen = -math.inf

    @property
    def answering(self) -> bool:
        """A generation is under way, and its answer is waited for."""
        return self._answering and self.phase is not Phase.ENDED

    def on_observation(self, stamp: float, wall: float) -> bool:
        """A frame captured at ``stamp`` is there; True: ask the model about it now."""
        if self.phase is not Phase.OBSERVE or self._answering or wall < self._ask_after:
            return False
        if stamp < self._not_before or stamp <= self.asked:
            return False
        self.asked = stamp
        self._asked_at = wall
        self._answering = True
        self._enter(Phase.THINK, wall)
        return True

    def on_action(
        self, action: ParsedAction, now: float, wall: float, *, verified: bool = True
    ) -> bool:
        """What the parser read from the answer about ``asked``; True: a step begins.

        A second reading of the same answer, with a code other than OK, takes the action back.
        What is not ``verified`` is done in part and slowly; it cannot end the mission well.
        """
        if self.phase is Phase.ACT and action.code is not Code.OK:
            self.velocity = self._executor.cancel()
            self.on_failure(_STATUS_OF.get(action.code, "UNREADABLE"), _refusal(action), now, wall)
            return False
        if self.phase is not Phase.THINK or action.code is Code.FAILED:
            return False  # FAILED: the generation's own result says more
        if action.code is not Code.OK:
            self.on_failure(_STATUS_OF.get(action.code, "UNREADABLE"), _refusal(action), now, wall)
            return False
        if action.kind is Kind.STOP and not verified:
            unsure = "stop, says the draft model alone: the target has not verified it"
            self.on_failure("UNAVAILABLE", unsure, now, wall)
            return False
        if action.kind is Kind.STOP:
            self.steps += 1
            self.end("OK")
            return False
        if self._pose is None or wall - self._pose_seen > self.config.odometry_timeout:
            self.end("NO_ODOMETRY", "no fresh odometry to measure a step with")
            return False
        self.action = action if verified else _shortened(action, self.config.unverified)
        self.steps += 1
        share = 1.0 if verified else self.config.unverified.speed_share
        self.velocity = self._executor.start(self.action, self._pose, now, share)
        self._enter(Phase.ACT, wall)
        return True

    def on_answer_ended(self, wall: float) -> None:
        """The generation asked for last is over, well or badly; call ``on_failure`` if badly."""
        self._answering = False
        self._answer_ended = wall
        if self.phase is Phase.OBSERVE:
            self._phase_since = wall  # only now did it begin to wait for a frame

    def on_failure(self, code: str, message: str, now: float, wall: float) -> None:
        """The answer cannot be used: ask again about a new frame, or end."""
        if self.phase is Phase.ENDED:
            return
        self._failures += 1
        if code in _FATAL or self._failures > self.config.retries:
            self.end(code, message)
            return
        self._not_before = now
        self._ask_after = wall + self.config.retry_pause
        self._enter(Phase.OBSERVE, wall)

    def on_odometry(self, pose: Pose2D, now: float, wall: float) -> None:
        """Measure; in ACT, steer."""
        last, self._pose, self._pose_seen = self._pose, pose, wall
        if self.phase is not Phase.ACT:
            return
        if last is not None:
            self.distance += math.hypot(pose.x - last.x, pose.y - last.y)
            self.angle += abs(math.remainder(pose.yaw - last.yaw, math.tau))
        self.velocity = self._executor.on_odometry(pose, now)
        self._after_step(now, wall)

    def tick(self, now: float, wall: float) -> None:
        """At a fixed rate: deadlines."""
        c = self.config
        waited = wall - max(self._phase_since, self._ask_after)
        if self.phase is Phase.ENDED:
            return
        if now > self._deadline:
            self.end("DEADLINE_EXCEEDED", f"not done within {c.deadline:g} s")
        elif self._answering and wall - self._asked_at > c.answer_timeout:
            self.on_answer_ended(wall)  # the caller gives that generation up
            if self.phase is not Phase.ACT:
                late = f"no answer within {c.answer_timeout:g} s"
                self.on_failure("DEADLINE_EXCEEDED", late, now, wall)
        elif self.phase is Phase.OBSERVE:
            if not self._answering and waited > c.observation_timeout:
                missing = f"no fresh camera frame for {c.observation_timeout:g} s"
                self.end("NO_OBSERVATION", missing)
        elif self.phase is Phase.THINK and not self._answering:
            if wall - self._answer_ended > c.parser_timeout:
                silent = "the answer is there, but no navigation_action about it"
                self.on_failure("UNAVAILABLE", silent, now, wall)
        elif self.phase is Phase.ACT:
            if wall - self._pose_seen > c.odometry_timeout:
                self.end("NO_ODOMETRY", f"odometry silent for {c.odometry_timeout:g} s")
                return
            self.velocity = self._executor.tick(now)
            self._after_step(now, wall)

    def end(self, code: str, message: str = "") -> None:
        """Stop the robot and end; the first ending counts."""
        if self.ending is None:
            self._executor.cancel()
            self.velocity = ZERO
            self.ending = Ending(code, message)
            self.phase = Phase.ENDED

    def _after_step(self, now: float, wall: float) -> None:
        outcome = self._executor.outcome
        if outcome is Outcome.RUNNING or self.action is None:
            return
        if outcome is Outcome.STALE:
            self.end("NO_ODOMETRY", "odometry or the clock stopped during a step")
        elif outcome is Outcome.TIMEOUT:
            self.end("TIMEOUT", f"{self.action.phrase!r} took longer than its allowance")
        else:
            self._failures = 0
            self.history.append(self.action.phrase)
            moved = outcome is Outcome.DONE or self._executor.travelled > 0.02
            self._blocked = 0 if moved else self._blocked + 1
            if self._blocked >= self.config.max_blocked:
                self.end("BLOCKED", f"{self._blocked} steps in a row without any motion")
            elif self.steps >= self.config.max_steps:
                self.end("MAX_STEPS", f"no stop after {self.steps} actions")
            else:
                self._not_before = now + self.config.settle
                self._enter(Phase.OBSERVE, wall)

    def _enter(self, phase: Phase, wall: float) -> None:
        self.phase = phase
        self._phase_since = wall
        if phase is not Phase.ACT:
            self.velocity = ZERO


def _shortened(action: ParsedAction, limits: UnverifiedConfig) -> ParsedAction:
    limit = limits.max_distance
    if action.kind is Kind.TURN:
        limit = math.radians(limits.max_angle)
    return replace(action, value=math.copysign(min(abs(action.value), limit), action.value))


def _refusal(action: ParsedAction) -> str:
    return f"{action.reason or REASONS[action.code]}: {action.text[:200]!r}"
