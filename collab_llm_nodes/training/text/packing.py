"""Documents in rows of one length: whole documents only, each row begins with one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Document = tuple[np.ndarray, np.ndarray]
"""Ids uint16 [n] and classes uint8 [n]."""


def pack(
    documents: Iterable[Document], length: int, rows: int, padding: int, waiting: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids uint16 and classes uint8 [rows, length], from as many documents as are needed.

    A row takes the longest waiting document that still fits, until none does; the rest of it is
    ``padding`` of class 0. Documents longer than a row are left out.

    Args:
        waiting: documents to choose from; more leave less padding.
    """
    source = iter(documents)
    ids = np.full((rows, length), padding, np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    pool: list[Document] = []
    for row in range(rows):
        used = 0
        while True:
            while len(pool) < waiting and (document := next(source, None)) is not None:
                if 0 < len(document[0]) <= length:
                    pool.append(document)
            # First the oldest one, so that none waits for ever; then what fills the row best.
            best = 0 if not used and pool else _longest(pool, length - used)
            if best < 0:
                break
            tokens, classes = pool.pop(best)
            ids[row, used : used + len(tokens)] = tokens
            kinds[row, used : used + len(tokens)] = classes
            used += len(tokens)
    return ids, kinds


def _longest(pool: list[Document], room: int) -> int:
    """Return the index of the longest document of at most ``room`` tokens, -1 if there is none."""
    best, longest = -1, 0
    for index, (tokens, _) in enumerate(pool):
        if longest < len(tokens) <= room:
            best, longest = index, len(tokens)
    return best
