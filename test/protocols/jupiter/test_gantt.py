"""Plans as text and as pictures."""

from __future__ import annotations

import io

import pytest
from jupiter_profiles import profile
from PIL import Image

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.jupiter.gantt import (
    describe,
    draw_plan,
    measured_rows,
    plan_rows,
)
from collab_llm_nodes.protocols.jupiter.messages import Span
from collab_llm_nodes.protocols.jupiter.planner import PlannerConfig, plan


def test_the_text_names_stages_parts_and_losses() -> None:
    made = plan(profile(1.0, 1.5), PlannerConfig(prompt_tokens=48, answer_tokens=32, lanes=4))
    text = describe(made)
    for part in made.placements:
        assert f"{part.device}: layers {part.first} to {part.last - 1}" in text
    assert f"{made.predicted.prefill_s:.3f} s to the first token" in text
    assert "answer of 32 tokens in 4 lanes" in text
    assert "answer" not in describe(plan(profile(1.0), PlannerConfig(answer_tokens=0)))


def test_the_spans_are_of_the_predicted_run() -> None:
    stored = profile(1.0, 1.0, 1.0)
    made = plan(stored, PlannerConfig(prompt_tokens=64, answer_tokens=0))
    lanes = plan_rows(made, stored, 64)
    stages = [spans for name, spans in lanes if name != "link"]
    assert len(stages) == len(made.placements) == 3
    assert len(lanes) == 5
    assert all(len(spans) == len(made.lengths(64)) for _, spans in lanes)
    last = stages[-1][-1][2]
    assert last <= made.prefill_s[63] <= last + 0.001, "and the token's way back"
    with Image.open(io.BytesIO(draw_plan(made, stored))) as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 5, "bars in several colours"
    with pytest.raises(InvalidInput):
        plan_rows(made, stored, 65)


def test_passes_are_drawn_as_if_all_workers_had_one_clock() -> None:
    """The second worker's clock is 1000 s ahead; its shortest way there takes no time."""
    passes = [
        (7, (Span(50.0, 51.0), Span(1051.25, 1052.25))),
        (8, (Span(51.0, 52.0), Span(1052.5, 1053.5))),
    ]
    first, second = measured_rows(["a 0-1", "b 2-3"], passes)
    assert first == ("a 0-1", [(7, 0.0, 1.0), (8, 1.0, 2.0)])
    assert second == ("b 2-3", [(7, 1.0, 2.0), (8, 2.25, 3.25)])
    assert measured_rows(["a", "b"], [(0, (Span(0.0, 1.0),))]) == [], "of another chain"
    assert measured_rows(["a"], []) == []


def test_what_was_measured_is_drawn_below_what_was_planned() -> None:
    stored = profile(1.0, 1.0)
    made = plan(stored, PlannerConfig(prompt_tokens=64, answer_tokens=0))
    measured = measured_rows(["a", "b"], [(0, (Span(0.0, 1.0), Span(1.0, 2.0)))])
    heights = []
    for drawn in (draw_plan(made, stored), draw_plan(made, stored, measured)):
        with Image.open(io.BytesIO(drawn)) as picture:
            assert picture.format == "PNG"
            heights.append(picture.height)
    assert heights[1] > heights[0]
