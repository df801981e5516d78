"""The material of ``bench dragon-quality``: documents for the store, and texts that are predicted.

Either invented houses and talks about them, or files of English prose, some of which are held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.bench.documents import PAGE, html_text
from collab_llm_lab.bench.dragon.material import House, make_house
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.documents import decoded
from collab_llm_nodes.protocols.dragon.layout import Ids, Layout

_KINDS = (".html", ".md", ".txt")
_LEAST_WORDS = 8
"""Shorter lines are headings, menus and examples."""


@dataclass(frozen=True)
class Window:
    """A text to predict, or a part of one.

    Attributes:
        ids: its tokens; the first ``query`` of them are the query.
        facts: bool [tokens], True for those that only a document tells.
    """

    ids: Ids
    facts: NDArray[np.bool_]

    @property
    def query(self) -> int:
        return len(self.ids) // 8

    def blocks(self, stride: int) -> Iterator[tuple[int, int]]:
        """Yield first and last + 1 of the tokens that are predicted together."""
        for first in range(self.query, len(self.ids), stride):
            yield first, min(first + stride, len(self.ids))

    def rolled(self, size: int) -> Iterator[Window]:
        """Yield the windows of ``size`` tokens, one behind the other."""
        for start in range(0, len(self.ids) - size + 1, size):
            yield Window(self.ids[start : start + size], self.facts[start : start + size])


@dataclass(frozen=True)
class Corpus:
    """Documents by name, and texts that are not among them."""

    documents: dict[str, str]
    texts: tuple[Window, ...]


def invented_corpus(
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    *,
    houses: int,
    documents: int,
    tokens: int,
    held_out: bool,
    seed: int,
) -> Corpus:
    """Return houses of ``documents`` each, and a talk of ``tokens`` about each of them."""
    named: dict[str, str] = {}
    talks = []
    for number in range(houses):
        exchanges = tokens // 12  # an exchange has more tokens than that
        house = make_house(f"{seed} {number}", documents, exchanges, layout.fits, held_out)
        for place, text in enumerate(house.documents):
            named[f"house {number} document {place}"] = text
        talk = talk_of(house, tokenizer, layout)
        talks.append(Window(talk.ids[:tokens], talk.facts[:tokens]))
    return Corpus(named, tuple(talks))


def talk_of(house: House, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> Window:
    """Return the talk without what the chat begins with."""
    text, places = layout.dialogue(house.turns())
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    facts = np.zeros(len(encoded["input_ids"]), np.bool_)
    ends = np.array([end for _, end in encoded["offset_mapping"]])
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    for exchange, start in zip(house.talk, places[1::2], strict=True):
        at = text.index(exchange.value, start)
        facts |= (ends > at) & (starts < at + len(exchange.value))
    return Window(tuple(encoded["input_ids"]), facts)


def corpus_of_files(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, texts: int, tokens: int, seed: int
) -> Corpus:
    """Return the prose of a folder's files, with ``texts`` files held out to be predicted.

    Lines of a few words are left out. A text is the first ``tokens`` of its file.

    Raises:
        InvalidInput: a file is no text, or too few files are long enough.
    """
    named: dict[str, str] = {}
    held: list[Window] = []
    files = sorted(file for file in folder.rglob("*") if file.suffix in _KINDS)
    random.Random(seed).shuffle(files)
    for file in files:
        name = str(file.relative_to(folder))
        text = prose(decoded(name, file.read_bytes(), "documents"), html=file.suffix == ".html")
        ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if len(held) < texts and len(ids) >= tokens:
            held.append(Window(ids[:tokens], np.zeros(tokens, np.bool_)))
        elif text:
            named[name] = text
    if len(held) < texts or not named:
        raise InvalidInput(
            f"{len(held)} files of {tokens} tokens of prose in {folder}, and {len(named)} others",
            field="documents",
            remedy=f"{texts} to be predicted and others to be found; kinds: {', '.join(_KINDS)}",
        )
    return Corpus(named, tuple(held))


def prose(text: str, *, html: bool = False) -> str:
    """Return the lines (HTML: blocks) that are sentences."""
    if html:
        lines = html_text(text, PAGE | {"pre", "table"}).split("\n")
    else:
        lines = text.split("\n\n")
    paragraphs = (" ".join(line.split()) for line in lines)
    return "\n".join(line for line in paragraphs if len(line.split()) >= _LEAST_WORDS)
