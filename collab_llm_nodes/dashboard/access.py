"""Who may see the page and command the robot: decided from a request's headers alone.

Two guards, both before anything else sees a request:

- **Who.** On a loopback address without a token: whoever is on this machine, under one of its own
  names (else a web site could have its name point here and speak for the visitor: DNS
  rebinding). With a token: who gave it, at the log-in page or as a bearer; compared in constant
  time. The log-in leaves a cookie that scripts cannot read and other sites cannot send. It is
  derived from the token, so a page stays logged in, and its emergency stop works, when the
  dashboard is started anew; a new token ends all log-ins.
- **From where.** What changes anything, and the page's web socket, must come from the page itself:
  a browser says where a request comes from, and no other site may command the robot through it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from enum import Enum
from http.cookies import CookieError, SimpleCookie

from collab_llm_nodes.errors import ConfigError

MIN_TOKEN = 16
"""Characters; a token is not to be guessed."""
_COOKIE_DAYS = 30


class Refusal(Enum):
    """Why a request is not served: HTTP status and words for people."""

    LOG_IN = (401, "log in with the dashboard's token")
    HOST = (403, "this dashboard serves this machine only, under its own name (localhost)")
    ORIGIN = (403, "the request comes from another site")

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def message(self) -> str:
        """For people."""
        return self.value[1]


def is_loopback(host: str) -> bool:
    """``host`` (a name or an address) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Access:
    """The rules for a dashboard that listens on ``host``.

    Raises:
        ConfigError: an address that others can reach, and no token or one that can be guessed.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached by others, who could then drive the robot",
                field="host",
                remedy="give a token (environment COLLAB_LLM_DASHBOARD_TOKEN, or token_file), or"
                " listen on 127.0.0.1",
            )
        if token and len(token) < MIN_TOKEN:
            raise ConfigError(
                f"{len(token)} characters can be guessed",
                field="token",
                remedy=f"at least {MIN_TOKEN}: openssl rand -hex 16",
            )
        self._token = token.encode()
        # Cookies know no ports: another dashboard on this machine must not log this one out.
        self._name = f"collab_llm_dashboard_{port}"
        said = hmac.new(self._token, b"collab_llm dashboard log-in", hashlib.sha256)
        self._value = said.hexdigest()

    def refusal(self, method: str, headers: Mapping[str, str], *, socket: bool) -> Refusal | None:
        """Why not to serve a request; None to serve it.

        Args:
            headers: by lower-case name.
            socket: it opens a web socket.
        """
        if not self._token:
            if not is_loopback(_name_of(headers.get("host", ""))):
                return Refusal.HOST
        elif not self._known(headers):
            return Refusal.LOG_IN
        if (socket or method not in ("GET", "HEAD")) and not self.same_origin(headers):
            return Refusal.ORIGIN
        return None

    def same_origin(self, headers: Mapping[str, str]) -> bool:
        """The request comes from this page, or from no web page at all."""
        origin = headers.get("origin")
        if origin is not None:
            return origin.partition("://")[2] == headers.get("host", "") != ""
        return headers.get("sec-fetch-site", "none") in ("same-origin", "none")

    def log_in(self, token: str, *, secure: bool) -> str | None:
        """The ``Set-Cookie`` header for who knows the token; None for who does not.

        ``secure``: the page is served over TLS, and the cookie only there.
        """
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        age = _COOKIE_DAYS * 86400
        cookie = f"{self._name}={self._value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict"
        return cookie + ("; Secure" if secure else "")

    def _known(self, headers: Mapping[str, str]) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return hmac.compare_digest(bearer.encode(), self._token)
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._name)
        except CookieError:
            return False
        given = cookie.value if cookie is not None else ""
        return hmac.compare_digest(given.encode(), self._value.encode())


def _name_of(host: str) -> str:
    """``Host`` header without the port: ``127.0.0.1:8080``, ``[::1]:8080``, ``localhost``."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
