"""Tokens and certificates of servers and clients: reading, checks, and gRPC's own objects.

Wrong files are refused with their field and a remedy; gRPC would only report that it cannot listen
or connect.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
import stat
from pathlib import Path
from urllib.parse import urlsplit

import grpc

from collab_llm_nodes.errors import ConfigError

log = logging.getLogger(__name__)


def is_local(address: str) -> bool:
    """Return True if ``address`` (host:port, or unix:path) is on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or address.startswith("unix:")


def check_proxy(proxy: str) -> None:
    """Check that HTTP clients and gRPC can use ``proxy``; empty: there is none.

    Raises:
        ConfigError: not http://host:port.
    """
    with contextlib.suppress(ValueError):
        parts = urlsplit(proxy)
        whole = parts.hostname and parts.port and parts.path in ("", "/") and "@" not in proxy
        if not proxy or (parts.scheme == "http" and whole):
            return
    raise ConfigError(
        "is no proxy that can be used",  # not repeated: it may hold a password
        field="proxy",
        remedy="http://host:port, without a password; SOCKS needs an HTTP proxy before it",
    )


def check_paired(cert: str, key: str, token: str, token_file: str) -> None:
    """Check that a configuration gives certificates with their keys, and one token at most.

    Raises:
        ConfigError: it does not.
    """
    if bool(cert) != bool(key):
        raise ConfigError("tls_cert and tls_key go together", field="tls_cert")
    if token and token_file:
        raise ConfigError("give token or token_file, not both", field="token")


def server_credentials(cert: str, key: str, client_ca: str) -> grpc.ServerCredentials | None:
    """Return the TLS credentials of a server; None without ``cert``.

    Args:
        cert, key: names of PEM files.
        client_ca: only clients with a certificate of this authority may connect; empty: all may.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    if not cert:
        return None
    pair = (read_file(key, "tls_key"), read_file(cert, "tls_cert"))
    ca = read_file(client_ca, "tls_client_ca") if client_ca else None
    check_certificates(cert, key, "tls_client_ca", client_ca)
    if ca is None:
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=True)


def channel_credentials(ca: str, cert: str, key: str) -> grpc.ChannelCredentials:
    """Return the TLS credentials of a client.

    Args:
        ca: authority of the server's certificate; empty: the system's.
        cert, key: the client's own, for a server that asks for one; may be empty.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    files = {"tls_ca": ca, "tls_key": key, "tls_cert": cert}
    contents = [read_file(name, field) if name else None for field, name in files.items()]
    check_certificates(cert, key, "tls_ca", ca)
    return grpc.ssl_channel_credentials(*contents)


def read_token(token: str, token_file: str) -> str:
    """Return the token given, or the content of the file that holds it; empty without both.

    Raises:
        ConfigError: the file cannot be read, or the token is not printable ASCII.
    """
    if token_file:
        _check_private(token_file)
        token = read_file(token_file, "token_file").decode("utf-8", "replace").strip()
        if not token:
            raise ConfigError("holds no token", field="token_file")
    if not (token.isascii() and (token.isprintable() or not token)):
        raise ConfigError("a token is printable ASCII", field="token")
    return token


def _check_private(token_file: str) -> None:
    with contextlib.suppress(OSError):  # reading it gives a better error
        if Path(token_file).expanduser().stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("others can read the token in %s: chmod 600 it", token_file)


def check_certificates(cert: str, key: str, authority_field: str, authority: str) -> None:
    """Check that TLS can use these PEM files.

    Raises:
        ConfigError: ``tls_cert`` is no certificate, or not that of ``tls_key``; ``authority`` holds
            no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if cert:
            own, its_key = Path(cert).expanduser(), Path(key).expanduser()
            context.load_cert_chain(own, its_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        remedy = "PEM files, the key not encrypted"
        message = f"{cert} is no certificate with the key {key}: {error}"
        raise ConfigError(message, field="tls_cert", remedy=remedy) from error
    try:
        if authority:
            context.load_verify_locations(Path(authority).expanduser())
    except ssl.SSLError as error:
        message = f"{authority} holds no certificate: {error}"
        raise ConfigError(message, field=authority_field, remedy="a PEM file") from error


def read_file(name: str, field_name: str) -> bytes:
    """Return the content of ``name``.

    Raises:
        ConfigError: it cannot be read; ``field`` is ``field_name``.
    """
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {name}: {error.strerror}", field=field_name, remedy="check the file name"
        ) from error
