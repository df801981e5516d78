"""The clients of a verifier as its limits see them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote


@dataclass(frozen=True)
class Peer:
    """The other end of a stream.

    Attributes:
        connection: equal for all streams of one connection, such as "ipv4:10.0.0.7:40312".
        address: its host, such as "10.0.0.7"; several connections may share it.
    """

    connection: str = "local"
    address: str = "local"

    @classmethod
    def of(cls, peer: str) -> Peer:
        """Read gRPC's form: "ipv4:10.0.0.7:40312", "ipv6:%5B::1%5D:40312" or "unix:"."""
        host = unquote(peer).partition(":")[2].rpartition(":")[0]
        return cls(peer, host.strip("[]") or peer)
