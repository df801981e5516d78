"""Shared prefixes: the common beginning of several prompts is computed and stored once.

A prompt is its token ids. :class:`Prefixes` is a cache of sessions whose prefixes later prompts may
fork; :func:`group_by_prefix` finds the new prompts that should wait for another to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.engine.cache import BLOCK
from collab_llm_nodes.engine.session import Session

Ids = NDArray[np.int32]

WORTH_SHARING = 16
"""Common prefixes shorter than this are computed again [tokens]."""

_MAX_SESSIONS = 64
"""Sessions kept: each new prompt is compared with all of them."""


def common(a: Ids, b: Ids) -> int:
    """Return the length of the longest common prefix of two prompts."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


def sort_key(ids: Ids) -> bytes:
    """Return a key that sorts prompts lexicographically."""
    return ids.astype(">i4").tobytes()


@dataclass(eq=False)
class _Kept:
    ids: Ids
    session: Session


class Prefixes:
    """LRU cache of sessions for their prefixes.

    Args:
        max_tokens: KV columns held at most, each common prefix counted once; 0 keeps nothing.
            Columns that a running job reads stay in memory until it ends.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: list[_Kept] = []  # in order of use

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """KV columns held."""
        prompts = sorted((kept.ids for kept in self._kept), key=sort_key)
        shared = [common(a, b) for a, b in zip(prompts, prompts[1:], strict=False)]
        return sum(map(len, prompts)) - sum(n for n in shared if n >= BLOCK)  # a fork copies less

    def known(self, ids: Ids) -> int:
        """Return the length of the longest prefix of ``ids`` that is held."""
        return max((common(kept.ids, ids) for kept in self._kept), default=0)

    def fork(self, ids: Ids) -> Session | None:
        """Return a session that has read a prefix of ``ids``; None if too little is held.

        At least the last token is left to be read, since its logits are needed.
        """
        if not self._kept:
            return None
        held = [common(kept.ids, ids) for kept in self._kept]
        best = self._kept[held.index(max(held))]
        shared = min(max(held), len(ids) - 1)
        if shared < WORTH_SHARING:
            return None
        self._kept.remove(best)
        self._kept.append(best)
        twin = best.session.fork()
        twin.length = shared
        return twin

    def keep(self, ids: Ids, session: Session, awaited: bool) -> None:
        """Keep a fork of ``session``, which has read ``ids``, if others may use it.

        Args:
            awaited: other prompts wait for this prefix; otherwise it is kept only if it adds at
                least a block.
        """
        new = len(ids) - self.known(ids)
        if len(ids) > self._max_tokens or new < (1 if awaited else BLOCK):
            return
        self._kept.append(_Kept(ids, session.fork()))
        while self.tokens > self._max_tokens or len(self._kept) > _MAX_SESSIONS:
            self._kept.pop(0).session.close()

    def clear(self) -> None:
        """Free everything."""
        while self._kept:
            self._kept.pop().session.close()


def group_by_prefix(
    prompts: Iterable[Ids], known: Callable[[Ids], int]
) -> list[tuple[int, list[int]]]:
    """Divide prompts into leaders, to be read now, and the followers of each.

    A follower waits until its leader's prompt is read, and then forks it. Followers may share more
    with each other, so they are grouped again then.

    Args:
        known: returns the length of a prompt's prefix that is held already.

    Returns:
        (leader, followers), as indices into ``prompts``.
    """
    ids = list(prompts)
    groups: list[tuple[int, list[int]]] = []
    needed = 0  # common tokens that make a prompt follow the current leader
    for i in sorted(range(len(ids)), key=lambda i: sort_key(ids[i])):
        if groups and common(ids[groups[-1][0]], ids[i]) >= needed:
            groups[-1][1].append(i)
        else:
            groups.append((i, []))
            needed = known(ids[i]) + WORTH_SHARING
    return groups
