"""Options of record and replay that have no effect are refused; 1 means a difference only."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import ROOM
from typer.testing import CliRunner

from collab_llm_nodes.cli import app, options
from collab_llm_nodes.errors import ConfigError


@pytest.mark.parametrize(
    "given",
    [
        "--model nonsense",
        "--target-model nonsense",
        "--verifier cloud:50551",
        "--device cuda",
        "--dtype float32",  # the default
        "--nodes",
        "--config embedded.yaml",
        "--ask go",
        "--image /image",
        "--every 3",
        "--texts",
        "--speed 2",
        "--json results.json",
    ],
)
def test_what_asks_models_is_refused_with_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["replay", str(ROOM), "--rerun", "x.rrd", *given.split()])
    assert refused.exit_code == 2
    assert f"{given.split()[0]}: has no effect here" in refused.output
    assert not list(tmp_path.iterdir())


def test_rerun_without_its_package_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda module: None)
    arguments = ["replay", str(ROOM), "--rerun", str(tmp_path / "x.rrd")]
    missing = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert missing.exit_code == 2
    assert "rerun-sdk is not installed" in missing.output


def test_a_rerun_file_has_its_ending() -> None:
    assert CliRunner().invoke(app, ["replay", str(ROOM), "--rerun", "x.txt"]).exit_code == 2


@pytest.mark.parametrize("given", ["--out bags", "--storage sqlite3", "--topic /image", "--keep 2"])
def test_what_records_is_refused_with_mend(given: str) -> None:
    refused = CliRunner().invoke(app, ["record", "--mend", str(ROOM), *given.split()])
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.field == given.split()[0]
