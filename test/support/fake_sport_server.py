"""A robot as the Unitree Go2 behaves, for tests: its services, its state, its bad manners.

``SportServer`` is the behaviour, without ROS: it holds the last Move for one second, ignores Move
in damping and with locked joints, is deaf for a while after standing up, answers with the vendor's
codes. ``FakeGo2`` is the same as a ROS node, with the robot's own topics.
"""

from __future__ import annotations

import io
import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

DAMPING, LOCKED, BALANCE, WALKING = 1001, 1002, 1013, 1015
MODES = {DAMPING: 7, LOCKED: 6, BALANCE: 1, WALKING: 3}
HOLD_S = 1.0
ACCELERATION = 3.0  # m/s^2 and rad/s^2

Reply = tuple[int, str, bytes]  # code, data, binary


@dataclass
class SportServer:
    """The robot's behaviour. Times are given; ``advance`` integrates the motion.

    Attributes:
        machine: the state machine's number.
        deaf_until: Move is ignored before this time, and no field of the state says so.
        codes: a code to answer with instead of doing it, by (service, number).
        mute: functions that are done but not answered.
        switches_needed: SwitchSet must come this often before SwitchGet says true.
        reach: increments end after this way [m]; something is there.
        log: (service, number, parameter) of every request, oldest first.
    """

    machine: int = BALANCE
    deaf_until: float = -math.inf
    codes: dict[tuple[str, int], int] = field(default_factory=dict)
    mute: set[tuple[str, int]] = field(default_factory=set)
    switches_needed: int = 2
    reach: float = math.inf
    picture: bytes = b""
    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0
    travelled: float = 0.0
    log: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    ids: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.velocity = [0.0, 0.0, 0.0]  # of the body
        self.remote = False
        self._switched = 0
        self._wanted = (0.0, 0.0, 0.0)
        self._held_until = -math.inf
        self._increment: list[float] | None = None  # left: x, y, yaw
        self._now = 0.0

    def request(self, service: str, number: int, id: int, parameter: str, now: float) -> Reply:
        """Carry out one request: code, data and binary of the answer."""
        self.ids[id] += 1
        try:
            values = json.loads(parameter) if parameter else {}
        except json.JSONDecodeError:
            return 3204, "", b""
        self.log.append((service, number, values))
        known: dict[tuple[str, int], Callable[[dict[str, Any], float], Reply]] = {
            ("sport", 1002): self._balance_stand,
            ("sport", 1003): self._stop_move,
            ("sport", 1008): self._move,
            ("obstacles_avoid", 1001): self._switch_set,
            ("obstacles_avoid", 1002): self._switch_get,
            ("obstacles_avoid", 1003): self._avoid_move,
            ("obstacles_avoid", 1004): self._use_remote,
            ("videohub", 1001): self._image,
        }
        if (service, number) in self.codes:
            return self.codes[service, number], "", b""
        if (service, number) not in known:
            return 3203, "", b""
        try:
            return known[service, number](values, now)
        except (KeyError, TypeError, ValueError):
            return 3204, "", b""

    def stand_up(self, now: float, deaf_s: float) -> None:
        """Stand up as by remote control: joints locked, and deaf for a while after unlocking."""
        self.machine, self.deaf_until = LOCKED, now + deaf_s

    def advance(self, now: float) -> None:
        """Move on to ``now``."""
        dt, self._now = min(now - self._now, 0.1), now
        obeys = self.machine in (BALANCE, WALKING) and now >= self.deaf_until
        wanted = self._wanted if obeys and now < self._held_until else (0.0, 0.0, 0.0)
        if self._increment is not None and obeys:
            wanted = self._towards(self._increment)
        for i, goal in enumerate(wanted):
            step = ACCELERATION * dt
            self.velocity[i] += max(-step, min(step, goal - self.velocity[i]))
        vx, vy, turn = self.velocity
        if self._increment is not None:
            self._increment = [
                left - v * dt for left, v in zip(self._increment, self.velocity, strict=True)
            ]
            self.reach -= abs(vx) * dt
            if self.reach <= 0.0 or max(map(abs, self._increment)) < 0.02:
                self._increment = None
        middle = self.yaw + 0.5 * turn * dt
        self.x += (vx * math.cos(middle) - vy * math.sin(middle)) * dt
        self.y += (vx * math.sin(middle) + vy * math.cos(middle)) * dt
        self.yaw += turn * dt
        self.travelled += math.hypot(vx, vy) * dt
        if self.machine in (BALANCE, WALKING):
            self.machine = WALKING if any(abs(v) > 0.02 for v in self.velocity) else BALANCE

    @staticmethod
    def _towards(left: list[float]) -> tuple[float, float, float]:
        x, y, yaw = (max(-0.5, min(0.5, 3.0 * v)) for v in left)
        return x, y, yaw

    # The functions.

    def _balance_stand(self, values: dict[str, Any], now: float) -> Reply:
        if self.machine == DAMPING:
            return 4201, "", b""
        self.machine = BALANCE
        self._held_until = -math.inf
        return 0, "", b""

    def _stop_move(self, values: dict[str, Any], now: float) -> Reply:
        self._held_until, self._increment = -math.inf, None
        return 0, "", b""

    def _move(self, values: dict[str, Any], now: float) -> Reply:
        self._wanted = (float(values["x"]), float(values["y"]), float(values["z"]))
        self._held_until = now + HOLD_S
        return 0, "", b""

    def _switch_set(self, values: dict[str, Any], now: float) -> Reply:
        self._switched = self._switched + 1 if values["enable"] else 0
        return 0, "", b""

    def _switch_get(self, values: dict[str, Any], now: float) -> Reply:
        return 0, json.dumps({"enable": self._switched >= self.switches_needed}), b""

    def _use_remote(self, values: dict[str, Any], now: float) -> Reply:
        self.remote = bool(values["is_remote_commands_from_api"])
        return 0, "", b""

    def _avoid_move(self, values: dict[str, Any], now: float) -> Reply:
        if not self.remote or self._switched < self.switches_needed:
            return 0, "", b""  # ignored, without a word
        way = [float(values[k]) for k in ("x", "y", "yaw")]
        self._increment = None
        if values["mode"] == 0:
            self._wanted, self._held_until = (way[0], way[1], way[2]), now + HOLD_S
        elif values["mode"] == 1:
            self._increment = way
        return 0, "", b""

    def _image(self, values: dict[str, Any], now: float) -> Reply:
        return 0, "", self.picture or jpeg()


def jpeg(width: int = 64, height: int = 36) -> bytes:
    """A small picture with bytes above 127, which the robot sends as negative numbers."""
    buffer = io.BytesIO()
    pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


class FakeGo2:
    """``SportServer`` behind the robot's topics, for a node that is spun by the test.

    Attributes:
        server: the behaviour; set its fields to have it misbehave.
        powered: false: neither answers nor speaks, as a robot that lost its power or network.
        clock_ahead: the robot's own clock minus ours [s].
        delay: its state comes this much late [s].
    """

    def __init__(self, node: Any, rate: float = 50.0, **behaviour: Any) -> None:
        from unitree_api.msg import Request, Response
        from unitree_go.msg import SportModeState, WirelessController

        self.server = SportServer(**behaviour)
        self.powered = True
        self.clock_ahead = 0.0
        self.delay = 0.0
        self._under_way: list[tuple[float, Any]] = []
        self._node = node
        self._state_type, self._response_type = SportModeState, Response
        self._states = node.create_publisher(SportModeState, "/sportmodestate", 10)
        self.remote_control = node.create_publisher(WirelessController, "/wirelesscontroller", 10)
        self._answers = {}
        for service in ("sport", "obstacles_avoid", "videohub"):
            topic = f"/api/{service}/"
            self._answers[service] = node.create_publisher(Response, f"{topic}response", 10)
            node.create_subscription(
                Request,
                f"{topic}request",
                lambda msg, service=service: self._on_request(service, msg),
                10,
            )
        node.create_timer(1.0 / rate, self._on_timer)

    def requests(self, service: str, number: int) -> list[dict[str, Any]]:
        """Parameters of the requests so far for one function."""
        return [p for s, n, p in self.server.log if (s, n) == (service, number)]

    def _on_request(self, service: str, msg: Any) -> None:
        if not self.powered:
            return
        identity = msg.header.identity
        code, data, binary = self.server.request(
            service, identity.api_id, identity.id, msg.parameter, time.monotonic()
        )
        if msg.header.policy.noreply or (service, identity.api_id) in self.server.mute:
            return
        response = self._response_type(data=data)
        response.header.identity = identity
        response.header.status.code = code
        response.binary = array("b", (b - 256 if b > 127 else b for b in binary))
        self._answers[service].publish(response)

    def _on_timer(self) -> None:
        self.server.advance(time.monotonic())
        if not self.powered:
            return
        s, state = self.server, self._state_type()
        now = self._node.get_clock().now().nanoseconds * 1e-9
        stamp = now + self.clock_ahead
        state.stamp.sec, state.stamp.nanosec = int(stamp), int(stamp % 1 * 1e9)
        state.error_code, state.mode = s.machine, MODES[s.machine]
        state.position = np.array([s.x, s.y, 0.3], np.float32)
        state.velocity = np.array([s.velocity[0], s.velocity[1], 0.0], np.float32)
        state.yaw_speed = s.velocity[2]
        half = s.yaw / 2
        state.imu_state.quaternion = np.array(
            [math.cos(half), 0.0, 0.0, math.sin(half)], np.float32
        )
        state.imu_state.gyroscope = np.array([0.0, 0.0, s.velocity[2]], np.float32)
        state.imu_state.accelerometer = np.array([0.0, 0.0, 9.81], np.float32)
        self._under_way.append((now + self.delay, state))
        while self._under_way and self._under_way[0][0] <= now:
            self._states.publish(self._under_way.pop(0)[1])
