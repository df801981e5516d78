"""The Sport API of a Unitree Go2: requests, answers, and the decisions of its driver. No I/O.

Facts: unitree_ros2 (v0.2, 2025-07, and later), unitree_sdk2_python, and the vendor's pages on the
sport services. All times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from collab_llm_nodes.config import check_ranges, fixed


class Api(Enum):
    """Every function of the robot that this project can call: service and number.

    ``Requests.make`` takes nothing else, so that no flip, jump or handstand can be sent, nor Damp,
    which lets the robot fall.
    """

    BALANCE_STAND = ("sport", 1002)
    STOP_MOVE = ("sport", 1003)
    MOVE = ("sport", 1008)
    AVOID_SWITCH_SET = ("obstacles_avoid", 1001)
    AVOID_SWITCH_GET = ("obstacles_avoid", 1002)
    AVOID_MOVE = ("obstacles_avoid", 1003)
    AVOID_REMOTE = ("obstacles_avoid", 1004)
    GET_IMAGE = ("videohub", 1001)

    @property
    def service(self) -> str:
        return self.value[0]

    @property
    def number(self) -> int:
        return self.value[1]


WALKING = (Api.BALANCE_STAND, Api.STOP_MOVE, Api.MOVE)
AVOIDANCE = (Api.AVOID_SWITCH_SET, Api.AVOID_SWITCH_GET, Api.AVOID_MOVE, Api.AVOID_REMOTE)

REQUEST_S = 0.5
"""Longest wait for the robot's answer [s]; it takes some 20 ms over its network."""
UNLOCK_PAUSE_S = 1.0
"""Time from one BalanceStand to the next: it takes about as long to stand [s]."""
DEAF_S, DEAF_SHARE = 0.8, 0.2
"""A robot is deaf if it moves by less than this share of its command for so long [s]: it takes up
to 0.5 s to start walking."""
LATERAL_SPEED = 0.4
"""Top speed sideways [m/s]. ``motion_guard`` passes no such velocity on; others may send one."""

NO_ANSWER = 3104

CODES = {
    0: "done",
    3001: "unknown error",
    3102: "the request could not be sent",
    3103: "the client does not know this function",
    NO_ANSWER: "no answer in time",
    3105: "the answer is to another function",
    3106: "the answer cannot be read",
    3107: "invalid lease",
    3201: "the robot could not send its answer",
    3202: "internal error of the robot's service",
    3203: "the robot does not have this function",
    3204: "the robot does not accept the parameter",
    3205: "refused: another program has exclusive use of the service",
    3206: "the lease does not exist",
    3207: "the lease exists already",
    4101: "bad path points",
    4201: "the motion took too long",
    4202: "the motion service is not ready",
    4205: "the motion service is not ready",
}
"""Meanings of the vendor's codes."""


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        id: unique; the answer repeats it.
        parameter: JSON, or empty.
        reply: an answer is wanted.
    """

    id: int
    api: Api
    parameter: str
    reply: bool


@dataclass(frozen=True)
class Answer:
    """Result of a call; ``code`` 0 is success, see ``CODES``."""

    call: Call
    code: int
    data: str = ""

    def __str__(self) -> str:
        return f"{self.call.api.name}: {self.code}, {CODES.get(self.code, 'unknown code')}"

    def value(self, key: str) -> Any:
        """Return ``key`` of the JSON object in ``data``; None if there is none."""
        try:
            found = json.loads(self.data)
        except json.JSONDecodeError:
            return None
        return found.get(key) if isinstance(found, dict) else None


class Requests:
    """Requests with unique ids, and the pairing of answers with them."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._last = 0
        self._waiting: dict[int, tuple[Call, float]] = {}

    def make(
        self, api: Api, parameter: Mapping[str, Any] | None, now: float, *, reply: bool = True
    ) -> Call:
        """Return a call to be sent now, with JSON or nothing as parameter.

        Ids are monotonic nanoseconds, as in the vendor's clients, so that those of several
        processes differ.
        """
        self._last = max(self._last + 1, int(now * 1e9))
        text = "" if parameter is None else json.dumps(parameter)
        call = Call(self._last, api, text, reply)
        if reply:
            self._waiting[call.id] = (call, now)
        return call

    def on_response(self, id: int, number: int, code: int, data: str = "") -> Answer | None:
        """Return the answer to one of our calls; None for other calls, and for late answers."""
        call, _ = self._waiting.pop(id, (None, 0.0))
        if call is None:
            return None
        return Answer(call, code if number == call.api.number else 3105, data)

    def overdue(self, now: float) -> list[Answer]:
        """Return each call that was not answered in time, once, as an answer ``NO_ANSWER``."""
        late = [call for call, sent in self._waiting.values() if now - sent > self.timeout]
        for call in late:
            del self._waiting[call.id]
        return [Answer(call, NO_ANSWER) for call in late]


# The robot's state.


class Stance(Enum):
    """Stance of the robot, on which depends whether it obeys a velocity."""

    READY = "ready"
    LOCKED = "standing with locked joints"
    DAMPED = "its joints are in damping"
    OTHER = "in another state"


_STANCES = {
    100: Stance.READY,  # agile
    1001: Stance.DAMPED,
    1002: Stance.LOCKED,  # as after StandUp
    1013: Stance.READY,  # balance stand
    1015: Stance.READY,  # walking
    1016: Stance.READY,  # running
    1017: Stance.READY,  # endurance gait
    2007: Stance.READY,  # dodging
}
"""Stances by the state machine's number. All others, such as sitting and lying, are OTHER."""

_STANCES_OF_MODES = {
    0: Stance.READY,  # idle, standing
    1: Stance.READY,  # balance stand
    3: Stance.READY,  # locomotion
    6: Stance.LOCKED,
    7: Stance.DAMPED,
}
"""Stances by ``mode``, for firmware that leaves the state machine's number empty."""


@dataclass(frozen=True)
class SportState:
    """The fields of SportModeState that matter for motion.

    Attributes:
        machine: number of the state machine; the vendor's field is called ``error_code``.
        mode: the older, coarser field.
        speed: measured, m/s in the plane.
        turn: measured, rad/s.
    """

    machine: int = 0
    mode: int = 0
    speed: float = 0.0
    turn: float = 0.0

    @property
    def stance(self) -> Stance:
        if self.machine >= 100:  # smaller ones are no states but errors, or nothing
            return _STANCES.get(self.machine, Stance.OTHER)
        return _STANCES_OF_MODES.get(self.mode, Stance.OTHER)

    @property
    def stands(self) -> bool:
        return self.speed < 0.05 and abs(self.turn) < 0.1

    def obeys(self, command: Command) -> bool:
        """Return True if it moves by ``DEAF_SHARE`` of ``command``, or ``command`` is tiny."""
        wanted, turn = math.hypot(command.x, command.y), abs(command.yaw)
        if wanted < 0.08 and turn < 0.15:
            return True
        walks = wanted >= 0.08 and self.speed >= DEAF_SHARE * wanted
        return walks or (turn >= 0.15 and abs(self.turn) >= DEAF_SHARE * turn)


@dataclass(frozen=True)
class Command:
    """A velocity in the robot's frame (REP 103): x ahead, y left [m/s], yaw left [rad/s]."""

    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0


REST = Command()


@dataclass(frozen=True)
class Trouble:
    """Reason why the robot does not, or might not, obey: a code and words."""

    code: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.code)


FINE = Trouble()


@dataclass(frozen=True)
class Go2Config:
    """Settings of the robot's driver."""

    avoid: bool = fixed(
        True,
        "Move by the robot's own obstacle avoidance, and not at all while that is off; false: by"
        " its plain Move, which stops before nothing.",
    )
    dry_run: bool = fixed(
        False, "Execute nothing: of all requests that concern motion only StopMove can be sent."
    )
    rate: float = fixed(
        20.0,
        "Move is sent this often while moving [1/s]: the robot holds one for 1 s only, and walks"
        " unevenly below 20.",
        low=10.0,
        high=100.0,
    )
    watchdog: float = fixed(
        0.4, "Without a command for this long the robot is stopped [s].", low=0.05, high=0.5
    )
    state_timeout: float = fixed(
        0.4, "Without a state of the robot for this long it is stopped [s].", low=0.05, high=0.5
    )
    stop_repeat: float = fixed(
        0.1, "StopMove is sent again after this time until it is obeyed [s].", low=0.02, high=0.5
    )
    unlock: bool = fixed(
        True, "Send BalanceStand when a motion is wanted and the joints are locked."
    )
    unlock_tries: int = fixed(8, "BalanceStand at most this often for one motion.", low=1, high=50)
    linear_speed: float = fixed(1.0, "Top speed, ahead or back [m/s].", low=0.05, high=2.5)
    angular_speed: float = fixed(1.5, "Top turn rate [rad/s].", low=0.1, high=4.0)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def functions(self) -> tuple[Api, ...]:
        """Return the functions of the robot that the driver may call."""
        if self.dry_run:
            return (Api.STOP_MOVE,)
        return (*WALKING, *AVOIDANCE) if self.avoid else WALKING


class Phase(Enum):
    """State of the driver."""

    STANDING = "standing"
    STOPPING = "stopping"
    UNLOCKING = "unlocking"
    MOVING = "moving"


class Go2:
    """State machine of the driver. Report every event, and send the calls returned.

    It begins, and ends, with a stop. A motion is executed while its commands and the robot's state
    are fresh and the stance allows it; a stop is repeated until the robot answers it and stands.

    Attributes:
        refusing: a motion is commanded and not executed; ``trouble(now)`` has the reason.
    """

    def __init__(self, config: Go2Config) -> None:
        self.config = config
        self._avoids = Api.AVOID_MOVE in config.functions
        self.requests = Requests(REQUEST_S)
        self.phase = Phase.STANDING
        self.refusing = False
        self._halted = True
        self._command, self._commanded_at = REST, -math.inf
        self._state, self._heard_at = SportState(), -math.inf
        self._sent, self._sent_at = REST, -math.inf
        self._obeyed_at = -math.inf  # or when the motion began
        self._deaf = False
        self._unlocked_at, self._tries = -math.inf, 0
        self._stop_began = self._stop_sent = -math.inf
        self._stop_answered, self._stop_first = False, 0
        self._doubled = ""  # second drivers or guards of this robot
        self._strangers = ""  # foreign publishers
        self._overruled = False  # the joints were locked during a motion
        self._complaint: Answer | None = None
        self._done: dict[Api, int] = {}  # id of the last successful call
        self._avoidance = Avoidance()

    # Events.

    def begin(self, now: float) -> list[Call]:
        """Activate the driver; the robot stops first."""
        self._halted = False
        self._command = REST
        return self._begin_stop(now)

    def halt(self, now: float) -> list[Call]:
        """Stop because the driver ends; ``tick`` repeats the stop while it is called."""
        self._halted = True
        self._command = REST
        calls = self._begin_stop(now)
        if self._avoids:
            self._avoidance = Avoidance()
            off = {"is_remote_commands_from_api": False}
            calls.append(self.requests.make(Api.AVOID_REMOTE, off, now))
        return calls

    def on_command(self, command: Command, now: float) -> list[Call]:
        """Take a commanded velocity; one that is not finite is a stop."""
        finite = all(map(math.isfinite, (command.x, command.y, command.yaw)))
        self._command, self._commanded_at = command if finite else REST, now
        return self._decide(now)

    def on_peers(self, doubled: str, now: float) -> list[Call]:
        """Take the second guards and drivers of the robot, in words; "" is none."""
        self._doubled = doubled
        return self._decide(now)

    def on_strangers(self, strangers: str, now: float) -> list[Call]:
        """Take the foreign publishers of motion topics, in words; "" is none."""
        self._strangers = strangers
        return self._decide(now)

    def on_state(self, state: SportState, now: float) -> list[Call]:
        """Take the robot's state."""
        back = self._silent(now) and now - self._stop_sent > self.config.stop_repeat
        self._state, self._heard_at = state, now
        if back and self.phase is Phase.STOPPING:
            return self._begin_stop(now)
        if state.stance is Stance.READY or self.phase is Phase.MOVING:
            self._overruled = state.stance is Stance.LOCKED
        if self.phase is Phase.MOVING and state.obeys(self._sent):
            self._obeyed_at = now
            if not state.stands:
                self._deaf = False
        return self._decide(now)

    def on_answer(self, answer: Answer, now: float) -> list[Call]:
        """Take the answer to a call, or ``NO_ANSWER``."""
        if answer.code == 0:
            self._complaint = None
            self._done[answer.call.api] = answer.call.id
        elif answer.call.id > self._done.get(answer.call.api, 0):  # no later success
            self._complaint = answer
        if answer.call.api is Api.STOP_MOVE and answer.code == 0:
            self._stop_answered |= answer.call.id >= self._stop_first
        self._avoidance.on_answer(answer, now)
        return self._decide(now)

    def tick(self, now: float) -> list[Call]:
        """Return the calls that are due; call it a few times as often as ``rate``."""
        calls = []
        for answer in self.requests.overdue(now):
            calls += self.on_answer(answer, now)
        return calls + self._decide(now)

    @property
    def avoiding(self) -> bool:
        """Return True if the robot's obstacle avoidance is on, and used for all motion."""
        return self._avoidance.armed

    # Faults.

    def trouble(self, now: float) -> Trouble:
        """Return the first reason that keeps the robot from moving, or might."""
        stance, state = self._state.stance, self._state
        if self.config.dry_run:
            return Trouble("DRY_RUN", "this is a dry run, in which the robot is never moved")
        if self._doubled:
            words = "the robot's nodes were started twice: end one of the graphs"
            return Trouble("STARTED_TWICE", f"{words} ({self._doubled})")
        if self._strangers:
            words = f"another node moves the robot: end it ({self._strangers})"
            return Trouble("FOREIGN_PUBLISHER", words)
        if self._heard_at == -math.inf:
            return Trouble("NO_STATE", "the robot has not been heard: network, CYCLONEDDS_URI?")
        if self._silent(now):
            return Trouble("STALE_STATE", f"the robot is silent for {now - self._heard_at:.1f} s")
        if stance is Stance.DAMPED:
            return Trouble("DAMPED", "its joints are in damping: let it stand up by remote control")
        if stance is Stance.OTHER:
            doing = f"state machine {state.machine}, mode {state.mode}"
            return Trouble("NOT_STANDING", f"it neither stands nor walks ({doing})")
        if self._overruled:
            return Trouble("LOCKED", "its joints were locked while it walked: unlock them likewise")
        if stance is Stance.LOCKED:
            return Trouble("LOCKED", "it stands with locked joints; BalanceStand unlocks them")
        if self._deaf:
            why = ": something may be in its way" if self._avoids else ""
            return Trouble("DEAF", f"it does not move although commanded{why}")
        if self._avoids and not self._avoidance.armed:
            why = f" ({self._complaint})" if self._complaint is not None else ""
            without = "a robot that has none needs avoid: false (docs/safety.md, Obstacles)"
            return Trouble("NO_AVOIDANCE", f"its obstacle avoidance is not on{why}; {without}")
        if self._complaint is not None:
            code = "NO_ANSWER" if self._complaint.code == NO_ANSWER else "REFUSED"
            return Trouble(code, str(self._complaint))
        return FINE

    def _silent(self, now: float) -> bool:
        return now - self._heard_at > self.config.state_timeout

    # Decisions.

    def _decide(self, now: float) -> list[Call]:
        fresh = now - self._commanded_at <= self.config.watchdog
        wanted = self._command != REST and fresh and not self._halted
        arms = self._avoids and not self._halted
        calls = self._avoidance.arm(self.requests, now) if arms else []
        self._notice_deafness(now)
        trouble = self.trouble(now).code if wanted else ""
        self.refusing = trouble not in ("", "NO_ANSWER", "REFUSED")
        if not wanted:
            self._tries, self._deaf = 0, False
            return calls + self._stop(now)
        if trouble == "DEAF" and self._avoids:
            return calls + self._move(now)  # its avoidance decides whether it can walk
        if trouble in ("LOCKED", "DEAF") and self.config.unlock and not self._overruled:
            return calls + self._unlock(now)
        return calls + (self._stop(now) if self.refusing else self._move(now))

    def _notice_deafness(self, now: float) -> None:
        if self.phase is Phase.MOVING and now - self._obeyed_at > DEAF_S:
            self._deaf = True

    def _move(self, now: float) -> list[Call]:
        if self.phase is not Phase.MOVING:
            self.phase, self._obeyed_at = Phase.MOVING, now
        c, command = self.config, self._command
        command = Command(
            _clamp(command.x, c.linear_speed),
            _clamp(command.y, LATERAL_SPEED),
            _clamp(command.yaw, c.angular_speed),
        )
        # A change goes out sooner, but a flood of commands is not passed on.
        due = (0.9 if command == self._sent else 0.4) / c.rate
        if now - self._sent_at < due:
            return []
        self._sent, self._sent_at = command, now
        return [self._velocity(command, now)]

    def _velocity(self, command: Command, now: float) -> Call:
        if self._avoids:
            velocity = {"x": command.x, "y": command.y, "yaw": command.yaw, "mode": 0}
            return self.requests.make(Api.AVOID_MOVE, velocity, now, reply=False)
        velocity = {"x": command.x, "y": command.y, "z": command.yaw}
        return self.requests.make(Api.MOVE, velocity, now, reply=False)

    def _unlock(self, now: float) -> list[Call]:
        """Return BalanceStand and pause; then try a deaf robot that is not locked again."""
        if self.phase is Phase.UNLOCKING and now - self._unlocked_at < UNLOCK_PAUSE_S:
            return []
        trying = self.phase is Phase.MOVING and now - self._obeyed_at <= DEAF_S
        if self._state.stance is Stance.READY and (trying or self.phase is Phase.UNLOCKING):
            return self._move(now)
        if self._tries >= self.config.unlock_tries:
            return self._stop(now)
        self.phase, self._unlocked_at, self._tries = Phase.UNLOCKING, now, self._tries + 1
        # A deaf robot may still obey the last velocity, and the watchdog waits for the next one.
        moved, self._sent, self._sent_at = self._sent != REST, REST, -math.inf
        stop = [self.requests.make(Api.STOP_MOVE, {}, now, reply=False)] if moved else []
        return [*stop, self.requests.make(Api.BALANCE_STAND, {}, now)]

    def _begin_stop(self, now: float) -> list[Call]:
        self.phase, self._stop_began, self._stop_answered = Phase.STOPPING, now, False
        self._sent, self._sent_at = REST, -math.inf
        calls = self._send_stop(now)
        self._stop_first = calls[-1].id
        return calls

    def _send_stop(self, now: float) -> list[Call]:
        self._stop_sent = now
        calls = [self.requests.make(Api.STOP_MOVE, {}, now)]
        if self._avoids:
            calls.insert(0, self._velocity(REST, now))
        return calls

    def _stop(self, now: float) -> list[Call]:
        if self.phase is Phase.STANDING:
            return []
        if self.phase is not Phase.STOPPING:
            return self._begin_stop(now)
        lasted = now - self._stop_began
        stands = self._state.stands and not self._silent(now)
        # Not for ever: the remote control must be able to move the robot away.
        if self._stop_answered and (stands or lasted > 1.0) or (stands and lasted > 2.0):
            self.phase = Phase.STANDING
            return []
        if lasted > 2.0 and self._silent(now):
            return []  # the robot is away; on_state stops it when it is back
        pause = self.config.stop_repeat if lasted < 2.0 else 1.0
        return self._send_stop(now) if now - self._stop_sent >= pause else []


class Avoidance:
    """Activation of the robot's obstacle avoidance, in the vendor's order.

    SwitchSet until SwitchGet says true, then commands of the API instead of the remote control's.
    It is checked every ``LOOK_S``, since the remote control can switch it off.

    Attributes:
        armed: it obeys our commands.
    """

    PAUSE_S = 0.2
    LOOK_S = 2.0

    def __init__(self) -> None:
        self.armed = False
        self._next = Api.AVOID_SWITCH_GET
        self._due = -math.inf
        self._pending: Call | None = None

    def arm(self, requests: Requests, now: float) -> list[Call]:
        """Return the next call of the sequence, if it is due."""
        if self._pending is not None or now < self._due:
            return []
        parameter = {
            Api.AVOID_SWITCH_SET: {"enable": True},
            Api.AVOID_REMOTE: {"is_remote_commands_from_api": True},
        }.get(self._next, {})
        self._pending = requests.make(self._next, parameter, now)
        return [self._pending]

    def on_answer(self, answer: Answer, now: float) -> None:
        """Advance the sequence; after any failure pause, and begin again."""
        if answer.call != self._pending:
            return
        self._pending = None
        api, done = answer.call.api, answer.code == 0
        self._next, self._due = Api.AVOID_SWITCH_GET, now + self.PAUSE_S
        if api is Api.AVOID_SWITCH_GET and done:
            on = answer.value("enable") is True
            if on and self.armed:
                self._due = now + self.LOOK_S
                return
            self._next, self._due = (Api.AVOID_REMOTE if on else Api.AVOID_SWITCH_SET), now
            self.armed = False
        elif api is Api.AVOID_REMOTE and done:
            self.armed, self._due = True, now + self.LOOK_S
        elif not done:
            self.armed = False


def _clamp(value: float, most: float) -> float:
    return max(-most, min(most, value))


class ClockAlignment:
    """Delay of the robot's messages, although its clock and ours may differ.

    The fastest message shows the offset of the clocks; others were delayed by what they took
    longer. The offset grows slowly, since clocks drift. A robot's clock that is set makes messages
    seem faster than any before, or goes back: both are followed at once.
    """

    DRIFT = 2e-4  # of quartz clocks, generously
    BACK_S = 0.1  # messages of one topic arrive in order: only a clock goes back

    def __init__(self) -> None:
        self._difference = math.inf
        self._at = self._stamped = -math.inf

    def delay(self, robot: float, received: float) -> float:
        """Return the delay of a message stamped ``robot`` by the robot [s].

        ``received``: by our monotonic clock [s].
        """
        measured = received - robot
        drift = self.DRIFT * (received - self._at) if self._at > -math.inf else 0.0
        was_set = robot < self._stamped - self.BACK_S
        self._difference = measured if was_set else min(self._difference + drift, measured)
        self._at, self._stamped = received, robot
        return measured - self._difference
