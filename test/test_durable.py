"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from collab_llm_nodes.durable import replacing


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    with replacing(file) as part:
        part.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert [*tmp_path.iterdir()] == [file]


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text("old")
    with pytest.raises(TypeError), replacing(file) as part:
        part.open("w").write(b"new")  # type: ignore[arg-type]
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_a_link_stays_and_what_is_no_plain_file_is_written_to(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_text("old")
    link.symlink_to(file)
    with replacing(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    device = Path("/dev/null")
    with replacing(device) as part:
        assert part == device
