"""The dashboard's server, with no ROS behind it."""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from dashboard_server import TOKEN, Server

from collab_llm_nodes.dashboard.view import Action, Answer, Figures, Goal, Link, Motion
from collab_llm_nodes.errors import CollabError, ConfigError, Unavailable

# The words of the page.


def test_the_words_of_the_page() -> None:
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    from collab_llm_nodes.dashboard import page

    assert page.goal_text(Goal()) == ""
    assert page.goal_text(Goal("running", "go", step=3)) == '"go": step 3'
    assert page.goal_text(Goal("ended", "go")) == '"go": arrived'
    assert page.goal_text(Goal("ended", "go", error="BLOCKED")) == '"go": BLOCKED'
    assert "given elsewhere" in page.goal_text(Goal("ended", "go", followed="find the cone"))
    assert page.action_text(Action(kind="turn", value=-math.pi / 4)) == "turn right by 45°"
    assert page.action_text(Action(kind="forward", value=0.5)) == "drive 0.50 m ahead"
    assert page.action_text(Action(kind="none", reason="negated")) == "no motion: negated"
    assert "arrived" in page.action_text(Action(kind="stop"))
    assert "has not found it" in page.action_text(Action(kind="give up"))
    assert "answers in words" in page.action_text(Action(kind="reply"))
    figures = Figures(rounds=2, tokens=7, tau=3.5, cache_hits=1, cache_lookups=2, total_s=0.05)
    told = page.figures_text(Answer(figures=figures, mode="cloud alone"))
    assert told.startswith("cloud alone: 7 tokens in 2 rounds (tau 3.50), cache hits 50%, 50 ms")
    told = page.link_text(Link("UP", rtt_s=0.0215, sessions=1, reconnects=2))
    assert told == "UP, round trip 21.5 ms, 1 session, 2 reconnects"


# The server, with no ROS behind it.


@pytest.fixture
def server() -> Iterator[Server]:
    """A server without a token."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    server = Server()
    yield server
    server.served.close()


def test_the_stop_is_confirmed_or_said_not_to_be(server: Server) -> None:
    assert server.told("/emergency_stop", "POST") == {"confirmed": True, "subscribers": 1}
    assert server.told("/motion")["emergency_stop"] is True
    assert server.told("/reset_emergency_stop", "POST") == {"success": True, "message": "reset"}
    server.robot.guarded, server.robot.stops = False, 0
    assert server.told("/emergency_stop", "POST") == {"confirmed": False, "subscribers": 0}
    assert server.robot.stops > 3, "it is published again until it is confirmed"
    assert server.told("/reset_emergency_stop", "POST")["success"] is False
    assert server.told("/motion") == {"known": False}


def test_a_stop_that_some_guard_or_driver_has_not_confirmed_is_none(server: Server) -> None:
    server.robot.stopped = ("EMERGENCY_STOP", "STOP_UNCONFIRMED")
    assert server.told("/emergency_stop", "POST") == {"confirmed": False, "subscribers": 1}
    server.robot.stopped = ("EMERGENCY_STOP",)
    assert server.told("/emergency_stop", "POST") == {"confirmed": True, "subscribers": 1}


def test_numbers_that_are_none_do_not_hide_the_state_of_motion(server: Server) -> None:
    """It is said what is known: here that the robot stands, why, and at which speed it may not."""
    bad: dict[str, Any] = {"linear": math.nan, "angular": -math.inf, "speed_limit": math.inf}
    stopped = Motion(emergency_stop=True, reasons=("EMERGENCY_STOP", "NEW"))
    server.robot.state = replace(stopped, **bad)
    told = server.told("/motion")
    assert (told["emergency_stop"], told["text"]) == (True, "EMERGENCY_STOP; NEW")
    assert [told[name] for name in bad] == [None] * 3


def test_the_stop_does_not_wait_for_the_pages(server: Server) -> None:
    """The pages' thread does something endless; the HTTP API answers as ever."""
    held, released = threading.Event(), threading.Event()

    def endless() -> None:
        held.set()
        released.wait(30.0)

    server.served._pages.loop.call_soon_threadsafe(endless)
    assert held.wait(10.0)
    try:
        assert server.told("/emergency_stop", "POST")["confirmed"] is True
        assert server.told("/motion")["emergency_stop"] is True
    finally:
        released.set()
    assert server.ask("/")[0] == 200


def test_nobody_stops_or_resets_by_following_a_link(server: Server) -> None:
    """GET changes nothing, and another site's POST is refused."""
    for path in ("/emergency_stop", "/reset_emergency_stop"):
        assert server.ask(path)[0] in (404, 405)
        assert server.ask(path, "POST", origin="http://evil.org")[0] == 403
        assert server.ask(path, "POST", host="evil.org")[0] == 403
    assert (server.robot.stops, server.robot.resets) == (0, 0)
    assert server.ask("/emergency_stop", "POST", origin=f"http://{server.own}")[0] == 200


def test_other_sites_get_no_web_socket(server: Server) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec_websocket_version": "13",
        "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    assert server.ask(path, **upgrade, origin="http://evil.org")[0] == 403
    poll = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert server.ask(poll, "POST", "40", origin="http://evil.org")[0] == 403


def test_the_newest_picture_once(server: Server) -> None:
    assert server.ask("/camera.jpg")[0] == 204
    server.robot.picture = (7, b"\xff\xd8seven")
    status, headers, body = server.ask("/camera.jpg?after=3")
    assert (status, headers["x-frame"], body) == (200, "7", b"\xff\xd8seven")
    assert headers["cache-control"] == "no-store"
    assert server.ask("/camera.jpg?after=7")[0] == 204
    assert server.ask("/camera.jpg?after=x")[0] == 422


def test_a_page_loads_nothing_from_elsewhere(server: Server) -> None:
    """It works without the internet; and the browser is told to allow nothing else."""
    status, headers, body = server.ask("/")
    page = body.decode()
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-frame-options"] == "DENY"
    links = re.findall(r"""(?:src|href)=["']([^"']+)|url\(["']?([^"')]+)|from ["']([^"']+)""", page)
    found = [next(filter(None, link)) for link in links]
    assert "/static/bar.js" in found
    assert len(found) > 5
    for link in found:
        assert "://" not in link, f"{link} is not served from here"
        assert not link.startswith("//")
    for local in {link for link in found if link.startswith("/")}:
        assert server.ask(local)[0] == 200, local


def test_nothing_is_kept_of_pages_that_do_not_exist(server: Server) -> None:
    from nicegui import Client

    before = set(Client.instances)
    assert [server.ask(f"/{n}")[0] for n in range(5)] == [404] * 5
    assert not set(Client.instances) - before  # one of an earlier test may have ended meanwhile


def test_the_stop_page_is_nothing_but_the_bar(server: Server) -> None:
    status, _, body = server.ask("/stop")
    page = body.decode()
    assert status == 200
    assert 'id="stop"' in page
    assert "nicegui" not in page
    assert server.ask("/static/bar.js")[0] == 200
    assert server.ask("/static/../http_api.py")[0] == 404


def test_with_a_token_nothing_is_shown_before_the_log_in() -> None:
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    server = Server(token=TOKEN)
    try:
        status, _, body = server.ask("/")
        assert status == 401
        assert b'name="token"' in body
        for path in ("/camera.jpg", "/motion", "/static/bar.js", "/_nicegui_ws/socket.io/"):
            assert server.ask(path)[0] == 401, path
        assert server.ask("/emergency_stop", "POST")[0] == 401
        assert server.ask("/log_in", "POST", "token=wrong")[0] == 401
        assert server.ask("/log_in", "POST", "x" * 10_000)[0] == 401
        form = "token=" + TOKEN.replace(" ", "+")
        assert server.ask("/log_in", "POST", form, origin="http://evil.org")[0] == 401
        status, headers, _ = server.ask("/log_in", "POST", form, origin=f"http://{server.own}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"].partition(";")[0]
        assert server.ask("/", cookie=cookie)[0] == 200
        assert server.ask("/emergency_stop", "POST", cookie=cookie)[0] == 200
        assert server.ask("/motion", authorization=f"Bearer {TOKEN}")[0] == 200
    finally:
        server.served.close()


def test_a_log_in_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers can begin one; they shall not collect connections."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    from collab_llm_nodes.dashboard import connection_limiter

    monkeypatch.setattr(connection_limiter, "STRANGER_S", 0.2)
    server = Server(token=TOKEN)
    link = http.client.HTTPConnection("127.0.0.1", server.served.port, timeout=30)
    try:
        with contextlib.closing(link):
            link.putrequest("POST", "/log_in")
            link.putheader("content-length", "100")
            link.endheaders(b"token=")
            with pytest.raises(ConnectionError):
                link.getresponse()
    finally:
        server.served.close()


def test_a_server_that_does_not_start_leaves_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    from collab_llm_nodes.dashboard import server as dashboard_server

    def fails(*_: Any) -> None:
        raise CollabError("no thread can be started")

    with monkeypatch.context() as patch:
        patch.setattr(dashboard_server, "ConnectionLimiter", fails)
        with pytest.raises(CollabError, match="no thread"):
            Server()
    server = Server()
    assert server.ask("/motion")[0] == 200
    server.served.close()


def test_a_port_in_use_and_an_address_of_others_are_told(server: Server) -> None:
    from collab_llm_nodes.dashboard.server import DashboardServer

    options: dict[str, Any] = {"max_viewers": 2, "rate": 5.0}
    with pytest.raises(Unavailable, match="port"):
        DashboardServer(server.robot, "127.0.0.1", server.served.port, "", **options)
    with pytest.raises(ConfigError, match="token"):
        DashboardServer(server.robot, "0.0.0.0", 0, "", **options)
    with pytest.raises(ConfigError, match="host"):
        DashboardServer(server.robot, "192.0.2.1", 0, TOKEN, **options)  # of no machine: RFC 5737
    assert server.ask("/motion")[0] == 200, "the one that serves is not disturbed"
