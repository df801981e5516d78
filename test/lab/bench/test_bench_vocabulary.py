"""Models with a larger vocabulary, and the same answers."""

from __future__ import annotations

from pathlib import Path

from collab_llm_lab.bench.edge_cloud import _alone
from collab_llm_lab.bench.emulation import blur
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.bench.vocabulary import widen
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load


def test_a_wider_vocabulary_changes_no_answer(tmp_path: Path) -> None:
    folder = widen("nav-target", 2000, tmp_path / "wide", exits="beside")
    wide = Engine(load(TargetConfig(str(folder), exits="beside")))
    own = Engine(load(TargetConfig("nav-target")))
    assert wide.vocab_size == 2000
    assert wide.exit_layers
    (prompt,) = scene_prompts(1, seed=3)
    assert _alone(wide, prompt) == _alone(own, prompt)


def test_a_draft_of_a_wider_vocabulary_errs_alike(tmp_path: Path) -> None:
    own = load(ModelConfig("nav-draft"))
    wide = load(ModelConfig(str(widen("nav-draft", 2000, tmp_path / "wide"))))
    blur(own, 2.0)
    blur(wide, 2.0, tokens=own.vocab_size)
    prompts = scene_prompts(2, seed=3)
    answers = [_alone(Engine(wide), prompt) for prompt in prompts]
    assert answers == [_alone(Engine(own), prompt) for prompt in prompts]
    assert answers != [_alone(Engine(load(ModelConfig("nav-draft"))), prompt) for prompt in prompts]
