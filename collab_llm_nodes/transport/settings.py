"""Configuration of servers and clients: addresses, TLS, tokens, limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import check_address, check_ranges, from_yaml, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.credentials import check_paired, check_proxy

BACKOFF_S = 0.05
"""Pause after a lost connection, doubled with each attempt: a short loss must cost little."""


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
    """Settings of every server. File names are PEM files. A protocol's own extends it."""

    address: str = setting("127.0.0.1:50551", "Listen here, host:port; port 0 takes a free one.")
    client_header: str = setting(
        "",
        "Header in which a proxy names the client, host:port. Set it only where nothing but the"
        " proxy can reach the address: others could name any client. Empty: there is no proxy.",
    )
    tls_cert: str = setting("", "Own certificate; empty: no encryption.")
    tls_key: str = setting("", "Key of tls_cert.")
    tls_client_ca: str = setting(
        "", "Authority of the clients' certificates; empty: clients need none."
    )
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the token every client must give.")
    limits: StreamLimits = field(default_factory=StreamLimits)
    shares: Shares = field(default_factory=Shares)
    drain_s: float = setting(
        10.0, "Time for open sessions to end on shutdown [s].", low=0.0, high=3600.0
    )
    metrics_address: str = setting(
        "",
        "Serve Prometheus metrics here, host:port, to any client; empty: do not. With Ray,"
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


@dataclass(frozen=True)
class RetryConfig:
    """Deadlines and pauses of a client's attempts to connect."""

    connect_deadline_s: float = setting(
        2.0,
        "One attempt to connect [s]. Raise it for a link whose round trip takes seconds.",
        low=0.01,
        high=60.0,
        read_only=True,
    )
    backoff_max_s: float = setting(
        1.0,
        "Longest pause between two attempts to connect [s]. Raise it for many robots of one"
        " server; lower it to be back sooner after an outage.",
        low=BACKOFF_S,
        high=60.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class ClientCredentials:
    """TLS and the token of a client. File names are PEM files."""

    tls: bool = setting(False, "Encrypt, and check the server's certificate.", read_only=True)
    tls_ca: str = setting(
        "", "Certificate authority of the server; empty: the system's.", read_only=True
    )
    tls_cert: str = setting("", "Own certificate, for a server that asks for one.", read_only=True)
    tls_key: str = setting("", "Key of tls_cert.", read_only=True)
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the bearer token.", read_only=True)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_paired(self.tls_cert, self.tls_key, self.token, self.token_file)
        if (self.tls_ca or self.tls_cert) and not self.tls:
            raise ConfigError("certificates need tls: true", field="tls")


@dataclass(frozen=True)
class ClientConfig(ClientCredentials):
    """Address of a server, TLS and time limits. File names are PEM files.

    Read when the connection is made, hence read-only as parameters: a new value needs a new node.
    """

    address: str = setting("127.0.0.1:50551", "Server, host:port.", read_only=True)
    tls_server_name: str = setting(
        "", "Name in the server's certificate if not the host's.", read_only=True
    )
    proxy: str = setting(
        "",
        "HTTP proxy to the server, http://host:port; not used for servers on this machine. Empty:"
        " none, and the environment's is ignored.",
        read_only=True,
    )
    max_message_bytes: int = setting(
        16 << 20,
        "Largest message [byte]. Raise it with the server's own limit, for larger pictures.",
        low=4096,
        read_only=True,
    )
    keepalive_s: float = setting(
        2.0,
        "A silent connection is probed after this time [s].",
        low=0.1,
        high=3600.0,
        read_only=True,
    )
    link: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.address.startswith("unix:"):
            check_address("address", self.address)
        check_proxy(self.proxy)


C = TypeVar("C", bound=ServerConfig)


def read_server_config(
    kind: type[C], file: str | Path | None, *, model: str | None, address: str | None
) -> C:
    """Return the settings in ``file``, with ``model`` and ``address`` replaced if given.

    Args:
        kind: of the settings; its field ``model`` names the model to serve.
        file: YAML: a path, or the name of a shipped file; None: the defaults.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    if file is not None and not Path(file).exists() and Path(file).name == str(file):
        file = config_file(str(file))
    config: Any = from_yaml(kind, file) if file is not None else kind()
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    if address is not None:
        config = replace(config, address=address)
    if not config.model.path:
        raise ConfigError("no model", field="model.path", remedy="name its folder or hub id")
    found: C = config
    return found
