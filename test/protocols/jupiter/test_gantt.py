"""Plans as text and as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from jupiter_profiles import profile
from PIL import Image

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.jupiter.gantt import describe, draw_plan, spans_of
from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig, plan


def test_the_text_names_stages_parts_and_losses() -> None:
    made = plan(profile(1.0, 1.5), PlannerConfig(prompt_tokens=48, answer_tokens=32, lanes=4))
    told = describe(made)
    for part in made.placements:
        assert f"{part.device}: layers {part.first} to {part.last - 1}" in told
    assert f"{made.predicted.prefill_s:.3f} s to the first token" in told
    assert "answer of 32 tokens in 4 lanes" in told
    assert "answer" not in describe(plan(profile(1.0), PlannerConfig(answer_tokens=0)))


def test_the_spans_are_of_the_predicted_run(tmp_path: Path) -> None:
    stored = profile(1.0, 1.0, 1.0)
    made = plan(stored, PlannerConfig(prompt_tokens=64, answer_tokens=0))
    lanes = spans_of(made, stored, 64)
    stages = [spans for name, spans in lanes if name != "link"]
    assert len(stages) == len(made.placements) == 3
    assert len(lanes) == 5
    assert all(len(spans) == len(made.lengths(64)) for _, spans in lanes)
    last = stages[-1][-1][2]
    assert last <= made.prefill_s[63] <= last + 0.001, "and the token's way back"
    draw_plan(made, stored, 64, tmp_path / "plots" / "plan.png")
    with Image.open(tmp_path / "plots" / "plan.png") as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 5, "bars in several colours"
    with pytest.raises(InvalidInput):
        spans_of(made, stored, 65)
