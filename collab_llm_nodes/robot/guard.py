"""The final decision on motion: which velocity may reach the robot now. No I/O, no clock.

The robot moves only while velocities, odometry, pictures and the link to the verifier are all
fresh, the emergency stop is not set and no obstacle is near; and never faster than the limits. A
stop is zero at once; a start needs a new command.

Events carry two clocks, as in ``mission.py``: ``now`` is the robot's [s], possibly simulated, and
bounds acceleration; ``wall`` is the machine's [s, monotonic] and decides freshness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.robot.executor import ANGULAR_SPEED, LINEAR_SPEED, ZERO, Velocity
from collab_llm_nodes.robot.obstacles import ObstacleConfig

LONGEST_S = 0.5
"""Upper bound of every freshness limit: no configuration allows a longer silence in motion."""

HELD_S = 1.0
"""A button pressed so recently counts as still held: buttons repeat."""

ALONE_S = 1.0
"""A second guard or driver must be gone for so long: the graph may lose it for a moment."""

_BURST_S = 0.1
"""Time whose acceleration is allowed at once: messages arrive unevenly, and legged robots ignore
slow starts."""

_LEAST_REPEAT_S = 0.2
"""Zero is repeated at least this long, since odometry may be older than the stop."""

_FORGET_S = 1.0
"""After this silence of commands ``NO_COMMAND`` no longer applies: the robot is at rest."""


class Source(Enum):
    """Sources that must be fresh while the robot moves, named as in ``FreshnessConfig``."""

    COMMAND = "command"
    ODOMETRY = "odometry"
    CAMERA = "camera"
    LINK = "link"
    SCAN = "scan"
    RANGE = "range"


ASK_DRIVER = "is the robot's driver running (topic odom)?"
ASK_CAMERA = "is camera_ingest running (topic observation)?"

REASONS = {
    "DRY_RUN": "this is a dry run, in which the robot is never moved",
    "EMERGENCY_STOP": "the emergency stop is set: call reset_emergency_stop",
    "STOP_UNCONFIRMED": "the emergency stop is not confirmed by all guards and drivers",
    "STARTED_TWICE": "the robot's nodes were started twice: end one of the graphs",
    "FOREIGN_PUBLISHER": "a topic that moves the robot has a foreign publisher: end it",
    "INVALID_COMMAND": "the last velocity is not a number",
    "NO_COMMAND": "the commands of the motion ceased",
    "STALE_ODOMETRY": f"no fresh odometry: {ASK_DRIVER}",
    "STALE_CAMERA": f"no fresh picture: {ASK_CAMERA}",
    "LINK_DOWN": "no link to the verifier: is it running (topic link_state)?",
    "STALE_SCAN": "no fresh laser scan: is its driver running (topic scan)?",
    "STALE_RANGE": "the range finder is silent: is its driver running (topic range)?",
    "OBSTACLE": "something is in the way: turning only",
}
"""Reasons to refuse motion: code and words."""

UNWATCHED = (
    "nothing stops the robot before an obstacle: there is no scan and no range, and its own"
    " obstacle avoidance is not in use"
)

_STALE = {
    Source.ODOMETRY: "STALE_ODOMETRY",
    Source.CAMERA: "STALE_CAMERA",
    Source.SCAN: "STALE_SCAN",
    Source.RANGE: "STALE_RANGE",
}


def _freshness(default: float, doc: str) -> float:
    limit: float = fixed(default, f"{doc} while moving [s].", low=0.05, high=LONGEST_S)
    return limit


@dataclass(frozen=True)
class FreshnessConfig:
    """Longest silences. None can be set beyond ``LONGEST_S``."""

    command: float = _freshness(0.3, "Longest silence of the commands")
    odometry: float = _freshness(0.3, "Longest silence of odometry")
    camera: float = _freshness(0.45, "Longest silence of the camera")
    link: float = _freshness(0.4, "Longest silence of link_state")
    scan: float = _freshness(0.45, "Longest silence of the laser scanner")
    range: float = _freshness(0.45, "Longest silence of the range finder")
    max_age: float = fixed(
        0.5,
        "A message stamped longer ago than this, or ahead, is no sign of life [s]; 0 = stamps are"
        " not checked (clocks that disagree, simulated time).",
        low=0.0,
        high=LONGEST_S,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class LimitsConfig:
    """Upper bounds of what is sent to the robot, whatever is commanded."""

    linear_speed: float = fixed(
        LINEAR_SPEED, "Top speed [m/s]; the default is for a first run.", low=0.05, high=2.0
    )
    angular_speed: float = fixed(
        ANGULAR_SPEED, "Top turn rate [rad/s], likewise.", low=0.1, high=3.0
    )
    least_linear_speed: float = fixed(
        0.1,
        "Where speed is reduced (draft_only, an obstacle ahead), no lower than this [m/s]: legged"
        " robots ignore lower speeds.",
        low=0.0,
        high=0.5,
    )
    least_angular_speed: float = fixed(0.2, "Likewise for turns [rad/s].", low=0.0, high=1.0)
    linear_acceleration: float = fixed(
        2.5, "Growth of speed [m/s^2]; it may fall at once.", low=0.1, high=10.0
    )
    angular_acceleration: float = fixed(
        8.0, "Growth of turn rate [rad/s^2]; it may fall at once.", low=0.2, high=30.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def reduced_linear(self, share: float) -> float:
        """Return the top speed reduced to ``share``, of which 0 is a stop."""
        return _reduced(self.linear_speed, share, self.least_linear_speed)

    def reduced_angular(self, share: float) -> float:
        """Return the top turn rate reduced to ``share``."""
        return _reduced(self.angular_speed, share, self.least_angular_speed)


def _reduced(top: float, share: float, least: float) -> float:
    return min(top, max(share * top, least)) if share > 0.0 else 0.0


@dataclass(frozen=True)
class GuardConfig:
    """Conditions and limits of motion.

    All of them are fixed at the start: any node may set parameters, but none may switch a check off
    while the robot drives.
    """

    freshness: FreshnessConfig = field(default_factory=FreshnessConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    obstacle: ObstacleConfig = field(default_factory=ObstacleConfig)
    needs_odometry: bool = fixed(True, "No motion without fresh odometry.")
    needs_camera: bool = fixed(True, "No motion without fresh pictures.")
    link_policy: str = fixed(
        "hold",
        "Without the verifier: hold = no motion; draft_only = slowly; ignore = as with it.",
        choices=("hold", "draft_only", "ignore"),
    )
    unverified_share: float = fixed(
        0.3,
        "draft_only: share of the top speeds without the verifier, but not below limits.least_*.",
        low=0.05,
        high=1.0,
    )
    dry_run: bool = fixed(False, "Let nothing move: every velocity becomes zero.")
    stop_repeat: float = fixed(
        2.0,
        "Longest repetition of zero until odometry says that the robot stands [s].",
        low=0.2,
        high=10.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class GuardState:
    """State of the guard, in the form of ``MotionState.msg``.

    Attributes:
        allowed: velocities are passed on; with OBSTACLE among the reasons, turns only.
        reasons: codes, keys of ``REASONS``.
        text: the same in words; a warning where motion is allowed.
        speed_limit: top speed ahead now [m/s].
        velocity: sent to the robot last.
    """

    allowed: bool
    emergency_stop: bool
    reasons: tuple[str, ...]
    text: str
    speed_limit: float
    velocity: Velocity


class Guard:
    """See the module docstring.

    Report every event. Send the velocity that ``on_command`` returns, and that of ``tick`` after
    any other event and at a fixed rate: a high one while ``watches``. An event's ``age`` is the
    robot's clock minus its stamp [s].

    Attributes:
        velocity: sent last.
        stops: times that a motion under way was stopped, by reason.
        troubles: fault of the last message's stamp, in words, by source; set by the caller.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.velocity = ZERO
        self.stops: dict[str, int] = {}
        self.troubles: dict[Source, str] = {}
        self._asked = ZERO
        self._valid = True
        self._heard: dict[Source, float] = {}
        self._gaps: dict[Source, float] = {}
        self._sensors: set[Source] = set()  # of obstacles, heard at least once
        self._link_up = False
        self._stands = False  # says odometry
        self._avoids = False  # obstacles, the robot by itself
        self._emergency = ""  # source of the emergency stop; "" = none
        self._held_at = -math.inf
        self._unconfirmed = ""  # peers that have not confirmed the emergency stop
        self._doubled = ""  # second guards and drivers
        self._alone_at = -math.inf
        self._strangers = ""  # foreign publishers
        self._stopped_at = -math.inf
        self._linear, self._angular = _Ramp(), _Ramp()

    # Events.

    def on_command(
        self, linear: float, angular: float, now: float, wall: float, age: float = 0.0
    ) -> Velocity:
        """Take a commanded velocity [m/s, rad/s]; return the one to send."""
        self._valid = math.isfinite(linear) and math.isfinite(angular)
        self._asked = Velocity(linear, angular) if self._valid else ZERO
        self._hear(Source.COMMAND, age, wall)
        stops = self._stops(wall)
        if stops:
            return self._set(ZERO, wall, stops)
        limits, share = self.config.limits, self._share(wall)
        forward, back = self.speed_limit(wall), limits.reduced_linear(share)
        wanted = max(-back, min(forward, linear))
        most = limits.reduced_angular(share)
        turn = max(-most, min(most, angular))
        return self._set(
            Velocity(
                self._linear.follow(wanted, limits.linear_acceleration, now),
                self._angular.follow(turn, limits.angular_acceleration, now),
            ),
            wall,
            ("OBSTACLE",) if linear > 0.0 and forward <= 0.0 else (),
        )

    def on_odometry(self, age: float, stands: bool, wall: float) -> None:
        """Take odometry; ``stands``: its velocities are those of a robot at rest."""
        self._stands = self._hear(Source.ODOMETRY, age, wall) and stands

    def on_camera(self, age: float, wall: float) -> None:
        """Take a picture."""
        self._hear(Source.CAMERA, age, wall)

    def on_link(self, up: bool, age: float, wall: float) -> None:
        """Take the state of the link to the verifier."""
        self._link_up = self._hear(Source.LINK, age, wall) and up

    def on_gap(self, source: Source, gap: float, age: float, wall: float) -> None:
        """Take the gap before the robot's front [m], by ``Source.SCAN`` or ``RANGE``."""
        if self._hear(source, age, wall):
            self._gaps[source] = gap
            self._sensors.add(source)

    def on_avoidance(self, on: bool) -> None:
        """Take whether the robot avoids obstacles by itself."""
        self._avoids = on

    def on_emergency(self, source: str, wall: float, *, held: bool = False) -> None:
        """Stop until reset. ``held``: by a button, which repeats while it is held."""
        self._emergency = self._emergency or source
        if held:
            self._held_at = wall

    def on_reset(self, wall: float) -> str:
        """Clear the emergency stop; return why that is refused, or "". A reset moves nothing."""
        if self._emergency and wall - self._held_at < HELD_S:
            return f"still pressed ({self._emergency})"
        if self._emergency and self._asked != ZERO and not self._silent(Source.COMMAND, wall):
            return "velocities are still commanded: send zero first, or end the instruction"
        self._emergency = ""
        return ""

    def on_peers(self, doubled: str, unconfirmed: str, wall: float) -> None:
        """Take the state of the robot's other guards and drivers, in words; "" is none.

        Args:
            doubled: second ones of a kind.
            unconfirmed: those that have not confirmed the emergency stop.
        """
        if self._doubled and not doubled:
            self._alone_at = wall
        self._doubled, self._unconfirmed = doubled, unconfirmed

    def on_strangers(self, strangers: str) -> None:
        """Take the foreign publishers of motion topics, in words; "" is none."""
        self._strangers = strangers

    def on_halt(self, wall: float) -> Velocity:
        """Return zero because the guard ends or fails; forget all but the emergency stop."""
        self._heard.clear()
        self._asked = ZERO
        return self._set(ZERO, wall, ())

    def tick(self, wall: float) -> Velocity | None:
        """Return the velocity to send without a command: a stop, a lower speed, zero; or None."""
        if self.velocity == ZERO:
            if self.silence(Source.COMMAND, wall) > _FORGET_S:
                self._asked, self._valid = ZERO, True
            return ZERO if self.watches(wall) else None
        stops = self._stops(wall)
        if stops:
            return self._set(ZERO, wall, stops)
        limit = self.speed_limit(wall)
        if self.velocity.linear > limit:
            slower = Velocity(limit, self.velocity.angular)
            return self._set(slower, wall, ("OBSTACLE",) if limit <= 0.0 else ())
        return None

    def watches(self, wall: float) -> bool:
        """Return True if ``tick`` is to be called often: during a motion or a repeated stop."""
        if self.velocity != ZERO:
            return True
        rest = self._stands and not self._silent(Source.ODOMETRY, wall)
        repeat = _LEAST_REPEAT_S if rest else self.config.stop_repeat
        return wall - self._stopped_at < repeat

    # State.

    def state(self, wall: float) -> GuardState:
        """Return the state for people and other nodes."""
        stops, limit = self._stops(wall), self.speed_limit(wall)
        reasons = stops if limit > 0.0 else (*stops, "OBSTACLE")
        words = [self._words(code) for code in reasons]
        if not stops and not self.watchers(wall):
            troubles = {s.value: self.troubles.get(s) for s in (Source.SCAN, Source.RANGE)}
            faults = "".join(f"; {s}: its messages are {t}" for s, t in troubles.items() if t)
            words.append(UNWATCHED + faults)
        return GuardState(
            not stops,
            bool(self._emergency),
            reasons,
            "; ".join(words),
            0.0 if stops else limit,
            self.velocity,
        )

    def _words(self, code: str) -> str:
        """Return ``code`` in words, with its cause: nodes, or a fault of the stamps."""
        cause = {
            "EMERGENCY_STOP": f"set by {self._emergency}",
            "STOP_UNCONFIRMED": self._unconfirmed,
            "STARTED_TWICE": self._doubled,
            "FOREIGN_PUBLISHER": self._strangers,
        }.get(code)
        if cause:
            return f"{REASONS[code]} ({cause})"
        sources = {**_STALE, Source.LINK: "LINK_DOWN", Source.COMMAND: "NO_COMMAND"}
        for source, trouble in self.troubles.items():
            if trouble and sources[source] == code:
                return f"{REASONS[code].split(':')[0]}: its messages are {trouble}"
        return REASONS[code]

    def speed_limit(self, wall: float) -> float:
        """Return the top speed ahead that obstacles and the link allow [m/s]."""
        config, share = self.config, self._share(wall)
        for source, gap in self._gaps.items():
            if self._use(source) != "off" and not self._silent(source, wall):
                share = min(share, config.obstacle.speed_share(gap))
        return config.limits.reduced_linear(share)

    def watchers(self, wall: float) -> tuple[str, ...]:
        """Return the sources that stop the robot before obstacles now: scan, range, robot."""
        sensors = [s for s in (Source.SCAN, Source.RANGE) if self._use(s) != "off"]
        found = [s.value for s in sensors if not self._silent(s, wall)]
        return (*found, *(["robot"] if self._avoids else []))

    def silence(self, source: Source, wall: float) -> float:
        """Return the time since ``source`` was heard last [s]; ``inf`` if it never was."""
        return wall - self._heard.get(source, -math.inf)

    # Decisions.

    def _stops(self, wall: float) -> tuple[str, ...]:
        """Return the codes that forbid any motion now."""
        config, codes = self.config, []
        if config.dry_run:
            codes.append("DRY_RUN")
        if self._emergency:
            codes.append("EMERGENCY_STOP")
            if self._unconfirmed:
                codes.append("STOP_UNCONFIRMED")
        if self._doubled or wall - self._alone_at < ALONE_S:
            codes.append("STARTED_TWICE")
        if self._strangers:
            codes.append("FOREIGN_PUBLISHER")
        if not self._valid:
            codes.append("INVALID_COMMAND")
        if self._asked != ZERO and self._silent(Source.COMMAND, wall):
            codes.append("NO_COMMAND")
        needed = {
            Source.ODOMETRY: config.needs_odometry,
            Source.CAMERA: config.needs_camera,
            Source.SCAN: self._is_needed(Source.SCAN),
            Source.RANGE: self._is_needed(Source.RANGE),
        }
        codes += [_STALE[s] for s, wanted in needed.items() if wanted and self._silent(s, wall)]
        if config.link_policy == "hold" and not self._linked(wall):
            codes.append("LINK_DOWN")
        return tuple(codes)

    def _linked(self, wall: float) -> bool:
        return self._link_up and not self._silent(Source.LINK, wall)

    def _share(self, wall: float) -> float:
        alone = self.config.link_policy == "draft_only" and not self._linked(wall)
        return self.config.unverified_share if alone else 1.0

    def _is_needed(self, source: Source) -> bool:
        """Return True for a required sensor, and for an optional one that was heard before."""
        use = self._use(source)
        return use == "required" or (use == "optional" and source in self._sensors)

    def _use(self, source: Source) -> str:
        obstacle = self.config.obstacle
        return obstacle.scan if source is Source.SCAN else obstacle.range

    def _hear(self, source: Source, age: float, wall: float) -> bool:
        """Return True if the message is a sign of life; the content of others does not count."""
        limit = self.config.freshness.max_age
        fresh: bool = not limit or -limit <= age <= limit
        if fresh:
            self._heard[source] = wall
        return fresh

    def _silent(self, source: Source, wall: float) -> bool:
        limit: float = getattr(self.config.freshness, source.value)
        return not self.silence(source, wall) <= limit

    def _set(self, velocity: Velocity, wall: float, why: tuple[str, ...]) -> Velocity:
        if self.config.dry_run:
            velocity = ZERO
        halts = velocity == ZERO != self.velocity
        if halts:
            self._stopped_at = wall
        if halts or self.velocity.linear > 0.0 == velocity.linear:
            for code in why:
                self.stops[code] = self.stops.get(code, 0) + 1
        self.velocity = velocity
        self._linear.speed, self._angular.speed = velocity.linear, velocity.angular
        return velocity


class _Ramp:
    """Limit on the growth of a speed: ``acceleration`` on average, with a small burst."""

    def __init__(self) -> None:
        self.speed = 0.0
        self._credit = 0.0
        self._at = -math.inf

    def follow(self, wanted: float, acceleration: float, now: float) -> float:
        """Return the speed to send at ``now`` [s], between 0 and ``wanted``."""
        elapsed = max(0.0, now - self._at)  # a clock that jumps back grants nothing
        self._credit = min(acceleration * _BURST_S, self._credit + acceleration * elapsed)
        self._at = now
        kept = abs(self.speed) if wanted * self.speed > 0.0 else 0.0
        size = min(abs(wanted), kept + self._credit)
        self._credit = max(0.0, self._credit - max(0.0, size - kept))
        self.speed = math.copysign(size, wanted)
        return self.speed
