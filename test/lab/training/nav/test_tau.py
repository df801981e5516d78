"""Tokens per verification, computed from the target's answers instead of decoded."""

from __future__ import annotations

import numpy as np
import pytest

from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.training.nav.models import read
from collab_llm_lab.training.nav.tau import GAMMA, BlindDraft, compare_sight, count_rounds, tau
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.sim.jpeg import from_jpeg

PROMPT = "find the red ball. history: none. search: place 1, turned 0."


@pytest.mark.parametrize("gamma", [1, 4])
def test_rounds_are_those_of_a_greedy_draft(gamma: int) -> None:
    """Against a literal simulation, token by token."""
    rng = np.random.default_rng(0)
    for length in range(1, 30):
        agree = [bool(a) for a in rng.random(length) < 0.7]
        at = rounds = 0
        while at < length:
            for drafted in range(gamma + 1):
                at += 1
                if at > length or drafted == gamma or not agree[at - 1]:
                    break
            rounds += 1
        assert count_rounds(agree, gamma) == rounds


def test_tau_is_that_of_the_engine() -> None:
    """The shipped pair decodes together, step by step."""
    prompts = scene_prompts(6, seed=3)
    draft, target = (Engine(load(ModelConfig(name))) for name in ("nav-draft", "nav-target"))
    made = [plain_runner(draft, target, GAMMA).generate(prompt) for prompt in prompts]
    model, tokenizer = read(shipped_model("nav-draft"))
    images = np.stack([from_jpeg(prompt.images[0]) for prompt in prompts])
    asked = [(prompt.text, one.text) for prompt, one in zip(prompts, made, strict=True)]
    tokens = sum(one.metrics.tokens for one in made)
    rounds = sum(one.metrics.rounds for one in made)
    assert tau(model, tokenizer, images, asked) == pytest.approx(tokens / rounds)
    blind = BlindDraft(tokenizer, [(PROMPT, "the red ball is not here.")])
    found = compare_sight(model, tokenizer, images, asked, blind)
    assert 1.0 <= found["tau_blind"] < found["tau_grey"] < found["tau"] == tokens / rounds


def test_the_blind_draft_says_what_mostly_followed() -> None:
    tokenizer = read(shipped_model("nav-draft"))[1]
    near, far = (f"the red ball is on the left and {away}." for away in ("near", "distant"))
    blind = BlindDraft(tokenizer, [(PROMPT, far), (PROMPT, near), (PROMPT, near)])
    tokens = len(tokenizer(near).input_ids) + 1
    assert blind.tau([(PROMPT, near)], gamma=100) == tokens, "one round"
    tokens = len(tokenizer(far).input_ids) + 1
    assert blind.tau([(PROMPT, far)], gamma=100) == tokens / 2, "one wrong guess"
    assert blind.tau([(PROMPT, "stop? no!")]) < 1.5


def test_the_blind_draft_learns_from_the_expert() -> None:
    tokenizer = read(shipped_model("nav-draft"))[1]
    asked = [(PROMPT, "the red ball is not in view, the way is open.")]
    assert BlindDraft.of_expert(tokenizer, rooms=2).tau(asked) > 1.0
