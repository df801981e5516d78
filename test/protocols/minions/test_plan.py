"""Plans, reductions, chunkers, and replies read as JSON."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.chat.structured import MAX_DEPTH
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import (
    MAX_SAMPLES,
    Fault,
    Job,
    JobList,
    JobManifest,
    JobOutput,
)
from collab_llm_nodes.protocols.minions.plan import (
    RULES,
    Plan,
    Reduction,
    jobs_of,
    number,
    read_plan,
)
from collab_llm_nodes.protocols.minions.reading import (
    as_text,
    decision,
    find_object,
    find_program,
    worker_output,
)


def _read(fields: object, *, reduce: bool = True) -> Plan | Fault:
    return read_plan(json.dumps(fields), tuple(CHUNKERS), reduce=reduce)


def test_a_plan_in_full() -> None:
    plan = _read(
        {
            "tasks": ["Extract a.", {"task": "Extract b.", "advice": "Look for it."}],
            "over": "answered",
            "chunker": "chunk_by_section",
            "size": 500,
            "samples": 2,
            "reduce": {"rule": "ratio", "tasks": [2, 1]},
        }
    )
    assert plan == Plan(
        (("Extract a.", ""), ("Extract b.", "Look for it.")),
        "chunk_by_section",
        500,
        2,
        True,
        Reduction("ratio", ("Extract b.", "Extract a.")),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tasks": []},
        {"tasks": "Extract"},
        {"tasks": [""]},
        {"tasks": [1]},
        {"tasks": [{"task": "a", "code": "b"}]},
        {"tasks": [{"advice": "a"}]},
        {"tasks": ["a"] * 65},
        {"tasks": ["a" * 100_000]},
        {"tasks": ["a"], "run": "import os"},
        {"tasks": ["a"], "chunker": "__import__"},
        {"tasks": ["a"], "chunker": ["chunk_by_page"]},
        {"tasks": ["a"], "over": "/etc/passwd"},
        {"tasks": ["a"], "over": ["documents"]},
        {"tasks": ["a"], "size": -1},
        {"tasks": ["a"], "size": 10**12},
        {"tasks": ["a"], "size": "10"},
        {"tasks": ["a"], "size": True},
        {"tasks": ["a"], "samples": 0},
        {"tasks": ["a"], "samples": 65},
        {"tasks": ["a"], "samples": 10**6},
        {"tasks": ["a"], "reduce": "sum"},
        {"tasks": ["a"], "reduce": {"rule": "eval", "tasks": [1]}},
        {"tasks": ["a"], "reduce": {"rule": ["sum"], "tasks": [1]}},
        {"tasks": ["a"], "reduce": {"rule": "sum", "tasks": [2]}},
        {"tasks": ["a"], "reduce": {"rule": "ratio", "tasks": [1]}},
        {"tasks": ["a"], "reduce": {"rule": "sum", "tasks": [[1]]}},
    ],
)
def test_anything_else_is_no_plan(fields: object) -> None:
    assert _read(fields) is Fault.NOT_A_PLAN


def test_a_plan_may_reduce_only_where_that_is_on() -> None:
    fields = {"tasks": ["a"], "reduce": {"rule": "sum"}}
    assert isinstance(_read(fields), Plan)
    assert _read(fields, reduce=False) is Fault.NOT_A_PLAN


def test_a_plan_does_each_task_over_each_chunk() -> None:
    plan = Plan((("a", "x"), ("b", "")), "chunk_by_page", samples=3)
    wanted = jobs_of(plan, ["one\ftwo", "three"], (), chunk_size=0, max_jobs=99)
    assert isinstance(wanted, JobList)
    assert [(job.chunk, job.task, job.times) for job in wanted.jobs] == [
        (chunk, task, 3) for chunk in ("one", "two", "three") for task in ("a", "b")
    ]


def test_a_plan_makes_no_more_jobs_than_it_may() -> None:
    plan = Plan((("a", ""), ("b", "")), "chunk_by_page")
    wanted = jobs_of(plan, ["1\f2\f3"], (), chunk_size=0, max_jobs=3)
    assert isinstance(wanted, JobList)
    assert (len(wanted.jobs), wanted.left_out) == (3, 3)


def test_a_plan_without_text_has_no_jobs() -> None:
    plan = Plan((("a", ""),), "chunk_by_page", answered=True)
    assert jobs_of(plan, ["one"], (), chunk_size=0, max_jobs=99) is Fault.NO_JOBS


# ---------------------------------------------------------------- reductions


def _job(task: str, chunk: int, answer: str | None, sample: int = 0) -> Job:
    manifest = JobManifest("text", task, "", chunk, 1, sample)
    return Job(manifest, JobOutput(answer=answer))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("sum", 36.0), ("count", 3.0), ("max", 20.0), ("ratio", 5.0), ("diff", 8.0)],
)
def test_reductions(rule: str, expected: float) -> None:
    jobs = [_job("a", 1, "10 kg"), _job("a", 2, "6 kg"), _job("a", 3, "20"), _job("b", 1, "2")]
    tasks = ("a", "b")[: RULES[rule].tasks]
    assert Reduction(rule, tasks).of(jobs) == expected


def test_more_samples_than_are_taken_are_left_out() -> None:
    plan = _read({"tasks": ["a"], "samples": MAX_SAMPLES + 1})
    assert isinstance(plan, Plan)
    assert plan.samples == MAX_SAMPLES


def test_samples_count_once_and_the_majority_wins() -> None:
    jobs = [_job("a", 1, answer, i) for i, answer in enumerate(["7", "8", "8"])]
    assert Reduction("sum", ("a",)).of(jobs) == 8
    assert Reduction("count", ("a",)).of(jobs) == 1


@pytest.mark.parametrize("below", ["0", "none", None])
def test_what_cannot_be_computed_is_none(below: str | None) -> None:
    jobs = [_job("a", 1, "1"), _job("b", 1, below)]
    assert Reduction("ratio", ("a", "b")).of(jobs) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("$1,234.5 million", 1234.5), ("-7", -7), ("in 2015", 2015), ("none", None), ("1,2", 1)],
)
def test_numbers(text: str, value: float | None) -> None:
    assert number(text) == value


# ---------------------------------------------------------------- chunkers


@pytest.mark.parametrize("name", CHUNKERS)
@given(text=st.text(alphabet="a #\n\f", max_size=400), size=st.integers(-5, 300))
def test_chunkers_lose_no_word_and_change_no_order(name: str, text: str, size: int) -> None:
    pieces = CHUNKERS[name](text, size)
    assert all(piece.strip() for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_chunk_sizes() -> None:
    text = "# A\n" + "word " * 1000 + "\n# B\nshort\n"
    assert all(len(piece) <= 500 for piece in CHUNKERS["chunk_by_section"](text, 500))
    assert CHUNKERS["chunk_by_section"](text, 500)[-1] == "# B\nshort"
    assert CHUNKERS["chunk_on_multiple_pages"]("1\f2\f3", 2) == ["1\n2", "3"]
    assert CHUNKERS["chunk_by_paragraph"]("a\n\nb\n\n" + "c" * 150, 100)[0] == "a\n\nb"


@pytest.mark.parametrize("name", CHUNKERS)
@pytest.mark.parametrize("text", ["x" * 10**6, "\n" * 10**6, "# \n" * 10**5, "\f" * 10**6])
def test_chunkers_take_linear_time(name: str, text: str) -> None:
    def seconds(document: str) -> float:
        begun = time.process_time()
        CHUNKERS[name](document, 1)
        return time.process_time() - begun

    small = min(seconds(text[: len(text) // 10]) for _ in range(3))
    assert seconds(text) < 40 * small + 0.5


# ---------------------------------------------------------------- replies


@pytest.mark.parametrize("text", ["{}" + " " * 10**6 + "x", "{" + " " * 10**6, "```" * 10**5])
def test_hostile_replies_take_linear_time(text: str) -> None:
    """Half a second at worst; in quadratic time a megabyte takes three quarters of an hour."""
    begun = time.process_time()
    assert find_object(text) is None
    find_program(text)
    assert time.process_time() - begun < 10.0


@pytest.mark.parametrize("text", ["{}", "Nothing: { }\n", "```json\n{\n}\n```\n"])
def test_an_empty_object_is_an_object(text: str) -> None:
    assert find_object(text) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Thinking {about it}.\n```json\n{"a": {"b": 1}}\n```\nDone.', {"a": {"b": 1}}),
        ('{"a": 1} {"a": 2}', {"a": 2}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ("no object", None),
        ("{", None),
        ("[1]", None),
        ("{" * 10**6, None),
        ('"\\' * 10**6, None),
        ('{"a": ' + "9" * 10**5 + "}", {"a": "9" * 10**5}),
    ],
)
def test_objects_in_prose(text: str, expected: object) -> None:
    assert find_object(text) == expected


def test_the_depth_of_objects_is_bounded() -> None:
    found: object = find_object('{"a":' * 10**5)
    depth = 0
    while isinstance(found, dict):
        found, depth = found.get("a"), depth + 1
    assert 0 < depth <= MAX_DEPTH


@given(st.text(alphabet='{}[]",:a1\\\n `', max_size=300))
def test_any_reply_can_be_read(text: str) -> None:
    find_object(text)
    find_program(text)
    decision(text)
    worker_output(text, quotes=True, max_characters=9)
    worker_output(text, quotes=False, max_characters=9)
    read_plan(text, tuple(CHUNKERS), reduce=True)


def test_programs_in_prose() -> None:
    assert (
        find_program("First:\n```python\na = 1\n```\nthen\n```\nb = 2\n```") == "a = 1\n\nb = 2\n"
    )
    assert find_program("a = 1") == "a = 1"


@pytest.mark.parametrize("text", ['{"answer": "\\ud800"}', '{"\\udc00": "\\ud800"}'])
def test_texts_of_models_can_always_be_sent_on(text: str) -> None:
    output = worker_output(text, quotes=True, max_characters=99)
    assert output is not None
    assert output.answer is not None
    assert "\ufffd" in output.answer.encode().decode()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"Date": "on 1 May", "dose": "two a day"}', "Date: on 1 May; dose: two a day"),
        ('{"Date": "on 1 May", "dose": "None"}', "Date: on 1 May"),
        ("{}", None),
        ('{"explanation": "The text is about something else.", "answer": null}', None),
        ('{"explanation": "It says so.", "answer": "1 May"}', "1 May"),
    ],
)
def test_quotes_for_keywords(text: str, answer: str | None) -> None:
    output = worker_output(text, quotes=True, max_characters=99)
    assert output is not None
    assert output.answer == answer


@pytest.mark.parametrize("nothing", [None, "", " ", "None", "null", "N/A", {}, ["none"]])
def test_an_abstention_is_no_text(nothing: object) -> None:
    assert as_text(nothing) is None


def test_lists_and_numbers_in_a_workers_answer() -> None:
    text = '{"explanation": "x", "citation": ["a", "None", "b"], "answer": 42}'
    expected = JobOutput("x", "a; b", "42")
    assert worker_output(text, quotes=False, max_characters=99) == expected
