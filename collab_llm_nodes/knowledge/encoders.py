"""Texts to vectors whose products tell how related two texts are."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from collab_llm_nodes.knowledge.words import words


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the vectors depend on: equal ones give equal vectors."""

    @property
    def width(self) -> int:
        """Numbers in a vector."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, width]."""


class WordHashes:
    """Counts of words, each at a place of the vector that its hash names; knows no meaning.

    For robots without an encoder model, and for tests. Like an encoder's, and unlike those of
    BM25, its scores do not depend on the other documents, so two stores can be compared.
    """

    def __init__(self, width: int = 1024) -> None:
        self.width = width

    @property
    def fingerprint(self) -> str:
        """Name of the method and its width."""
        return f"word hashes 3 {self.width}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, width], of length 1 where there are words."""
        vectors = np.zeros((len(texts), self.width), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word, count in Counter(words(text)).items():
                hashed = zlib.crc32(word.encode())
                # The sign, from another bit, lets words that share a place cancel out on average.
                row[(hashed >> 1) % self.width] += count**0.5 * (1 if hashed & 1 else -1)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(norms > 0, norms, 1)
        return vectors
