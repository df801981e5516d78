"""Places for the streams of a verifier's clients, shared out fairly: no I/O, no clock.

All clients together have ``limits.max_streams`` places. One connection gets a share of them at
most, and so does one address, so that nobody can take the last place from the others. A stream
holds its place from its first moment, before it has said what it wants; one that says nothing for
``PATIENCE_S`` loses its place to a newcomer who would have none otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.network import network_of

PATIENCE_S = 1.0
"""Time for a stream to send Open while places are scarce [s]."""


@dataclass(frozen=True)
class Shares:
    """How much of ``limits.max_streams`` one client may take; always one stream at least."""

    connection: float = setting(0.25, "Share of one connection.", low=0.001, high=1.0)
    address: float = setting(
        0.5, "Share of one address: a host, or all that share its NAT.", low=0.001, high=1.0
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
    """

    connection: str = ""
    address: str = ""

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
        return cls.of(f"client:{client}" if client else proxy)


@dataclass(eq=False)
class Place:
    """What a stream holds from ``Admission.enter`` to ``Admission.leave``.

    Attributes:
        since: when it was taken [s].
        opened: its client has said what it wants.
    """

    peer: Peer
    since: float
    opened: bool = False


class Admission:
    """See the module docstring. Times are seconds of one monotonic clock."""

    def __init__(self, max_streams: int, shares: Shares) -> None:
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
        lost = self._silent(full, now) if full else None
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

    def _silent(self, full: tuple[str, str], now: float) -> Place | None:
        """Return the place held longest in vain, of those whose end would make room in ``full``."""
        for place in self._places:
            if place.since + PATIENCE_S > now:
                return None  # nor can those that came later
            if not place.opened and (full[0] == "all" or full in _names(place.peer)):
                return place
        return None

    def _refusal(self, full: tuple[str, str]) -> Unavailable:
        kind = full[0]
        if kind == "all":
            what, remedy = "", "try again later, or raise limits.max_streams on the verifier"
        else:
            what, remedy = f" of one {kind}", f"use fewer, or raise shares.{kind} on the verifier"
        return Unavailable(
            f"all {self._most[kind]} streams{what} are taken", field="session", remedy=remedy
        )


def part(places: int, share: float) -> int:
    """Return ``share`` of ``places``, one at least."""
    return max(1, int(places * share))


def _names(peer: Peer) -> list[tuple[str, str]]:
    """Return whose shares a stream of ``peer`` counts in; none where the peer is not known."""
    named = (("connection", peer.connection), ("address", peer.address))
    return [(kind, name) for kind, name in named if name]
