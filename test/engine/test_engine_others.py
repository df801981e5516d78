"""Causal language models that are not among those of the protocols, through either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from other_models import write_other_model
from sessions import near
from tiny_models import WINDOWED, tiny_model

from collab_llm_lab import reference
from collab_llm_lab.random_models import WINDOW
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine import attention
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.footprint import column_bytes
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt

TOKENS = 24
PROMPT = EncodedPrompt(tuple(range(5, 45)))
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"attention_multiplier": 0.3},
    "phi3": {"sliding_window": WINDOW},
}


@pytest.mark.parametrize("name", OTHERS)
def test_answers_equal_the_reference_across_rollbacks(name: str, tmp_path: Path) -> None:
    folder = write_other_model(tmp_path, name, **OTHERS[name])
    loaded = load(TargetConfig(str(folder), exit_layers=(2,)))
    engine = Engine(loaded)
    assert engine.eager
    right = reference.generate(loaded, PROMPT, SamplingConfig(), TOKENS, frozenset())
    assert len(set(right)) > 3, "a constant answer proves nothing"
    exits: dict[int, torch.Tensor] = {}
    session = engine.open(PROMPT)
    answer = [int(session.feed(PROMPT.ids, exits.__setitem__, last=1)[-1].argmax())]
    assert exits[2].isfinite().all()
    while len(answer) < TOKENS:
        wrong = [(token + 1) % engine.vocab_size for token in answer[-3:]]
        session.feed([answer[-1], *wrong])  # a draft that falls
        session.length = len(PROMPT.ids) + len(answer) - 1
        answer.append(int(session.feed(answer[-1:], last=1)[-1].argmax()))
    assert answer == right


@pytest.mark.parametrize("columns", [512, 40, 0], ids=["in blocks", "forks", "in place"])
def test_sessions_of_a_model_with_windows_share_passes(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_model("gemma3_text")
    prefix = list(range(5, 140))
    after = [[30, 31, 32], [40, 41], [50]], [[33], [42], [51]]

    def logits(engine: Engine) -> list[torch.Tensor]:
        first = engine.open(EncodedPrompt(()))
        first.feed(prefix, last=0)
        sessions = [first.fork(), first.fork(), engine.open(EncodedPrompt(()))]
        sessions[2].feed(prefix[:20], last=0)
        passes = [engine.run([*map(Feed, sessions, ids)]) for ids in after]
        found = [each for results in passes for each in results if isinstance(each, torch.Tensor)]
        assert len(found) == 6, passes
        return found

    right = logits(Engine(loaded, eager=True))
    text = loaded.model.config
    monkeypatch.setattr(attention, "GATHERED", columns * column_bytes(text, torch.float32))
    for found, expected in zip(logits(Engine(loaded)), right, strict=True):
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_of_a_node_holds_its_nearest_ancestors(name: str) -> None:
    """Two branches whose nodes take turns, longer than the window."""
    engine = Engine(tiny_model(name))
    session = engine.open(PROMPT)
    session.feed(PROMPT.ids, last=0)
    count, first = 2 * (WINDOW + 4), session.length
    ids = [(7 * i) % 90 for i in range(count)]
    logits = session.grow(ids, [first - 1] * 2 + list(range(first, first + count - 2)))
    for branch in (0, 1):
        path = ids[branch::2]
        near(logits[branch::2], engine.open(PROMPT).feed([*PROMPT.ids, *path], last=len(path)))


@pytest.mark.parametrize("name", WINDOWED)
def test_trees_are_refused_where_transformers_attends_in_windows(name: str) -> None:
    session = Engine(tiny_model(name), eager=True).open(PROMPT)
    session.feed(PROMPT.ids)
    with pytest.raises(ModelError, match="sliding windows"):
        session.grow([3, 4], parents=[session.length - 1, session.length - 1])


def test_a_model_built_in_another_way_is_a_typed_error(tmp_path: Path) -> None:
    folder = write_other_model(tmp_path, "gpt2")
    with pytest.raises(ModelError, match="'gpt2' is built differently.*self_attn"):
        load(ModelConfig(str(folder)))


@pytest.mark.parametrize(
    "changed",
    [{"query_pre_attn_scalar": 64}, {"final_logit_softcapping": 3.0}],
    ids=["scores scaled otherwise", "logits capped"],
)
def test_what_the_layer_loop_does_not_follow_is_left_to_transformers(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_other_model(tmp_path, "gemma3_text", **changed)
    assert Engine(load(ModelConfig(str(folder)))).eager


@pytest.mark.parametrize("name", OTHERS)
def test_only_known_architectures_are_divided(name: str, tmp_path: Path) -> None:
    folder = write_other_model(tmp_path, name, **OTHERS[name])
    with pytest.raises(ModelError, match="known architectures are divided"):
        Stage(ModelConfig(str(folder)), 0, 2)
