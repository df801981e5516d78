"""Bags in which the clock was set back: each run is read by itself, in the order of its time."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from bag_content import drive, write_runs
from nav_msgs.msg import Odometry

from collab_llm_nodes.cli.output import console
from collab_llm_nodes.replay import command
from collab_llm_nodes.replay.compare import Reply
from collab_llm_nodes.replay.log import write_log
from collab_llm_nodes.replay.mend import mend
from collab_llm_nodes.replay.recording import read_recording
from collab_llm_nodes.replay.replayers import Models

STORAGES = ("mcap", "sqlite3")


def odometry(x: float) -> Odometry:
    message = Odometry()
    message.pose.pose.position.x = x
    return message


def log_of(*bags: Path) -> str:
    out = StringIO()
    write_log(bags, out)
    return out.getvalue()


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_simulator_that_is_started_again_is_told_once(
    tmp_path: Path, storage: str, chunk: int
) -> None:
    """Sorted by time, the robot would jump between both runs with every message."""
    away = [("/odom", odometry(10.0 + 0.05 * n)) for n in range(40)]
    home = [("/odom", odometry(0.05 * n)) for n in range(40)]
    bag = write_runs(tmp_path, away, home, storage=storage, chunk=chunk)
    told = [line for line in log_of(bag).splitlines() if line.startswith("- ")]
    assert [n for n, line in enumerate(told) if "times begin again" in line] == [2]
    assert [line.count("was here") for line in told] == [1, 1, 0, 1, 1]
    assert "x 10.0 m" in told[0]
    assert "00:00:00 UTC, at x 0.0 m" in told[3]


def test_a_bag_of_an_earlier_time_is_told_as_one(tmp_path: Path) -> None:
    drives = [("/odom", odometry(2.0 * n)) for n in range(4)]
    bags = [write_runs(tmp_path / name, drives) for name in "ab"]
    assert log_of(*bags).count("times begin again") == 1


@pytest.mark.parametrize("storage", STORAGES)
def test_topics_that_were_written_one_after_the_other_are_one_run(
    tmp_path: Path, storage: str
) -> None:
    left = [("/a/odom", odometry(2.0 * n)) for n in range(3)]
    right = [("/b/odom", odometry(2.0 * n)) for n in range(3)]
    text = log_of(write_runs(tmp_path, left, right, storage=storage))
    assert "times begin again" not in text
    told = [line.split()[2] for line in text.splitlines() if line.startswith("- ")]
    assert told == sorted(told)


def test_a_topic_s_name_stays_on_its_line(tmp_path: Path) -> None:
    text = log_of(write_runs(tmp_path, [("/a\n## forged\x1b[2J/odom", odometry(0.0))]))
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("## forged")]


def run(name: str, picture: int) -> list[tuple[str, Any]]:
    """Return a drive with the times of every other one, but pictures and answers of its own."""
    messages = []
    for topic, message in drive(3):
        if topic == "observation":
            message.image.data = array("B", bytes([picture]) * 50)
        elif topic != "instruction":
            message.session_id = f"{name} {message.session_id}"
        messages.append((f"/{topic}", message))
    return messages


@pytest.mark.parametrize("storage", STORAGES)
def test_each_answer_has_the_picture_of_its_own_run(tmp_path: Path, storage: str) -> None:
    recording = read_recording(
        write_runs(tmp_path, run("first", 1), run("second", 2), storage=storage)
    )
    assert recording.epochs == 2
    assert [step.epoch for step in recording.steps] == [0, 0, 0, 1, 1, 1]
    assert [step.turn for step in recording.steps] == [1, 2, 3, 1, 2, 3]
    for step in recording.steps:
        assert step.picture == bytes([step.epoch + 1]) * 50


def test_a_replay_says_once_that_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def answered(recording: Any, models: Models) -> Any:
        yield lambda step: Reply(step.tokens, step.text, step.action, 1.0, 0.1)

    monkeypatch.setattr(command, "in_process", answered)
    bag = write_runs(tmp_path, run("first", 1), run("second", 2))
    with console.capture() as printed:
        command.run_replay(
            bag,
            Models(),
            nodes=False,
            params=None,
            texts=False,
            speed=0.0,
            namespace=None,
            console=console,
        )
    assert printed.get().count("the clock was set back") == 1
    assert "6 of 6 answers compared" in printed.get()


def test_a_mended_bag_keeps_the_order_of_its_runs(tmp_path: Path) -> None:
    bag = write_runs(tmp_path, run("first", 1), run("second", 2), storage="sqlite3")
    mended, _ = mend(bag)
    assert [step.epoch for step in read_recording(mended).steps] == [0, 0, 0, 1, 1, 1]
