"""Chunkers: nothing lost, nothing above the limit, linear time; headings as Markdown's peer has."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.chunking import Chunk, ChunkPlan, chunks, sentence_spans, sentences
from collab_llm_nodes.knowledge.documents import Document

KINDS = ("window", "page", "section", "paragraph", "sentence", "code")
TEXTS = st.text(st.sampled_from(list("ab#` ~\n\n\n\f\r\t}")), max_size=300)


def cut(content: str, plan: ChunkPlan) -> list[Chunk]:
    return list(chunks(Document("d", content), plan))


def texts(content: str, **plan: object) -> list[str]:
    return [chunk.text for chunk in cut(content, ChunkPlan(**plan))]  # type: ignore[arg-type]


# --- Every chunker -------------------------------------------------------------------------------


@given(TEXTS, st.sampled_from(KINDS), st.integers(16, 80), st.integers(1, 3))
def test_chunks_hold_the_whole_text_in_order(
    content: str, by: str, characters: int, pages: int
) -> None:
    found = cut(content, ChunkPlan(by=by, characters=characters, pages=pages))
    document, end = Document("d", content), 0
    for chunk in found:
        assert chunk.document == document.id
        assert 0 < len(chunk.text) <= characters
        there = content[chunk.start : chunk.end]
        if by == "sentence":  # blanks are tidied
            assert chunk.text.split() == there.split()
        else:
            assert chunk.text == there
        assert chunk.text == chunk.text.strip()
        assert content[end : chunk.start].isspace() or end == chunk.start
        assert chunk.page == (content.count("\f", 0, chunk.start) + 1 if "\f" in content else 0)
        end = chunk.end
    assert not content[end:].strip()


@given(TEXTS, st.sampled_from(KINDS), st.integers(16, 80))
def test_overlap_repeats_and_nothing_else_changes(content: str, by: str, characters: int) -> None:
    found = cut(content, ChunkPlan(by=by, characters=characters, overlap=characters // 2))
    covered: set[int] = set()
    starts = [chunk.start for chunk in found]
    assert starts == sorted(set(starts))
    for chunk in found:
        assert len(chunk.text) <= characters
        covered.update(range(chunk.start, chunk.end))
    assert all(i in covered or c.isspace() for i, c in enumerate(content))


SIZE = 2_000_000
HOSTILE = {
    "one line": "x" * SIZE,
    "newlines": "\n" * SIZE,
    "headings": "#\n" * (SIZE // 2),
    "hashes": "#" * SIZE,
    "hashes and spaces": "# " * (SIZE // 2),
    "fences": "```\n" * (SIZE // 4),
    "one fence": "```" + "\n" * SIZE,
    "longer and longer fences": "".join("`" * i + "\n" for i in range(3, 2000)),
    "backticks": "`" * SIZE,
    "spaces": " " * SIZE,
    "blank lines": " \n" * (SIZE // 2),
    "a line of spaces": "\n" + " " * SIZE + "x",
    "carriage returns": "\r\n" * (SIZE // 2),
    "page breaks": "\f" * SIZE,
    "closing brackets": "}\n" * (SIZE // 2),
    "indented": "\tx\nx\n" * (SIZE // 5),
    "wrapped": f"{'x' * 60}\n{'y' * 60}\n" * (SIZE // 122),
    "gaps": "x    " * (SIZE // 5),
    "line separators": "x-\u2028 " * (SIZE // 4),
}


@pytest.mark.parametrize("by", KINDS)
def test_time_is_linear_whatever_the_text_is(by: str) -> None:
    """Each of these has cost some chunker quadratic time: 2 MB would take minutes."""
    for name, content in HOSTILE.items():
        begun = time.process_time()
        for _ in chunks(Document(name, content), ChunkPlan(by=by)):
            pass
        assert time.process_time() - begun < 20, name


def test_chunks_are_made_one_at_a_time() -> None:
    """The first of a million is there without the others."""
    found = chunks(Document("d", "#\n" * 1_000_000), ChunkPlan(by="section"))
    assert isinstance(found, Iterator)
    assert next(found).text == "#"


def test_a_plan_that_would_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        ChunkPlan(characters=100, overlap=51)
    with pytest.raises(ConfigError, match="by"):
        ChunkPlan(by="word")


# --- Each of them --------------------------------------------------------------------------------


def test_windows_end_at_a_line_or_a_space() -> None:
    assert texts("one two three four five", characters=16) == ["one two three", "four five"]
    assert texts("first line\nsecond line", characters=16) == ["first line", "second line"]
    assert texts("x" * 40, characters=16) == ["x" * 16, "x" * 16, "x" * 8]


def test_pages() -> None:
    content = "one\ftwo\f\ffour\ffive"
    assert texts(content, by="page") == ["one", "two", "four", "five"]
    assert texts(content, by="page", pages=2) == ["one\ftwo", "four", "five"]
    found = cut(content, ChunkPlan(by="page"))
    assert [chunk.page for chunk in found] == [1, 2, 4, 5]


def test_a_text_without_page_breaks_has_pages_of_3000_characters() -> None:
    content = "word " * 2000
    found = cut(content, ChunkPlan(by="page", characters=100_000))
    assert [chunk.start for chunk in found] == [0, 3000, 6000, 9000]
    assert {chunk.page for chunk in found} == {0}
    assert len(cut(content, ChunkPlan(by="page", pages=2, characters=100_000))) == 2


def test_sections() -> None:
    content = "before\n# One #\ntext\n```\n# no heading\n```\n## Two\n#three\n    # code\n"
    found = cut(content, ChunkPlan(by="section"))
    assert [chunk.section for chunk in found] == ["", "One", "Two"]
    assert found[1].text == "# One #\ntext\n```\n# no heading\n```"


def test_a_page_begins_with_a_line() -> None:
    content = "# One\fmore\f  ## Two\f~~~\f# no heading\f~~~\fa # b\f#"
    found = cut(content, ChunkPlan(by="section"))
    assert [(chunk.section, chunk.page) for chunk in found] == [("One", 1), ("Two", 3), ("", 8)]


@given(
    st.lists(
        st.sampled_from(
            ["# a", "## b ##", "   ### c", "    # d", "#e", "#", "```", "````", "~~~", "```x", "t"]
        ),
        max_size=12,
    )
)
def test_headings_are_those_that_markdown_it_finds(lines: list[str]) -> None:
    content = "\n".join(lines)
    mine = [
        (content.count("\n", 0, chunk.start), chunk.section)
        for chunk in cut(content, ChunkPlan(by="section", characters=10_000))
        if re.match(r"#{1,6}([ \t\n]|\Z)", chunk.text)
        and chunk.section == re.sub(r"\s*#*$", "", chunk.text.split("\n")[0].lstrip("# "))
    ]
    tokens = MarkdownIt("commonmark").parse(content)
    theirs = [
        (token.map[0], tokens[i + 1].content)
        for i, token in enumerate(tokens)
        if token.type == "heading_open" and token.map and token.level == 0
    ]
    assert mine == theirs


def test_paragraphs_are_joined_while_they_fit() -> None:
    content = "one\n\ntwo\n \t\nthree\r\n\r\nfour is longer than the others\n\nfive"
    assert texts(content, by="paragraph", characters=16) == [
        *("one\n\ntwo", "three", "four is longer", "than the others", "five")
    ]
    assert texts(content, by="paragraph", characters=24)[0] == "one\n\ntwo\n \t\nthree"


PYTHON = '''import os
import sys

@cached
def one(
    a,
):
    if a:

        return 1
    else:
        return 2


class Two:
    """Text."""

    def method(self):
        pass
try:
    x = 1
except E:
    x = 2
'''


def test_code_is_cut_between_definitions() -> None:
    found = cut(PYTHON, ChunkPlan(by="code", characters=110))
    assert [chunk.section for chunk in found] == ["import os", "class Two:"]
    found = cut(PYTHON, ChunkPlan(by="code", characters=90))
    assert [chunk.section for chunk in found] == ["import os", "@cached", "class Two:", "try:"]
    assert found[1].text.startswith("@cached\ndef one(")
    assert found[1].text.endswith("return 2")
    assert found[3].text == "try:\n    x = 1\nexcept E:\n    x = 2"


def test_code_with_braces() -> None:
    content = "int f(int a) {\n  return a;\n}\nint g() {\n  if (1) {\n  }\n}\n"
    assert [chunk.section for chunk in cut(content, ChunkPlan(by="code", characters=30))] == [
        *("int f(int a) {", "int g() {")
    ]


def test_sentences_and_lines_without_the_blanks_around_them() -> None:
    text = 'At (1.0, 2.0). Then, by 10:32, "stop!" he said.\n\nNo mark at the end'
    assert sentences(text) == [
        "At (1.0, 2.0).",
        'Then, by 10:32, "stop!"',
        "he said.",
        "No mark at the end",
    ]
    assert "".join(text[begin:end] for begin, end in sentence_spans(text)) == text
    assert sentences("") == [] == sentence_spans("")
