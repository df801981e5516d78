"""Configuration of any server: where it listens, who may connect, and for how much."""

from __future__ import annotations

from dataclasses import dataclass, field

from collab_llm_nodes.config import check_address, check_ranges, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.credentials import check_paired


@dataclass(frozen=True)
class StreamLimits:
    """Bounds on what clients can ask of a server. A protocol's own limits extend it."""

    max_streams: int = setting(64, "Streams open at a time.", low=1, high=65536)
    max_connections: int = setting(
        256, "Connections at a time; one carries any number of sessions.", low=1, high=65536
    )
    max_message_bytes: int = setting(9 << 20, "One message [byte].", low=4096, high=256 << 20)
    idle_s: float = setting(
        60.0, "Longest silence of a client within a session [s].", low=0.01, high=86400.0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ServerConfig:
    """What every server can be told. File names are PEM files. A protocol's own extends it."""

    address: str = setting("127.0.0.1:50551", "Listen here, host:port; port 0 takes a free one.")
    client_header: str = setting(
        "",
        "Header in which a proxy names the client it speaks for, host:port. Only where nobody but"
        " the proxy can reach the address: others could name anyone. Empty: there is no proxy.",
    )
    tls_cert: str = setting("", "Own certificate; empty: no encryption.")
    tls_key: str = setting("", "Key of tls_cert.")
    tls_client_ca: str = setting("", "Authority of the clients' certificates, to ask for them.")
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the token every client must give.")
    limits: StreamLimits = field(default_factory=StreamLimits)
    shares: Shares = field(default_factory=Shares)
    drain_s: float = setting(
        10.0, "When told to stop, wait this long for open sessions [s].", low=0.0, high=3600.0
    )
    metrics_address: str = setting(
        "",
        "Serve Prometheus metrics here, host:port, to whoever asks; empty: do not. With Ray,"
        " replica n at port + n, from 0.",
    )
    log_format: str = setting(
        "text", "text, or json: one object per line.", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        check_address("address", self.address)
        if self.metrics_address:
            check_address("metrics_address", self.metrics_address)
        check_paired(self.tls_cert, self.tls_key, self.token, self.token_file)
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("needs tls_cert and tls_key", field="tls_client_ca")
