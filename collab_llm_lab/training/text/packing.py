"""Documents in rows of one length: whole documents only, each row begins with one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

NOWHERE = -1
Document = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids uint16 [n], classes uint8 [n] and sources int16 [n]: the place in the document of the token
that the next one is copied from, NOWHERE where that is not known."""


def pack(
    documents: Iterable[Document], length: int, rows: int, padding: int, waiting: int = 256
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, classes and sources [rows, length], from as many documents as are needed.

    Sources are places in a row.

    A row takes the longest waiting document that still fits, until none does; the rest of it is
    ``padding`` of class 0. Documents longer than a row are left out.

    Args:
        waiting: documents to choose from; more leave less padding.
    """
    source = iter(documents)
    ids = np.full((rows, length), padding, np.uint16)
    kinds = np.zeros((rows, length), np.uint8)
    sources = np.full((rows, length), NOWHERE, np.int16)
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
            tokens, classes, places = pool.pop(best)
            here = slice(used, used + len(tokens))
            ids[row, here] = tokens
            kinds[row, here] = classes
            sources[row, here] = np.where(places >= 0, places + used, NOWHERE)
            used += len(tokens)
    return ids, kinds, sources


def _longest(pool: list[Document], room: int) -> int:
    """Return the index of the longest document of at most ``room`` tokens, -1 if there is none."""
    best, longest = -1, 0
    for index, (tokens, *_) in enumerate(pool):
        if longest < len(tokens) <= room:
            best, longest = index, len(tokens)
    return best
