"""``bench guided``: what the table says of a pair of random models."""

from __future__ import annotations

import pytest
from rich.console import Console
from tiny_models import tiny_model

from collab_llm_lab.bench import guided
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.prompt import Prompt


def test_answers_of_random_models_can_be_read_with_a_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "WARM_UP", 0)
    target = Engine(tiny_model("llama"))
    draft = Engine(tiny_model("llama", head_noise=0.3))
    prompts = [Prompt(f"question {i}") for i in range(3)]
    found = guided.compare_guided(draft, target, prompts, 4, Console(quiet=True))
    assert found["ok"]
    readable = {name: modes["drafted"]["readable"] for name, modes in found["rows"].items()}
    assert (readable["free"], readable["actions"]) == (0, 1)
    assert found["guided_tau"] > found["tau"]  # forced tokens cost no pass
