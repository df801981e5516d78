"""Logs and questions from a seed, and the passages of a log for retrieval."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from collab_llm_lab.training.minions.logs import LogWriter
from collab_llm_lab.training.minions.questions import CLASSES, Asked, draw
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, retrieve
from collab_llm_nodes.knowledge.store import Store

PASSAGE_CHARACTERS = 1000
"""Characters of a passage, from appendix E.3 of paper 000."""


@dataclass(frozen=True)
class Case:
    """A log and questions about it; ``tokens`` is the length of ``text``."""

    text: str
    asked: tuple[Asked, ...]
    tokens: int


def make_case(seed: str, tokens: int, questions: int, count: Callable[[str], int]) -> Case:
    """Return a log with held-out names, and questions of all classes in turn."""
    writer = LogWriter(random.Random(seed), held_out=True)
    first = writer.rng.randrange(len(CLASSES))
    asked = tuple(draw(writer, CLASSES[(first + i) % len(CLASSES)]) for i in range(questions))
    planted = [group for each in asked for group in each.planted]
    text = writer.log(planted, tokens, count).text
    return Case(text, asked, count(text))


def make_cases(
    seed: str, tokens: int, questions: int, per_log: int, count: Callable[[str], int]
) -> list[Case]:
    """Return logs of about ``tokens`` tokens with ``questions`` questions in all."""
    sizes = [per_log] * (questions // per_log) + [questions % per_log] * bool(questions % per_log)
    return [
        make_case(f"bench minions {seed} {tokens} {number}", tokens, size, count)
        for number, size in enumerate(sizes)
    ]


class Passages:
    """Retrieval of the passages of one log, by words or by vectors."""

    def __init__(self, store: Store, encoder: Encoder) -> None:
        self._store, self._encoder = store, encoder

    def find(self, method: str, question: str, k: int) -> Sequence[str]:
        """Return the ``k`` best passages by ``bm25`` or ``dense``."""
        config = RetrievalConfig(method=method, chunks=k)
        found = retrieve(self._store, question, config, self._encoder)
        return [hit.chunk.text for hit in found.hits]


@contextmanager
def passages_of(text: str, encoder: Encoder) -> Iterator[Passages]:
    """Yield the passages of ``text``, with the vectors of ``encoder``."""
    document = Document("log", text)
    with Store(None) as store:
        store.add(document, chunks(document, ChunkPlan("window", PASSAGE_CHARACTERS)))
        while store.embed(encoder, 1000):
            pass
        yield Passages(store, encoder)
