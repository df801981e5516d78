"""Plain questions about documents on two sides, through the command, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tiny_models import tiny_folder
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import InvalidInput

TEXTS = {
    "a": "Tighten the wheel nuts to 210 Nm.",
    "b": "The pump stops at a pressure of 6 bar.",
}
QUESTIONS: tuple[tuple[str, list[str]], ...] = (
    ("To what torque is the wheel nut tightened?", ["210"]),
    ("At what pressure does the pump stop?", ["6 bar"]),
    ("Who keeps the key of the archive?", ["Ann"]),
    ("Which vaccine protects against measles?", []),
)


def asked(folder: Path, answers: str, *arguments: str) -> dict[str, object]:
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    lines = [json.dumps({"question": q, "answers": a}) for q, a in QUESTIONS]
    (folder / "q.jsonl").write_text("\n".join([*lines, "{"]))
    side = {"retrieval": {"method": "rescored", "candidates": 16, "temperature": 0.1}}
    content = {"/**/dragon_server": {"ros__parameters": {"side": side}}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    words = ["bench", "dragon-quality", "--model", str(tiny_folder("llama"))]
    words += ["--documents", str(folder), "--asked", str(folder / "q.jsonl")]
    words += ["--config", str(folder / "mine.yaml"), "--answers", answers, *arguments]
    result = CliRunner().invoke(app, [*words, "--json", str(folder / "report.json")])
    if isinstance(result.exception, InvalidInput):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads((folder / "report.json").read_text())["reality"]
    return found


def test_quotes_are_right_wrong_or_refused(tmp_path: Path) -> None:
    found = asked(tmp_path, "quote")
    assert found["right"] == pytest.approx(2 / 3)
    assert found["false_refusals"] == pytest.approx(1 / 3)
    assert (found["refused_unseen"], found["unseen"], found["skipped"]) == (1.0, 1, 1)


def test_free_answers_of_a_random_model_are_wrong(tmp_path: Path) -> None:
    found = asked(tmp_path, "free", "--most", "1")
    assert (found["right"], found["questions"], found["unseen"]) == (0.0, 1, 1)


def test_one_file_has_no_two_sides(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "one.txt").write_text("one")
    with pytest.raises(InvalidInput, match="text files"):
        asked(tmp_path, "quote", "--documents", str(tmp_path / "empty"))
