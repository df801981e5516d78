"""Chunking functions that programs and plans may call, over those of ``knowledge/``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import PAGE_BREAK, Document
from collab_llm_nodes.protocols.minions.prompts import read_back

_WHOLE_PAGES = 10_000_000
"""Size limit of a piece that is cut only at its pages [characters]."""
_SIGNATURE = "def {name}(doc: str, {argument}: int = {size}) -> list[str]:"


@dataclass(frozen=True)
class Chunker:
    """A chunking function as programs and plans see it.

    Attributes:
        argument: name of its second argument, a size.
        size: default size.
        low, high: limits to which a size is clipped.
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
        """Return the pieces of ``document``; ``size`` 0 means the default."""
        return list(self.cut(document, size))

    def cut(self, document: str, size: int = 0) -> Iterable[str]:
        """Yield the pieces of ``document``; ``size`` 0 means the default."""
        return self.split(document, self.size_of(size))

    def size_of(self, size: int) -> int:
        """Return ``size`` within the limits; 0 means the default."""
        return min(max(size or self.size, self.low), self.high)

    def source(self, size: int = 0) -> str:
        """Return signature and docstring for a prompt; ``size`` 0 means the default."""
        signature = _SIGNATURE.format(
            name=self.name, argument=self.argument, size=size or self.size
        )
        return f'{signature}\n    """{self.about}"""'


def offered(prompt: str) -> tuple[str, int]:
    """Return name and default size of the first chunking function that ``prompt`` offers."""
    for line in prompt.splitlines():
        signature = read_back(_SIGNATURE, line)
        if signature is not None:
            return signature["name"], int(signature["size"])
    raise ValueError("the prompt offers no chunking function")


def _pieces(document: str, plan: ChunkPlan) -> Iterable[str]:
    return (chunk.text for chunk in chunks(Document("", document), plan))


def _by_pages(document: str, pages_per_chunk: int) -> Iterable[str]:
    pieces = _pieces(document, ChunkPlan("page", _WHOLE_PAGES, pages=pages_per_chunk))
    return (piece.replace(PAGE_BREAK, "\n") for piece in pieces)


def _by(kind: str) -> Callable[[str, int], Iterable[str]]:
    return lambda document, characters: _pieces(document, ChunkPlan(kind, characters))


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
            _by("section"),
        ),
        Chunker(
            "chunk_by_paragraph",
            "max_chunk_size",
            1500,
            100,
            1_000_000,
            "Cut the document into groups of whole paragraphs of at most this many characters.",
            _by("paragraph"),
        ),
        Chunker(
            "chunk_by_code",
            "max_chunk_size",
            3000,
            100,
            1_000_000,
            "Cut source code into groups of whole definitions of at most this many characters.",
            _by("code"),
        ),
    )
}
"""The chunkers that a program may call, by name."""
