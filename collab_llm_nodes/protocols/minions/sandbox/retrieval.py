"""Retrieval by keywords for programs, as the authors of paper 000 offer it (BM25)."""

from __future__ import annotations

from typing import Any

from collab_llm_nodes.knowledge.bm25 import WordScores
from collab_llm_nodes.knowledge.words import words

RETRIEVE = "retrieve_top_k_chunks"
ABOUT = """\
def retrieve_top_k_chunks(keywords: list[str], chunks: list[str],
                          weights: dict[str, float] | None = None, k: int = 10) -> list[str]:
    \"\"\"Return the k chunks that fit the keywords best (BM25), in their order.\"\"\""""
"""Its signature and docstring for a prompt."""


def retrieve_top_k_chunks(
    keywords: list[str],
    chunks: list[str],
    weights: dict[str, float] | None = None,
    k: int = 10,
) -> list[str]:
    """Return the ``k`` of ``chunks`` with the best scores, in their order.

    Args:
        weights: of keywords; 1 for others.

    Raises:
        TypeError, ValueError: an argument is of another type.
    """
    if not (_are_texts(keywords) and _are_texts(chunks) and isinstance(k, int)):
        raise TypeError("wrong arguments")
    by_word = WordScores(chunks)
    scores = [0.0] * len(chunks)
    for keyword in keywords:
        weight = float(dict(weights or {}).get(keyword, 1.0))
        for word in words(keyword):
            for place, score in enumerate(by_word.of(word)):
                scores[place] += weight * score
    best = sorted(range(len(chunks)), key=lambda place: -scores[place])[: max(k, 0)]
    return [chunks[place] for place in sorted(best)]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
