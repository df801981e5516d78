"""The navigator's question to the model."""

from __future__ import annotations

import yaml
from folders import ROOT

from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text

CONFIG = ROOT / "config"


def test_the_text_has_instruction_and_history() -> None:
    assert user_text("  Find the RED\tball!", []) == "find the red ball. history: none."
    history = ["stop", "turn left 45 degree", "move forward 75 cm"]
    told = "find the red ball. history: turn left 45 degree, move forward 75 cm."
    assert user_text("find the red ball.", history) == told


def test_the_embedded_pair_is_asked_as_it_was_trained() -> None:
    parameters = yaml.safe_load((CONFIG / "embedded.yaml").read_text(encoding="utf-8"))
    assert parameters["/**/navigator"]["ros__parameters"]["answer"]["prompt"] == SEARCH_TEMPLATE


def test_a_template_is_filled_and_a_stranger_s_braces_are_not() -> None:
    template = "Did: {history}. Do: {instruction}! {other}"
    assert (
        user_text("go {history} {0}", ["stop"], template)
        == "Did: stop. Do: go {history} {0}! {other}"
    )


def test_what_the_robot_remembers_is_one_short_line() -> None:
    template = "{memory}? {instruction}"
    assert user_text("go", [], template, "at\n (1, 2) {history}") == "at (1, 2) {history}? go"
    assert user_text("go", [], template) == "nothing? go"
    assert len(user_text("go", [], template, "x" * 1000)) == 300 + len("? go")


def test_the_general_model_is_told_how_to_end() -> None:
    parameters = yaml.safe_load((CONFIG / "qwen2_vl_2b_7b.yaml").read_text(encoding="utf-8"))
    template = parameters["/**/navigator"]["ros__parameters"]["answer"]["prompt"]
    text = user_text("find the chair", ["turn left 15 degree"], template)
    assert "find the chair" in text
    assert "turn left 15 degree" in text
    assert "The next action is ACTION." in text
