"""Guided answers over stages: the guided single device's, whatever drafts or divides them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from jupiter_bed import ARCHITECTURE, LAYERS, control, pipeline, prompt
from llguidance import LLMatcher
from tiny_models import tiny_model

from collab_llm_lab.reference import generate_guided
from collab_llm_nodes.decoding.sampling import SamplingConfig, masked
from collab_llm_nodes.errors import InvalidInput, ProtocolError
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.guided_text import GuidedText
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.jupiter import codec, stage_lanes
from collab_llm_nodes.protocols.jupiter.drafters import DRAFTERS
from collab_llm_nodes.protocols.jupiter.generation import answer
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig, LaneAnswer
from collab_llm_nodes.protocols.jupiter.messages import Outcome, Pass, Step, Want
from collab_llm_nodes.protocols.jupiter.outline import OUTLINE_FORM, read_outline

TOKENS = 40
SENTENCE = (
    r"the (red|green|blue) (box|ball|cone) is (far left|ahead|not in view)\. "
    r"the next action is (turn (left|right) [1-9]0 degree|stop)\."
)
LOADED = tiny_model(ARCHITECTURE, layers=LAYERS)


def guided(source: Guide | None = None) -> GuidedText:
    return LOADED.guides.open(source or Guide("regex", SENTENCE))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_guided_answer_is_the_guided_single_device_s(drafter: str, temperature: float) -> None:
    ids, sampling = prompt(30) * 2, SamplingConfig(temperature, seed=4)
    grammar = LLMatcher.grammar_from_regex(SENTENCE)
    own = generate_guided(LOADED, EncodedPrompt(tuple(ids)), grammar, sampling, TOKENS)
    with pipeline(2) as made:
        asked = DecodeConfig(TOKENS, sampling, DRAFTERS[drafter], guide=guided())
        found = answer(made, ids, asked, control())
        free = answer(made, ids, DecodeConfig(TOKENS, sampling), control())
    assert found.tokens == own
    assert re.fullmatch(SENTENCE, LOADED.decode(own))
    assert found.passes < len(own), "forced tokens share passes"
    assert free.tokens != own


def test_rows_of_a_tree_follow_their_parents() -> None:
    text, other = guided(), guided()
    forced = text.forced((), 64)
    a, b = np.flatnonzero(text.allowed(forced))[:2].tolist()
    rows = text.rows(forced, (a, b, 5, 6), (0, 0, 2, 3))
    assert np.array_equal(rows[1], other.allowed((*forced, a)))
    assert np.array_equal(rows[2], other.allowed((*forced, b)))
    assert not other.allows((*forced, b, 5))
    assert rows[3].all()
    assert rows[4].all()


@pytest.mark.parametrize("drafter", ["none", "medusa"])
def test_a_lane_judged_by_its_masks_writes_a_text_of_the_guide(drafter: str) -> None:
    """The last stage with random logits, and random guesses of its heads."""
    sampling, eos = SamplingConfig(1.0, seed=2), frozenset({LOADED.tokenizer.eos_token_id})
    asked = DecodeConfig(TOKENS, sampling, DRAFTERS[drafter], guide=guided())
    lane = LaneAnswer(0, [9, 8, 7], asked, eos=eos, context=256)
    rng = torch.Generator().manual_seed(1)
    while not lane.finished:
        (step,) = lane.steps()
        logits = torch.randn(step.rows, LOADED.vocab_size, generator=rng)
        limited = masked(logits, stage_lanes._allowed(step, LOADED.vocab_size))
        draft = step.ids[len(step.ids) - step.rows + 1 :]
        parents = step.parents or range(len(draft))
        path, token = stage_lanes.judge(limited, draft, parents, sampling, step.position, eos)
        guesses = torch.randint(7, LOADED.vocab_size, (3 * step.guesses,), generator=rng)
        lane.on_outcome(Outcome(path, token, tuple(guesses.tolist())))
    assert re.fullmatch(SENTENCE, LOADED.decode(lane.tokens))
    assert lane.passes < len(lane.tokens)


def test_a_worker_that_knows_no_guides_is_not_believed() -> None:
    lane = LaneAnswer(0, [1, 2], DecodeConfig(8, guide=guided()), eos=frozenset({2}), context=64)
    (step,) = lane.steps()
    size = LOADED.vocab_size
    assert len(step.allowed) == (size + 7) // 8
    with pytest.raises(ProtocolError, match="guide"):
        lane.on_outcome(Outcome(next=9))


@pytest.mark.parametrize(
    "wrong", [Step(0, ids=(1, 2), want=Want.VERDICT, rows=2, allowed=b"abc"),
              Step(0, ids=(1,), want=Want.LOGITS, rows=1, allowed=b"a")]
)  # fmt: skip
def test_masks_that_fit_no_rows_are_refused(wrong: Step) -> None:
    whole = replace(wrong, want=Want.VERDICT, allowed=b"ab")
    assert codec.decode_order(codec.encode_order(Pass(0, (whole,)))) == Pass(0, (whole,))
    with pytest.raises(InvalidInput) as refused:
        codec.decode_order(codec.encode_order(Pass(0, (wrong,))))
    assert refused.value.field.endswith("allowed")


@pytest.mark.parametrize("seed", range(6))
def test_an_outline_in_its_form_has_points(seed: int) -> None:
    rng, text = np.random.default_rng(seed), guided(OUTLINE_FORM)
    answer: list[int] = []
    while not answer or answer[-1] != LOADED.tokenizer.eos_token_id:
        allowed = np.flatnonzero(text.allowed(answer))
        answer.append(int(rng.choice(allowed)))
    written = LOADED.decode(answer)
    assert re.fullmatch(OUTLINE_FORM.source, written)
    found = read_outline("1. walls\n2. floors\n3. doors", complete=True)
    assert found.usable
    assert re.fullmatch(OUTLINE_FORM.source, "1. walls\n2. floors\n3. doors")
    assert len(read_outline(written, complete=True).points) >= 1
