"""The action grammar: what it contains moves the robot, whatever else is said does not."""

from __future__ import annotations

import json
import math
import re
import time
from copy import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from adversarial import ACTIONS as ACTIONS_SAID
from adversarial import FAMILIES, adversarial, disguised, filled, placed
from grammar_oracle import Oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot import grammar, observations
from collab_llm_nodes.robot.grammar import (
    Code,
    GrammarConfig,
    Kind,
    StreamingParser,
    parse,
)
from collab_llm_nodes.robot.prompt import user_text

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True)
WIDE = GrammarConfig(max_distance=10.0, max_angle=180.0, reason="lenient")
PLAIN = GrammarConfig(max_distance=10.0, max_angle=180.0, things=("blue unicorn", "path"))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("the next action is move forward 75 cm.", Kind.FORWARD, 0.75),
        ("The next action is turn left 30 degree.", Kind.TURN, math.radians(30)),
        ("The next action is turn right 45 degrees", Kind.TURN, -math.radians(45)),
        ("the next action is stop.", Kind.STOP, 0.0),
        ("the red ball is far left. the next action is turn left 15 degree.", Kind.TURN, 0.2617994),
        ("it is not in view, so the next action is turn left 45 deg.", Kind.TURN, 0.7853982),
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


def test_a_lenient_reason_may_say_anything_not_known_to_speak_against_the_action() -> None:
    for text in (
        "i am close enough to stop. the next action is stop.",
        "so far. next action is stop",
    ):
        assert parse(text).code is Code.AMBIGUOUS
        assert parse(text, WIDE).kind is Kind.STOP


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


PIECES = (
    *(
        "\n",
        " ",
        ".",
        ". ",
        "so, ",
        "so ",
        "the next ",
        "the next action is ",
        "move forward ",
        "9",
    ),
    *(
        "9 ",
        "9.",
        "by ",
        "rotate ",
        "turn left 3",
        "turn left 30 degree ",
        "stop ",
        "not ",
        "'",
        '"',
    ),
    *(
        "if ",
        "the ball is ",
        "the ball is ahead. ",
        "on ",
        "a ",
        "i see ",
        "no ",
        "and ",
        "on and ",
        "it's ",
    ),
    *(
        "ball ",
        "2 m ",
        "stop sign ",
        "some way ",
        "there is ",
        "[",
        "{",
        '{"action":',
        "\\",
        "\u0436",
    ),
)
FRAMES = (
    "{}",
    "{}. the next action is stop.",
    "the next action is{}stop",
    "the next action is turn left{}30 degree",
    "the next action is turn left 30{}degree",
    "the next action is stop{}x",
    "turn left 30 degree{}",
    "rotate{}",
    "```{}",
    "```json{}```",
    '{{"action": "stop", "reason": "{}"}}',
    '{{"action": {}',
)


def effort(read: Any, size: int) -> float:
    """CPU time [s]."""
    before = time.process_time()
    read(size)
    return time.process_time() - before


def assert_linear(read: Any, what: str, size: int = 1_000) -> None:
    """Three doublings take less than 20 times as long; a quadratic reading takes 64 times.

    What else the machine does only adds to a time, so the best of several tries counts.
    """
    for _ in range(10):
        short = effort(read, size)
        if effort(read, 8 * size) < 20 * short + 0.005:
            return
    raise AssertionError(what)


@pytest.mark.parametrize("words", ["its own", "configured"])
def test_reading_takes_time_in_proportion_to_the_text(words: str) -> None:
    config = GrammarConfig()
    if words == "configured":
        things = tuple("a" * n for n in range(1, 100))
        config = replace(OTHER_WORDS, reason="plain", stop=("stop here",), things=things)
    config = replace(config, max_characters=100_000, json=True)
    for frame in FRAMES:
        for piece in PIECES:

            def read(size: int) -> None:
                filled = piece * (size // len(piece))  # noqa: B023
                parse(frame.format(filled), config)  # noqa: B023

            assert_linear(read, f"{frame!r} of {piece!r}")


@pytest.mark.parametrize("piece", [". ", "the next action is ", "!", "the next action is 0.", " "])
def test_a_stream_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """However small the pieces in which it comes."""

    def read(size: int) -> None:
        parser = StreamingParser(GrammarConfig(max_characters=100_000))
        for character in piece * (size // len(piece)):
            parser.push(character)

    assert_linear(read, piece, 2_000)


def test_a_text_that_is_too_long_is_not_read_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_compiled", None)
    monkeypatch.setattr(grammar, "_parse_json", None)
    for text in ("```" + " " * 4_000, "{" * 4_000, " " * 4_000):
        assert parse(text, GrammarConfig(json=True)).code is Code.UNREADABLE


ACTIONS = st.one_of(
    st.just("stop"),
    st.integers(1, 75).map(lambda n: f"move forward {n} cm"),
    st.tuples(st.sampled_from(["left", "right"]), st.integers(1, 45)).map(
        lambda t: f"turn {t[0]} {t[1]} degree"
    ),
)


@given(
    ACTIONS, st.sampled_from(["{}", "{}.", "the next action is {}.", "I see it. Next action is {}"])
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
    reason="lenient",
)
"""Another way of speaking: numbers in the middle, markers with a colon."""

PARTS = {
    WIDE: (
        ["the next action is", "next action is", "The next action is to:", "so, next action is"],
        ["move forward {} cm", "moving forward by {} m", "turn left {} degree", "stop", "STOP"],
    ),
    PLAIN: (
        ["the next action is", "so the next action is", "Next action is:"],
        ["move forward {} cm", "turn left {} degree", "turn right {} degree", "stop"],
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
OBSERVATIONS = (
    "the red ball is on the far left, near",
    "I can see a blue unicorn 2.5 m ahead",
    "there are two boxes in front of me and a cone on the right",
    "i don\u2019t see the ball",
    "i cannot see it, i keep looking to the left",
    "no red ball in sight",
    "no cone is visible on the left",
    "there is no box in view",
    "it's not in my view, so i search to the right",
    "some way off and straight ahead there is the box",
    "the floor is visible and the box is on the path",
    "on the left stands the ball; it is very close!",
    "i am next to the stop sign",
)
NEARLY = (
    "the ball is not on the left",
    "no ball",
    "look to the left",
    "i see no",
    "is the ball ahead",
    "the ball ahead",
    "see the ball",
    "on the left",
    "there is no ball",
    "there is no box on the left",
    "the box is not near",
    "it is not the red cone",
    "no red ball ahead",
    "i do see the ball",
    "the ball is ahead, exit the room",
    "the door is safe",
    "if the ball is visible",
    "i see a sign:",
    "i cannot see the floor",
    "there is no road in view",
    "i am off the path",
)
REASONS_OF = {PLAIN: OBSERVATIONS * 2 + NEARLY + REASONS}
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
    "no",
    "i",
    "see",
    "is",
    "are",
    "there",
    "in view",
    "on",
    "ball",
    "unicorn",
    "some way",
    "2 m",
    ",",
]
ALIKE = str.maketrans("sk5 ", "\u017f\u212a\u0665\u2009")
"""A long s and a Kelvin sign, which lower-case to Latin letters; a digit; a space."""


def sentence(random: Random, config: GrammarConfig) -> str:
    """A text near the grammar: often in it, often just outside."""
    markers, orders = PARTS[config]
    pieces = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.5:
            pieces.append(random.choice(REASONS_OF.get(config, REASONS)) + random.choice(SIGNS))
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


@pytest.mark.parametrize("config", [PLAIN, WIDE, OTHER_WORDS], ids=["plain", "lenient", "other"])
def test_texts_move_the_robot_exactly_as_the_grammar_says(config: GrammarConfig) -> None:
    """120,000 in all, against a second reader."""
    wrong, orders = disagreements(config, 40_000)
    assert wrong == []
    assert 2_000 < orders < 20_000  # neither side of the border is empty


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    "said",
    [
        "if the door is open.",
        "Only when it is safe.",
        "Provided the door is open,",
        "It is not true:",
        "Under no circumstances:",
        "do not do this:",
        "dont move forward.",
        "nobody should move.",
        "moving forward is dangerous.",
        "wait 10 seconds, then",
        "stand still.",
        "drive backwards.",
        "He said:",
        "turn to the left.",
        "\u043d\u0435 \u0434\u0432\u0438\u0433\u0430\u0439\u0441\u044f.",
    ],
)
def test_what_once_moved_the_robot_does_not(said: str, place: int) -> None:
    seen = ("", "the red ball is ahead. ", "the red ball is ahead, ")[place]
    for action in ("move forward 75 cm", "turn right 45 degree", "stop"):
        assert parse(f"{seen}{said} the next action is {action}.").kind is Kind.NONE
        content = json.dumps({"reason": seen + said, "action": action}, ensure_ascii=False)
        assert parse(content, GrammarConfig(json=True)).kind is Kind.NONE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_objection_is_heard_in_every_place(family: str) -> None:
    random = Random(family)
    for template in FAMILIES[family]:
        for _ in range(60):
            text = placed(random, filled(random, template))
            assert parse(text, GrammarConfig(json=True)).kind is Kind.NONE, text


def test_a_hundred_thousand_adversarial_texts_move_nothing() -> None:
    config = GrammarConfig(json=True)
    moved = [t for t in adversarial(100_000) if parse(t, config).kind is not Kind.NONE]
    assert moved == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stream_acts_behind_an_objection(family: str) -> None:
    random = Random(family)
    for template in FAMILIES[family]:
        said = disguised(random, filled(random, template))
        text = f"{said}. the next action is {random.choice(ACTIONS_SAID)}. the ball is ahead."
        assert stream(text, random.randint(1, 9))[0] == [], text


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_plain_observations_stand_beside_an_action(observation: str) -> None:
    turn = "turn right 45 degree" if "right" in observation else "turn left 15 degree"
    order = f"the next action is {turn}."
    config = GrammarConfig(things=("blue unicorn", "path"))
    for text in (f"{observation}. {order}", f"{observation.upper()}, so {order}"):
        assert parse(text, config).code is Code.OK, text


def test_the_cause_of_a_refusal_is_named() -> None:
    parsed = parse("the ball is ahead. the blorp is near. the next action is stop.")
    assert parsed.text[slice(*parsed.span)] == "blorp"
    assert parsed.reason == "'blorp' is no plain observation"
    named = GrammarConfig(things=("blorp",))
    assert parse(parsed.text, named).kind is Kind.STOP


def test_a_search_goes_where_the_robot_turns() -> None:
    for verb in ("i look", "i search", "i keep looking"):
        told = f"{verb} to the left. the next action is turn {{}} 45 degree."
        assert parse(told.format("left")).kind is Kind.TURN
        assert parse(told.format("right")).kind is Kind.NONE


def test_a_reason_that_names_one_side_goes_with_no_turn_to_the_other() -> None:
    for reason in ("the target is on the left, so", "a box is on the left. it is near."):
        assert parse(f"{reason} the next action is turn left 30 degree.").kind is Kind.TURN
        assert parse(f"{reason} the next action is move forward 25 cm.").kind is Kind.FORWARD
        assert parse(f"{reason} the next action is turn right 30 degree.").code is Code.AMBIGUOUS
    both = "i see a box on the left and a ball on the right, so"
    assert parse(f"{both} the next action is turn right 30 degree.").kind is Kind.TURN


@pytest.mark.parametrize(
    "reason",
    [
        "I see a sign:",
        "There is a sign:",
        "I see on the poster:",
        "There is on the paper:",
        "It is not visible:",
        "I see no floor ahead.",
        "There is no floor in view,",
        "I do not see the floor.",
        "I don't see the road.",
        "I cannot see the bridge.",
        "The floor is not visible.",
        "I'm off the floor.",
        "I am on the edge.",
        "I see stairs.",
        "A person is right in front of me,",
        "There is a child 5 cm in front of me.",
        "I see a red light.",
    ],
)
def test_reasons_that_speak_against_every_motion(reason: str) -> None:
    for action in ACTIONS_SAID:
        text = f"{reason} the next action is {action}."
        assert parse(text).kind is Kind.NONE
        assert parse(text, GrammarConfig(things=("way", "ground"))).kind is Kind.NONE


def test_the_ground_may_be_seen_but_not_missed() -> None:
    config = GrammarConfig(things=("path", "way"))
    order = "the next action is move forward 75 cm."
    assert parse(f"the ball is on the path. {order}", config).kind is Kind.FORWARD
    for reason in ("no path in view", "i see no way", "i am off the path"):
        assert parse(f"{reason}. {order}", config).kind is Kind.NONE


@pytest.mark.parametrize(
    "things",
    [
        ("",),
        ("do not",),
        ("if",),
        ("go",),
        ("turn",),
        ("a.*",),
        ("b-c",),
        ("\u0430",),
        ("x",) * 1001,
    ],
)
def test_things_that_are_none_are_refused(things: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="things"):
        GrammarConfig(things=things)


def test_looser_observations_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    anything = re.compile("(?s).*")
    own = observations._CLAUSE.pattern
    mutations = {
        "any form": ("_CLAUSE", anything),
        "places of any form": ("_PLACE", anything),
        "any sign": ("_FIXED", {**observations._FIXED, "other": ""}),
        "a search or turn elsewhere": ("_SIDES", frozenset()),
        "ground out of sight": ("_GROUND", frozenset()),
        "negation of anything": ("_CLAUSE", re.compile(own.replace("V(?:", "[DTOpRV](?:"))),
        "any subject": ("_CLAUSE", re.compile(own.replace("(?!b)", "").replace("D{0,2}", "D*"))),
        "no rule": ("_objection", lambda *_: None),
    }
    for name, (attribute, mutation) in mutations.items():
        with monkeypatch.context() as patch:
            patch.setattr(observations, attribute, mutation)
            assert disagreements(PLAIN, 6_000)[0], name


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
