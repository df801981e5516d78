"""The action grammar: what it contains moves the robot, whatever else is said does not."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from grammar_texts import OTHER_WORDS, WIDE

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot import grammar
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, Kind, actions_pattern, parse


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("the next action is move forward 75 cm.", Kind.FORWARD, 0.75),
        ("The next action is turn left 30 degree.", Kind.TURN, math.radians(30)),
        ("The next action is turn right 45 degrees", Kind.TURN, -math.radians(45)),
        ("the next action is stop.", Kind.STOP, 0.0),
        ("the red ball is far left. the next action is turn left 15 degree.", Kind.TURN, 0.2617994),
        ("The sign is red and white, the next action is stop.", Kind.STOP, 0.0),
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


@pytest.mark.parametrize(
    "config",
    [
        GrammarConfig(),
        GrammarConfig(max_distance=10.0, max_angle=180.0, markers=("action:", "i will")),
        GrammarConfig(max_distance=0.01, max_angle=9.5, stop=("halt here", "stop")),
        GrammarConfig(max_distance=2.19, max_angle=100.0, left=("rotate {angle} leftwards",)),
    ],
    ids=["default", "widest", "narrowest", "other phrases"],
)
def test_the_pattern_of_actions_holds_what_is_read_and_no_other_number(
    config: GrammarConfig,
) -> None:
    pattern = re.compile(actions_pattern(config))
    marker = config.markers[0].capitalize()
    for number in range(1100):
        for slots in (config.forward, config.left, config.right):
            for slot, unit in (("{distance}", "cm"), ("{angle}", "degree")):
                for phrase in (p.replace(slot, f"{number} {unit}") for p in slots if slot in p):
                    text = f"{marker} {phrase}."
                    readable = parse(text, config).code is Code.OK
                    assert (pattern.fullmatch(text) is not None) == readable, text
    for phrase in config.stop:
        text = f"{marker} {phrase}."
        assert pattern.fullmatch(text)
        assert parse(text, config).kind is Kind.STOP
    assert not pattern.fullmatch(f"{marker} stop")
    assert not pattern.fullmatch(f"{marker} {config.forward[0].replace('{distance}', '05 cm')}.")
