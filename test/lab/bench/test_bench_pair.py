"""``bench pair``: figures of trained exits through the engine; folders that cannot be used."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from collected_answers import collect_answers
from tiny_models import tiny_folder
from typer.testing import CliRunner

from collab_llm_lab.training.pair.choosing import Operation
from collab_llm_lab.training.pair.draft import DraftConfig, train_draft
from collab_llm_lab.training.pair.exits import ExitsConfig, train_exits
from collab_llm_lab.training.pair.heads import HeadsConfig, train_heads
from collab_llm_lab.training.pair.reports import REPORT
from collab_llm_lab.training.pair.speculation import GAMMA
from collab_llm_nodes.cli import app
from collab_llm_nodes.models.loading import ModelConfig


def bench(folder: Path, *options: str) -> tuple[int, str]:
    command = ["bench", "pair", str(folder), "--device", "cpu", *options]
    done = CliRunner().invoke(app, command)
    return done.exit_code, done.output + str(done.exception or "")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExitsConfig:
    folder = tmp_path_factory.mktemp("bench") / "some_pair"
    folder.mkdir()
    return ExitsConfig(
        ModelConfig(str(tiny_folder("llama"))),
        collect_answers(folder, "llama", 60),
        folder / "exits",
        epochs=6,
        learning_rate=5e-3,
        operation=Operation(pass_ms=100.0, draft_ms=10.0, exit_ms=0.01),
    )


def test_exits_agree_in_the_engine_as_the_training_has_reported(
    config: ExitsConfig, tmp_path: Path
) -> None:
    report = train_exits(config)
    assert report is not None
    status, output = bench(config.out.parent, "--json", str(tmp_path / "found.json"))
    assert status == 0, output
    found = json.loads((tmp_path / "found.json").read_text())["pairs"]["some_pair"]
    assert found["exits"]["chosen"] == report["chosen"]
    assert found["exits"]["candidates"] == report["exits"]
    assert found["exit_agreement"] == {
        str(layer): pytest.approx(report["exits"][str(layer)]["agreement"])
        for layer in report["chosen"]
    }


def test_a_pair_whose_exits_do_not_pay_has_none(config: ExitsConfig, tmp_path: Path) -> None:
    never = replace(config, operation=replace(config.operation, missed=0.0))
    assert train_exits(never) is not None
    status, output = bench(config.out.parent, "--json", str(tmp_path / "found.json"))
    assert status == 0, output
    found = json.loads((tmp_path / "found.json").read_text())["pairs"]["some_pair"]
    assert (found["exit_agreement"], found["exits"]["chosen"]) == ({}, [])
    (config.out / REPORT).write_text("{}")
    status, output = bench(config.out.parent)
    assert status == 1
    assert "cannot read" in output


def test_a_draft_and_heads_are_measured_with_their_target(
    config: ExitsConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "some_pair"
    shutil.copytree(config.data, folder / "data")
    draft = DraftConfig(config.target, config.data, folder / "draft", layers=2, epochs=1)
    assert train_draft(draft) is not None
    heads = train_heads(HeadsConfig(config.target, config.data, folder / "heads", epochs=1))
    assert heads is not None
    json_file, plot = tmp_path / "found.json", tmp_path / "found.png"
    status, output = bench(folder, "--answers", "4", "--json", str(json_file), "--plot", str(plot))
    assert status == 0, output
    found = json.loads(json_file.read_text())["pairs"]["some_pair"]
    for name in ("tau_before", "tau_after", "tau"):
        assert 1 <= found[name] <= GAMMA + 1
    assert 1 < found["guided_tau_alone"] <= found["guided_tau"]  # the form's braces cost no pass
    assert found["speedup"] > 0
    assert found["guided_speedup"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert found["different_answers"] == 0
    assert found["heads"]["tokens_per_round"] == heads["tokens_per_round"]


def test_folders_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    status, output = bench(tmp_path)
    assert status == 1
    assert "holds no data.json" in output
    collect_answers(tmp_path, "llama", 12)
    status, output = bench(tmp_path)
    assert status == 1
    assert "nothing that was trained" in output
