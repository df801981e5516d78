"""A mission driven without ROS, with a robot that obeys."""

from __future__ import annotations

import math
from typing import Any

from collab_llm_nodes.robot.executor import ZERO, ExecutorConfig, Pose2D
from collab_llm_nodes.robot.grammar import parse
from collab_llm_nodes.robot.mission import Mission, MissionConfig, Permission

DT = 0.05
INDOORS = ExecutorConfig(linear_speed=0.5, angular_speed=0.8)
"""Speeds of a robot that has had its first run."""
CONFIG = MissionConfig(
    executor=INDOORS,
    max_steps=5,
    deadline=60.0,
    answer_timeout=3.0,
    retries=2,
    max_blocked=2,
)


class Drive:
    """A mission with its two clocks and an obedient base around it.

    Args:
        pace: robot's seconds per second of the machine.
    """

    def __init__(
        self,
        config: MissionConfig = CONFIG,
        *,
        guarded: bool = False,
        instruction: str = "find the red ball",
        pace: float = 1.0,
    ) -> None:
        self.now = self.wall = 100.0
        self.pace = pace
        self.mission = Mission(
            config, self.now, self.wall, instruction=instruction, guarded=guarded
        )
        self.pose = Pose2D()
        self.odometry = True
        self.obeys = True

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / DT)):
            self.now += DT
            self.wall += DT / self.pace
            v = self.mission.velocity
            if self.obeys:
                yaw = self.pose.yaw + v.angular * DT
                x = self.pose.x + v.linear * math.cos(yaw) * DT
                self.pose = Pose2D(x, self.pose.y + v.linear * math.sin(yaw) * DT, yaw)
            if self.odometry:
                self.mission.on_odometry(self.pose, self.now, self.wall)
            self.mission.tick(self.now, self.wall)

    def observe(self) -> bool:
        return self.mission.on_observation(self.now, self.wall)

    def answer(self, text: str, verified: bool = True) -> bool:
        """A whole answer, as parser and generation deliver it."""
        begins = self.mission.on_action(parse(text), self.now, self.wall, verified=verified)
        self.mission.on_answer_ended(self.now)
        return begins

    def step(self, text: str, verified: bool = True) -> bool:
        self.run(0.2)
        assert self.observe()
        return self.answer(text, verified)

    def fastest(self, seconds: float) -> float:
        """Run; the greatest speed commanded meanwhile, linear or angular."""
        top = 0.0
        for _ in range(round(seconds / DT)):
            self.run(DT)
            v = self.mission.velocity
            top = max(top, abs(v.linear), abs(v.angular))
        return top

    def permit(self, **fields: Any) -> None:
        """Tell the mission what motion_guard says."""
        self.mission.on_motion_state(Permission(**fields), self.now, self.wall)

    def refuse(self, *reasons: str) -> None:
        self.permit(allowed=False, reasons=reasons, text="because", speed_limit=0.0)

    def fail(self, code: str = "UNAVAILABLE", message: str = "why") -> None:
        """Ask about a frame, unless the mission has ended; the answer fails."""
        self.run(0.6)
        assert self.observe() or self.code()
        self.mission.on_answer_ended(self.wall)
        self.mission.on_failure(code, message, self.now, self.wall)

    def code(self) -> str:
        """Code of the ending; "" while there is none."""
        return self.mission.ending.code if self.mission.ending else ""

    def message(self) -> str:
        return self.mission.ending.message if self.mission.ending else ""


# Motion refused by others.


def moving(config: MissionConfig = CONFIG) -> Drive:
    drive = Drive(config, guarded=True)
    drive.permit()
    assert drive.step("move forward 75 cm")
    drive.run(0.5)
    assert drive.mission.velocity != ZERO
    return drive
