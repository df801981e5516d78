"""Chunks of a document: pure functions, linear in its length, one chunk in memory at a time.

    content   |---- piece ----|------- piece -------|-- piece --|     cut by ``by``
    chunks    |---------------|----------|----------|-----------|     none above ``characters``

A plan first cuts the text into pieces (pages, sections, paragraphs, ...). Then a piece with more
than ``characters`` is cut again, at a line's end or a space if the second half of a chunk has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.documents import PAGE_BREAK, Document
from collab_llm_nodes.knowledge.unwrapping import tidy, unwrapped

LEAST_CHARACTERS = 16
"""Smallest value of ``ChunkPlan.characters``."""

_PAGE_CHARACTERS = 3000
"""A page of a text that has no page breaks."""
_MAX_TITLE = 200

_Piece = tuple[int, int, str]  # first and last + 1 character, title of the section
Split = Callable[[str], Iterable[tuple[int, int]]]

# All of these are linear: no two parts of one can match the same characters, and a line is tried
# from its beginning only. A page break ends a line too: the text of a PDF has no newline beside it.
_FENCE_OR_HEADING = re.compile(
    r"(?<![^\n\f]) {0,3}(?:(?P<fence>`{3,}|~{3,})|#{1,6}(?=[ \t\r\n\f]|\Z))"
)
_LINE = re.compile(r"[^\n\f]*")
_SENTENCE_END = re.compile(r"[.!?][)\"'\u201d\u2019]?[ \t]|[\n\f]")
_BLANK_LINES = re.compile(r"\n[ \t\r\f]*\n")
# A line that can end a definition (indented, closing or blank), before one that begins something.
_DEFINITION_END = re.compile(
    r"^(?:[ \t][^\n]*|[})\]][^\n]*|\r?)\n(?=[^\s})\]])(?!(?:else|elif|except|finally|case)\b)",
    re.M,
)


@dataclass(frozen=True)
class ChunkPlan:
    """The way to cut a document into chunks."""

    by: str = setting(
        "window",
        "window: characters only; page; section: Markdown headings; paragraph: whole paragraphs as"
        " long as they fit; sentence: whole sentences and lines as long as they fit; code: whole"
        " top-level definitions as long as they fit.",
        choices=("window", "page", "section", "paragraph", "sentence", "code"),
    )
    characters: int = setting(
        1000, "A chunk holds at most so many characters.", low=LEAST_CHARACTERS, high=10_000_000
    )
    overlap: int = setting(
        0,
        "Characters that a chunk repeats of the one before it, where a piece had to be cut.",
        low=0,
        high=5_000_000,
    )
    pages: int = setting(
        1,
        "Pages of a piece, with `page`. A text without page breaks counts 3,000 characters a page.",
        low=1,
        high=1_000_000,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.overlap > self.characters // 2:
            raise ConfigError(
                f"{self.overlap} of {self.characters} characters",
                field="overlap",
                remedy="at most half of them",
            )


@dataclass(frozen=True)
class Chunk:
    """A part of a document.

    Attributes:
        document: ``Document.id``.
        start, end: place in the document's content [characters].
        text: what stands there; by sentence, without the line ends within paragraphs.
        page: of its first character, from 1; 0 if the document has no page breaks.
        section: heading above it, or the first line of a piece of code; empty if there is none.
    """

    document: str
    start: int
    end: int
    text: str
    page: int
    section: str


def chunks(document: Document, plan: ChunkPlan, split: Split | None = None) -> Iterator[Chunk]:
    """Yield the chunks of ``document`` in order; blank ones are left out, and blank edges.

    By sentence, the lines of a wrapped paragraph are joined, and runs of blanks are one space.

    Args:
        split: returns first and last + 1 character of the parts of a chunk that has to be cut once
            more; None: none has.
    """
    by_sentence = plan.by == "sentence"
    content = unwrapped(document.content) if by_sentence else document.content
    page, counted = int(PAGE_BREAK in content), 0
    for first, last, section in _places(content, plan, split):
        text = content[first:last]
        body = text.strip()
        if not body:
            continue
        first += len(text) - len(text.lstrip())
        if page:
            page += content.count(PAGE_BREAK, counted, first)
            counted = first
        last = first + len(body)
        yield Chunk(document.id, first, last, tidy(body) if by_sentence else body, page, section)


def _places(content: str, plan: ChunkPlan, split: Split | None) -> Iterator[_Piece]:
    for start, end, section in _PIECES[plan.by](content, plan):
        for first, last in windows(content, start, end, plan.characters, plan.overlap):
            if split is None:
                yield first, last, section
                continue
            for begin, stop in split(content[first:last]):
                yield first + begin, first + stop, section


def windows(
    content: str, start: int, end: int, size: int, overlap: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the places of windows of ``size`` characters at most that cover start to end."""
    while end - start > size:
        low, last = start + size // 2, start + size
        at = content.rfind("\n", low, last)
        if at < 0:
            at = content.rfind(" ", low, last)
        last = at + 1 if at >= 0 else last
        yield start, last
        start = last - overlap
    if start < end:
        yield start, end


def _by_window(content: str, _: ChunkPlan) -> Iterator[_Piece]:
    yield 0, len(content), ""


def _by_page(content: str, plan: ChunkPlan) -> Iterator[_Piece]:
    if PAGE_BREAK not in content:
        for start, end in windows(content, 0, len(content), plan.pages * _PAGE_CHARACTERS):
            yield start, end, ""
        return
    start, count = 0, 0
    at = content.find(PAGE_BREAK)
    while at >= 0:
        count += 1
        if count == plan.pages:
            yield start, at, ""
            start, count = at + 1, 0
        at = content.find(PAGE_BREAK, at + 1)
    yield start, len(content), ""


def _by_section(content: str, _: ChunkPlan) -> Iterator[_Piece]:
    start, title = 0, ""
    for at, found in _headings(content):
        yield start, at, title
        start, title = at, found
    yield start, len(content), title


def _headings(content: str) -> Iterator[tuple[int, str]]:
    """Yield place and title of the headings (``#`` to ``######``) outside fenced code."""
    fence = ""  # that has been opened
    for mark in _FENCE_OR_HEADING.finditer(content):
        found = mark["fence"]
        if found is None:
            if not fence:
                yield mark.start(), _title(content, mark.end())
        elif not fence:
            # Backticks with another one behind them on the line are code within a line.
            if found[0] == "~" or "`" not in _rest(content, mark.end()):
                fence = found
        elif found.startswith(fence) and not _rest(content, mark.end()).strip():
            fence = ""


def _rest(content: str, at: int) -> str:
    """Return the rest of the line from ``at``."""
    line = _LINE.match(content, at)
    assert line is not None
    return line.group()


def _title(content: str, at: int) -> str:
    return _rest(content, at).strip().rstrip("#").rstrip()[:_MAX_TITLE]


def _by_mark(mark: re.Pattern[str], content: str, plan: ChunkPlan) -> Iterator[_Piece]:
    cuts = (found.end() for found in mark.finditer(content))
    for start, end in _packed(cuts, len(content), plan.characters):
        yield start, end, ""


def sentences(text: str) -> list[str]:
    """Return the sentences and lines of ``text``, without blanks around them."""
    found = (text[begin:end].strip() for begin, end in sentence_spans(text))
    return [sentence for sentence in found if sentence]


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return first and last + 1 character of each sentence or line, with the blanks behind it."""
    cuts = [0, *(mark.end() for mark in _SENTENCE_END.finditer(text))]
    if cuts[-1] < len(text):
        cuts.append(len(text))
    return list(pairwise(cuts))


def _by_code(content: str, plan: ChunkPlan) -> Iterator[_Piece]:
    cuts = (line.end() for line in _DEFINITION_END.finditer(content))
    for start, end in _packed(cuts, len(content), plan.characters):
        yield start, end, _rest(content, start)[:_MAX_TITLE].strip()


def _packed(cuts: Iterable[int], end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield places of as many whole pieces as fit into ``size``; a longer piece stands alone."""
    start = last = 0
    for cut in chain(cuts, (end,)):
        if cut - start > size and last > start:
            yield start, last
            start = last
        last = cut
    yield start, end


_PIECES: dict[str, Callable[[str, ChunkPlan], Iterator[_Piece]]] = {
    "window": _by_window,
    "page": _by_page,
    "section": _by_section,
    "paragraph": partial(_by_mark, _BLANK_LINES),
    "sentence": partial(_by_mark, _SENTENCE_END),
    "code": _by_code,
}
