"""Bags as recordings of Rerun, read again by Rerun's own reader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import OLD_ROOM, ROOM
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.replay.bag import open_bag

pytest.importorskip("rerun", reason="pip install -r requirements/rerun.txt (700 MB)")

from collab_llm_nodes.replay.rerun_file import TIMELINE, write_rerun


def read(file: Path) -> tuple[Any, dict[str, list[Any]]]:
    """Return Rerun's reader of ``file``, and its chunks by entity."""
    from rerun.chunk import RrdReader

    reader = RrdReader(str(file))
    chunks: dict[str, list[Any]] = {}
    for chunk in reader.stream():
        chunks.setdefault(str(chunk.entity_path), []).append(chunk)
    return reader, chunks


def column(chunks: list[Any], ending: str) -> list[Any]:
    """Return the values of the column whose name ends in ``ending``."""
    values: list[Any] = []
    for chunk in chunks:
        batch = chunk.to_record_batch()
        (name,) = (name for name in batch.schema.names if name.endswith(ending))
        values += batch.column(name).to_pylist()
    return values


def test_a_recorded_room_has_all_that_the_bag_has(tmp_path: Path) -> None:
    out = tmp_path / "room.rrd"
    count = write_rerun(ROOM, out)
    assert out.stat().st_mode & 0o777 == 0o600
    reader, chunks = read(out)
    assert [entry.application_id for entry in reader.recordings()] == ["collab_llm"]
    assert len(reader.blueprints()) == 1
    rows = {entity: sum(c.num_rows for c in group) for entity, group in chunks.items()}
    with open_bag(ROOM) as bag:
        told: Counter[str] = Counter()
        pictures, speeds, texts = [], [], []
        for topic, _, message in bag.messages(bag.types):
            told[topic] += 1
            if topic == "/observation":
                pictures.append(bytes(message.image.data))
            elif topic == "/cmd_vel":
                speeds.append(message.linear.x)
            elif topic == "/generated_text" and message.final:
                texts.append(message.text)
    assert count > 2000
    assert rows["/map/robot"] == told["/odom"]
    assert rows["/log/action"] == told["/navigation_action"]
    stored = [bytes(blob[0]) for blob in column(chunks["/camera"], "blob")]
    assert stored == pictures, "as the camera sent them, none encoded again"
    assert np.allclose(
        [v[0] for v in column(chunks["/plots/velocity/guard/linear"], "scalars")], speeds
    )
    assert [line[0] for line in column(chunks["/log/answer"], "text")] == texts
    assert TIMELINE in chunks["/camera"][0].timeline_names
    assert chunks["/map/path"][0].is_static


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "old.rrd"
    done = CliRunner().invoke(app, ["replay", str(OLD_ROOM), "--rerun", str(out)])
    assert done.exit_code == 0, done.output
    assert out.stat().st_size > 100_000
    lost = CliRunner().invoke(app, ["replay", str(tmp_path / "none"), "--rerun", str(out)])
    assert lost.exit_code == 2


def test_a_bag_without_a_robot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="none of a robot's topics"):
        write_rerun(ROOM, tmp_path / "x.rrd", "another_robot")
    assert not (tmp_path / "x.rrd").exists()
