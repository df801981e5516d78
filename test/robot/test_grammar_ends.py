"""Answers that end the task without a motion: "give up" and "reply"."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from adversarial import FAMILIES, adversarial, disguised, filled
from grammar_texts import OTHER_WORDS, WIDE, mutated, stream

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.grammar import (
    Code,
    GrammarConfig,
    Kind,
    StreamingParser,
    actions_pattern,
    parse,
)

CONFIGS = (GrammarConfig(), WIDE, OTHER_WORDS, GrammarConfig(json=True))
FREE = (
    "",
    "yes, a red ball is on the left",
    "i do not know what a chair is",
    "if you mean the ball: turn left 45 degree, then move forward 75 cm and stop",
    "do not move",
    "you may stop",
    "\u043d\u0435 \u0437\u043d\u0430\u044e!",
    "<think>the next action is move forward 75 cm.</think> no",
    "a cat\x1b[2J\n\n42",
)
"""Texts of a model beside an end: nothing of them moves the robot."""
MARKERS = ("the next action is", "The NEXT  action is to:", "so, next action is")
ENDS = ("give up", "Give  Up", "reply", "REPLY", "give\nup", '"reply"', "reply!", "give up.*")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("give up", Kind.GIVE_UP, ""),
        ("the next action is give up.", Kind.GIVE_UP, ""),
        ("the red ball is not here. the next action is give up.", Kind.GIVE_UP, None),
        ("i do not know what a chair is. the next action is reply.", Kind.REPLY, None),
        ("Which ball?\nThe next action is to: reply", Kind.REPLY, "Which ball?"),
        ("Two, so the next action is reply.", Kind.REPLY, "Two"),
        ("hm; you could turn left 30 degree. next action is reply.", Kind.REPLY, None),
        ("<think>stop?</think> No. The next action is reply.", Kind.REPLY, "No."),
    ],
)
def test_the_words_beside_an_end_are_free_and_kept(
    text: str, kind: Kind, words: str | None
) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.value, parsed.code) == (kind, 0.0, Code.OK)
    assert parsed.words == (f"{text.split('. ')[0]}." if words is None else words)
    assert re.fullmatch(r"(?i)give up|reply", text[slice(*parsed.span)])


def test_every_action_keeps_its_words() -> None:
    assert parse("the ball is near. the next action is stop.").words == "the ball is near."
    refused = parse("the blorp is near. the next action is stop.")
    assert (refused.code, refused.words) == (Code.AMBIGUOUS, "")


def test_the_reply_of_an_object_is_its_reason() -> None:
    config = GrammarConfig(json=True)
    parsed = parse('{"reason": "two, I think", "action": "reply"}', config)
    assert (parsed.kind, parsed.words) == (Kind.REPLY, "two, I think")
    assert parse('{"action": "reply"}', config).code is Code.EMPTY


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("reply", Code.EMPTY),
        ("the next action is reply.", Code.EMPTY),
        ("... so the next action is reply.", Code.EMPTY),
        ("yes. reply.", Code.AMBIGUOUS),
        ("i give up", Code.AMBIGUOUS),
        ("i believe the next action is reply", Code.AMBIGUOUS),
        ("the next action is give up the search", Code.AMBIGUOUS),
        ("yes. the next action is reply. ok?", Code.AMBIGUOUS),
        ("yes. the next action is replying", Code.UNREADABLE),
        ("yes. the next action is not reply", Code.NEGATED),
        ("do not give up", Code.NEGATED),
        ("no. the next action is reply or stop", Code.CONTRADICTORY),
        ("the next action is stop. the next action is reply.", Code.CONTRADICTORY),
        ("the next action is move forward 25 cm. the next action is give up.", Code.CONTRADICTORY),
        ("i give up. the next action is move forward 25 cm.", Code.CONTRADICTORY),
        ("i reply: go on. the next action is turn left 30 degree.", Code.CONTRADICTORY),
    ],
)
def test_an_end_is_anchored_like_every_action(text: str, code: Code) -> None:
    for config in (GrammarConfig(), WIDE):
        parsed = parse(text, config)
        assert (parsed.kind, parsed.code) == (Kind.NONE, code)


def test_no_text_that_ends_in_an_end_moves_the_robot() -> None:
    """Spellings of the end, signs around it, free words before it, changed letters."""
    random, ended = Random(5), 0
    for _ in range(6_000):
        action = random.choice(ENDS)
        said = f"{random.choice(FREE)}{random.choice(('. ', ', ', ' ', chr(10)))}"
        text = f"{said}{random.choice(MARKERS)} {action}."
        if random.random() < 0.2:
            text = json.dumps({"reason": said, "action": action.lower()})
        elif random.random() < 0.5:
            text = mutated(random, text)
        for config in CONFIGS:
            parsed = parse(text, config)
            # Changed letters may cut the end off, never make a motion of what is left.
            assert not parsed.kind.moves, text
            ended += parsed.kind in (Kind.GIVE_UP, Kind.REPLY)
    assert ended > 5_000


@pytest.mark.parametrize("family", FAMILIES)
def test_an_objection_beside_an_end_moves_nothing(family: str) -> None:
    random = Random(family)
    for template in FAMILIES[family]:
        said = disguised(random, filled(random, template))
        for action in ("give up", "reply"):
            text = f"{said}. the next action is {action}."
            for config in CONFIGS:
                assert not parse(text, config).kind.moves, text
            for prefix in stream(text, random.randint(1, 9))[0]:
                assert not parse(prefix).kind.moves, text


def test_adversarial_texts_with_an_end_after_them_move_nothing() -> None:
    for text in adversarial(1_000):
        for action in ("give up", "reply"):
            assert not parse(f"{text} the next action is {action}.").kind.moves, text


def test_a_stream_that_ends_otherwise_takes_its_motion_back() -> None:
    parser = StreamingParser()
    early = parser.push("the next action is move forward 25 cm.")
    assert early is not None
    assert early.kind is Kind.FORWARD
    parser.push(" the next action is reply.")
    assert parser.finish().code is Code.CONTRADICTORY


def test_a_guided_answer_may_give_up_but_has_no_words_to_reply_with() -> None:
    pattern = re.compile(actions_pattern())
    assert pattern.fullmatch("The next action is give up.")
    assert not pattern.fullmatch("The next action is reply.")


def test_other_phrases_can_end_the_task() -> None:
    config = from_mapping(GrammarConfig, {"give_up": ["it is lost"], "reply": ["answer"]})
    assert parse("the next action is it is lost.", config).kind is Kind.GIVE_UP
    assert parse("no. the next action is answer.", config).kind is Kind.REPLY
    assert parse("the next action is give up.", config).code is Code.UNREADABLE
    with pytest.raises(ConfigError, match="stop"):
        GrammarConfig(stop=("stop", "give up"))
