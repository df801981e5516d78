"""HTTP clients of servers that are not trusted: addresses, TLS, proxies, bounded responses."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from collab_llm_nodes.errors import ConfigError, ProtocolError, quoted
from collab_llm_nodes.transport.credentials import check_certificates, is_local, read_file

RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that are retried; server errors are retried as well."""
PERMANENT = frozenset({501, 505})


def is_transient(status: int) -> bool:
    """Return True if another attempt may succeed where a server answered ``status``."""
    return status in RETRIED or (status >= 500 and status not in PERMANENT)


def is_local_url(url: str) -> bool:
    """Return True if ``url`` leads to this machine."""
    return is_local(f"{urlsplit(url).hostname}:0")


def check_url(url: str, *, unencrypted: bool, tls_ca: str = "", example: str) -> None:
    """Check the base URL of a server.

    Args:
        unencrypted: http:// to other machines is allowed.
        example: of a good URL, for the remedy.

    Raises:
        ConfigError: no base URL, one with a password in it, or one that leaves this machine
            unencrypted without leave.
    """
    usable = _is_base_url(url)
    if "@" in (urlsplit(url).netloc if usable else url):
        raise ConfigError("holds a password", field="url", remedy="use token_file")
    if not usable:
        raise ConfigError(f"{quoted(url)} is no base URL", field="url", remedy=f"such as {example}")
    parts = urlsplit(url)
    encrypted = parts.scheme == "https"
    if not (encrypted or unencrypted or is_local_url(url)):
        raise ConfigError(
            "leaves this machine unencrypted",
            field="url",
            remedy="use https://, or set unencrypted where the network is trusted",
        )
    if tls_ca and not encrypted:
        raise ConfigError(
            "a certificate authority needs https://", field="tls_ca", remedy="leave it out"
        )


def _is_base_url(url: str) -> bool:
    """Return True if requests can be sent to paths below ``url``."""
    try:
        parts = urlsplit(url)
        port = parts.port
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):  # a bracket without its other, a port beyond 65535
        return False
    named = parts.scheme in ("http", "https") and parts.hostname and port != 0
    return bool(named) and not any(c in "?#" or c.isspace() for c in url)


def client_options(
    url: str, *, tls_ca: str, proxy: str, connections: int, max_bytes: int
) -> dict[str, Any]:
    """Return the arguments of an ``httpx2.AsyncClient`` for the server at ``url``.

    Redirects are not followed, since they would carry texts and keys elsewhere; proxies of the
    environment are not used. Cookies are not kept: a server could send them without end.

    Args:
        tls_ca: certificate authority, a PEM file; empty: the system's.
        proxy: not used for servers on this machine; empty: none.
        connections: at a time.
        max_bytes: of one response; a longer one raises ``TooLarge``.

    Raises:
        ConfigError: ``tls_ca`` cannot be read.
    """
    verify = _system_trust()
    if tls_ca:
        read_file(tls_ca, "tls_ca")
        check_certificates("", "", "tls_ca", tls_ca)
        verify = ssl.create_default_context(cafile=Path(tls_ca).expanduser())

    async def bound(response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(
                "the server compresses its response, though it was asked not to",
                field="url",
                remedy="switch compression off, there or in the proxy before it",
            )
        response.stream = _Bounded(response.stream, max_bytes)

    return {
        "verify": verify,
        "trust_env": False,
        "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=())),
        "proxy": None if is_local_url(url) else proxy or None,
        "follow_redirects": False,
        "event_hooks": {"request": [], "response": [bound]},
        "limits": httpx2.Limits(max_connections=connections),
    }


@functools.cache
def _system_trust() -> ssl.SSLContext:
    """Return the system's certificate authorities; reading them takes long."""
    return httpx2.create_ssl_context()


class TooLarge(Exception):
    """A response has too many bytes."""


class _Bounded(httpx2.AsyncByteStream):
    """The bytes of a response, up to a limit."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._left = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise TooLarge
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
