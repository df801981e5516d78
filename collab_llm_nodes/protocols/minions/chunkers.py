"""The chunking functions that programs and plans may call. All are linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_HEADING = re.compile(r"(?:^|(?<=\f))#{1,6} ", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n")
_PAGE_CHARACTERS = 3000
"""Length of a page of a document that marks no pages by form feeds."""


@dataclass(frozen=True)
class Chunker:
    """A chunking function as programs and plans see it.

    Attributes:
        argument: name of its second argument, a size.
        size: default of that argument.
        low, high: limits of it; sizes beyond are set to the nearest.
        about: one sentence for the remote.
        split: cuts one document into pieces of that size.
    """

    name: str
    argument: str
    size: int
    low: int
    high: int
    about: str
    split: Callable[[str, int], Iterable[str]]

    def __call__(self, document: str, size: int = 0) -> list[str]:
        """Return the pieces of ``document``; ``size`` 0: the default."""
        size = min(max(size or self.size, self.low), self.high)
        return [piece for piece in self.split(document, size) if piece.strip()]

    def source(self, size: int = 0) -> str:
        """Return signature and meaning, for a prompt; ``size`` as its default, unless 0."""
        return (
            f"def {self.name}(doc: str, {self.argument}: int = {size or self.size}) -> list[str]:\n"
            f'    """{self.about}"""'
        )


def _pages(document: str) -> Iterator[str]:
    if "\f" in document:
        yield from document.split("\f")
    else:
        yield from _packed(document.splitlines(keepends=True), _PAGE_CHARACTERS)


def _by_pages(document: str, pages_per_chunk: int) -> Iterator[str]:
    held: list[str] = []
    for page in _pages(document):
        held.append(page)
        if len(held) == pages_per_chunk:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def _by_sections(document: str, max_characters: int) -> Iterator[str]:
    starts = [0, *(match.start() for match in _HEADING.finditer(document)), len(document)]
    for begin, end in zip(starts, starts[1:], strict=False):
        yield from _packed(document[begin:end].splitlines(keepends=True), max_characters)


def _by_paragraphs(document: str, max_characters: int) -> Iterator[str]:
    yield from _packed((f"{p}\n\n" for p in _BLANK_LINES.split(document)), max_characters)


def _packed(parts: Iterable[str], max_characters: int) -> Iterator[str]:
    """Join consecutive parts while they fit; cut those that are longer than a piece may be."""
    held: list[str] = []
    length = 0
    for part in parts:
        for begin in range(0, len(part), max_characters):
            piece = part[begin : begin + max_characters]
            if length + len(piece) > max_characters:
                yield "".join(held)
                held, length = [], 0
            held.append(piece)
            length += len(piece)
    yield "".join(held)


CHUNKERS = {
    chunker.name: chunker
    for chunker in (
        Chunker(
            "chunk_on_multiple_pages",
            "pages_per_chunk",
            5,
            1,
            1000,
            "Cut the document into pieces of this many pages.",
            _by_pages,
        ),
        Chunker(
            "chunk_by_page",
            "pages",
            1,
            1,
            1,
            "Cut the document into its pages.",
            _by_pages,
        ),
        Chunker(
            "chunk_by_section",
            "max_chunk_size",
            3000,
            100,
            1_000_000,
            "Cut the document at its headings, and longer sections at this many characters.",
            _by_sections,
        ),
        Chunker(
            "chunk_by_paragraph",
            "max_chunk_size",
            1500,
            100,
            1_000_000,
            "Cut the document into groups of whole paragraphs of at most this many characters.",
            _by_paragraphs,
        ),
    )
}
"""By name. Room for the chunkers of ``knowledge/``: one entry each."""
