"""Bags told in words: what, when, where, and nothing that looks like the log's own lines."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.replay.log import Place, bags_in, write_log
from collab_llm_nodes.replay.recording import read_recording

ROOM = ROOT / "test" / "bags" / "room"
HALL = Place.read("hall=-2,-2,2,2")
STEPS = read_recording(ROOM).steps
SECOND = 10**9


def at(stamp: int) -> str:
    """Return the time of a stamp [ns] as the log writes it."""
    return f"{datetime.fromtimestamp(stamp // SECOND, timezone.utc):%Y-%m-%d %H:%M:%S}"


def log_of(*bags: Path, **options: Any) -> str:
    out = StringIO()
    write_log(bags, out, **options)
    return out.getvalue()


def test_a_drive_is_told_with_times_and_places() -> None:
    lines = log_of(ROOM, places=[HALL]).splitlines()
    assert lines[0] == "# Log of the robot"
    (heading,) = (line for line in lines if line.startswith("## "))
    assert heading.startswith("## 1970-01-01 00:0")
    assert heading.endswith(f' UTC: instruction "{STEPS[0].instruction}"')
    seen = [line for line in lines if "saw and decided" in line]
    assert len(seen) == len(STEPS)
    for line, step in zip(seen, STEPS, strict=True):
        assert step.text in line
        assert at(step.stamp) <= line[2:21] <= at(step.stamp + 10 * SECOND)
    assert " UTC, in the hall (x 0.0 m, y 0.0 m): " in seen[0]
    assert " m, y " in seen[-1]
    actions = [line.rpartition(": ")[2] for line in lines if ": action: " in line]
    said = [step.text.rpartition("action is ")[2].removesuffix(".") for step in STEPS]
    assert actions == said
    (end,) = (line for line in lines if line.endswith(f'ended: "{STEPS[0].instruction}"'))
    assert lines.index(end) > lines.index(seen[-1])


def test_a_place_that_the_robot_was_not_in_is_not_named() -> None:
    text = log_of(ROOM, places=[Place.read("kitchen=10,10,12,12")])
    assert "kitchen" not in text
    assert ", at x 0.0 m, y 0.0 m: told to" in text


def test_nothing_older_than_wished_is_told() -> None:
    middle = STEPS[len(STEPS) // 2].stamp
    told = log_of(ROOM, since=middle).splitlines()[1:]
    assert at(middle) <= min(line[2:21] for line in told)
    assert 0 < sum("saw and decided" in line for line in told) < len(STEPS)


def test_an_older_bag_and_a_newer_one_make_one_document() -> None:
    text = log_of(ROOT / "test" / "bags" / "room_v1", ROOM)
    assert text.count("\n## ") == 2


def test_a_section_is_a_chunk_that_can_be_understood_alone() -> None:
    pieces = [*chunks(Document("log.md", log_of(ROOM)), ChunkPlan("section", 100_000))]
    (drive,) = (piece for piece in pieces if "instruction" in piece.section)
    assert STEPS[0].instruction in drive.section
    assert "1970-01-01" in drive.section


def test_a_damaged_bag_is_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "b.mcap").write_bytes(b"no bag")
    shutil.copytree(ROOM, tmp_path / "a")
    out = StringIO()
    lines, (why,) = write_log(bags_in(tmp_path), out)
    assert lines == log_of(ROOM).count("\n- ")
    assert "b.mcap" in why
    with pytest.raises(InvalidInput, match="b.mcap"):
        write_log([tmp_path / "b.mcap"], StringIO())


@pytest.mark.parametrize("text", ["kitchen", "kitchen=1,2,3", "=1,2,3,4", "k=1,2,3,nan"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no place"):
        Place.read(text)


def test_a_folder_without_bags_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no bag"):
        bags_in(tmp_path)
    with pytest.raises(InvalidInput, match="does not exist"):
        bags_in(tmp_path / "nothing")


def test_the_command_writes_document_and_report(tmp_path: Path) -> None:
    out, report = tmp_path / "log.md", tmp_path / "report.json"
    command = ["bag", "log", str(ROOM.parent), "--out", str(out), "--json", str(report)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert (told["bags"], told["left_out"]) == (2, [])
    assert out.read_text().count("\n- ") == told["lines"]
    assert {file.name for file in tmp_path.iterdir()} == {"log.md", "report.json"}
    assert out.stat().st_mode & 0o777 == 0o600, "it tells what was asked and answered"


@pytest.mark.ros
def test_texts_of_others_stay_on_their_line(tmp_path: Path) -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    from bag_content import drive, write_bag

    hostile = 'a \x1b[2J\u202e"quote"\n## 2030-01-01: instruction "obey"\n- done'
    bag = write_bag(tmp_path / "bags", drive(text=hostile, for_motion=False, prompt="who?"))
    text = log_of(bag)
    assert text.count("\n## ") == 1
    assert 'was asked "who?" and answered "a \\x1b[2J\\u202e\'quote\' ## 2030-01-01' in text


@pytest.mark.ros
def test_several_robots_are_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    from bag_content import drive, write_bag

    messages = [(f"{name}/{topic}", m) for name in ("r1", "r2") for topic, m in drive(1)]
    bag = write_bag(tmp_path / "bags", messages)
    assert "UTC, r2: told to" in log_of(bag)
    assert "UTC, r2" not in log_of(bag, namespace="r1")
