"""Order of passes and assignment of KV caches: two state machines without I/O or clock.

:class:`ReadyQueue` makes the passes of continuous batching. Sessions whose turn is due wait in one
queue; a pass takes the first ``max_batch`` of them. Prompts are read in the same passes,
``prefill_tokens`` at a time: a long prompt lengthens each of its passes by a bounded time, instead
of delaying all turns until it is read (chunked prefill of Sarathi-Serve, Agrawal et al., OSDI
2024). Every pass reads some of the oldest prompt, so neither turns nor prompts can starve. The
first turns and prompts of all owners come before the second of any. Urgent ones come first among
their owner's only, so an owner gains nothing over others by calling everything urgent.

:class:`Slots` assigns the KV caches. A newcomer gets a free one, or that of the session that has
been idle longest, whose client then rebuilds it by replaying its tokens. Owners share the memory
fairly: the newcomer whose owner holds the least is served first, and an owner that holds the most
loses an idle cache at once to a newcomer whose owner would still hold less. An urgent newcomer
comes before the others of its own owner, and takes the cache of one of them that is not urgent at
once, even if its turn is due. From other owners it takes only what any newcomer may.

Keys identify sessions; times are seconds on the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from collab_llm_nodes.config import check_ranges, setting

K = TypeVar("K")  # hashable


@dataclass(frozen=True)
class BatchConfig:
    """Rules by which sessions share the model."""

    max_batch: int = setting(32, "Drafts verified in one forward pass at most.", low=1, high=4096)
    max_wait_s: float = setting(
        0.002,
        "A free model waits at most this long for more drafts to join a pass, and only while"
        " sessions that took part in the last one, or are new, have not come back [s]. Raise it for"
        " fuller passes, lower it for shorter waits.",
        low=0.0,
        high=1.0,
    )
    prefill_tokens: int = setting(
        256, "Prompt tokens read in one forward pass at most.", low=1, high=1 << 20
    )
    evict_idle_s: float = setting(
        2.0,
        "Time without a draft after which a session may lose its KV cache to a newcomer [s]."
        " Raise it where robots pause longer between drafts and memory suffices for all.",
        low=0.0,
        high=3600.0,
    )
    slot_wait_s: float = setting(
        2.0,
        "Longest wait of a newcomer for a KV cache [s]."
        " Raise it where refusals are worse than waits.",
        low=0.0,
        high=3600.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Batch(Generic[K]):
    """One pass.

    Attributes:
        turns: sessions whose turn it is (in the verifier: a draft to verify), and since when.
        prompts: sessions whose prompts are read, and by how many tokens.
    """

    turns: tuple[tuple[K, float], ...]
    prompts: tuple[tuple[K, int], ...]


class ReadyQueue(Generic[K]):
    """The queue for the model. The caller runs one pass at a time."""

    def __init__(self, config: BatchConfig) -> None:
        self._config = config
        self._turns: dict[K, float] = {}  # due since; dictionaries keep the order of arrival
        self._prompts: dict[K, float] = {}
        self._unread: dict[K, int] = {}  # prompt tokens
        self._owners: dict[K, str] = {}  # of both
        self._urgent: set[K] = set()
        self._had: dict[str, int] = {}  # prompt tokens read so far, by owner

    def __len__(self) -> int:
        return len(self._turns) + len(self._prompts)

    def add_turn(self, key: K, now: float, owner: str = "", *, urgent: bool = False) -> None:
        """Queue ``key``, whose turn is due; ``owner`` and ``urgent`` as in :meth:`add_prompt`."""
        self._turns.setdefault(key, now)
        self._enter(key, owner, urgent)

    def add_prompt(
        self, key: K, tokens: int, now: float, owner: str = "", *, urgent: bool = False
    ) -> None:
        """Queue a prompt of which ``tokens`` >= 1 tokens are to be read.

        Args:
            owner: equal for all keys that share turns, in order of arrival; empty: an owner as
                well.
            urgent: before the others of the same owner.
        """
        self._prompts.setdefault(key, now)
        self._unread[key] = tokens
        self._enter(key, owner, urgent)
        self._had.setdefault(owner, min(self._had.values(), default=0))

    def _enter(self, key: K, owner: str, urgent: bool) -> None:
        self._owners[key] = owner
        if urgent:
            self._urgent.add(key)

    def discard(self, key: K) -> None:
        """Drop ``key`` and its turn or prompt."""
        self._turns.pop(key, None)
        self._prompts.pop(key, None)
        self._unread.pop(key, None)
        self._owners.pop(key, None)
        self._urgent.discard(key)

    def starts_at(self, coming: int) -> float | None:
        """Return the time of the next pass unless more arrive; None if nothing is queued.

        Args:
            coming: number of sessions that are not queued but may be soon.
        """
        heads = [next(iter(line.values())) for line in (self._turns, self._prompts) if line]
        if not heads:
            return None
        full = not coming or len(self._turns) >= self._config.max_batch
        return min(heads) + (0.0 if full else self._config.max_wait_s)

    def take(self) -> Batch[K]:
        """Return the next pass. A prompt that it does not read to the end keeps its place."""
        ranks = self._ranks(self._turns)
        turns = tuple((k, self._turns[k]) for k in sorted(ranks, key=ranks.__getitem__))
        turns = turns[: self._config.max_batch]
        for key, _ in turns:
            self.discard(key)
        prompts, budget = [], self._config.prefill_tokens
        for key in self._prompts_in_turn():
            if not budget:
                break
            count = min(budget, self._unread[key])
            self._had[self._owners[key]] += count
            prompts.append((key, count))
            budget -= count
            self._unread[key] -= count
            if not self._unread[key]:
                self.discard(key)
        return Batch(turns, tuple(prompts))

    def _prompts_in_turn(self) -> list[K]:
        """Return the first prompt of every owner, then the second; the least read owner first."""
        ranks = self._ranks(self._prompts)
        waiting = {self._owners[key] for key in ranks}
        self._had = {owner: had for owner, had in self._had.items() if owner in waiting}
        return sorted(ranks, key=lambda key: (ranks[key], self._had[self._owners[key]]))

    def _ranks(self, line: dict[K, float]) -> dict[K, int]:
        """Return the place of each key among those of its owner, in order of arrival."""
        before: Counter[str] = Counter()
        places: dict[K, int] = {}
        for key in sorted(line, key=lambda key: key not in self._urgent):
            owner = self._owners[key]
            places[key] = before[owner]
            before[owner] += 1
        return {key: places[key] for key in line}


@dataclass(frozen=True)
class Granted(Generic[K]):
    """``key`` now holds a KV cache."""

    key: K


@dataclass(frozen=True)
class Evicted(Generic[K]):
    """``key`` has lost its KV cache."""

    key: K


@dataclass(frozen=True)
class Refused(Generic[K]):
    """``key`` has waited for ``slot_wait_s`` in vain."""

    key: K


class Slots(Generic[K]):
    """The KV caches: served to the owner that holds the least, taken from the longest idle.

    Args:
        count: caches at a time.

    Attributes:
        room: bytes for all of them together.
        held_bytes: of the slots in use, busy and idle.
    """

    def __init__(self, count: int, config: BatchConfig) -> None:
        self.room = math.inf
        self.held_bytes = 0
        self._count = count
        self._config = config
        self._sizes: dict[K, int] = {}  # bytes of all below
        self._advanced = -math.inf  # when that was done last
        self._busy: set[K] = set()
        self._idle: dict[K, float] = {}  # since; the longest idle first
        self._line: dict[K, float] = {}  # newcomers, since; in order of arrival
        self._owners: dict[K, str] = {}  # of all these; an empty name shares with none
        self._held: Counter[str] = Counter()  # bytes of slots, by owner
        self._urgent: set[K] = set()

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._busy) + len(self._idle)

    @property
    def waiting(self) -> int:
        """Newcomers without a slot."""
        return len(self._line)

    def request(
        self, key: K, now: float, owner: str = "", size: int = 0, *, urgent: bool = False
    ) -> None:
        """Queue ``key`` for a slot; :meth:`advance` returns the outcome.

        Args:
            owner: equal for all keys that share; empty: shares with none.
            size: bytes that its cache takes at most.
            urgent: before the others of the same owner.
        """
        self._line[key] = now
        self._owners[key] = owner
        self._sizes[key] = size
        if urgent:
            self._urgent.add(key)

    def mark_busy(self, key: K) -> None:
        """Mark the slot of ``key`` as busy: a turn of it is due."""
        if self._idle.pop(key, None) is not None:
            self._busy.add(key)

    def mark_idle(self, key: K, now: float) -> None:
        """Mark the slot of ``key`` as idle: no turn of it is due."""
        self._busy.remove(key)
        self._idle[key] = now

    def leave(self, key: K) -> None:
        """Free the slot of ``key``, or its place in the queue."""
        if key in self._busy or key in self._idle:
            self._release(key)
        self._line.pop(key, None)
        self._owners.pop(key, None)
        self._sizes.pop(key, None)
        self._urgent.discard(key)

    def advance(self, now: float) -> list[Granted[K] | Evicted[K] | Refused[K]]:
        """Assign slots, and return all changes; call it after every event and when :attr:`due`.

        Call it between two passes, since an evicted session may be busy.
        """
        self._advanced = now
        out: list[Granted[K] | Evicted[K] | Refused[K]] = []
        self._grant(now, out)
        late = [k for k, since in self._line.items() if now >= since + self._config.slot_wait_s]
        for key in late:
            del self._line[key]
            out.append(Refused(key))
        if late:  # others may have waited for them
            self._grant(now, out)
        return out

    def _grant(self, now: float, out: list[Granted[K] | Evicted[K] | Refused[K]]) -> None:
        """Give slots to all keys that may have one, and append the changes to ``out``."""
        while (found := self._next(now)) is not None:
            key, victims = found
            for victim in victims:
                self._release(victim)
                out.append(Evicted(victim))
            del self._line[key]
            self._busy.add(key)
            self.held_bytes += self._sizes[key]
            self._held[self._owners[key]] += self._weight(key)
            out.append(Granted(key))

    def _next(self, now: float) -> tuple[K, list[K]] | None:
        """Return the next key to get a slot, and the keys evicted for it; None: none can get one.

        Small newcomers overtake a large one for which there is no memory, until it has waited for
        half of ``slot_wait_s``. Then only an urgent one overtakes it, in the place of others of its
        owner.
        """
        stuck = False
        for key in sorted(self._urgent_first(), key=self._holds):  # of equals the first
            if stuck and key not in self._urgent:
                continue
            victims = self._victims(key, now, own=stuck)
            if victims is not None:
                return key, victims
            lacks_memory = len(self) < self._count
            stuck |= not lacks_memory or now >= self._line[key] + self._config.slot_wait_s / 2
        return None

    def _urgent_first(self) -> list[K]:
        """Return the newcomers in order of arrival, each owner's urgent ones in its first places.

        So an owner gains nothing over others by calling its newcomers urgent.
        """
        own: dict[object, deque[K]] = defaultdict(deque)
        for key in sorted(self._line, key=lambda key: key not in self._urgent):
            own[self._owners[key] or key].append(key)
        return [own[self._owners[key] or key].popleft() for key in self._line]

    @property
    def due(self) -> float | None:
        """Time at which :meth:`advance` must be called if nothing else happens."""
        if not self._line:
            return None
        refused = next(iter(self._line.values())) + self._config.slot_wait_s
        long_idle = (since + self._config.evict_idle_s for since in self._idle.values())
        # Those that are long idle already were not enough.
        return min(refused, next((at for at in long_idle if at > self._advanced), math.inf))

    def _weight(self, key: K) -> int:
        """Return the bytes of ``key``; 1 if they are unknown, so that slots are counted."""
        return self._sizes[key] or 1

    def _holds(self, key: K, held: Counter[str] | None = None) -> int:
        """Return the bytes of the slots of the owner of ``key``; of ``held`` if that is given."""
        owner = self._owners[key]
        return (self._held if held is None else held)[owner] if owner else 0

    def _release(self, key: K) -> None:
        self._busy.discard(key)
        self._idle.pop(key, None)
        self.held_bytes -= self._sizes[key]
        owner = self._owners[key]
        self._held[owner] -= self._weight(key)
        if not self._held[owner]:
            del self._held[owner]

    def _victims(self, newcomer: K, now: float, *, own: bool) -> list[K] | None:
        """Return the keys to evict for ``newcomer``; None if that does not suffice.

        Args:
            own: only slots of its own owner may go to ``newcomer``.
        """
        slots, memory = self._count - len(self), self.room - self.held_bytes
        idle, held, victims = dict(self._idle), self._held.copy(), list[K]()
        if own:
            slots, memory, idle = 0, 0, {k: idle[k] for k in idle if self._yields(k, newcomer)}
        busy = (k for k in self._busy if self._yields(k, newcomer))
        idle |= dict.fromkeys(busy, math.inf)  # after all that are idle
        share = self._holds(newcomer) + self._weight(newcomer)
        while slots < 1 or memory < self._sizes[newcomer]:
            victim = self._evictable(newcomer, idle, held, share, now)
            if victim is None:
                return None
            victims.append(victim)
            del idle[victim]
            held[self._owners[victim]] -= self._weight(victim)
            slots, memory = slots + 1, memory + self._sizes[victim]
        return victims

    def _yields(self, key: K, newcomer: K) -> bool:
        """Return True if ``newcomer`` is urgent and ``key``, of the same owner, is not."""
        urgent = newcomer in self._urgent and key not in self._urgent
        return urgent and self._owners[key] == self._owners[newcomer] != ""

    def _evictable(
        self, newcomer: K, idle: dict[K, float], held: Counter[str], share: int, now: float
    ) -> K | None:
        """Return the key to evict: one idle for long, one of the same owner that is less urgent, or
        one of an owner that holds more than ``share``."""
        key, since = next(iter(idle.items()), (None, 0.0))
        if key is None or now >= since + self._config.evict_idle_s:
            return key
        own = (k for k in idle if self._yields(k, newcomer))
        if (less_urgent := next(own, None)) is not None:
            return less_urgent
        rich = max(idle, key=lambda key: self._holds(key, held))  # of equals the longest idle
        return rich if self._holds(rich, held) > share else None
