"""A planar circular base: limits of velocity and acceleration, solid walls and things, odometry.

Lengths in m, angles in rad, speeds in m/s and rad/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import Room


@dataclass(frozen=True)
class BaseConfig:
    """Limits of the base and quality of its odometry."""

    radius: float = 0.3
    max_speed: float = 0.8
    max_turn: float = 1.5
    acceleration: float = 2.0
    turn_acceleration: float = 6.0
    odometry_scale: float = 0.02
    """Standard deviation of the scale error, drawn once per room, of distance and of heading."""
    odometry_noise: float = 0.01
    """Standard deviation per square root of metre (or radian) travelled."""


class Base:
    """The simulated base; its state is ``pose`` (truth), ``odometry``, ``speed`` and ``turn``."""

    def __init__(self, room: Room, seed: int = 0, config: BaseConfig | None = None) -> None:
        self._push_out = room.push_out
        self.config = config or BaseConfig()
        self.pose = room.start
        self.odometry = Pose(0.0, 0.0, 0.0)
        self.speed = 0.0
        self.turn = 0.0
        self.bumped = False
        """Whether the last step was stopped or deflected by something solid."""
        self._rng = np.random.default_rng([room.seed, seed, 0x0D0])
        scale = self.config.odometry_scale
        self._scale_forward, self._scale_turn = (float(s) for s in self._rng.normal(1.0, scale, 2))

    def step(self, speed: float, turn: float, dt: float) -> None:
        """Advance ``dt`` s towards the commanded forward speed and turn rate."""
        c = self.config
        self.speed = _approach(self.speed, _limit(speed, c.max_speed), c.acceleration * dt)
        self.turn = _approach(self.turn, _limit(turn, c.max_turn), c.turn_acceleration * dt)
        yaw = math.remainder(self.pose.yaw + self.turn * dt, math.tau)
        middle = self.pose.yaw + 0.5 * self.turn * dt
        x = self.pose.x + self.speed * math.cos(middle) * dt
        y = self.pose.y + self.speed * math.sin(middle) * dt
        free_x, free_y = self._push_out(x, y, c.radius)
        self.bumped = free_x != x or free_y != y
        moved = math.cos(middle) * (free_x - self.pose.x) + math.sin(middle) * (
            free_y - self.pose.y
        )
        self.pose = Pose(free_x, free_y, yaw)
        self._measure(moved, self.turn * dt)

    def _measure(self, moved: float, turned: float) -> None:
        noise = self.config.odometry_noise
        if moved:
            moved = (
                moved * self._scale_forward
                + noise * math.sqrt(abs(moved)) * self._rng.standard_normal()
            )
        if turned:
            turned = (
                turned * self._scale_turn
                + noise * math.sqrt(abs(turned)) * self._rng.standard_normal()
            )
        o = self.odometry
        self.odometry = Pose(
            o.x + moved * math.cos(o.yaw + turned / 2),
            o.y + moved * math.sin(o.yaw + turned / 2),
            math.remainder(o.yaw + turned, math.tau),
        )

    def execute(self, action: str, dt: float = 0.04, allowance: float = 4.0) -> float:
        """Execute one action text, measured by odometry, as the navigator's executor does.

        Ends at rest.

        Args:
            allowance: longest time [s]; a blocked step ends there.

        Returns:
            The share of the action that was carried out.
        """
        kind, sign, amount = parse_action(action)
        turned = travelled = 0.0
        before = self.odometry
        steps = int(allowance / dt)
        for _ in range(steps):
            left = amount - (abs(turned) if kind == "turn" else travelled)
            if left <= 0.005 or kind == "stop" or (kind == "move" and self.bumped):
                break
            rate = min(2.5 * left + 0.08, 10.0)
            if kind == "turn":
                self.step(0.0, sign * rate, dt)
                turned += math.remainder(self.odometry.yaw - before.yaw, math.tau)
            else:
                self.step(rate, 0.0, dt)
                travelled += math.hypot(self.odometry.x - before.x, self.odometry.y - before.y)
            before = self.odometry
        self.speed = self.turn = 0.0
        self.bumped = False
        return (abs(turned) if kind == "turn" else travelled) / amount if amount else 1.0


def parse_action(action: str) -> tuple[str, float, float]:
    """Return "stop", "move" or "turn", the sign (+ = left or forward), and metres or radians."""
    words = action.split()
    if words[0] == "stop":
        return "stop", 0.0, 0.0
    if words[0] == "move":
        return "move", 1.0, float(words[2]) / 100.0
    return "turn", 1.0 if words[1] == "left" else -1.0, math.radians(float(words[2]))


def _limit(value: float, most: float) -> float:
    return min(most, max(-most, value))


def _approach(value: float, goal: float, step: float) -> float:
    return value + _limit(goal - value, step)
