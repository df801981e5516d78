"""``train draft`` on tiny models: it learns, it goes on after a kill, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collected_answers import collect_answers
from safetensors.torch import load_file
from tiny_models import tiny_folder, tiny_model
from typer.testing import CliRunner

from collab_llm_lab.training.pair.draft import DraftConfig, train_draft
from collab_llm_lab.training.pair.laws import Law
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError, VocabularyMismatch
from collab_llm_nodes.models.loading import ModelConfig, load

ANSWERS = 60


def task(tmp_path: Path, architecture: str = "llama", **changed: Any) -> DraftConfig:
    if not (tmp_path / "data").exists():
        collect_answers(tmp_path, architecture, ANSWERS)
    options: dict[str, Any] = {"layers": 2, "epochs": 8.0, "batch": 4, "learning_rate": 3e-3}
    target = ModelConfig(str(tiny_folder(architecture)))
    return DraftConfig(target, tmp_path / "data", tmp_path / "run", **{**options, **changed})


@pytest.mark.parametrize(("architecture", "lora"), [("llama", 0), ("qwen2_vl", 4), ("smolvlm", 0)])
def test_a_draft_of_the_first_layers_learns_the_target(
    tmp_path: Path, architecture: str, lora: int
) -> None:
    config = task(tmp_path, architecture, lora=lora, learning_rate=3e-2 if lora else 1e-2)
    report = train_draft(config)
    assert report is not None
    curve = json.loads((config.out / "training" / "curve.json").read_text())
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.2
    assert report == json.loads((config.out / "report.json").read_text())
    draft = load(ModelConfig(str(config.out / "model")))  # a complete checkpoint
    assert len(draft.model.get_decoder().layers) == 2
    begun = load(ModelConfig(str(config.out / "beginning" / "model")))
    same = [
        torch.equal(a, b)
        for a, b in zip(draft.model.parameters(), begun.model.parameters(), strict=True)
    ]
    assert not all(same)
    of_target = tiny_model(architecture).model.state_dict()
    seeing = [name for name in of_target if "visi" in name or "visual" in name]
    assert bool(seeing) == (architecture != "llama")
    for name in seeing:
        assert torch.equal(draft.model.state_dict()[name], of_target[name])


def test_a_draft_that_is_the_target_is_right_before(tmp_path: Path) -> None:
    config = task(tmp_path, layers=0, draft=str(tiny_folder("llama")))
    report = train_draft(replace(config, epochs=0.1))
    assert report is not None
    assert report["acceptance_before"] == 1


def test_a_draft_learns_what_a_guide_leaves_of_the_targets_law(tmp_path: Path) -> None:
    collect_answers(tmp_path, "llama", ANSWERS, guide="regex", guide_source="[ab]{4}")
    config = task(tmp_path, learning_rate=1e-2)
    report = train_draft(config)
    assert report is not None
    assert report["tau_after"] >= report["tau_before"] >= 1
    laws = [load_file(file) for file in (config.out / "laws").glob("*.safetensors")]
    assert len(laws) == ANSWERS
    loaded = tiny_model("llama")
    for law in laws:
        likely = law["ids"][:-1][law["logs"][:-1] > -torch.inf]  # the last token ends the answer
        assert set(loaded.decode(likely.tolist())) <= {"a", "b"}


def test_a_stopped_training_gives_the_same_draft(tmp_path: Path) -> None:
    whole = task(tmp_path, epochs=3.0)
    assert train_draft(whole)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls % 67 == 0  # later than the target's laws are written

    halting = replace(whole, out=tmp_path / "halting")
    stopped = 0
    while not train_draft(halting, stop):
        stopped += 1
    assert stopped
    weights = [(c.out / "model" / "model.safetensors").read_bytes() for c in (whole, halting)]
    assert weights[0] == weights[1]


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    config = task(tmp_path)
    other = replace(config, target=ModelConfig(str(tiny_folder("llama", 1))))
    with pytest.raises(InvalidInput, match="other weights"):
        train_draft(other)


def test_a_draft_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch):
        train_draft(task(tmp_path, layers=0, draft="text-worker"))


def test_a_draft_that_sees_nothing_is_refused(tmp_path: Path) -> None:
    blind = str(tiny_folder("llama"))
    with pytest.raises(InvalidInput, match="about pictures") as caught:
        train_draft(task(tmp_path, "qwen2_vl", layers=0, draft=blind))
    assert caught.value.field == "--draft"


def test_a_draft_that_is_gone_is_not_said_to_be_there(tmp_path: Path) -> None:
    config = task(tmp_path, epochs=0.1)
    assert train_draft(config)
    shutil.rmtree(config.out / "model")
    with pytest.raises(ConfigError, match="is gone"):
        train_draft(config)


@pytest.mark.parametrize("layers", [4, 9])
def test_more_layers_than_the_target_has_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        train_draft(task(tmp_path, layers=layers))


def test_a_beginning_is_needed_and_one_only(tmp_path: Path) -> None:
    for layers, draft in ((0, ""), (1, "text-worker")):
        with pytest.raises(ConfigError, match="--draft"):
            DraftConfig(ModelConfig("text-target"), tmp_path, tmp_path, draft=draft, layers=layers)


def test_the_distance_is_least_at_the_law_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 200, generator=generator)
    law = Law.of(logits)
    own = law.distance(logits)
    kept = logits.softmax(-1).topk(64).values
    rest = 1 - kept.sum(-1)
    entropy = -(kept * kept.log()).sum(-1) - rest * rest.log()
    torch.testing.assert_close(own, entropy)
    for _ in range(20):
        other = logits + torch.randn(5, 200, generator=generator)
        assert (law.distance(other) > own).all()


def test_small_vocabularies_are_kept_whole() -> None:
    logits = torch.randn(3, 10)
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(Law.of(logits).distance(logits), expected)


def test_the_command_writes_what_it_has_measured(tmp_path: Path) -> None:
    config = task(tmp_path)
    found = tmp_path / "found.json"
    command = ["train", "draft", "--target", config.target.path, "--data", str(config.data)]
    command += ["--layers", "1", "--out", str(config.out), "--epochs", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--json", str(found)])
    assert done.exit_code == 0, done.output
    assert json.loads(found.read_text())["prompts"] >= 1
    assert "tokens per pass" in done.output
    other = CliRunner().invoke(app, [*command, "--learning-rate", "1"])
    assert "--learning-rate: " in str(other.exception)


def test_a_damaged_law_is_named(tmp_path: Path) -> None:
    config = task(tmp_path)
    stop = iter([False] * ANSWERS + [True] * 9)
    assert train_draft(config, lambda: next(stop)) is None
    for file in (config.out / "laws").glob("*.safetensors"):
        file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot read"):
        train_draft(config)
