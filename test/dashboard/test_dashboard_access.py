"""Access to the dashboard: names, tokens, other sites."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard_server import TOKEN

from collab_llm_nodes.dashboard.access import Access, Refusal, is_loopback
from collab_llm_nodes.errors import ConfigError


def ask(access: Access, method: str = "GET", **headers: str) -> Any:
    """The refusal of a request; header names with _ for -. Method SOCKET: a web socket."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    socket = method == "SOCKET"
    return access.refusal("GET" if socket else method, given, socket=socket)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "robot.local", "fe80::1"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        Access(host, 8080, "")
    with pytest.raises(ConfigError, match="guessed"):
        Access(host, 8080, "short")
    Access(host, 8080, TOKEN)


def test_loopback_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "", "localhost.evil.org", "127.0.0.1.evil.org")))


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:8080", "localhost:9999"])
def test_without_a_token_this_machine_is_served_under_its_own_names(host: str) -> None:
    assert ask(Access("127.0.0.1", 8080, ""), host=host) is None


@pytest.mark.parametrize("host", ["evil.org:8080", "localhost.evil.org", "", "127.0.0.1@evil.org"])
def test_no_name_of_others_that_points_here_is_served(host: str) -> None:
    assert ask(Access("127.0.0.1", 8080, ""), host=host) is Refusal.HOST


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_the_page_itself_may_change_anything(method: str) -> None:
    access = Access("127.0.0.1", 8080, "")
    here = {"host": "localhost:8080"}
    assert ask(access, method, **here, origin="http://localhost:8080") is None
    assert ask(access, method, **here) is None  # no browser
    assert ask(access, method, **here, sec_fetch_site="same-origin") is None
    for origin in ("http://evil.org", "http://localhost:8081", "null", "", "http://127.0.0.1:8080"):
        assert ask(access, method, **here, origin=origin) is Refusal.ORIGIN
    assert ask(access, method, **here, sec_fetch_site="cross-site") is Refusal.ORIGIN


def test_a_web_socket_from_another_site_is_refused() -> None:
    access = Access("127.0.0.1", 8080, "")
    here = {"host": "localhost:8080"}
    assert ask(access, "SOCKET", **here, origin="http://localhost:8080") is None
    assert ask(access, "SOCKET", **here, origin="http://evil.org") is Refusal.ORIGIN


def test_the_token_opens_by_cookie_or_bearer() -> None:
    access, host = Access("0.0.0.0", 8080, TOKEN), "robot:8080"
    assert ask(access, host=host) is Refusal.LOG_IN
    assert access.log_in("another", secure=False) is None
    assert access.log_in("", secure=False) is None
    header = access.log_in(TOKEN, secure=False)
    assert header is not None
    assert TOKEN not in header
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(header.split("; "))
    cookie = header.partition(";")[0]
    assert ask(access, host=host, cookie=f"other=1; {cookie}") is None
    assert ask(access, host=host, cookie=cookie[:-1]) is Refusal.LOG_IN
    assert ask(access, host=host, cookie="\x00=;=") is Refusal.LOG_IN
    assert ask(access, host=host, authorization=f"Bearer {TOKEN}") is None
    assert ask(access, host=host, authorization=f"Bearer {TOKEN}x") is Refusal.LOG_IN
    assert ask(access, host=host, authorization=f"Basic {TOKEN}") is Refusal.LOG_IN
    evil = {"host": host, "cookie": cookie, "origin": "http://evil.org"}
    assert ask(access, "POST", **evil) is Refusal.ORIGIN
    secure = access.log_in(TOKEN, secure=True)
    assert secure is not None
    assert secure.endswith("; Secure")


def test_a_log_in_outlives_the_dashboard_but_not_its_token() -> None:
    header = Access("0.0.0.0", 8080, TOKEN).log_in(TOKEN, secure=False)
    assert header is not None
    cookie = header.partition(";")[0]
    assert ask(Access("0.0.0.0", 8080, TOKEN), host="r", cookie=cookie) is None
    other = Access("0.0.0.0", 8080, "another token, also long")
    assert ask(other, host="r", cookie=cookie) is Refusal.LOG_IN
