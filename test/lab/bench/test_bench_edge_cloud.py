"""The benchmark of ways to decode: modes take turns, and its rows say what was decoded."""

from __future__ import annotations

import pytest
from rich.console import Console

from collab_llm_lab.bench import edge_cloud
from collab_llm_lab.bench.edge_cloud import MODES, TRIALS, Point, Setup, measure_modes
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import Generation


def test_modes_take_turns_and_answer_like_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Engine(load(ModelConfig(path="nav-target")))
    prompts = scene_prompts(TRIALS, seed=3)
    right = [edge_cloud._alone(target, prompt) for prompt in prompts]
    tokens = sum(map(len, right))
    right[0] = (*right[0], 0)
    turns: list[RemoteRunner] = []
    generate = edge_cloud._generate

    def noted(runner: RemoteRunner, prompt: Prompt) -> tuple[Generation, int]:
        turns.append(runner)
        return generate(runner, prompt)

    monkeypatch.setattr(edge_cloud, "_generate", noted)
    drafts = [Engine(load(ModelConfig(path="nav-draft"))) for _ in range(2)]
    modes = {**MODES, "vote": Setup(drafts=2)}
    rows = measure_modes(
        Point(0.0, 0.0, 0.02), drafts, prompts, right, modes, Console(quiet=True), "test"
    )
    assert list(rows) == list(modes)
    assert len(set(map(id, turns))) == len(modes)
    each = turns[: len(modes)]
    planned = each[list(modes).index("planner")]
    assert turns == each + [planned] * (TRIALS - 1) + each * len(prompts)
    for row in rows.values():
        assert row["output_mismatches"] == 1, "all but the one that was made wrong here"
        assert row["ms_per_token"] > 0
        assert row["predicted_ms_per_token"] > 0
        assert row["rounds"] * row["tau"] == pytest.approx(tokens)
        assert row["answers"] == len(prompts)
    assert [len(row["trials_ms_per_token"]) for row in rows.values()].count(1) == len(modes) - 1
    assert len(rows["planner"]["trials_ms_per_token"]) == TRIALS
    assert rows["ar"]["modes"] == ["ar"]
    assert rows["ar"]["tau"] == 1.0
    assert rows["sd"]["hit_rate"] == 0.0
    assert rows["vote"]["tau"] == rows["sd"]["tau"], "two equal drafts always agree"
    assert rows["push_ahead"]["pushed"] > 0
    assert rows["co_located"]["modes"] == ["co_located(4)"]
    assert rows["co_located"]["tau"] == rows["sd"]["tau"], "the same draft model elsewhere"
