"""Access to the page and to the robot, decided from a request's headers alone.

Two checks, both before anything else handles a request:

- **Client.** On a loopback address without a token: any client on this machine that uses one of its
  own names (against DNS rebinding, where a web site's name resolves to this address). With a token:
  clients that present it, at the log-in page or as a bearer; compared in constant time. The log-in
  sets a cookie that scripts cannot read and other sites cannot send. It is derived from the token,
  so pages stay logged in, and their emergency stop works, after a restart; a new token ends all
  log-ins.
- **Origin.** Requests must come from the page itself or from no web page at all, so that no other
  site can command the robot through a visitor's browser. Following a link to the page is allowed.

The right token is always accepted at once. Wrong ones at the log-in page are slowed by
:class:`Tries`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from enum import Enum

from collab_llm_nodes.errors import ConfigError

MIN_TOKEN = 16
"""Characters; a token is not to be guessed."""
_COOKIE_DAYS = 30
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")


class Refusal(Enum):
    """Reasons not to serve a request: HTTP status and words for people."""

    LOG_IN = (401, "log in with the dashboard's token")
    HOST = (403, "this dashboard serves this machine only, under its own name (localhost)")
    ORIGIN = (403, "the request comes from another site")

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def message(self) -> str:
        """Words for people."""
        return self.value[1]


def is_loopback(host: str) -> bool:
    """``host`` (a name or an address) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def authority(text: str, default_port: int = 80) -> tuple[str, int] | None:
    """Return name and port of exactly ``name[:port]``; None for any other text.

    The name is in lower case, an IPv6 address in brackets.
    """
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    name, port = match[1].lower(), int(match[2] or default_port)
    if name.startswith("["):
        try:
            ipaddress.IPv6Address(name[1:-1])
        except ValueError:
            return None
    return (name, port) if port < 65536 else None


class Tries:
    """Limit on the wrong tokens that a network may give at the log-in page.

    ``AT_ONCE`` times, then once every ``EVERY_S`` seconds. At most ``NETWORKS`` networks have
    an allowance each and all others share one, which bounds the memory and the rate of them all.
    """

    AT_ONCE = 5
    EVERY_S = 5.0
    NETWORKS = 256

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        """By network: when all its tries will have come back."""

    def take(self, network: str, now: float) -> float:
        """Take a try at ``now`` [s]; return 0.0, or the seconds to wait for one."""
        if network not in self._free_at and len(self._free_at) >= self.NETWORKS:
            self._free_at = {key: at for key, at in self._free_at.items() if at > now}
            if len(self._free_at) >= self.NETWORKS:
                network = ""
        free_at = max(now, self._free_at.get(network, now)) + self.EVERY_S
        wait = free_at - now - self.AT_ONCE * self.EVERY_S
        if wait > 0:
            return wait
        self._free_at[network] = free_at
        return 0.0

    def forgive(self, network: str) -> None:
        """Give a network all its tries back: the right token came from there."""
        self._free_at.pop(network, None)


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
        digest = hmac.new(self._token, b"collab_llm dashboard log-in", hashlib.sha256)
        self._value = digest.hexdigest()

    def refusal(self, method: str, headers: Mapping[str, str], *, socket: bool) -> Refusal | None:
        """Return the reason not to serve a request; None to serve it.

        Args:
            headers: by lower-case name.
            socket: it opens a web socket.
        """
        if not self._token:
            named = authority(headers.get("host", ""))
            if named is None or not is_loopback(named[0]):
                return Refusal.HOST
        elif not self._known(headers):
            return Refusal.LOG_IN
        follows_link = method in ("GET", "HEAD") and not socket and _is_navigation(headers)
        if not follows_link and not self.same_origin(headers):
            return Refusal.ORIGIN
        return None

    def same_origin(self, headers: Mapping[str, str]) -> bool:
        """The request comes from this page, or from no web page at all."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        scheme, _, there = origin.partition("://")
        if scheme not in _DEFAULT_PORTS:
            return False
        port = _DEFAULT_PORTS[scheme]
        here = authority(headers.get("host", ""), port)
        return here is not None and here == authority(there, port)

    def log_in(self, token: str, *, secure: bool) -> str | None:
        """Return the ``Set-Cookie`` header for the right ``token``, None for a wrong one.

        Args:
            secure: the page is served over TLS, so the cookie is sent over TLS only.
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
        cookies = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        # All of that name: another server on this machine can set one that hides the right one.
        given = [value for name, _, value in cookies if name == self._name]
        return any(hmac.compare_digest(value.encode(), self._value.encode()) for value in given)


def _is_navigation(headers: Mapping[str, str]) -> bool:
    """A browser opens the page in a tab, as by a link: visible, and not within another page."""
    asked = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return asked == ("navigate", "document") and "origin" not in headers
