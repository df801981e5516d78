"""The action grammar: what it contains moves the robot, whatever else is said does not."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.navigation.grammar import (
    REASONS,
    Code,
    GrammarConfig,
    Kind,
    StreamingParser,
    parse,
)
from collab_llm_nodes.navigation.prompt import user_text

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)
WIDE = GrammarConfig(max_distance=10.0, max_angle=180.0)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("the next action is move forward 75 cm.", Kind.FORWARD, 0.75),
        ("The next action is turn left 30 degree.", Kind.TURN, math.radians(30)),
        ("The next action is turn right 45 degrees", Kind.TURN, -math.radians(45)),
        ("the next action is stop.", Kind.STOP, 0.0),
        ("the red ball is far left. the next action is turn left 15 degree.", Kind.TURN, 0.2617994),
        ("it is not in view, so the next action is turn left 45 deg.", Kind.TURN, 0.7853982),
        ("i am close enough to stop. the next action is stop.", Kind.STOP, 0.0),
        ("a stop sign is ahead. the next action is move forward 50 cm.", Kind.FORWARD, 0.5),
        ("Move forward 75 cm", Kind.FORWARD, 0.75),
        ("  STOP!\n", Kind.STOP, 0.0),
        ("moving forward 0.5 m", Kind.FORWARD, 0.5),
        ("turn left by 15.5 deg.", Kind.TURN, math.radians(15.5)),
        ("turn left 30°", Kind.TURN, math.radians(30)),
        ('The next action is to: "turn right 15 degree".', Kind.TURN, -math.radians(15)),
        ("next action is move forward 25cm", Kind.FORWARD, 0.25),
    ],
)
def test_reads(text: str, kind: Kind, value: float) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.code) == (kind, Code.OK)
    assert parsed.value == pytest.approx(value, abs=1e-6)
    assert re.fullmatch(r"(?i)(move|moving|turn|stop).*", text[slice(*parsed.span)])


# Texts on which published parsers move the robot 10 m, forward by default, or turn 345 degree.
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The next action is move forward 1000 cm.", Code.OUT_OF_RANGE),
        ("The next action is move forward 75 cm and do not stop", Code.NEGATED),
        ("do not move, stop", Code.NEGATED),
        ("I cannot see", Code.UNREADABLE),
        ("", Code.EMPTY),
        (" \n\t", Code.EMPTY),
        ("move backward 50 cm", Code.UNREADABLE),
        ("The next action is turn right 345 degree", Code.OUT_OF_RANGE),
        ("The next action is turn left 90 degree", Code.OUT_OF_RANGE),
    ],
)
def test_published_failures_stand_still(text: str, code: Code) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.value, parsed.code) == (Kind.NONE, 0.0, code)


def test_published_failures_that_are_orders() -> None:
    assert parse("Move forward 75 cm").value == 0.75  # "no 'is'": read as None elsewhere
    assert parse("The next action is Move Forward 75 cm").value == 0.75  # read as 25 elsewhere


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("turn left", Code.UNREADABLE),
        ("move forward 75", Code.UNREADABLE),
        ("move forward 75 mm", Code.UNREADABLE),
        ("move forward 7 5 cm", Code.UNREADABLE),
        ("move forward 1e3 cm", Code.UNREADABLE),
        ("move forward ٧٥ cm", Code.UNREADABLE),
        ("\N{LATIN SMALL LETTER LONG S}top", Code.UNREADABLE),  # a look-alike in Unicode's folding
        ("the next action is turn around", Code.UNREADABLE),
        ("i see a box. move forward 75 cm.", Code.AMBIGUOUS),
        ("turn left 30 degree then move forward 75 cm", Code.AMBIGUOUS),
        ("move forward 25 cm. the next action is move forward 75 cm.", Code.AMBIGUOUS),
        ("the next action is stop. the next action is stop.", Code.AMBIGUOUS),
        ("the next action is move forward 75 cm, slowly", Code.AMBIGUOUS),
        ("the next action is turn left 30 degree?", Code.AMBIGUOUS),
        ("if the door is open, the next action is stop.", Code.AMBIGUOUS),
        ("the next action is not turn left 30 degree", Code.NEGATED),
        ("don't move forward 25 cm", Code.NEGATED),
        ("it is not true that the next action is stop", Code.NEGATED),
        ("turn left 30 degree turn right 30 degree", Code.CONTRADICTORY),
        ("move forward 25 cm and stop", Code.CONTRADICTORY),
        ("move forward -75 cm", Code.CONTRADICTORY),
        ("turn right to face it. the next action is turn left 30 degree.", Code.CONTRADICTORY),
        ("do not turn. the next action is turn left 30 degree.", Code.CONTRADICTORY),
        ("i stop here. the next action is move forward 25 cm.", Code.CONTRADICTORY),
        ("move forward 0 cm", Code.OUT_OF_RANGE),
        ("turn left 0.0 degree", Code.OUT_OF_RANGE),
        ("move forward 75.1 cm", Code.OUT_OF_RANGE),
        ("move forward 75 m", Code.OUT_OF_RANGE),
        ("stop " * 1000, Code.UNREADABLE),
    ],
)
def test_refuses(text: str, code: Code) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.code) == (Kind.NONE, code)
    assert REASONS[parsed.code]


def test_limits_are_configurable() -> None:
    assert parse("turn left 90 degree", GrammarConfig(max_angle=90.0)).code is Code.OK
    short = GrammarConfig(max_distance=0.25)
    assert parse("move forward 26 cm", short).code is Code.OUT_OF_RANGE
    assert parse("move forward 25 cm", short).code is Code.OK
    with pytest.raises(ConfigError, match="max_angle"):
        GrammarConfig(max_angle=500.0)


ACTIONS = st.one_of(
    st.just("stop"),
    st.integers(1, 75).map(lambda n: f"move forward {n} cm"),
    st.tuples(st.sampled_from(["left", "right"]), st.integers(1, 45)).map(
        lambda t: f"turn {t[0]} {t[1]} degree"
    ),
)


@given(
    ACTIONS, st.sampled_from(["{}", "{}.", "the next action is {}.", "so far. Next action is {}"])
)
def test_round_trip(action: str, frame: str) -> None:
    parsed = parse(frame.format(action))
    assert parsed.code is Code.OK
    assert parsed.phrase == action
    assert parse(parsed.phrase).value == pytest.approx(parsed.value)


def in_the_grammar(text: str, kind: Kind, value: float) -> bool:
    """A second, word-by-word reading: does ``text`` end in just this action, alone or after the
    marker?"""
    text = re.sub(r"(\d)([a-z])", r"\1 \2", text.strip(" \n\t.!\"'*").lower())
    text = re.sub(r"forward(?=\d)|left(?=\d)|right(?=\d)", r"\g<0> ", text)
    words = re.sub(r"[\"'*:]|\b(by|to)\b", " ", text).split()
    if kind is Kind.STOP:
        action, rest = words[-1:], words[:-1]
        same = action == ["stop"]
    else:
        action, rest = words[-4:], words[:-4]
        number = float(action[2])
        if kind is Kind.FORWARD:
            same = action[:2] == ["move", "forward"] and math.isclose(
                number * {"cm": 0.01, "m": 1.0}[action[3]], value
            )
        else:
            sign = {"left": 1, "right": -1}[action[1]]
            same = action[0] == "turn" and math.isclose(sign * math.radians(number), value)
    return same and (not rest or rest[-3:] == ["next", "action", "is"])


VOCABULARY = (
    "the next action is . , turn left right move forward backward stop not do and then if 25 75 "
    "1000 0 -30 30 45 cm m degree degrees red ball ahead so no"
)
WORDS = st.sampled_from(VOCABULARY.split())
FRAGMENTS = st.sampled_from(
    ["the next action is", "move forward 75 cm", "turn left 30 degree", "stop", "do not", "."]
)


@PROPERTY
@given(st.lists(st.one_of(WORDS, FRAGMENTS), max_size=12).map(" ".join))
def test_generated_texts_never_move_outside_the_grammar(text: str) -> None:
    parsed = parse(text, WIDE)
    if parsed.code is Code.OK:
        assert in_the_grammar(text, parsed.kind, parsed.value)
    else:
        assert (parsed.kind, parsed.value) == (Kind.NONE, 0.0)


@PROPERTY
@given(ACTIONS, st.data())
def test_mutated_texts_never_move_outside_the_grammar(action: str, data: st.DataObject) -> None:
    text = f"the red ball is ahead. the next action is {action}."
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 4))
    text = (
        text[:at] + data.draw(st.one_of(WORDS, FRAGMENTS, st.text(max_size=3))) + text[at + cut :]
    )
    parsed = parse(text, WIDE)
    if parsed.code is Code.OK:
        assert in_the_grammar(text, parsed.kind, parsed.value)


@PROPERTY
@given(st.text(max_size=200))
def test_never_raises(text: str) -> None:
    parsed = parse(text)
    assert 0 <= parsed.span[0] <= parsed.span[1] <= len(text)


def stream(text: str, size: int) -> tuple[list[str], StreamingParser]:
    """Feed ``text`` in pieces; the text read so far at each report."""
    parser = StreamingParser()
    seen = []
    for i in range(0, len(text), size):
        if parser.push(text[i : i + size]):
            seen.append(parser.text)
    return seen, parser


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


@PROPERTY
@given(st.lists(FRAGMENTS, max_size=6).map(" ".join), st.integers(1, 9))
def test_streaming_never_reports_what_no_prefix_says(text: str, size: int) -> None:
    for prefix in stream(text, size)[0]:
        assert parse(prefix).code is Code.OK


def test_every_answer_the_models_are_trained_on_is_read() -> None:
    from collab_llm_nodes.sim.expert import DIRECTIONS, DISTANCES, action_for
    from collab_llm_nodes.training.wording import VERBS, reason_seen, reason_unseen

    answers = [
        (reason_seen("red ball", where, far, verb), action_for(where, far))
        for where in DIRECTIONS
        for far in DISTANCES
        for verb in range(len(VERBS))
    ]
    for last in ("left", "right"):
        history = [f"turn {last} 45 degree"]
        answers += [(reason_unseen("box", history, v), history[0]) for v in range(len(VERBS))]
    for reason, action in answers:
        parsed = parse(f"{reason}. the next action is {action}.")
        assert (parsed.code, parsed.phrase) == (Code.OK, action), reason


def test_prompts_tell_instruction_and_history() -> None:
    history = ["stop", "turn left 45 degree", "move forward 75 cm"]
    told = "turn left 45 degree, move forward 75 cm"
    assert user_text("Find  the ball. ", []) == "find the ball. history: none."
    assert user_text("go", history) == f"go. history: {told}."
    template = "{history}|{instruction}|{x}"  # braces of a stranger's text stay as they are
    assert user_text("a {history} b", history, template) == f"{told}|a {{history}} b|{{x}}"
