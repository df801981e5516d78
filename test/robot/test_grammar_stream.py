"""The action grammar on text that is still growing."""

from __future__ import annotations

from random import Random

import numpy as np
from grammar_oracle import Oracle
from grammar_texts import ACTIONS, WIDE, mutated, sentence, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_lab.home.asking import draw_request
from collab_llm_lab.home.expert import drive
from collab_llm_lab.home.requests import Kind as Asked
from collab_llm_lab.home.wording import TRAINED
from collab_llm_nodes.robot.grammar import Code, Kind, StreamingParser, parse
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.rooms import make_room

PROPERTY = settings(max_examples=300, derandomize=True)


@PROPERTY
@given(st.text(max_size=200))
def test_never_raises(text: str) -> None:
    parsed = parse(text)
    assert 0 <= parsed.span[0] <= parsed.span[1] <= len(text)


@PROPERTY
@given(ACTIONS, st.integers(1, 30))
def test_streaming_reports_once_when_complete(action: str, size: int) -> None:
    text = f"the red ball is ahead. the next action is {action}."
    seen, parser = stream(text, size)
    assert seen == [text]
    assert parser.finish().phrase == action


def test_streaming_does_not_act_on_a_beginning() -> None:
    parser = StreamingParser()
    for delta in ["the next action is stop", " sign", ".", " the next action is move forward 7"]:
        assert parser.push(delta) is None
    assert parser.push("5 cm. ok") is None  # two markers
    assert parser.finish().code is Code.AMBIGUOUS
    # The bare form may be the first words of anything.
    bare = StreamingParser()
    assert bare.push("stop.") is None
    assert bare.finish().kind is Kind.STOP
    assert bare.push(" the next action is turn left 30 degree.") is None
    assert bare.finish().code is Code.CONTRADICTORY


def test_streaming_takes_back_what_the_rest_contradicts() -> None:
    parser = StreamingParser()
    first = parser.push("the next action is move forward 75 cm.")
    assert first is not None
    assert first.kind is Kind.FORWARD
    assert parser.push(" and do not stop") is None
    assert parser.finish().code is Code.NEGATED


def test_streaming_never_reports_what_no_prefix_says() -> None:
    random, oracle, reported = Random(3), Oracle(WIDE), 0
    for _ in range(6_000):
        text = mutated(random, sentence(random, WIDE))
        for prefix in stream(text, random.randint(1, 9))[0]:
            meant = oracle.reads(prefix)
            assert meant is not None, prefix
            reported += 1
    assert reported > 50


def test_every_answer_the_models_are_trained_on_is_read() -> None:
    """Also the answers to questions, prohibitions and unknown words."""
    kinds = set[Asked]()
    for seed in range(6):
        room, rng = make_room(seed), np.random.default_rng(seed)
        for request in (draw_request(room, rng, TRAINED) for _ in range(16)):
            kinds.add(request.kind)
            for step in drive(room, request, seed).steps:
                _, parser = stream(step.answer, 7)
                assert (parser.finish().code, parser.finish().phrase) == (
                    Code.OK,
                    step.decision.action,
                ), step.answer
    assert kinds == {*Asked}


def test_prompts_tell_instruction_and_history() -> None:
    history = ["stop", "turn left 45 degree", "move forward 75 cm"]
    told = "turn left 45 degree, move forward 75 cm"
    assert user_text("Find  the ball. ", []) == "find the ball. history: none."
    assert user_text("go", history) == f"go. history: {told}."
    template = "{history}|{instruction}|{x}"  # braces of a stranger's text stay as they are
    assert user_text("a {history} b", history, template) == f"{told}|a {{history}} b|{{x}}"
