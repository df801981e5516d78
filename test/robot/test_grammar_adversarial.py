"""The action grammar against an independent reading of random texts."""

from __future__ import annotations

import json
import math
import re
from copy import copy
from random import Random
from typing import Any

import pytest
from adversarial import ACTIONS as ACTIONS_SAID
from adversarial import FAMILIES, adversarial, disguised, filled, placed
from grammar_oracle import Oracle
from grammar_texts import ACTIONS, OBSERVATIONS, OTHER_WORDS, PLAIN, WIDE, mutated, sentence, stream
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot import grammar, observations
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, Kind, parse


@given(
    ACTIONS, st.sampled_from(["{}", "{}.", "the next action is {}.", "I see it. Next action is {}"])
)
def test_round_trip(action: str, frame: str) -> None:
    parsed = parse(frame.format(action))
    assert parsed.code is Code.OK
    assert parsed.phrase == action
    assert parse(parsed.phrase).value == pytest.approx(parsed.value)


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


def found_out(config: GrammarConfig) -> bool:
    """Return True if parser and oracle disagree; more texts are read only if fewer show nothing."""
    return any(disagreements(config, count)[0] for count in (2_000, 6_000, 20_000))


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


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_adversarial_texts_move_nothing(count: int) -> None:
    config = GrammarConfig(json=True)
    moved = [t for t in adversarial(count) if parse(t, config).kind is not Kind.NONE]
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
    token, quality = observations._TOKEN.pattern, observations._QUALITY
    mutations = {
        "any form": ("_CLAUSE", anything),
        "places of any form": ("_PLACE", anything),
        "any sign": ("_FIXED", {**observations._FIXED, "other": ""}),
        "a search or turn elsewhere": ("_SIDES", frozenset()),
        "ground out of sight": ("_GROUND", frozenset()),
        "negation of anything": ("_CLAUSE", re.compile(own.replace("V(?:", "[DTOpRV](?:"))),
        "any subject": ("_CLAUSE", re.compile(own.replace("(?!b)", "").replace("D{0,2}", "D*"))),
        "any words joined": ("_TOKEN", re.compile(token.replace(quality, "[a-z]+"), re.I)),
        "no rule": ("_objection", lambda *_: None),
    }
    for name, (attribute, mutation) in mutations.items():
        with monkeypatch.context() as patch:
            patch.setattr(observations, attribute, mutation)
            assert found_out(PLAIN), name


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
        "_FLAGS": re.IGNORECASE,  # look-alike letters; takes effect on what is compiled again
        "_compiled": loosened("marker", f"(?P<end>){start[start.index('[^') :]}"),  # anywhere
        "_objection": lambda *_: None,
    }
    for name, mutation in mutations.items():
        with monkeypatch.context() as patch:
            patch.setattr(grammar, name, mutation)
            if name == "_FLAGS":
                patch.setattr(grammar, "_compiled", grammar._Grammar)
            assert found_out(WIDE), name
