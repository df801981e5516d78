"""``train heads`` on tiny models: the law that heads learn, their files, and an interrupted run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collected_answers import collect_answers
from tiny_models import tiny_folder, tiny_model

from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.pair.heads import HeadsConfig, HeadsLearner, train_heads
from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.trained import trained_files


def task(tmp_path: Path, model: str = "llama", **changed: Any) -> HeadsConfig:
    data = tmp_path / "data"
    if not data.exists():
        collect_answers(tmp_path, model, 60)
    options: dict[str, Any] = {"heads": 2, "epochs": 8.0, "batch": 4, "learning_rate": 2e-2}
    target = ModelConfig(str(tiny_folder(model)))
    return HeadsConfig(target, data, tmp_path / "run", **{**options, **changed})


@pytest.mark.parametrize("model", ["llama", "qwen2_vl"])
def test_heads_learn_and_load_with_their_target(tmp_path: Path, model: str) -> None:
    config = task(tmp_path, model)
    report = train_heads(config)
    assert report is not None
    assert report == json.loads((config.out / "report.json").read_text())
    curve = json.loads((config.out / "heads" / "curve.json").read_text())
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.4
    heads = MedusaHeads.load(config.out, decoder_parts(tiny_model(model).model))
    assert heads.heads == 2
    for shares in report["heads"].values():
        assert 0 <= shares[0] <= shares[1] <= shares[2] <= 1
    assert 1 <= report["tokens_per_round"] <= 3
    with pytest.raises(ModelError, match="heads of model"):
        MedusaHeads.load(config.out, decoder_parts(tiny_model(model, 1).model))


def test_a_head_is_compared_with_the_law_of_its_place_in_the_same_answer() -> None:
    target = tiny_model("llama")
    learner = HeadsLearner(target, 2, Recipe(1, 1e-3, steps=1))
    states = torch.randn(7, learner.parts.hidden_size)
    found = learner.losses(states, torch.tensor([3, 2, 1, 0, 2, 1, 0]))  # answers of 4 and of 3
    best = learner.parts.head(states).argmax(-1)  # of an untrained head, too
    for later, places in ((1, [0, 1, 2, 4, 5]), (2, [0, 1, 4])):
        same = [bool(best[place] == best[place + later]) for place in places]
        assert found[f"head_{later}"].item() == pytest.approx(sum(same) / len(same))
    nothing = learner.learn(states, torch.zeros(7, dtype=torch.int64))  # answers of one token
    assert nothing == {"loss": 0}


def test_a_stopped_training_gives_the_same_heads(tmp_path: Path) -> None:
    whole = task(tmp_path, epochs=3.0)
    assert train_heads(whole) is not None
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls % 17 == 0

    halting = replace(whole, out=tmp_path / "halting", cache_gb=0.0)
    stopped = 0
    while train_heads(halting, stop) is None:
        stopped += 1
    assert stopped > 1
    weights = [trained_files(config.out, "medusa")[0].read_bytes() for config in (whole, halting)]
    assert weights[0] == weights[1]


def test_answers_of_one_token_teach_nothing(tmp_path: Path) -> None:
    config = task(tmp_path, epochs=0.5)
    file = config.data / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    short = [json.dumps({**line, "answer": line["answer"][:1]}) for line in lines]
    file.write_text("\n".join(short) + "\n")
    with pytest.raises(InvalidInput, match="one token"):
        train_heads(config)
