"""Streams, sessions and bytes of a server's clients, shared out fairly: no I/O, no clock.

All clients together have ``limits.max_streams`` places. One connection gets a share of them at
most, and so does one address, so that nobody can take the last place from the others. A stream
holds its place from its first moment, before it has said what it wants; one that says nothing for
``PATIENCE_S`` loses its place to a newcomer who would have none otherwise, and one of a client that
has two more of these than the newcomer does so at once.

How many sessions an address begins in a second, and how many bytes they bring, is a
:class:`Allowance`: above it they wait, since each prompt costs all others time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.network import network_of

PATIENCE_S = 1.0
"""Time for a stream to send its first message while places are scarce [s].

A picture of 300 kB takes 0.6 s at 4 Mbit/s.
"""
MOST_WAIT_S = 2.0
"""Longest wait of a session whose address has begun too many; a longer one is a refusal [s]."""
URGENT = "collab-llm-urgent"
"""Metadata of a stream that is counted apart from others of its address, before it is read."""
_BURST_S = 2.0  # what may be used up at once, after a silence
_SWEEP = 1024  # addresses, before those that owe nothing are forgotten


@dataclass(frozen=True)
class Shares:
    """The share of one client; of ``limits.max_streams`` always one stream at least."""

    connection: float = setting(0.25, "Share of one connection.", low=0.001, high=1.0)
    address: float = setting(
        0.5, "Share of one address: a host, or all that share its NAT.", low=0.001, high=1.0
    )
    sessions_per_s: float = setting(
        25.0,
        "Sessions that one address may begin, for motion and others counted apart, twice as many at"
        " once; more have to wait [1/s].",
        low=0.1,
        high=1e6,
    )
    bytes_per_s: float = setting(
        4e6,
        "What one address may send to begin them, counted likewise: prompts and pictures; more has"
        " to wait [byte/s].",
        low=1e3,
        high=1e12,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Peer:
    """The other end of a stream.

    Attributes:
        connection: equal for all streams of one connection, such as "ipv4:10.0.0.7:40312"; empty:
            not known.
        address: its network as in ``network_of``, such as "10.0.0.7"; several connections may share
            it. Empty: not known.
        urgent: the stream says so, in its metadata.
    """

    connection: str = ""
    address: str = ""
    urgent: bool = False

    @property
    def account(self) -> str:
        """Name by which what the stream uses is counted: urgent ones of an address apart."""
        return f"{self.address} urgent" if self.address and self.urgent else self.address

    @classmethod
    def of(cls, peer: str) -> Peer:
        """Read gRPC's form: "ipv4:10.0.0.7:40312", "ipv6:%5B::1%5D:40312" or "unix:"."""
        host = unquote(peer).partition(":")[2].rpartition(":")[0]
        return cls(peer, network_of(host.strip("[]")) or host or peer)

    @classmethod
    def behind(cls, proxy: str, metadata: Mapping[str, str], header: str) -> Peer:
        """Read who a proxy speaks for: its ``header`` holds the client's "host:port".

        Args:
            proxy: the proxy's own connection, as in :meth:`of`; counts where the header is missing.
            header: name of the header; empty: there is no proxy.
        """
        client = metadata.get(header) if header else None
        peer = cls.of(f"client:{client}" if client else proxy)
        return replace(peer, urgent=bool(metadata.get(URGENT)))


@dataclass(eq=False)
class Place:
    """The right to a stream, held from ``Admission.enter`` to ``Admission.leave``.

    Attributes:
        since: when its client could first say something [s]; infinity while it waits for its turn.
        opened: its client has said what it wants.
    """

    peer: Peer
    since: float
    opened: bool = False


class Admission:
    """See the module docstring. Times are seconds of one monotonic clock."""

    def __init__(self, max_streams: int, shares: Shares, name: str = "server") -> None:
        self._name = name  # for messages
        self._most = {
            "connection": part(max_streams, shares.connection),
            "address": part(max_streams, shares.address),
            "all": max_streams,
        }
        self._places: dict[Place, None] = {}  # in order of arrival
        self._held: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        """Places that are taken."""
        return len(self._places)

    def enter(self, peer: Peer, now: float) -> tuple[Place, Place | None]:
        """Return a place for a new stream of ``peer``, and the one that was taken away for it.

        Raises:
            Unavailable: the client has its share, or all places are taken.
        """
        full = self._full(peer)
        lost = self._silent(full, peer, now) if full else None
        if full is not None and lost is None:
            raise self._refusal(full)
        if lost is not None:
            self.leave(lost)
        place = Place(peer, now)
        self._places[place] = None
        self._held.update(_names(peer))
        return place, lost

    def leave(self, place: Place) -> None:
        """Give ``place`` back; nothing happens if it is back already."""
        if place not in self._places:
            return
        del self._places[place]
        self._held.subtract(_names(place.peer))
        for name in _names(place.peer):
            if not self._held[name]:
                del self._held[name]

    def _full(self, peer: Peer) -> tuple[str, str] | None:
        """Return what has no room for another stream: a connection, an address or ("all", "")."""
        for name in _names(peer):
            if self._held[name] >= self._most[name[0]]:
                return name
        return ("all", "") if len(self._places) >= self._most["all"] else None

    def _silent(self, full: tuple[str, str], peer: Peer, now: float) -> Place | None:
        """Return a silent stream's place whose end would make room in ``full``, if one must go.

        At once one of the address, or the connection, that has two more of them than ``peer``; else
        one that has had its time.
        """
        silent = [
            place
            for place in self._places
            if not place.opened and (full[0] == "all" or full in _names(place.peer))
        ]
        silent.sort(key=lambda place: place.since)
        for kind in ("address", "connection"):
            held = Counter(getattr(place.peer, kind) for place in silent)
            greediest = max(held, key=held.__getitem__, default="")
            if greediest and held[greediest] >= held[getattr(peer, kind)] + 2:
                return next(p for p in silent if getattr(p.peer, kind) == greediest)
        return silent[0] if silent and silent[0].since + PATIENCE_S <= now else None

    def _refusal(self, full: tuple[str, str]) -> Unavailable:
        kind = full[0]
        if kind == "all":
            what, remedy = "", f"try again later, or raise limits.max_streams on the {self._name}"
        else:
            what, remedy = (
                f" of one {kind}",
                f"use fewer, or raise shares.{kind} on the {self._name}",
            )
        return Unavailable(
            f"all {self._most[kind]} streams{what} are taken", field="session", remedy=remedy
        )


class Allowance:
    """The amount that each address may use up in a second.

    After a silence ``_BURST_S`` of it may be used at once. Times are seconds of one monotonic
    clock.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._paid_until: dict[str, float] = {}  # by address: all it has used is earned by then
        self._sweep_at = _SWEEP

    def wait_s(self, address: str, now: float) -> float:
        """Return how long ``address`` has to wait before it may use more [s]."""
        return max(0.0, self._paid_until.get(address, 0.0) - now - _BURST_S)

    def use(self, address: str, amount: float, now: float) -> None:
        """Count what ``address`` uses; an empty one is nobody's."""
        if not address:
            return
        if len(self._paid_until) >= self._sweep_at:
            self._paid_until = {a: paid for a, paid in self._paid_until.items() if paid > now}
            self._sweep_at = max(_SWEEP, 2 * len(self._paid_until))
        paid = max(self._paid_until.pop(address, 0.0), now)
        self._paid_until[address] = paid + amount / self._per_s


def part(places: int, share: float) -> int:
    """Return ``share`` of ``places``, one at least."""
    return max(1, int(places * share))


def _names(peer: Peer) -> list[tuple[str, str]]:
    """Return whose shares a stream of ``peer`` counts in; none where the peer is not known."""
    named = (("connection", peer.connection), ("address", peer.address))
    return [(kind, name) for kind, name in named if name]
