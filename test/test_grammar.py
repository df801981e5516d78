"""The action grammar: what it contains moves the robot, whatever else is said does not."""

from __future__ import annotations

import json
import math
import re
import time
from copy import copy
from random import Random
from typing import Any

import pytest
from grammar_oracle import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.navigation import grammar
from collab_llm_nodes.navigation.grammar import (
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
        ("turn right 0.5 rad", Kind.TURN, -0.5),
        ("Turn Left 0.25 radians.", Kind.TURN, 0.25),
        ("move forward 20 centimetres", Kind.FORWARD, 0.2),
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
        ("turn left 2 rad", Code.OUT_OF_RANGE),
        ("move forward 1 rad", Code.UNREADABLE),
        ("the next action isstop", Code.UNREADABLE),
        ("rotate right a bit. the next action is turn left 30 degree.", Code.CONTRADICTORY),
        ("stop " * 1000, Code.UNREADABLE),
    ],
)
def test_refuses(text: str, code: Code) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.code) == (Kind.NONE, code)
    assert grammar.REASONS[parsed.code]


def test_limits_are_configurable() -> None:
    assert parse("turn left 90 degree", GrammarConfig(max_angle=90.0)).code is Code.OK
    short = GrammarConfig(max_distance=0.25)
    assert parse("move forward 26 cm", short).code is Code.OUT_OF_RANGE
    assert parse("move forward 25 cm", short).code is Code.OK
    with pytest.raises(ConfigError, match="max_angle"):
        GrammarConfig(max_angle=500.0)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("Action: go 50 cm straight ahead", Kind.FORWARD, 0.5),
        ("The box is left. Next action: rotate 30 degrees to the left.", Kind.TURN, 0.5235988),
        ("so i will now walk 1.5 m", Kind.FORWARD, 1.5),
        ("Stop here.", Kind.STOP, 0.0),
        ("action: halt", Kind.STOP, 0.0),
    ],
)
def test_other_phrases_can_be_configured(text: str, kind: Kind, value: float) -> None:
    parsed = parse(text, OTHER_WORDS)
    assert (parsed.kind, parsed.code) == (kind, Code.OK)
    assert parsed.value == pytest.approx(value, abs=1e-6)
    assert parse(text, WIDE).kind is Kind.NONE


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("the next action is stop.", Code.UNREADABLE),  # not its marker, and "stop" alone no phrase
        ("action halt", Code.AMBIGUOUS),  # the marker has a colon
        ("rotate right. action: rotate 30 degree to the left", Code.CONTRADICTORY),
        ("rotate 9 deg to the right. action: rotate 30 deg to the left", Code.AMBIGUOUS),
        ("do not rotate. action: rotate 30 deg to the left", Code.CONTRADICTORY),
    ],
)
def test_configured_phrases_are_as_strict(text: str, code: Code) -> None:
    assert parse(text, OTHER_WORDS).code is code


@pytest.mark.parametrize(
    ("field", "phrases"),
    [
        ("forward", ["go"]),
        ("forward", ["{distance}"]),
        ("forward", ["go {angle}"]),
        ("left", ["turn {angle} or {angle} left"]),
        ("stop", ["stop {distance}"]),
        ("stop", []),
        ("stop", [""]),
        ("stop", ["(a+)+"]),
        ("stop", [".*"]),
        ("stop", ["do not move"]),
        ("stop", ["arr\u00eat"]),
        ("stop", ["a " * 13]),
        ("stop", ["stop"] * 33),
        ("stop", ["Stop", "stop"]),
        ("right", ["turn left {angle}"]),
        ("markers", ["action =", "if"]),
        ("markers", [":"]),
    ],
)
def test_phrases_that_are_none_are_refused(field: str, phrases: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(GrammarConfig, {field: phrases})
    assert caught.value.field == field
    assert caught.value.remedy


def test_objects_are_read_where_allowed() -> None:
    config = GrammarConfig(json=True)
    text = '{"reason": "the ball is left", "action": "turn left 30 degree"}'
    for said in (text, f"```json\n{text}\n```", '{"action": "turn left 30 degree"}'):
        parsed = parse(said, config)
        assert (parsed.code, parsed.phrase) == (Code.OK, "turn left 30 degree")
        assert said[slice(*parsed.span)] == "turn left 30 degree"
        assert parse(said).kind is Kind.NONE
    assert parse("the next action is stop.", config).kind is Kind.STOP


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({"action": "do not move"}, Code.NEGATED),
        ({"action": "stop", "speed": 3}, Code.UNREADABLE),
        ({"action": 1}, Code.UNREADABLE),
        ({"reason": "stop"}, Code.UNREADABLE),
        ({"action": "stop."}, Code.AMBIGUOUS),
        ({"action": "move forward 9 m"}, Code.OUT_OF_RANGE),
        ({"reason": "turn right", "action": "turn left 30 degree"}, Code.CONTRADICTORY),
        ({"reason": "do not move", "action": "move forward 25 cm"}, Code.CONTRADICTORY),
        ({"reason": "if it is open", "action": "stop"}, Code.AMBIGUOUS),
        ({"reason": "the next action is left", "action": "stop"}, Code.AMBIGUOUS),
        (["stop"], Code.AMBIGUOUS),
    ],
)
def test_objects_are_as_strict(content: Any, code: Code) -> None:
    assert parse(json.dumps(content), GrammarConfig(json=True)).code is code


@pytest.mark.parametrize(
    "text",
    [
        '{"action": "stop", "action": "move forward 25 cm"}',
        '{"action": "stop"',
        '{"action": "st\\u006fp"}',
        '{"action": "stop"} and then',
        '{"a":' * 300,
        "``` stop ```",
    ],
)
def test_broken_objects_move_nothing(text: str) -> None:
    assert parse(text, GrammarConfig(json=True)).code is Code.UNREADABLE


@pytest.mark.parametrize("piece", ["\n", " ", ". ", "so, ", "the next ", "move forward ", "9"])
def test_long_texts_are_read_in_time(piece: str) -> None:
    config = GrammarConfig(max_characters=100_000, json=True)
    before = time.process_time()
    parse(piece * (90_000 // len(piece)), config)
    assert time.process_time() - before < 2.0


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


OTHER_WORDS = GrammarConfig(
    max_distance=10.0,
    max_angle=180.0,
    markers=("action:", "next action:", "i will now"),
    forward=("go {distance} straight ahead", "walk {distance}", "move forward {distance}"),
    left=("rotate {angle} to the left", "turn left {angle}"),
    right=("rotate {angle} to the right", "turn right {angle}"),
    stop=("stop here", "halt"),
)
"""Another way of speaking: numbers in the middle, markers with a colon."""

PARTS = {
    WIDE: (
        ["the next action is", "next action is", "The next action is to:", "so, next action is"],
        ["move forward {} cm", "moving forward by {} m", "turn left {} degree", "stop", "STOP"],
    ),
    OTHER_WORDS: (
        ["action:", "Next action:", "i will now", "so i will now", "the next action is"],
        ["go {} cm straight ahead", "walk {}m", "rotate {} deg to the left", "halt", "stop here"],
    ),
}
NUMBERS = ("25", "0.5", "75", "1000", "0", "-30", "30", "7 5", "1e3", "3.", "1234567890")
REASONS = (
    "the red ball is ahead",
    "i cannot see the box",
    "turn left to face it",
    "do not move",
    "if the door is open",
    "a stop sign is near",
    "no way forward",
    "i don\u2019t go back",
    "walk 25 cm",
)
SIGNS = (".", ",", "!", "?", ":", ";", "\n", " ", "  ", '"', "*", "'", "-", "")
WORDS = [
    "turn",
    "left",
    "right",
    "move",
    "forward",
    "backward",
    "stop",
    "not",
    "do",
    "and",
    "then",
    "if",
    "no",
    "so",
    "to",
    "by",
    "next",
    "is",
    "the",
]
WORDS += [
    "action",
    "cm",
    "m",
    "degree",
    "rad",
    "30",
    "75",
    "red",
    "until",
    "avoid",
    "go",
    "halt",
    "sign",
]
ALIKE = str.maketrans("sk5 ", "\u017f\u212a\u0665\u2009")
"""A long s and a Kelvin sign, which lower-case to Latin letters; a digit; a space."""


def sentence(random: Random, config: GrammarConfig) -> str:
    """A text near the grammar: often in it, often just outside."""
    markers, orders = PARTS[config]
    pieces = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.5:
            pieces.append(random.choice(REASONS) + random.choice(SIGNS))
        if random.random() < 0.7:
            pieces.append(random.choice(markers))
        if random.random() < 0.9:
            pieces.append(random.choice(orders).format(random.choice(NUMBERS)))
    return " ".join(pieces) + random.choice((".", "", "!", " and", " ."))


def mutated(random: Random, text: str) -> str:
    """``text`` with a few letters or words changed."""
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(text) + 1)
        to = min(len(text), at + random.choice((0, 0, 1, 1, 3, 8)))
        put = random.choice(
            (
                "",
                random.choice(SIGNS),
                f" {random.choice(WORDS)} ",
                text[at:to].swapcase(),
                text[at:to].translate(ALIKE),
                chr(random.randrange(32, 127)),
            )
        )
        text = text[:at] + put + text[to:]
    return text


def disagreements(config: GrammarConfig, count: int) -> tuple[list[str], int]:
    """Texts that parser and oracle read differently, and how many of ``count`` are orders.

    A third of the texts are as generated, the others mutated up to twice.
    """
    random, oracle = Random(count), Oracle(config)
    limits = {Kind.FORWARD: config.max_distance, Kind.TURN: math.radians(config.max_angle)}
    wrong, orders = [], 0
    text = ""
    for i in range(count):
        text = mutated(random, text) if i % 3 else sentence(random, config)
        parsed, meant = parse(text, config), oracle.reads(text)
        if meant and meant[0] in limits and not 0.0 < abs(meant[1]) <= limits[meant[0]] + 1e-9:
            meant = None
        orders += meant is not None
        if parsed.code is not Code.OK:
            same = meant is None and (parsed.kind, parsed.value) == (Kind.NONE, 0.0)
        else:
            kind, value = meant or (Kind.NONE, math.nan)
            same = parsed.kind is kind and math.isclose(parsed.value, value, abs_tol=1e-12)
        if not same:
            wrong.append(text)
    return wrong, orders


@pytest.mark.parametrize("config", [WIDE, OTHER_WORDS], ids=["navila", "other words"])
def test_texts_move_the_robot_exactly_as_the_grammar_says(config: GrammarConfig) -> None:
    """120,000 in all, against a second reader."""
    wrong, orders = disagreements(config, 60_000)
    assert wrong == []
    assert 3_000 < orders < 30_000  # neither side of the border is empty


def test_a_looser_grammar_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop one of the anchors or objections at a time."""

    def loosened(name: str, pattern: str) -> Any:
        changed = copy(grammar._compiled(WIDE))
        setattr(changed, name, re.compile(pattern, grammar._FLAGS))
        return lambda config: changed

    start = grammar._compiled(WIDE).marker.pattern
    mutations = {
        "_TAIL": re.compile(""),  # words after the action
        "_NEGATION": re.compile("(?!)"),
        "_CONDITION": re.compile("(?!)"),
        "_FLAGS": re.IGNORECASE,  # look-alike letters; takes effect on what is compiled anew
        "_compiled": loosened("marker", start[start.index("[^") :]),  # in the middle of a clause
        "_objection": lambda *_: None,
    }
    for name, mutation in mutations.items():
        with monkeypatch.context() as patch:
            patch.setattr(grammar, name, mutation)
            if name == "_FLAGS":
                patch.setattr(grammar, "_compiled", grammar._Grammar)
            assert disagreements(WIDE, 6_000)[0], name


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
