"""BM25 scores of texts that are in no store (Robertson and Zaragoza, 2009)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from collab_llm_nodes.knowledge.words import words

_K1, _B = 1.5, 0.75
"""The usual constants."""


class WordScores:
    """Scores of ``texts`` for one word at a time, with the statistics of these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in self._counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0  # no text has a word: all scores are 0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def of(self, word: str) -> list[float]:
        """Return the score of each text; ``word`` is in its normal form (``words.words``)."""
        holding = sum(word in count for count in self._counts)
        idf = math.log(1 + (len(self._counts) - holding + 0.5) / (holding + 0.5))
        return [
            idf * count[word] * (_K1 + 1) / (count[word] + norm)
            for count, norm in zip(self._counts, self._norms, strict=True)
        ]


def bm25(query: str, texts: Sequence[str]) -> list[float]:
    """Return the BM25 score of each text for the different words of ``query``."""
    by_word, scores = WordScores(texts), [0.0] * len(texts)
    for word in dict.fromkeys(words(query)):
        scores = [sum(both) for both in zip(scores, by_word.of(word), strict=True)]
    return scores
