"""Guides: what they allow, what they force, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from collab_llm_lab.random_models import random_tokenizer
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models import guided_text
from collab_llm_nodes.models.guide import MAX_GUIDE_BYTES, Guide
from collab_llm_nodes.models.guided_text import GuidedText, Guides
from collab_llm_nodes.models.tokenizer import train_text_tokenizer
from collab_llm_nodes.models.vocabulary import vocabulary_size

TOKENIZER = random_tokenizer()
SIZE = vocabulary_size(TOKENIZER)
EOS = TOKENIZER.eos_token_id
ACTIONS = Guide("regex", r"the next action is (move forward [1-9][0-9] cm|stop)\.")
PERSON = Guide(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
            "required": ["name", "old"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(TOKENIZER, SIZE, {EOS}, TOKENIZER.all_special_ids)


def spelt(tokens: Sequence[int], tokenizer: Any = TOKENIZER) -> str:
    """Return the text of ``tokens``."""
    return str(tokenizer.decode([*tokens], skip_special_tokens=True))


def walk(text: GuidedText, seed: int, most: int = 200) -> list[int]:
    """Return an answer of tokens drawn evenly from those allowed, with its end token."""
    rng = np.random.default_rng(seed)
    answer: list[int] = []
    while len(answer) < most and (not answer or answer[-1] != EOS):
        answer.append(int(rng.choice(np.flatnonzero(text.allowed(answer)))))
    return answer


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_a_text_of_the_regular_expression(guides: Guides, seed: int) -> None:
    answer = walk(guides.open(ACTIONS), seed)
    assert answer[-1] == EOS
    assert re.fullmatch(ACTIONS.source, spelt(answer[:-1]))


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_an_object_of_the_schema(guides: Guides, seed: int) -> None:
    answer = walk(guides.open(PERSON), seed)
    text = spelt(answer[:-1])
    found = json.loads(text.replace("\N{REPLACEMENT CHARACTER}", "x"))
    assert sorted(found) == ["name", "old"]
    assert isinstance(found["old"], bool)


def test_a_choice_is_one_of_its_lines(guides: Guides) -> None:
    lines = ["turn left", "turn (right)", "C:\\a.b*|#~-&/"]
    seen = {
        spelt(walk(guides.open(Guide("choice", "\n".join(lines))), seed)[:-1]) for seed in range(30)
    }
    assert seen == set(lines)


def test_the_end_is_allowed_exactly_where_the_guide_may_end(guides: Guides) -> None:
    text = guides.open(Guide("regex", "(ab)+"))
    answer: list[int] = []
    for token in TOKENIZER("ababab", add_special_tokens=False)["input_ids"]:
        complete = re.fullmatch("(ab)+", spelt(answer)) is not None
        assert text.allowed(answer)[EOS] == complete
        answer.append(token)
    assert text.allowed(answer)[EOS]
    assert text.allows([*answer, EOS])
    assert not text.allows([*answer, answer[0], answer[0], EOS]) or len(answer) == 6


def test_no_control_token_is_allowed_although_a_guide_spells_it(guides: Guides) -> None:
    control = guides.open(Guide("regex", r"a<\|im_start\|>b"))
    with pytest.raises(InvalidInput, match="no text of this model") as refused:
        walk(control, 0)
    assert refused.value.field == "answer.guide"
    anything = guides.open(Guide("regex", "(.|\n)*")).allowed(())
    assert not anything[[i for i in TOKENIZER.all_special_ids if i != EOS]].any()
    assert anything.sum() > SIZE / 2


def test_forced_tokens_are_the_tokenizers_own_and_the_only_ones_allowed(guides: Guides) -> None:
    text = guides.open(ACTIONS)
    forced = text.forced((), 64)
    assert spelt(forced) == "the next action is"
    own = TOKENIZER("the next action is stop.", add_special_tokens=False)["input_ids"]
    assert forced == tuple(own[: len(forced)])
    for i, token in enumerate(forced):
        assert np.flatnonzero(text.allowed(forced[:i])).tolist() == [token]
    assert text.forced((), 2) == forced[:2]
    end = own[: -1 + len(own)]
    assert text.forced(end, 64) == (own[-1], EOS), "the end token is forced, too"
    assert text.forced((*own, EOS), 64) == ()


@pytest.mark.parametrize("guide", [ACTIONS, PERSON], ids=["regex", "json"])
def test_masks_do_not_depend_on_the_order_of_questions(guides: Guides, guide: Guide) -> None:
    rng = np.random.default_rng(3)
    text = guides.open(guide)
    answers = [walk(text, seed)[:-1] for seed in range(6)]
    for _ in range(60):
        answer = answers[rng.integers(len(answers))]
        prefix = answer[: rng.integers(len(answer) + 1)]
        assert np.array_equal(text.allowed(prefix), guides.open(guide).allowed(prefix))


def test_rows_of_a_draft_are_the_masks_up_to_a_token_that_is_not_allowed(guides: Guides) -> None:
    text = guides.open(ACTIONS)
    answer = walk(guides.open(ACTIONS), 1)
    rows = text.rows(answer[:2], answer[2:5])
    for i in range(4):
        assert np.array_equal(rows[i], text.allowed(answer[: 2 + i]))
    wrong = next(t for t in range(SIZE) if not rows[1, t])
    rows = text.rows(answer[:2], [answer[2], wrong, answer[3]])
    assert not rows[1, wrong]
    assert rows[2:].all()


def test_too_much_work_for_one_answer_spoils_no_other(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(initial_lexer_fuel=500_000, max_lexer_states=100)
    monkeypatch.setattr(guided_text, "_LIMITS", limits)
    guide = Guide("regex", r"Q(\p{L}|\p{N}|\w){100}|Z(k|m)")
    text = guides.open(guide)
    heavy, light = (
        TOKENIZER(s, add_special_tokens=False)["input_ids"] for s in ("Qabcdefg" * 40, "Z")
    )
    with pytest.raises(InvalidInput, match="too much work"):
        text.allowed(heavy)
    for other in (text, guides.open(guide)):
        assert other.allowed(light).sum() == 2
        assert other.allows(heavy[:40])


def test_a_tokenizer_that_adds_joiners_spells_the_text_all_the_same() -> None:
    tokenizer = train_text_tokenizer(['one line\nnew "name": 5'] * 3, 300)
    size = vocabulary_size(tokenizer)
    guides = Guides(tokenizer, size, {tokenizer.eos_token_id}, tokenizer.all_special_ids)
    source = 'the line\nnew "name"'
    forced = guides.open(Guide("regex", source)).forced((), 64)
    assert spelt(forced, tokenizer) == source


NESTED: dict[str, object] = {"type": "string"}
for _ in range(200):
    NESTED = {"type": "array", "items": NESTED}

REFUSED = {
    "no text at all": Guide("regex", r"a[^\s\S]"),
    "false": Guide("json", "false"),
    "an empty choice of values": Guide("json", '{"enum": []}'),
    "itself": Guide("json", '{"$ref": "#"}'),
    "contradiction": Guide("json", '{"type": "string", "minLength": 5, "maxLength": 2}'),
    "no JSON": Guide("json", "{"),
    "brackets": Guide("json", "[" * 5000),
    "another site": Guide("json", '{"$ref": "http://localhost/x.json"}'),
    "unknown keyword": Guide("json", '{"not": {"type": "string"}}'),
    "own settings": Guide("json", '{"type": "string", "x-guidance": {"item_separator": "a{9}"}}'),
    "optional repeats": Guide("regex", "(a?){5000}a{5000}"),
    "optional signs": Guide("regex", f"({'a?' * 4000}){'a' * 4000}"),
    "empty alternatives": Guide("regex", "(|a)" * 2500 + "a" * 2500),
    "many patterns": Guide(
        "json",
        json.dumps({"anyOf": [{"pattern": f"(a?){{300}}a{{{300 + i}}}"} for i in range(99)]}),
    ),
    "upper bounds": Guide("regex", "a{0,3000}a{3000}"),
    "optional repeats in a pattern": Guide(
        "json", '{"type":"string","pattern":"(a?){5000}a{5000}"}'
    ),
    "a gigabyte forced": Guide("regex", "((a{1000}){1000}){1000}"),
    "spaces in repeats": Guide("regex", "(?x)((a{ 1000 , }){1000}){ 1000 }"),
    "a parenthesis in a class": Guide("regex", "(a{9999}[(]b){800}"),
    "a parenthesis after a bracket": Guide("regex", "(a{9999}[](]b){800}"),
    "a parenthesis in a comment": Guide("regex", "(?ix:(a{9999}#(\nb){800})"),
    "an escape that looks repeated": Guide("regex", r"(\x{0}{9999}){9999}"),
    "leading zeros": Guide("regex", "(a{0000000009999}){0000000009999}"),
    "braces": Guide("regex", "(" + "{0" * 8000),
    "digits": Guide("regex", "a{" + "0" * 8000 + "1" * 8000),
    "optional": Guide("regex", "((a{9999}){0,1}b{9999}){0,1}"),
    "a gigabyte in a pattern": Guide("json", '{"type":"string","pattern":"((a{9999}){9999}){9}"}'),
    "a gigabyte in length": Guide(
        "json", '{"type":"string","pattern":"^a*$","minLength":1000000000}'
    ),
    "unbalanced": Guide("regex", "(("),
    "look-ahead": Guide("regex", "(?!a)b"),
    "parentheses": Guide("regex", "(" * 8000 + "a" + ")" * 8000),
    "intersections": Guide(
        "json",
        json.dumps({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(12)]}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_guide_that_cannot_be_used_is_refused_at_once(guides: Guides, name: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidInput) as refused:
        guides.open(REFUSED[name]).allowed(())
    assert refused.value.field == "answer.guide"
    assert refused.value.remedy
    assert time.process_time() - begun < 2.0


HEAVY = {
    "automaton of 2 ** 24 states": Guide("regex", "(a|b)*a(a|b){24}"),
    "nested counts": Guide("regex", "(x{0,50}y{0,50}){0,50}"),
    "any text between": Guide("regex", "(.*a){30}"),
    "a long literal": Guide("regex", "a" * MAX_GUIDE_BYTES),
    "many alternatives": Guide("regex", "|".join(f"w{i}" for i in range(2500))),
    "classes": Guide("regex", r"(\p{L}|\p{N}|\w){500}"),
    "deep arrays": Guide("json", json.dumps(NESTED)[:MAX_GUIDE_BYTES]),
    "doubling references": Guide(
        "json",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {
                    f"d{i}": {
                        "type": "array",
                        "prefixItems": 2 * [{"$ref": f"#/$defs/d{i + 1}"}],
                        "minItems": 2,
                        "items": False,
                    }
                    for i in range(30)
                }
                | {"d30": {"const": 1}},
            }
        ),
    ),
    "many properties": Guide(
        "json",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
        ),
    ),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_guide_is_read_within_its_limits_or_refused(guides: Guides, name: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(InvalidInput):
        walk(guides.open(HEAVY[name]), 0, most=50)
    assert time.process_time() - begun < 3.0


@pytest.mark.parametrize(
    ("kind", "source"),
    [("lark", "a"), ("regex", " "), ("json", ""), ("regex", "a" * (MAX_GUIDE_BYTES + 1))],
)
def test_a_guide_without_bounds_or_kind_cannot_be_made(kind: str, source: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Guide(kind, source)
    assert refused.value.field == "answer.guide"


def test_an_identifier_with_many_counted_parts_is_no_flood(guides: Guides) -> None:
    parts = "-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12))
    assert walk(guides.open(Guide("regex", parts)), 0)[-1] == EOS
