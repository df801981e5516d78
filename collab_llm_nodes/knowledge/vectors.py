"""The vectors of a store in memory, for exact search, or for approximate search by faiss.

Exact search compares the question with every vector. From ``MANY`` vectors on, and where faiss-cpu
is installed, an inverted index compares it with those of the nearest cells only.
"""

from __future__ import annotations

import math
import sqlite3
from importlib.util import find_spec
from typing import Any

import numpy as np

from collab_llm_nodes.knowledge.database import Database

HAS_FAISS = find_spec("faiss") is not None
NUMBER = np.dtype("<f4")
MANY = 100_000
_PROBED = 32
"""Cells that are compared, of about as many as the root of the number of vectors."""
_PER_CELL = 40
"""Vectors of each cell that its centre is computed from."""
_TOLERANCE = 1e-2
"""Largest error of a vector's length: encoders compute it in float32, or less."""


def is_vector(value: object, width: int) -> bool:
    """Return False if an encoder cannot have given these bytes.

    A vector has length 1, or 0 where a text has no words.
    """
    if not isinstance(value, bytes) or len(value) != width * NUMBER.itemsize:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(np.linalg.norm(np.frombuffer(value, NUMBER)))
    return length == 0 or abs(length - 1) < _TOLERANCE  # not for NaN


class Vectors:
    """A copy of the table ``vector``; what has changed there is read, the rest is kept.

    Args:
        database: with the table.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._version = -1
        self._encoder = ""
        self._ids = np.zeros(0, np.int64)  # ascending
        self._rows = np.zeros((0, 0), NUMBER)
        self._cells: Any = None  # of faiss

    def refresh(self, db: sqlite3.Connection) -> None:
        """Read what has changed since the last call; ``db`` is in a transaction.

        Raises:
            Unavailable: a row holds no vector.
        """
        meta = dict(db.execute("SELECT key, value FROM meta"))
        if meta["version"] == self._version:
            return
        encoder = meta.get("encoder", "")
        if encoder != self._encoder:
            first = db.execute("SELECT length(value) FROM vector LIMIT 1").fetchone()
            width = (first[0] or 0) // NUMBER.itemsize if first else 0
            self._ids, self._rows = np.zeros(0, np.int64), np.zeros((0, width), NUMBER)
        listed = db.execute("SELECT chunk FROM vector ORDER BY chunk")
        ids = np.array([row[0] for row in listed], np.int64)
        kept = np.isin(ids, self._ids)
        rows = np.empty((len(ids), self._rows.shape[1]), NUMBER)
        rows[kept] = self._rows[np.isin(self._ids, ids)]
        places = dict(zip(ids[~kept].tolist(), np.flatnonzero(~kept).tolist(), strict=True))
        found = db.execute(
            "SELECT chunk, value FROM vector WHERE chunk >= ?", (min(places, default=0),)
        )
        for chunk, value in self._database.checked(found, int, bytes) if places else ():
            if (place := places.get(chunk)) is not None:
                if len(value) != rows[place].nbytes:
                    raise self._database.damaged("vectors of different lengths")
                rows[place] = np.frombuffer(value, NUMBER)
        same = encoder == self._encoder
        gone = self._ids[~np.isin(self._ids, ids)] if same else self._ids
        self._version, self._encoder = meta["version"], encoder
        self._ids, self._rows = ids, rows
        self._refresh_cells(gone, ~kept if same else np.ones(len(ids), bool), same)

    def _refresh_cells(self, gone: np.ndarray, added: np.ndarray, same: bool) -> None:
        """Take vectors out of the inverted index and put others in, or make it anew.

        Args:
            gone: ids that are not there any more.
            added: bool [ids].
            same: the encoder is the one of the index.
        """
        if not HAS_FAISS or len(self._ids) < MANY:
            self._cells = None
        elif self._cells is None or not same:
            self._cells = _cells(self._ids, self._rows)
        else:
            self._cells.remove_ids(gone)
            self._cells.add_with_ids(self._rows[added], self._ids[added])

    def nearest(self, vector: np.ndarray, most: int) -> tuple[list[int], list[float]]:
        """Return ids and products of the best rows, the best one first.

        Raises:
            Unavailable: the rows have another width than ``vector``.
        """
        if not len(self._ids):
            return [], []
        if self._rows.shape[1:] != vector.shape:
            raise self._database.damaged("vectors of another length than the encoder's")
        if self._cells is not None:
            products, ids = self._cells.search(vector.astype(NUMBER)[None], most)
            there = ids[0] >= 0
            return ids[0][there].tolist(), products[0][there].tolist()
        scores = self._rows @ vector.astype(NUMBER)
        most = min(most, len(scores))
        least = np.partition(scores, -most)[-most]
        best = np.flatnonzero(scores >= least)  # among equals, the oldest come first
        best = best[np.argsort(-scores[best], kind="stable")][:most]
        return self._ids[best].tolist(), scores[best].tolist()


def _cells(ids: np.ndarray, rows: np.ndarray) -> Any:
    """Return an inverted index of ``rows`` [ids, width]."""
    import faiss  # where it is used: most stores are small

    count = math.isqrt(len(ids))
    cells = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(rows.shape[1]), rows.shape[1], count, faiss.METRIC_INNER_PRODUCT
    )
    step = max(1, len(rows) // (_PER_CELL * count))
    cells.train(np.ascontiguousarray(rows[::step]))
    cells.add_with_ids(rows, ids)
    cells.nprobe = _PROBED
    return cells
