"""Questions with known answers, and the calibration of evidence by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from collab_llm_lab.training.evidence.calibration import Example, fit, shares
from collab_llm_lab.training.evidence.questions import (
    DEVELOPMENT,
    HANDBOOK,
    Question,
    read_questions,
)
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.evidence import load_calibration


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("It listens on port 25.", True),
        ("PORT 25, of course", True),
        ("port 250", False),
        ("25 ports", False),
        ("", False),
    ],
)
def test_an_answer_contains_what_is_accepted_word_by_word(said: str, right: bool) -> None:
    assert Question("Which port?", ("port 25",)).is_right(said) == right
    assert not Question("Which port?", ()).is_right(said)


def test_lines_that_cannot_be_used_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    good = [
        {"question": f"Which port {n}?", "answers": ["25"] if n % 2 else []} for n in range(990)
    ]
    bad = ["{", "[]", "3", "", '{"question": ""}', '{"question": "a"}', '{"answers": []}']
    bad += ['{"question": "a", "answers": 3}', '{"question": "a", "answers": ["!"]}', "\\", "x" * 9]
    file.write_text("\n".join([*bad, *map(json.dumps, good)]), encoding="utf-8")
    questions, skipped = read_questions(file)
    assert (len(questions), len(skipped)) == (990, len(bad))
    assert skipped[0].startswith("line 1: ")
    for text in ("", "\n".join(bad)):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidInput, match="no question"):
            read_questions(file)
    with pytest.raises(InvalidInput, match="cannot read"):
        read_questions(tmp_path / "none.jsonl")


def test_the_shipped_questions_can_all_be_used() -> None:
    asked = []
    for file in (DEVELOPMENT, HANDBOOK):
        questions, skipped = read_questions(file)
        assert not skipped
        assert sum(bool(each.answers) for each in questions) >= 50
        asked += [each.question for each in questions if each.answers]
    assert len(set(asked)) == len(asked), "the questions are kept apart"


def test_the_weights_tell_right_sentences_from_wrong_ones() -> None:
    """A sentence is right if its coverage is high; where none is, the answer is none."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(60):
        features = torch.rand(4, 7, generator=generator, dtype=torch.float64)
        features[:, 0] *= 0.5
        known = number % 2 == 0
        if known:
            features[0, 0] = 0.9
        found.append(Example(features, torch.tensor([known, False, False, False]), known))
    calibration = fit(found)
    assert calibration.coverage > max(0.0, calibration.pairs, calibration.conflict)
    figures = shares(found, calibration, 0.5)
    assert figures["right"] > 0.9 < figures["refused_unseen"]
    assert figures["false_refusals"] < 0.1
    assert shares(found, calibration, 1.0)["false_refusals"] == 1.0


def test_the_command_writes_weights_that_can_be_used(tmp_path: Path) -> None:
    folder, out, report = tmp_path / "docs", tmp_path / "mine.yaml", tmp_path / "report.json"
    folder.mkdir()
    (folder / "a.txt").write_text("The gate of the yard is painted green. The key is with Ann.")
    questions = tmp_path / "q.jsonl"
    lines = [("What colour is the gate painted?", ["green"]), ("How tall is the gate?", [])]
    lines += [("Who has the key?", ["Ann"]), ("Who has the hammer?", [])]
    text = "\n".join(json.dumps({"question": q, "answers": a}) for q, a in lines)
    questions.write_text(text, encoding="utf-8")
    arguments = ["train", "evidence", str(folder), "--questions", str(questions)]
    arguments += ["--held-out", str(folder), "--held-out-questions", str(questions)]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--json", str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert load_calibration(str(out)).coverage == found["weights"]["coverage"]
    assert found["held_out"]["known"] == found["held_out"]["unseen"] == 2
