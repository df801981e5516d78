"""The witness of ``bench safety`` sees what must not be; its processes can be killed and return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from folders import environment
from waiting import gone

from collab_llm_lab.bench.safety.rig import Child
from collab_llm_lab.bench.safety.usage import LEAK_MB_PER_HOUR, Usage, growth
from collab_llm_lab.bench.safety.watch import GRACE_S, STOP_LIMIT_S, MotionWatch, Permitted
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.robot.executor import ZERO, Pose2D, Velocity

PERIOD = 0.05
AHEAD, LEFT = Velocity(0.5, 0.02), Velocity(0.0, 0.5)


class Drive:
    """Time goes by; the robot does as it is sent."""

    def __init__(self) -> None:
        self.watch, self.now, self.pose = MotionWatch(PERIOD), 10.0, Pose2D()
        self.watch.on_instruction(True, self.now)

    def go(self, velocity: Velocity, seconds: float) -> Drive:
        for _ in range(round(seconds / PERIOD)):
            self.now += PERIOD
            self.watch.on_velocity(velocity, self.now)
            x = self.pose.x + PERIOD * velocity.linear
            self.pose = Pose2D(x, 0.0, self.pose.yaw + PERIOD * velocity.angular)
            self.watch.on_pose(self.pose, self.now)
        return self

    @property
    def rules(self) -> list[str]:
        return [rule for _, rule, _ in self.watch.violations]


@pytest.fixture
def drive() -> Drive:
    return Drive()


def test_what_was_allowed_is_no_violation(drive: Drive) -> None:
    drive.watch.on_action(Permitted(False, 0.75), drive.now)
    drive.go(AHEAD, 1.5).go(ZERO, 2.0)
    drive.watch.on_action(Permitted(True, 0.5), drive.now)
    drive.go(LEFT, 1.0).go(ZERO, 2.0)
    drive.watch.on_instruction(False, drive.now)
    drive.pose = Pose2D(3.0, 0.0, 0.0)  # another room
    drive.go(ZERO, 2.0)
    assert drive.rules == []


def test_motion_must_have_an_action_of_its_kind(drive: Drive) -> None:
    drive.go(AHEAD, 0.1)
    assert drive.rules == ["no action"]
    drive.go(ZERO, 2.0)
    drive.watch.on_action(Permitted(True, -0.5), drive.now)
    drive.go(LEFT, 0.1)
    assert drive.rules == ["no action", "other"]
    drive.go(ZERO, 2.0)
    drive.watch.on_action(Permitted(False, 0.5), drive.now)
    drive.go(LEFT, 0.1)
    assert drive.rules == ["no action", "other", "other"]


def test_an_action_is_not_overdone(drive: Drive) -> None:
    drive.watch.on_action(Permitted(False, 0.25), drive.now)
    drive.go(AHEAD, 0.7)
    assert drive.rules == []
    drive.go(AHEAD, 0.2)
    assert drive.rules == ["more"]


@pytest.mark.parametrize("late", [False, True])
def test_what_is_broken_stops_the_robot_in_time(drive: Drive, late: bool) -> None:
    drive.watch.on_action(Permitted(True, 9.0), drive.now)
    drive.go(LEFT, 0.5)
    drive.watch.on_broken("a fault", drive.now)
    drive.go(LEFT, STOP_LIMIT_S + (3 if late else -1) * PERIOD).go(ZERO, 1.0)
    assert drive.rules == (["late"] if late else [])


def test_a_velocity_stays_in_force_until_another_comes(drive: Drive) -> None:
    """A node that is killed during a motion publishes nothing more, and the robot goes on."""
    drive.watch.on_action(Permitted(True, 9.0), drive.now)
    drive.go(LEFT, 0.5)
    drive.watch.on_broken("the death of the guard", drive.now)
    drive.watch.on_pose(drive.pose, drive.now + 1.0)
    assert drive.rules == ["late"]


def test_nothing_moves_after_the_end(drive: Drive) -> None:
    drive.watch.on_action(Permitted(True, 9.0), drive.now)
    drive.go(LEFT, 0.5)
    drive.watch.on_instruction(False, drive.now)
    drive.go(LEFT, GRACE_S - PERIOD)
    assert drive.rules == []
    drive.go(LEFT, 3 * PERIOD)
    assert drive.rules == ["no instruction"]


def test_a_robot_that_moves_by_itself_is_seen(drive: Drive) -> None:
    drive.watch.on_action(Permitted(True, 9.0), drive.now)
    drive.go(LEFT, 0.5).go(ZERO, 1.2)
    drive.watch.on_pose(Pose2D(0.05, 0.0, drive.pose.yaw), drive.now)
    assert drive.rules == ["drift"]


def test_growth_that_levels_off_is_no_leak() -> None:
    hours = np.linspace(0.0, 0.5, 60)
    times = list(3600.0 * hours)
    steady = list(300.0 + 2 * LEAK_MB_PER_HOUR * hours)
    filling = list(300.0 + 50.0 * np.minimum(hours, 0.1))
    assert growth(times, steady)["leaks"]
    assert not growth(times, filling)["leaks"]
    assert not growth(times, [300.0] * 60)["leaks"]
    assert not growth(times[:5], steady[:5])["leaks"]  # too short to tell
    assert growth(times, steady)["mb_per_hour"] == pytest.approx(2 * LEAK_MB_PER_HOUR)


def test_usage_is_that_of_the_process() -> None:
    usage = Usage({"me": os.getpid()})
    sum(range(3_000_000))
    row = usage.rows()["me"]
    assert row["cpu_percent"] > 10.0
    assert row["rss_mb"] > 10.0


def _serve(file: str) -> int:
    Path(f"{file}.part").write_text(str(os.getpid()), encoding="ascii")
    os.replace(f"{file}.part", file)  # who waits for it is to find it whole
    print("up", flush=True)
    signal.pause()
    return 0


def test_a_process_is_killed_and_comes_back(tmp_path: Path) -> None:
    child = Child("child", tmp_path / "log", _serve, str(tmp_path / "pid"))
    try:
        child.check()
        first = child.pid
        child.kill()
        with pytest.raises(CollabError, match="child ended with status -9"):
            child.check()
        child.start()
        assert child.pid != first
        child.check()
    finally:
        child.stop()


# A benchmark that starts a robot's process and is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from test_bench_safety import _serve
from collab_llm_lab.bench.safety.rig import Child

if __name__ == "__main__":
    child = Child("child", Path(sys.argv[1]), _serve, sys.argv[2])
    while not Path(sys.argv[2]).is_file():
        child.check()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_benchmark_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    script, pid = tmp_path / "killed.py", tmp_path / "pid"
    script.write_text(KILLED, encoding="ascii")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log"), str(pid)],
        env=environment(Path(__file__).parent),
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert gone(int(pid.read_text("ascii")))
