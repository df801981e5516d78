"""JSON objects in replies: found, mended, bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.chat.structured import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    last_object,
)

ANSWER = {"decision": "provide_final_answer", "answer": "0.56"}

MENDED: list[tuple[str, dict[str, Any]]] = [
    ("{'answer': 'yes', \"n\": 1}", {"answer": "yes", "n": 1}),
    ('{"answer": "yes",}', {"answer": "yes"}),
    ("{answer: yes}", {"answer": "yes"}),
    ('{"answer": None, "ok": True, "no": false}', {"answer": None, "ok": True, "no": False}),
    ('{"answer": "two\nlines"}', {"answer": "two\nlines"}),
    ('{"answer": "he said "yes" and left"}', {"answer": 'he said "yes" and left'}),
    ('{"answer": "so "a", then b", "n": 2}', {"answer": 'so "a", then b', "n": 2}),
    ('{"answer": 1,234, "n": 2}', {"answer": "1,234", "n": 2}),
    ('{"answer": 5 apples, "n": 2}', {"answer": "5 apples", "n": 2}),
    ('{"answer": "null", # Good format\n "n": 2 // two\n}', {"answer": "null", "n": 2}),
    ("{“answer”: “yes”}", {"answer": "yes"}),
    ('{"a": "cut off', {"a": "cut off"}),
    ('{"a": "x", "b": [1, 2', {"a": "x", "b": [1, 2]}),
    ('{"a": "x", "b": {"c": "d"', {"a": "x", "b": {"c": "d"}}),
    ('{"a": "x", "b"', {"a": "x"}),
    ('{"a": "x", "b":', {"a": "x", "b": ""}),
    ('{"a": "x"\n"b": "y"}', {"a": "x", "b": "y"}),
    ('{"a": "C:\\path\\q"}', {"a": "C:pathq"}),
    ('{"a": [1, [2, "x"], ], }', {"a": [1, [2, "x"]]}),
    ('{"a": ["it "is" so", "b"]}', {"a": ['it "is" so', "b"]}),
    ("{'a': 'it's'}", {"a": "it's"}),
    ('{"a": +.5}', {"a": 0.5}),
]


@pytest.mark.parametrize(("text", "content"), MENDED)
def test_common_errors_are_mended(text: str, content: dict[str, Any]) -> None:
    found = last_object(text)
    assert found is not None
    assert found.content == content
    assert found.mended


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ANSWER),
        f"Let me think {{step by step}}.\n```json\n{json.dumps(ANSWER, indent=2)}\n```\nDone {{}}.",
        f'First: {{"decision": "x"}}\nThen: {json.dumps(ANSWER)}',
        "\\frac{1}{2} " + json.dumps(ANSWER) + " {",
        'Use {"x" as a set} ' + json.dumps(ANSWER),
    ],
)
def test_the_last_object_is_found_among_words(text: str) -> None:
    found = last_object(text)
    assert found is not None
    assert found.content == ANSWER
    assert not found.mended


def test_an_object_without_the_keys_does_not_count() -> None:
    text = json.dumps(ANSWER) + ' and {"note": "ignore"}'
    found = last_object(text, keys=("answer",))
    assert found is not None
    assert found.content == ANSWER


@pytest.mark.parametrize("text", ["", "no", "{", "{}", "{{{{", "{x}", "[1, 2]", '{"a"}', '{"a" 1}'])
def test_text_without_an_object(text: str) -> None:
    assert last_object(text) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100)
@given(st.dictionaries(st.text("abc \"'{}[],:\\\n", min_size=1), JSON, min_size=1), st.booleans())
def test_json_is_read_as_json_reads_it(content: dict[str, Any], ascii_only: bool) -> None:
    found = last_object(f"So: {json.dumps(content, ensure_ascii=ascii_only)} done")
    assert found is not None
    assert found.content == content
    assert not found.mended


@settings(max_examples=300)
@given(st.text("{}[]\"'\\:,ab1 \n#/“”", max_size=60))
def test_any_text_is_read_to_an_end(text: str) -> None:
    found = last_object(text)
    assert found is None or found.content


@settings(max_examples=100)
@given(st.dictionaries(st.text("abc", min_size=1), JSON, min_size=1), st.data())
def test_any_cut_is_read_to_an_end(content: dict[str, Any], data: st.DataObject) -> None:
    whole = json.dumps(content)
    found = last_object(whole[: data.draw(st.integers(0, len(whole)))])
    assert found is None or found.content


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_depth_is_bounded() -> None:
    found = last_object(nested(MAX_DEPTH))
    assert found is not None
    assert not found.mended
    assert last_object(nested(MAX_DEPTH + 1)) is None
    innermost = last_object(nested(100_000))
    assert innermost is not None
    assert json.dumps(innermost.content).count("{") <= MAX_DEPTH
    assert last_object('{"a":' + "[" * 100_000) is None


ATTACKS = [
    "{",
    '"\\',
    '{"',
    '{"a',
    '{"a" ',
    '{"a":',
    '{"a":[',
    '{"a":"',
    '{"a":"b" ',
    '{"a":1,',
    '{"a":1 ,',
    "{a ",
    "{a:",
    "{a:b,",
    "{'",
    "{“",
    "{ ",
    "{\n//",
    "{a//\n",
]


MARKS = ['"', '\\"', "\\", "[", ",", ", ", " ", "\n", '",', '" ,', '"\n', "#", "a,", "'"]


def seconds_for(text: str) -> float:
    begun = time.process_time()
    last_object(text)
    return time.process_time() - begun


@pytest.mark.parametrize("inside", ["", '{"a":"', '{"a":', '{"a":['], ids=["bare", "t", "v", "l"])
@pytest.mark.parametrize("unit", [*ATTACKS, *MARKS])
def test_time_is_linear_in_hostile_text(unit: str, inside: str) -> None:
    """A quarter of a second at worst; reading in quadratic time would take an hour."""
    size = MAX_CHARACTERS // 8
    assert seconds_for((inside + unit * (size // len(unit)))[:size]) < 5.0


@pytest.mark.parametrize("unit", ["{", '"\\', '{"a":"', '{"a" '])
def test_a_hostile_megabyte_takes_seconds(unit: str) -> None:
    assert seconds_for(unit * (MAX_CHARACTERS // len(unit))) < 20.0


def test_longer_text_is_not_read() -> None:
    assert last_object(json.dumps({"a": "x" * MAX_CHARACTERS})) is None
