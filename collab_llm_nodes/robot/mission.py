"""One instruction: observe, think, act, until the model ends the task. No I/O, no clock.

Events carry two clocks: ``now`` is the robot's [s], possibly simulated, and governs motion;
``wall`` is the machine's [s, monotonic] and governs every deadline, so that a simulator that stands
still blocks nothing, and one that runs fast shortens no deadline.

The robot moves in the phase ACT only; every other phase, and every ending, means zero velocity.

With ``overlap`` the next answer is asked for while the robot still moves. It replaces the rest of
the step, measured from where its picture was taken.

A model that cannot be reached costs time only: the mission asks again until it answers, or for
``outage_timeout``.

``motion_guard`` may forbid motion (``on_motion_state``). That ends a step, not the mission: it
takes a new picture once motion is allowed, and gives up after ``refusal_timeout``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple
from unicodedata import category

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.executor import (
    ZERO,
    ExecutorConfig,
    Outcome,
    Pose2D,
    StepExecutor,
)
from collab_llm_nodes.robot.grammar import (
    LONGEST_M,
    REASONS,
    WIDEST_DEGREE,
    Code,
    Kind,
    ParsedAction,
    check_step,
)
from collab_llm_nodes.robot.guard import ASK_CAMERA, ASK_DRIVER
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.robot.steps import Steps

DEADLINE_LIMITS_S = (1.0, 86_400.0)
"""Least and greatest time for a mission."""

MAX_INSTRUCTION = 500
"""Longest instruction [characters]."""

RETRY_PAUSE_S = 0.5
"""Pause after a failed answer, machine's time: an outage must not become a loop of requests."""
OBSERVATION_S = 5.0
"""Longest wait for the first camera frame; later ones have ``refusal_timeout``."""
PARSER_S = 2.0
"""Longest wait for the action after its answer: reading a text takes milliseconds."""
ODOMETRY_S = 2.0
"""Odometry older than this measures no step; a running step ends sooner (``executor.watchdog``)."""


@dataclass(frozen=True)
class UnverifiedConfig:
    """Limits of a step whose text the target has not verified, where the parser lets it pass."""

    speed_share: float = fixed(0.3, "Share of the top speeds.", low=0.05, high=1.0)
    max_distance: float = fixed(
        0.25, "Longest step forward [m]; a longer one is shortened.", low=0.01, high=10.0
    )
    max_angle: float = fixed(
        30.0, "Widest turn [degree]; a wider one is shortened.", low=1.0, high=180.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class MissionConfig:
    """Limits of one mission."""

    max_distance: float = fixed(
        0.75,
        "Longest step forward [m]; grammar.max_distance of navigation_action_parser limits what is"
        " read.",
        low=0.01,
        high=LONGEST_M,
    )
    max_angle: float = fixed(45.0, "Widest turn, likewise [degree].", low=1.0, high=WIDEST_DEGREE)
    max_steps: int = fixed(40, "Most actions, unless the goal says otherwise.", low=1, high=10_000)
    deadline: float = fixed(
        300.0,
        "Time for the mission, unless the goal says otherwise, machine's time [s].",
        low=DEADLINE_LIMITS_S[0],
        high=DEADLINE_LIMITS_S[1],
    )
    answer_timeout: float = fixed(
        20.0, "Wait for the model's answer, machine's time [s].", low=0.1, high=600.0
    )
    settle: float = fixed(
        0.1, "Rest before the next frame counts, robot's time [s].", low=0.0, high=5.0
    )
    check_thing: bool = fixed(
        False,
        "Hold where the answer names another thing than the instruction (docs/safety.md). For"
        " models that name things in the words of the instruction, as the embedded pair does.",
    )
    retries: int = fixed(3, "Unusable answers in a row before the mission ends.", low=0, high=100)
    outage_timeout: float = fixed(
        120.0,
        "Wait for a model that cannot be reached, such as one that restarts, machine's time [s].",
        low=0.0,
        high=DEADLINE_LIMITS_S[1],
    )
    max_blocked: int = fixed(
        5, "Steps in a row without any motion before the mission ends.", low=1, high=1000
    )
    overlap: float = fixed(
        0.0,
        "Ask for the next answer when a step has this long left, instead of standing still for it"
        " [s]; 0 = off. The picture is then taken in motion, and the robot drives on while the"
        " model computes.",
        low=0.0,
        high=5.0,
    )
    refusal_timeout: float = fixed(
        30.0,
        "Wait for motion to be allowed again, and for a camera that has fallen silent, machine's"
        " time [s].",
        low=0.1,
        high=600.0,
    )
    guard_timeout: float = fixed(
        3.0, "Longest silence of motion_guard, where it is required [s].", low=1.0, high=60.0
    )
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    unverified: UnverifiedConfig = field(default_factory=UnverifiedConfig)

    def __post_init__(self) -> None:
        check_ranges(self)


class Phase(Enum):
    """Phase of a mission."""

    OBSERVE = "observe"
    THINK = "think"
    ACT = "act"
    ENDED = "ended"


class Ending(NamedTuple):
    """Reason of the end, as in the result of ``action/Navigate``.

    Attributes:
        code: name of a status constant.
        text: the model's words, where it ended the task.
    """

    code: str
    message: str = ""
    text: str = ""


_ENDINGS = {
    Kind.STOP: Ending("OK"),
    Kind.GIVE_UP: Ending("NOT_FOUND", "the model looked round and did not find it"),
    Kind.REPLY: Ending("ANSWERED", "the model replied, and nothing moves"),
}
"""Ends of the task that the model decides on."""


_FATAL = {
    "INVALID_INPUT",
    "VOCABULARY_MISMATCH",
    "UNAUTHENTICATED",
    "MODEL_ERROR",
    "INVALID_CONFIG",
}
"""Failures of an answer that another try cannot cure."""

_OUTAGES = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "BUSY", "INACTIVE", "CANCELLED"}
"""Failures of an answer because the model, or its link, cannot be reached now."""

_STATUS_OF = {Code.UNVERIFIED: "UNAVAILABLE", Code.STALE: "NO_OBSERVATION"}
"""Status of a mission after too many refusals of one kind; UNREADABLE for the others."""


@dataclass(frozen=True)
class Permission:
    """Permission to move, as in ``msg/MotionState``."""

    allowed: bool = True
    emergency_stop: bool = False
    reasons: tuple[str, ...] = ()
    text: str = ""
    speed_limit: float = math.inf

    @property
    def link_lost(self) -> bool:
        """Return True if the lost link is one of the reasons."""
        return "LINK_DOWN" in self.reasons


NO_GUARD = Permission(
    False,
    reasons=("NO_GUARD",),
    text="motion_guard is silent, and only it passes velocities on to the robot: start it, or set"
    " require_guard to false and remap cmd_vel_nav to the robot's driver",
)

_ASK_KNOWN = "name a thing that the model knows and sees"
_ASK_CONTINUOUS = "does its source restart, correct itself, or scale wrongly? It must be continuous"

_MOVED_M = 0.02
"""Less is no motion (m, or rad)."""
_REMEMBERED_S = 3.0
"""Time for which a pose is kept, for pictures that come late."""


def check_instruction(instruction: str) -> None:
    """Check that ``instruction`` can be followed.

    Raises:
        InvalidInput: no letter or digit, a control character other than tabulator and line ends
            (terminals obey them), or too long.
    """
    control = next((c for c in instruction if category(c) == "Cc" and c not in "\t\n\r"), None)
    if control is not None:
        raise InvalidInput(
            f"has the control character {control!r} at {instruction.index(control)}",
            field="instruction",
            remedy="plain text only",
        )
    if not any(character.isalnum() for character in instruction):
        raise InvalidInput("empty", field="instruction", remedy="say where to go")
    if len(instruction) > MAX_INSTRUCTION:
        raise InvalidInput(
            f"{len(instruction)} characters",
            field="instruction",
            remedy=f"at most {MAX_INSTRUCTION}",
        )


def asked_thing(instruction: str, config: MissionConfig) -> AskedThing | None:
    """Return the thing that answers must name; None if ``check_thing`` is off."""
    return AskedThing(instruction) if config.check_thing else None


def refusal(
    action: ParsedAction, config: MissionConfig, asked: AskedThing | None
) -> tuple[str, str]:
    """Return status and words of the refusal of ``action``; empty if it is accepted.

    Args:
        asked: of ``asked_thing``.
    """
    try:
        check_step(action, config.max_distance, config.max_angle)
    except InvalidInput as error:
        action = replace(
            action, kind=Kind.NONE, value=0.0, code=Code.OUT_OF_RANGE, reason=str(error)
        )
    if action.code is not Code.OK:
        return _STATUS_OF.get(action.code, "UNREADABLE"), _words(action)
    compared = action.kind.moves or action.kind is Kind.STOP
    if asked and compared and (objection := asked.objection(action)):
        return "NOT_FOUND", f"{objection}: {_ASK_KNOWN}"
    return "", ""


class Mission:
    """See the module docstring. Feed events; read ``phase``, ``velocity`` and ``ending``.

    Attributes:
        velocity: to command now.
        ending: set once, when the mission is over.
        steps: actions executed, including the one under way.
        action: the last of them, as executed.
        history: phrases of the finished actions, oldest first; see ``prompt_history``.
        search: memory of the search, as of the finished actions; see ``prompt_search``.
        distance, angle: path length [m] and sum of absolute turns [rad] by odometry.
        asked: capture stamp of the frame asked about last [s].
        odometry_trouble: why the last odometry could not be used; set by the caller.
    """

    def __init__(
        self,
        config: MissionConfig,
        now: float,
        wall: float,
        *,
        instruction: str = "",
        steps: Steps | None = None,
        guarded: bool = False,
    ) -> None:
        """``steps``: their executor. ``guarded``: no motion without ``on_motion_state``."""
        self.config = config
        self._asked_thing = asked_thing(instruction, config)
        self.phase = Phase.OBSERVE
        self.velocity = ZERO
        self.ending: Ending | None = None
        self.steps = 0
        self.history: list[str] = []
        self.search = SearchMemory()
        self.distance = self.angle = 0.0
        self.asked = -math.inf
        self.odometry_trouble = ""
        self._executor: Steps = steps or StepExecutor(config.executor)
        self.action: ParsedAction | None = None
        self._deadline = wall + config.deadline
        self._not_before = now  # capture time from which frames count
        self._phase_since = wall
        self._ask_after = wall  # pause after a failure
        self._answering = False  # a generation is under way, asked for at ...
        self._asked_at = wall
        self._answer_ended = wall
        self._failures = self._blocked = 0
        self._sees = False  # a frame has come
        self._stamped = -math.inf  # capture time of the last one
        self._outage: tuple[float, Ending] | None = None  # since when, and its last failure
        self._pose: Pose2D | None = None
        self._pose_seen = -math.inf
        self._poses: deque[tuple[float, Pose2D]] = deque()  # of the last seconds, robot's time
        self._ahead = False  # the answer waited for is about a picture taken in motion ...
        self._seen_from: Pose2D | None = None  # ... here
        self._verified = True
        self._guarded = guarded
        self._permission = NO_GUARD if guarded else Permission()
        self._permitted_at = -math.inf  # heard from motion_guard, machine's time
        self._began = wall
        self._refused_since = wall  # by reasons of the present kind: with the link, or without

    @property
    def answering(self) -> bool:
        """Return True while a generation is under way whose answer is wanted."""
        return self._answering and self.phase is not Phase.ENDED

    @property
    def awaits_action(self) -> bool:
        """Return True while an answer is generated or read that may begin a step."""
        return self.phase is Phase.THINK or (self.phase is Phase.ACT and self._ahead)

    @property
    def prompt_history(self) -> list[str]:
        """Return the phrases of the finished actions and of the one under way."""
        if self.phase is Phase.ACT and self.action is not None:
            return [*self.history, self.action.phrase]
        return self.history

    @property
    def prompt_search(self) -> SearchMemory:
        """Return the memory of the search, with the action under way as if it were finished."""
        if self.phase is Phase.ACT and self.action is not None:
            return self.search.after(self.action.phrase, self.action.words)
        return self.search

    def on_observation(self, stamp: float, wall: float) -> bool:
        """Take a frame captured at ``stamp``; return True if the model is to be asked about it."""
        self._sees, self._stamped = True, stamp
        ahead = self._may_look_ahead()
        if not (ahead or self.phase is Phase.OBSERVE) or self._answering or wall < self._ask_after:
            return False
        if stamp < self._not_before or stamp <= self.asked:
            return False
        if not (self._permission.allowed or self._permission.link_lost):
            self._phase_since = wall  # frames do arrive
            return False
        self.asked = stamp
        self._asked_at = wall
        self._answering = True
        self._ahead, self._seen_from = ahead, self._pose_at(stamp) if ahead else None
        if not ahead:
            self._enter(Phase.THINK, wall)
        return True

    def on_action(
        self, action: ParsedAction, now: float, wall: float, *, verified: bool = True
    ) -> bool:
        """Take the action read from the answer about ``asked``; return True if a step begins.

        One that is not ``verified`` is shortened and slow, and does not end the task.
        """
        if not self.awaits_action or action.code is Code.FAILED:
            return False  # FAILED: the generation's own result says more
        refused, why = refusal(action, self.config, self._asked_thing)
        if refused:
            self.on_failure(refused, why, now, wall)
            return False
        ending = _ENDINGS.get(action.kind)
        if ending and not verified:
            unsure = f"the draft model alone says {action.phrase}: the target has not verified it"
            self.on_failure("UNAVAILABLE", unsure, now, wall)
            return False
        self._outage = None
        if ending:
            self.steps += 1
            self.end(*ending._replace(text=action.words))
            return False
        if not self._permission.allowed:
            self._look_again(now, wall)
            return False
        if self._pose is None or wall - self._pose_seen > ODOMETRY_S:
            self._end_without_odometry("no fresh odometry to measure a step with")
            return False
        if self.phase is Phase.ACT:  # the step under way ends here
            self._remember_step(in_full=True)
            self._failures = self._blocked = 0
        self.action = action if verified else _shortened(action, self.config.unverified)
        self.steps += 1
        self._verified = verified
        share = 1.0 if verified else self.config.unverified.speed_share
        self.velocity = self._executor.start(self.action, self._pose, now, share, self._seen_from)
        self._ahead = False
        self._not_before = now
        self._enter(Phase.ACT, wall)
        return True

    def on_retraction(self, action: ParsedAction, now: float, wall: float) -> None:
        """Take the reading of a whole answer, of which a part began the step under way."""
        if self.phase is Phase.ACT and action.code is not Code.OK:
            self._executor.cancel()
            self._abandon(wall)
            self._enter(Phase.OBSERVE, wall)
            self.on_failure(_STATUS_OF.get(action.code, "UNREADABLE"), _words(action), now, wall)

    def on_motion_state(self, permission: Permission, now: float, wall: float) -> None:
        """Take the permission to move from now on."""
        self._permit(permission, wall)
        self._permitted_at = wall
        self._executor.limit = permission.speed_limit
        if permission.emergency_stop:
            self.end("EMERGENCY_STOP", permission.text)
        elif not permission.allowed:
            self._end_step(now, wall)
        else:
            ahead = self.action is not None and self.action.kind is Kind.FORWARD
            if self.phase is Phase.ACT and ahead and permission.speed_limit <= 0.0:
                self._interrupt(now, wall, counts=True)  # an obstacle

    def on_answer_ended(self, wall: float) -> None:
        """Take the end of the last generation; after a failure call ``on_failure`` as well."""
        self._answering = False
        self._answer_ended = wall
        if self.phase is Phase.OBSERVE:
            self._phase_since = wall  # only now did it begin to wait for a frame

    def on_failure(self, code: str, message: str, now: float, wall: float) -> None:
        """Take an unusable answer: ask again about a new frame, or end."""
        if self.phase is Phase.ENDED:
            return
        if code in _OUTAGES:
            since = self._outage[0] if self._outage else wall
            self._outage = since, Ending(code, message)
            over = wall - since >= self.config.outage_timeout
        else:
            self._outage = None
            self._failures += 1
            over = code in _FATAL or self._failures > self.config.retries
        if over:
            self.end(code, message)
            return
        self._ask_after = wall + RETRY_PAUSE_S
        self._look_again(now, wall)

    def on_odometry(
        self, pose: Pose2D, now: float, wall: float, measured: float | None = None
    ) -> None:
        """Take a pose; in ACT, steer. ``measured``: when the robot had it, robot's time."""
        last, self._pose, self._pose_seen = self._pose, pose, wall
        self._poses.append((now, pose))
        while self._poses[0][0] < now - _REMEMBERED_S:
            self._poses.popleft()
        if self.phase is not Phase.ACT:
            return
        self.velocity = self._executor.on_odometry(pose, now, measured)
        if last is not None and self._executor.outcome is not Outcome.JUMPED:
            self.distance += math.hypot(pose.x - last.x, pose.y - last.y)
            self.angle += abs(math.remainder(pose.yaw - last.yaw, math.tau))
        self._after_step(now, wall)

    def tick(self, now: float, wall: float) -> None:
        """Check the deadlines; call it at a fixed rate."""
        c = self.config
        waited = wall - max(self._phase_since, self._ask_after)
        if self.phase is Phase.ENDED:
            return
        self._check_guard(now, wall)
        refused = 0.0 if self._permission.allowed else wall - self._refused_since
        patience = c.refusal_timeout if self._sees else OBSERVATION_S
        link_lost = self._permission.link_lost
        if wall > self._deadline:
            self.end("DEADLINE_EXCEEDED", f"not done within {c.deadline:g} s")
        elif self.phase is Phase.OBSERVE and not self._answering and waited > patience:
            old = f"the last is stamped {now - self._stamped:.1f} s ago; " if self._sees else ""
            missing = f"no fresh camera frame for {patience:g} s: {old}{ASK_CAMERA}"
            self.end("NO_OBSERVATION", missing)
        elif refused > (c.outage_timeout if link_lost else c.refusal_timeout):
            if self._outage and link_lost:
                self.end(*self._outage[1])
            self.end("MOTION_REFUSED", self._permission.text)
        elif self._answering and wall - self._asked_at > c.answer_timeout:
            self.on_answer_ended(wall)  # the caller cancels that generation
            if self.phase is not Phase.ACT or self._ahead:
                late = f"no answer within {c.answer_timeout:g} s"
                self.on_failure("DEADLINE_EXCEEDED", late, now, wall)
        elif self.phase is Phase.THINK and not self._answering:
            if wall - self._answer_ended > PARSER_S:
                silent = "the answer is there, but no navigation_action about it"
                self.on_failure("UNAVAILABLE", silent, now, wall)
        elif self.phase is Phase.ACT:
            if wall - self._pose_seen > ODOMETRY_S:
                self._end_without_odometry(f"odometry silent for {ODOMETRY_S:g} s")
                return
            self.velocity = self._executor.tick(now)
            self._after_step(now, wall)

    def end(self, code: str, message: str = "", text: str = "") -> None:
        """Stop the robot and end; the first ending counts."""
        if self.ending is None:
            self._executor.cancel()
            self.velocity = ZERO
            self.ending = Ending(code, message, text)
            self.phase = Phase.ENDED

    def _end_without_odometry(self, what: str) -> None:
        self.end("NO_ODOMETRY", f"{what}: {self.odometry_trouble or ASK_DRIVER}")

    def _may_look_ahead(self) -> bool:
        """Return True if the step under way is nearly done, and the next may overlap it."""
        return (
            self.phase is Phase.ACT
            and self._verified
            and self.steps < self.config.max_steps
            and self._executor.time_left < self.config.overlap
        )

    def _pose_at(self, stamp: float) -> Pose2D | None:
        """Return the remembered pose nearest in time to ``stamp``."""
        return min(self._poses, key=lambda p: abs(p[0] - stamp))[1] if self._poses else None

    def _check_guard(self, now: float, wall: float) -> None:
        if not self._guarded or wall - self._permitted_at <= self.config.guard_timeout:
            return
        if self._permitted_at > -math.inf:
            self._permit(NO_GUARD, wall)
            self._end_step(now, wall)
        elif wall - self._began > self.config.guard_timeout:
            self.end("MOTION_REFUSED", NO_GUARD.text)

    def _permit(self, permission: Permission, wall: float) -> None:
        """Set the permission; refusals because of the link, and others, are timed apart."""
        before, self._permission = self._permission, permission
        if (before.allowed, before.link_lost) != (permission.allowed, permission.link_lost):
            self._refused_since = wall

    def _end_step(self, now: float, wall: float) -> None:
        """End the step under way, because motion is refused."""
        if self.phase is Phase.ACT:
            self._interrupt(now, wall, counts=False)

    def _interrupt(self, now: float, wall: float, *, counts: bool) -> None:
        """End the step because of ``motion_guard``; ``counts``: as one blocked by an obstacle."""
        self._executor.cancel()
        if counts or self._executor.travelled > _MOVED_M:
            self._done(now, wall, obstacle=counts)
        else:
            self._abandon(wall)
            self._enter(Phase.OBSERVE, wall)
            self._not_before = now

    def _after_step(self, now: float, wall: float) -> None:
        outcome = self._executor.outcome
        if outcome is Outcome.RUNNING or self.action is None:
            return
        if outcome is Outcome.STALE:
            self._end_without_odometry("odometry or the clock stopped during a step")
        elif outcome is Outcome.JUMPED:
            self.end("NO_ODOMETRY", f"{self._executor.message}: {_ASK_CONTINUOUS}")
        elif outcome is Outcome.TIMEOUT:
            self.end("TIMEOUT", f"{self.action.phrase!r} took longer than its allowance")
        elif outcome is Outcome.FAILED:
            self.end("MOTION_REFUSED", self._executor.message)
        else:
            done = outcome is Outcome.DONE
            self._done(now, wall, obstacle=not done, in_full=done)

    def _done(self, now: float, wall: float, *, obstacle: bool, in_full: bool = False) -> None:
        """Go on after a step: to the next frame, or to the answer asked for meanwhile.

        Args:
            obstacle: an obstacle, and no refusal of motion, ended the step.
        """
        moved = in_full or self._executor.travelled > _MOVED_M
        self._remember_step(in_full=in_full, obstacle=obstacle)
        self._failures = 0
        self._blocked = 0 if moved else self._blocked + 1
        if not in_full:  # the question asked meanwhile assumed that the step would be finished
            self._abandon(wall)
        if self._blocked >= self.config.max_blocked:
            self.end("BLOCKED", f"{self._blocked} steps in a row without any motion")
        elif self.steps >= self.config.max_steps:
            self.end("MAX_STEPS", f"no end after {self.steps} actions")
        elif self._ahead:
            self._enter(Phase.THINK, wall)
        else:
            self._not_before = now + self.config.settle
            self._enter(Phase.OBSERVE, wall)

    def _remember_step(self, *, in_full: bool, obstacle: bool = False) -> None:
        assert self.action is not None
        action, travelled = self.action, self._executor.travelled
        done = 1.0 if in_full else min(1.0, max(0.0, travelled / abs(action.value)))
        self.history = self.prompt_history
        self.search = self.search.after(action.phrase, action.words, done, obstacle=obstacle)

    def _abandon(self, wall: float) -> None:
        """Drop the question asked while the step was under way."""
        if self._ahead:
            self._ahead = False
            if self._answering:
                self.on_answer_ended(wall)

    def _look_again(self, now: float, wall: float) -> None:
        """Wait for another frame; a step under way goes on meanwhile."""
        self._not_before = now
        self._ahead = False
        if self.phase is not Phase.ACT:
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


def _words(action: ParsedAction) -> str:
    return f"{action.reason or REASONS[action.code]}: {action.text[:200]!r}"
