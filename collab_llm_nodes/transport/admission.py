"""Fair shares of streams, sessions and bytes for a server's clients: no I/O, no clock.

All clients together have ``limits.max_streams`` places, of which one connection, and one address,
get a share at most: no client can take the last place. A stream holds its place from the moment it
is opened. If it sends no message for ``PATIENCE_S``, it loses its place to a newcomer that would
have none otherwise; at once if its client has two more silent streams than the newcomer.

The sessions that an address begins in a second, and their bytes, are limited by an
:class:`Allowance`. Further ones wait, since each prompt costs all other clients time.
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
"""Longest wait of a session whose address has used up its allowance; then it is refused [s]."""
URGENT = "collab-llm-urgent"
"""Metadata of an urgent stream, which is counted apart from the others of its address."""
_BURST_S = 2.0  # allowance that may be used up at once after a silence
_SWEEP = 1024  # addresses at which those that owe nothing are dropped


@dataclass(frozen=True)
class Shares:
    """Shares of one client in what the server has; one stream at least."""

    connection: float = setting(0.25, "Share of one connection.", low=0.001, high=1.0)
    address: float = setting(
        0.5, "Share of one address: a host, or all that share its NAT.", low=0.001, high=1.0
    )
    sessions_per_s: float = setting(
        25.0,
        "Sessions that one address may begin, those for motion and all others counted apart, and"
        " twice as many at once; further ones wait [1/s].",
        low=0.1,
        high=1e6,
    )
    bytes_per_s: float = setting(
        4e6,
        "Bytes of prompts and pictures that one address may send to begin them, counted likewise;"
        " further ones wait [byte/s].",
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
            unknown.
        address: its network as in ``network_of``, such as "10.0.0.7", which several connections may
            share; empty: unknown.
        urgent: its metadata say so.
    """

    connection: str = ""
    address: str = ""
    urgent: bool = False

    @property
    def account(self) -> str:
        """Name of the account for the stream's use: that of its address, or of its urgent ones."""
        return f"{self.address} urgent" if self.address and self.urgent else self.address

    @classmethod
    def of(cls, peer: str) -> Peer:
        """Parse gRPC's form: "ipv4:10.0.0.7:40312", "ipv6:%5B::1%5D:40312" or "unix:"."""
        host = unquote(peer).partition(":")[2].rpartition(":")[0]
        return cls(peer, network_of(host.strip("[]")) or host or peer)

    @classmethod
    def behind(cls, proxy: str, metadata: Mapping[str, str], header: str) -> Peer:
        """Return the client that a proxy forwards: its ``header`` holds "host:port".

        Args:
            proxy: the proxy's own connection, as in :meth:`of`; used if the header is missing.
            header: name of the header; empty: there is no proxy.
        """
        client = metadata.get(header) if header else None
        peer = cls.of(f"client:{client}" if client else proxy)
        return replace(peer, urgent=bool(metadata.get(URGENT)))


@dataclass(eq=False)
class Place:
    """The right to a stream, held from ``Admission.enter`` to ``Admission.leave``.

    Attributes:
        since: start of the time for the first message [s]; infinity while it waits for its turn.
        opened: its first message has been accepted.
    """

    peer: Peer
    since: float
    opened: bool = False


class Admission:
    """Hands out the places for streams. Times are seconds of one monotonic clock."""

    def __init__(self, max_streams: int, shares: Shares, name: str = "server") -> None:
        self._name = name  # for messages
        self._most = {
            "connection": share_of(max_streams, shares.connection),
            "address": share_of(max_streams, shares.address),
            "all": max_streams,
        }
        self._places: dict[Place, None] = {}  # in order of arrival
        self._held: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        """Return the number of places in use."""
        return len(self._places)

    def enter(self, peer: Peer, now: float) -> tuple[Place, Place | None]:
        """Return a place for a new stream of ``peer``, and the place that was freed for it.

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
        """Give ``place`` back, unless that has been done."""
        if place not in self._places:
            return
        del self._places[place]
        self._held.subtract(_names(place.peer))
        for name in _names(place.peer):
            if not self._held[name]:
                del self._held[name]

    def _full(self, peer: Peer) -> tuple[str, str] | None:
        """Return what has no free place: ("connection" or "address", its name) or ("all", "")."""
        for name in _names(peer):
            if self._held[name] >= self._most[name[0]]:
                return name
        return ("all", "") if len(self._places) >= self._most["all"] else None

    def _silent(self, full: tuple[str, str], peer: Peer, now: float) -> Place | None:
        """Return the place of a silent stream that is to end to make room in ``full``, if any.

        At once one of the address, or the connection, that has two more of them than ``peer``; else
        one whose time is over.
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
    """A rate limit for each address, with bursts of ``_BURST_S`` after a silence.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._paid_until: dict[str, float] = {}  # by address: when its use is paid off
        self._sweep_at = _SWEEP

    def wait_s(self, address: str, now: float) -> float:
        """Return the time until ``address`` may use more [s]."""
        return max(0.0, self._paid_until.get(address, 0.0) - now - _BURST_S)

    def use(self, address: str, amount: float, now: float) -> None:
        """Charge ``amount`` to ``address``; an empty address is not charged."""
        if not address:
            return
        if len(self._paid_until) >= self._sweep_at:
            self._paid_until = {a: paid for a, paid in self._paid_until.items() if paid > now}
            self._sweep_at = max(_SWEEP, 2 * len(self._paid_until))
        paid = max(self._paid_until.pop(address, 0.0), now)
        self._paid_until[address] = paid + amount / self._per_s


def share_of(places: int, share: float) -> int:
    """Return ``share`` of ``places``, one at least."""
    return max(1, int(places * share))


def _names(peer: Peer) -> list[tuple[str, str]]:
    """Return the shares that a stream of ``peer`` counts in; none if the peer is unknown."""
    named = (("connection", peer.connection), ("address", peer.address))
    return [(kind, name) for kind, name in named if name]
