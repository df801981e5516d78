"""``collab-llm pair check``: tables, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_folder
from typer.testing import CliRunner, Result

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.protocols.edge_cloud import pair_timing


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["pair", "check", *words], env={"COLUMNS": "200"})


def test_a_pair_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    result = run("nav-target", "nav-draft", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in ("layer loop", "bfloat16", "early exits", "they fit"):
        assert words in result.output
    found = json.loads(file.read_text("utf-8"))
    assert found["fits"]
    assert (
        found["target"]["memory"]["int8"]["weights"]
        < found["target"]["memory"]["float32"]["weights"]
    )
    assert "measured" not in found


def test_a_pair_that_does_not(tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    result = run("text-target", str(tmp_path), "--json", str(file), "--measure")
    assert result.exit_code == 1
    assert "they do not fit" in result.output
    (reason,) = json.loads(file.read_text("utf-8"))["reasons"]
    assert reason["field"] == "draft.path"
    assert reason["remedy"]


def test_a_pair_that_is_measured(tmp_path: Path) -> None:
    file, prompts = tmp_path / "pair.json", tmp_path / "prompts.txt"
    prompts.write_text("go to the red ball\n\nstop\n", encoding="utf-8")
    target, draft = (str(tiny_folder("llama", seed)) for seed in (0, 1))
    result = run(
        *(target, draft, "--measure", "--prompts", str(prompts), "--rtt-ms", "10"),
        *("--acceptance", "0.7", "--draft-ms", "5", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert found["measured"]["t_p_ms"] == pytest.approx(5.0)
    assert found["measured"]["tau"] == pytest.approx(sum(0.7**i for i in range(5)), rel=0.01)
    assert found["modes"][0]["mode"] == "ar"
    assert found["fastest"].partition(" ")[0] in [each["mode"] for each in found["modes"]]
    assert found["fastest"] in result.output
    assert "draft: one token, T_p [ms]" in result.output


def test_an_error_of_loading_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> None:
        raise ModelError("too little memory", field="quantization", remedy="take int8")

    monkeypatch.setattr(pair_timing, "load", load)
    result = run(*[str(tiny_folder("llama"))] * 2, "--measure")
    assert result.exit_code == 1
    assert "MODEL_ERROR: target.quantization: too little memory (take int8)" in result.output


@pytest.mark.parametrize("content", [b"\n \n", b"\xff\xfe\xff"], ids=["empty", "no text"])
def test_prompts_that_cannot_be_used(content: bytes, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    result = run("nav-target", "nav-draft", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "--prompts"
