"""The dashboard: what is shown, who may see it, the stop that always works, and the page itself."""

from __future__ import annotations

import contextlib
import html
import http.client
import itertools
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from dashboard_server import TOKEN, Server

from collab_llm_nodes.dashboard import drawing
from collab_llm_nodes.dashboard.access import Access, Refusal, is_loopback
from collab_llm_nodes.dashboard.view import (
    ANSWERS,
    PATH_POINTS,
    SAMPLES,
    SILENT_S,
    STATUSES,
    TEXT,
    Action,
    Answer,
    Figures,
    Goal,
    Level,
    Link,
    Path,
    Pose,
    View,
    direction,
    words,
)
from collab_llm_nodes.errors import CollabError, ConfigError, Unavailable
from collab_llm_nodes.protocols.edge_cloud.client import Source

A, R, B, U = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.UNVERIFIED
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=2</script>'


# What is shown.


def test_words_are_the_text_again_by_token() -> None:
    text = "the ball is left. turn left"
    ends, sources = [3, 8, 11, 17, 22, 27], [A, A, R, A, A, B]
    shown = words(text, ends, sources, span=(18, 27))
    assert "".join(w.text for w in shown) == text
    assert [(w.text, w.source) for w in shown[:4]] == [
        ("the", A),
        (" ball", A),
        (" is", R),
        (" left.", A),
    ]
    assert [w.text for w in shown if w.matched] == ["turn", " left"]
    assert [w.source for w in shown if w.matched] == [A, B]


@pytest.mark.parametrize(
    ("ends", "sources"),
    [([], []), ([3], [A]), ([3, 900], [A, A]), ([3, 8], [A]), ([3, 8], [A, 77]), ([8, 3], [A, A])],
)
def test_words_of_tokens_that_do_not_fit_the_text_lose_nothing(
    ends: list[int], sources: list[int]
) -> None:
    text = "the ball is left"
    for span in ((0, 0), (4, 8), (10, 999), (12, 3)):
        assert "".join(w.text for w in words(text, ends, sources, span)) == text


def test_a_tokens_source_is_known_up_to_its_end_only() -> None:
    shown = words("the ball", [3], [R])
    assert [(w.text, w.source) for w in shown] == [("the", R), (" ball", None)]


def test_text_of_models_is_never_markup() -> None:
    drawn = drawing.answer_html(words(EVIL, [5, len(EVIL)], [A, R]))
    assert "<img" not in drawn
    assert "<script" not in drawn
    assert html.unescape(re.sub(r"</?span[^>]*>", "", drawn)) == EVIL
    assert drawn.count("<span") == 2
    assert 'class="token accepted"' in drawn
    view = View(1.0)
    view.on_health(f"{EVIL}: {EVIL}", 2, EVIL, now=0.0)
    table = drawing.health_html(view.snapshot(0.0).health)
    assert "<img" not in table
    assert "<script" not in table
    assert '"window' not in table  # which would end the attribute it stands in


def test_a_direction_is_where_a_pinhole_camera_sees_it() -> None:
    fov = math.radians(90)
    assert direction(0.0, fov).x == 0.5
    assert direction(math.radians(44.999), fov).x == pytest.approx(0.0, abs=1e-4)
    left = direction(math.radians(30), fov)
    assert left.inside
    assert left.x == pytest.approx(0.5 - 0.5 * math.tan(math.radians(30)))
    assert direction(math.radians(-30), fov).x == pytest.approx(1 - left.x)
    assert (direction(1.5, fov).x, direction(1.5, fov).inside) == (0.0, False)
    assert (direction(-1.5, fov).x, direction(-1.5, fov).inside) == (1.0, False)


def test_the_direction_follows_the_turn() -> None:
    view = View(math.radians(90))
    view.on_pose(Pose(yaw=3.0))
    assert view.snapshot(0.0).direction is None
    view.on_action(Action(kind="turn", value=1.0))
    begun = view.snapshot(0.0)
    assert begun.direction is not None
    assert begun.direction.angle == pytest.approx(1.0)
    assert begun.done == 0.0
    view.on_pose(Pose(yaw=3.5 - 2 * math.pi))  # across the seam of the angles
    half = view.snapshot(0.0)
    assert half.direction is not None
    assert half.direction.angle == pytest.approx(0.5)
    assert half.done == pytest.approx(0.5)
    view.on_action(Action(kind="forward", value=0.5))
    view.on_pose(Pose(x=0.25, yaw=-2.8))
    ahead = view.snapshot(0.0)
    assert ahead.direction is not None
    assert ahead.direction.x == 0.5
    assert ahead.done == pytest.approx(0.5)
    view.on_action(Action(kind="none", reason="NEGATED"))
    assert view.snapshot(0.0).direction is None


def test_what_the_action_was_read_from_is_marked_in_its_own_answer_only() -> None:
    view = View(1.0)
    view.on_action(Action(session="a", kind="turn", value=1.0, span=(4, 8)))
    view.on_answer(Answer(session="a", text="now turn", ends=(3, 8), sources=(A, B)))
    assert [w.text for w in view.snapshot(0.0).words if w.matched] == [" turn"] or [
        w.text for w in view.snapshot(0.0).words if w.matched
    ] == ["turn"]
    view.on_answer(Answer(session="b", text="now turn", ends=(3, 8), sources=(A, B)))
    assert not any(w.matched for w in view.snapshot(0.0).words)


def test_the_path_keeps_its_length_and_its_end() -> None:
    path = Path()
    for n in range(100_000):
        path.add(0.02 * n, 0.0)
    assert PATH_POINTS / 2 <= len(path.points) <= PATH_POINTS
    assert path.points[0] == (0.0, 0.0)
    assert path.points[-1][0] == pytest.approx(2000.0, abs=15.0)
    path.add(-500.0, 3.0)  # another room, or odometry began anew
    assert path.points == [(-500.0, 3.0)]


def test_odometry_that_is_no_number_is_not_drawn() -> None:
    view = View(1.0)
    view.on_pose(Pose(1.0, 2.0))
    view.on_pose(Pose(math.nan, 2.0))
    assert view.snapshot(0.0).pose == Pose(1.0, 2.0)
    assert "nan" not in drawing.path_svg(view.snapshot(0.0).path, view.snapshot(0.0).pose)


def test_the_robot_points_where_it_goes() -> None:
    """The odometry frame's x is up in the picture, y is left."""
    drawn = drawing.path_svg([(0.0, 0.0), (1.0, 2.0)], Pose(1.0, 2.0, math.pi / 2))
    assert "translate(-2.000 -1.000) rotate(-90.0)" in drawn
    assert "0.00,0.00 -2.00,-1.00" in drawn.replace("-0.00", "0.00")


def test_memory_is_bounded_whatever_arrives() -> None:
    view = View(1.0)
    for n in range(3 * STATUSES):
        view.on_draft(str(n), 4, solo=False, ahead=False)
        view.on_answer(Answer(session=str(n), text="x" * 10 * TEXT, final=True))
        view.on_link(Link("UP", rtt_s=0.01), now=2.0 * n)
        view.on_health(f"node{n}: part", 0, "y" * 10_000, now=0.0)
    shown = view.snapshot(0.0)
    assert len(shown.answers) == ANSWERS
    assert len(shown.rtts) == SAMPLES
    assert len(shown.health) == STATUSES
    assert len(shown.answer.text) == TEXT
    assert all(not a.text for a in shown.answers)
    assert len(view._modes) <= 8


def test_times_of_an_answer_add_up() -> None:
    figures = Figures(total_s=1.0, draft_s=0.2, wait_s=0.6, verify_s=0.4)
    assert figures.stages == pytest.approx({"draft": 0.2, "verify": 0.4, "link": 0.2, "other": 0.2})
    ahead = replace(figures, verify_s=0.9)  # while nobody waited for it
    assert sum(ahead.stages.values()) == pytest.approx(1.0)
    chart = drawing.stages_chart([Answer(figures=figures), Answer(figures=ahead)])
    assert [s["data"] for s in chart["series"]] == [
        [200, 200],
        [400, 600],
        [200, 0],
        [200, 200],
    ]


def test_charts_of_rates_and_round_trips() -> None:
    with_hits = Figures(tau=2.5, cache_hits=3, cache_lookups=4)
    alone = Answer(figures=Figures(tau=1.0), mode="cloud alone")
    rates = drawing.rates_chart([Answer(figures=with_hits, mode="draft and verify"), alone, alone])
    assert {s["name"]: s["data"] for s in rates["series"]} == {
        "tau": [2.5, 1.0, 1.0],
        "cache hits": [75, None, None],
        "draft and verify": [0, None, None],
        "cloud alone": [None, 0, 0],
    }
    view = View(1.0)
    for n, state in enumerate(("UP", "UP", "DOWN")):
        view.on_link(Link(state, rtt_s=0.02), now=n / 2)  # twice a second: one sample each second
    assert drawing.rtt_chart(view.snapshot(0.0).rtts)["series"][0]["data"] == [20.0, None]


@pytest.mark.parametrize(
    ("drafts", "sources", "mode"),
    [
        ([(4, False, False)], [A, B], "draft and verify"),
        ([(4, False, False), (4, False, True), (4, False, False)], [A], "push-ahead"),
        ([(0, True, False)], [R, R], "cloud alone"),
        ([(4, False, False)], [A, U], "robot ends it"),
        ([], [U, U], "robot alone"),
    ],
)
def test_how_an_answer_was_decoded(
    drafts: list[tuple[int, bool, bool]], sources: list[int], mode: str
) -> None:
    view = View(1.0)
    for tokens, solo, ahead in drafts:
        view.on_draft("s", tokens, solo=solo, ahead=ahead)
    view.on_answer(Answer(session="s", text="x", sources=tuple(sources)))
    assert mode in view.snapshot(0.0).answer.mode


def test_silence_is_told() -> None:
    view = View(1.0)
    assert view.snapshot(0.0).link.state == "UNKNOWN"
    view.on_link(Link("UP"), now=10.0)
    view.on_health("robot/navigator: node", Level.OK, "active", now=10.0)
    view.on_health("slow: node", Level.OK, "active", now=0.0)
    view.on_health("slow: node", Level.OK, "active", now=10.0)  # every ten seconds
    fresh, stale = view.snapshot(10.0 + SILENT_S), view.snapshot(10.1 + SILENT_S)
    assert (fresh.link.state, stale.link.state) == ("UP", "UNKNOWN")
    assert [h.level for h in fresh.health] == [Level.OK, Level.OK]
    assert [(h.name, h.level) for h in stale.health] == [
        ("robot/navigator", Level.STALE),
        ("slow", Level.OK),
    ]


def test_the_worst_part_speaks_for_its_node() -> None:
    view = View(1.0)
    view.on_health("b: node", Level.OK, "active", now=0.0)
    view.on_health("a: node", Level.OK, "active", now=0.0)
    view.on_health("b: odom", Level.ERROR, "silent for 3 s", now=0.0)
    view.on_health("b: camera", Level.WARN, "slow", now=0.0)
    view.on_health("c: node", 200, "a level nobody knows", now=0.0)
    shown = view.snapshot(0.0).health
    assert [(h.name, h.level) for h in shown] == [
        ("b", Level.ERROR),
        ("c", Level.ERROR),
        ("a", Level.OK),
    ]
    assert shown[0].message == "odom: silent for 3 s"
    assert shown[2].message == "active"
    assert len(shown[0].parts) == 3


def test_a_goal_is_busy_while_anything_is_followed() -> None:
    assert not Goal().busy
    assert not Goal("ended", "x", error="NO_ODOMETRY").busy
    assert Goal("ended", "x", followed="find the cone").busy
    assert all(Goal(state, "x").busy for state in ("sent", "running", "cancelling"))


# Who may see it.


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
    figures = Figures(rounds=2, tokens=7, tau=3.5, cache_hits=1, cache_lookups=2, total_s=0.05)
    told = page.figures_text(Answer(figures=figures, mode="cloud alone"))
    assert told.startswith("cloud alone: 7 tokens in 2 rounds (tau 3.50), cache hits 50%, 50 ms")
    told = page.link_text(Link("UP", rtt_s=0.0215, sessions=1, reconnects=2))
    assert told == "UP, round trip 21.5 ms, 1 session, 2 reconnects"


# The server, with no ROS behind it.


@pytest.fixture
def server() -> Iterator[Server]:
    """Without a token."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    server = Server()
    yield server
    server.site.close()


def test_the_stop_is_confirmed_or_said_not_to_be(server: Server) -> None:
    assert server.told("/emergency_stop", "POST") == {"confirmed": True, "subscribers": 1}
    assert server.told("/motion")["emergency_stop"] is True
    assert server.told("/reset_emergency_stop", "POST") == {"success": True, "message": "reset"}
    server.robot.guarded, server.robot.stops = False, 0
    assert server.told("/emergency_stop", "POST") == {"confirmed": False, "subscribers": 0}
    assert server.robot.stops > 3, "it is published again until it is confirmed"
    assert server.told("/reset_emergency_stop", "POST")["success"] is False
    assert server.told("/motion") == {"known": False}


def test_the_stop_does_not_wait_for_the_pages(server: Server) -> None:
    """The pages' thread does something endless; the front answers as ever."""
    held, released = threading.Event(), threading.Event()

    def endless() -> None:
        held.set()
        released.wait(30.0)

    server.site._pages.loop.call_soon_threadsafe(endless)
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
    assert set(Client.instances) == before


def test_the_stop_page_is_nothing_but_the_bar(server: Server) -> None:
    status, _, body = server.ask("/stop")
    page = body.decode()
    assert status == 200
    assert 'id="stop"' in page
    assert "nicegui" not in page
    assert server.ask("/static/bar.js")[0] == 200
    assert server.ask("/static/../front.py")[0] == 404


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
        server.site.close()


def test_a_log_in_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers can begin one; they shall not collect connections."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    from collab_llm_nodes.dashboard import door

    monkeypatch.setattr(door, "STRANGER_S", 0.2)
    server = Server(token=TOKEN)
    link = http.client.HTTPConnection("127.0.0.1", server.site.port, timeout=30)
    try:
        with contextlib.closing(link):
            link.putrequest("POST", "/log_in")
            link.putheader("content-length", "100")
            link.endheaders(b"token=")
            with pytest.raises(ConnectionError):
                link.getresponse()
    finally:
        server.site.close()


def test_a_server_that_does_not_start_leaves_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    from collab_llm_nodes.dashboard import site

    def fails(self: Any) -> None:
        """Ends at once."""

    with monkeypatch.context() as patch:
        patch.setattr(site.uvicorn.Server, "run", fails)
        with pytest.raises(CollabError, match="did not start"):
            Server()
    server = Server()
    assert server.ask("/motion")[0] == 200
    server.site.close()


def test_a_port_in_use_and_an_address_of_others_are_told(server: Server) -> None:
    from collab_llm_nodes.dashboard.site import Site

    options: dict[str, Any] = {"max_viewers": 2, "rate": 5.0}
    with pytest.raises(Unavailable, match="port"):
        Site(server.robot, "127.0.0.1", server.site.port, "", **options)
    with pytest.raises(ConfigError, match="token"):
        Site(server.robot, "0.0.0.0", 0, "", **options)
    with pytest.raises(ConfigError, match="host"):
        Site(server.robot, "192.0.2.1", 0, TOKEN, **options)  # of no machine: RFC 5737
    assert server.ask("/motion")[0] == 200, "the one that serves is not disturbed"


# The node, in a graph.


@pytest.fixture
def graph(ros_graph: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The running graph; nodes started in it are stopped in the thread that ran them."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    monkeypatch.delenv("COLLAB_LLM_DASHBOARD_TOKEN", raising=False)
    ros_graph.started = []
    yield ros_graph
    for node in ros_graph.started:
        node.post(node.stop)
    ros_graph.wait_for(lambda: not any(node.active for node in ros_graph.started), 30.0)


def start(graph: Any, node_type: type, **parameters: Any) -> Any:
    """Start a node in the graph's own thread; ``__`` stands for the dot of a nested parameter."""
    from rclpy.parameter import Parameter

    overrides = [Parameter(name.replace("__", "."), value=v) for name, v in parameters.items()]
    node = node_type(context=graph.context, parameter_overrides=overrides)
    graph.add(node)
    graph.started.append(node)
    node.post(node.start)
    graph.wait_for(lambda: node.active, 60.0)
    return node


class Guard:
    """motion_guard as the dashboard sees it, in an executor of its own."""

    def __init__(self, graph: Any) -> None:
        from std_msgs.msg import Bool
        from std_srvs.srv import Trigger

        from collab_llm.msg import MotionState
        from collab_llm_nodes.ros.node import COMMAND, STATE

        self.graph = type(graph)(graph.context, graph.domain_id)
        self.node = self.graph.node("motion_guard")
        self.stopped = False
        self.heard: list[bool] = []
        self.resets = 0
        self._states = self.node.create_publisher(MotionState, "motion_state", STATE)
        self.node.create_subscription(Bool, "emergency_stop", self._on_stop, COMMAND)
        self.node.create_service(Trigger, "reset_emergency_stop", self._on_reset)
        self.node.create_timer(0.2, self._tell)

    def _on_stop(self, msg: Any) -> None:
        self.heard.append(msg.data)
        self.stopped = self.stopped or msg.data
        self._tell()

    def _on_reset(self, request: Any, response: Any) -> Any:
        self.resets += 1
        self.stopped, response.success, response.message = False, True, "reset"
        return response

    def _tell(self) -> None:
        from collab_llm.msg import MotionState

        state = MotionState(allowed=not self.stopped, emergency_stop=self.stopped)
        if self.stopped:
            state.reasons, state.text = ["EMERGENCY_STOP"], "the emergency stop is set"
        self._states.publish(state)


@pytest.fixture
def guard(graph: Any) -> Iterator[Guard]:
    """Stands in for motion_guard."""
    guard = Guard(graph)
    yield guard
    guard.graph.close()


def post(node: Any, path: str) -> Any:
    """The JSON that the dashboard answers to a POST."""
    link = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    with contextlib.closing(link):
        link.request("POST", path)
        answer = link.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())


@pytest.mark.ros
def test_what_the_graph_says_is_shown(graph: Any) -> None:
    from array import array

    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
    from nav_msgs.msg import Odometry
    from rclpy.parameter import Parameter

    from collab_llm.msg import Draft, GeneratedText, LinkState, NavigationAction, Observation
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.node import RESULT, STATE

    node, user = start(graph, Dashboard, port=0), graph.node("user")
    publishers = {
        topic: user.create_publisher(kind, topic, STATE if topic == "link_state" else RESULT)
        for topic, kind in {
            "observation": Observation,
            "odom": Odometry,
            "draft": Draft,
            "generated_text": GeneratedText,
            "navigation_action": NavigationAction,
            "link_state": LinkState,
            "/diagnostics": DiagnosticArray,
        }.items()
    }
    graph.wait_for(lambda: all(p.get_subscription_count() for p in publishers.values()), 30.0)
    node.frame()  # somebody looks
    seen = Observation()
    seen.image.data = array("B", b"\xff\xd8jpeg")
    publishers["observation"].publish(seen)
    moved = Odometry()
    moved.pose.pose.position.x, moved.pose.pose.orientation.w = 2.0, 1.0
    publishers["odom"].publish(moved)
    publishers["draft"].publish(Draft(session_id="s", tokens=[1, 2], ahead=True))
    publishers["link_state"].publish(LinkState(state=LinkState.UP, model="big", rtt_s=0.02))
    answer = GeneratedText(session_id="s", text="turn left", final=True)
    answer.ends, answer.sources = array("I", [4, 9]), array("B", [A, B])
    answer.metrics.tau = 2.0
    graph.wait_for(lambda: node._view._modes, 30.0)
    publishers["generated_text"].publish(answer)
    action = NavigationAction(session_id="s", kind=NavigationAction.TURN, angle=0.5, span_end=9)
    publishers["navigation_action"].publish(action)
    status = DiagnosticStatus(name="x: node", level=DiagnosticStatus.WARN, message="slow")
    publishers["/diagnostics"].publish(DiagnosticArray(status=[status]))

    def complete() -> Any:
        shown = node.shown()
        parts = (shown.answers, shown.action, shown.pose, shown.health, shown.frame_age is not None)
        return shown if all(parts) and shown.link.model else None

    shown = graph.wait_for(complete, 30.0)
    assert node.frame()[1] == b"\xff\xd8jpeg"
    assert [(w.text, w.source, w.matched) for w in shown.words] == [
        ("turn", A, True),
        (" left", B, True),
    ]
    assert "push-ahead" in shown.answer.mode
    assert (shown.pose.x, shown.link.state, shown.answers[0].figures.tau) == (2.0, "UP", 2.0)
    assert shown.direction.angle == pytest.approx(0.5)
    assert shown.direction.inside
    node.set_parameters([Parameter("camera_fov", value=40.0)])
    graph.wait_for(lambda: not node.shown().direction.inside, 30.0)
    assert any(h.name == "x" and h.level is Level.WARN for h in shown.health)


@pytest.mark.ros
def test_the_stop_passes_a_busy_node(graph: Any, guard: Guard) -> None:
    """The node's own thread is held; the stop is published and heard all the same."""
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    guard.graph.wait_for(lambda: node.motion()[0] is not None, 30.0)
    held, released = threading.Event(), threading.Event()

    def busy() -> None:
        held.set()
        released.wait(30.0)

    node.post(busy)
    assert held.wait(10.0)
    told = post(node, "/emergency_stop")
    assert guard.graph.wait_for(lambda: guard.stopped, 30.0)
    assert told == {"confirmed": False, "subscribers": 1}, "who would confirm it is held"
    released.set()
    assert post(node, "/emergency_stop") == {"confirmed": True, "subscribers": 1}
    assert post(node, "/reset_emergency_stop") == {"success": True, "message": "reset"}
    assert not guard.stopped
    assert all(guard.heard), "false would mean nothing"


@pytest.mark.ros
def test_a_reset_that_was_given_up_does_not_come_later(graph: Any, guard: Guard) -> None:
    """The page said that it failed; whoever is beside the robot by now relies on that."""
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    guard.graph.wait_for(lambda: node.motion()[0] is not None, 30.0)
    graph.wait_for(node._resets.service_is_ready, 30.0)
    assert post(node, "/emergency_stop")["confirmed"]
    released, passed = threading.Event(), threading.Event()
    node.post(released.wait, 30.0)
    told = post(node, "/reset_emergency_stop")
    assert told == {"success": False, "message": "motion_guard does not answer"}
    released.set()
    node.post(passed.set)
    assert passed.wait(10.0)
    assert post(node, "/emergency_stop")["confirmed"], "the node's thread runs again"
    assert guard.resets == 0
    assert guard.stopped


@pytest.mark.ros
def test_cancel_frees_the_page_when_the_navigator_was_started_anew(graph: Any) -> None:
    """The one that took the goal was killed, and another came before the loss was noticed."""
    from rclpy.action import ActionServer
    from rclpy.task import Future as RosFuture
    from std_msgs.msg import String

    from collab_llm.action import Navigate
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.node import STATE

    endless = RosFuture()

    async def follow(goal: Any) -> Any:
        return await endless

    node = start(graph, Dashboard, port=0)
    old, new = graph.node("navigator"), graph.node("navigator_anew")
    first = ActionServer(old, Navigate, "navigate", follow)
    instructions = old.create_publisher(String, "instruction", STATE)
    graph.wait_for(node._navigate.server_is_ready, 30.0)
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.state == "sent", 30.0)
    instructions.publish(String(data="find the cone"))
    graph.wait_for(lambda: node.shown().goal.state == "running", 30.0)
    assert node.shown().goal.followed
    ActionServer(new, Navigate, "navigate", follow)
    graph.wait_for(lambda: node.count_publishers("navigate/_action/status") == 2, 30.0)
    node.post(first.destroy)
    graph.wait_for(lambda: node.count_publishers("navigate/_action/status") == 1, 30.0)
    assert node.shown().goal.busy
    node.cancel()
    graph.wait_for(lambda: not node.shown().goal.busy, 30.0)
    assert node.shown().goal.error


@pytest.mark.ros
def test_an_instruction_to_stop_is_a_cancel(graph: Any) -> None:
    from action_msgs.msg import GoalStatus
    from rclpy.action import ActionClient, ActionServer, CancelResponse
    from rclpy.task import Future as RosFuture

    from collab_llm.action import Navigate
    from collab_llm_nodes.nodes.dashboard import Dashboard

    over, followed = RosFuture(), []

    async def follow(goal: Any) -> Any:
        followed.append(goal)
        await over
        goal.canceled()
        return Navigate.Result(status=Navigate.Result.CANCELLED)

    def cancel(goal: Any) -> CancelResponse:
        over.set_result(None)
        return CancelResponse.ACCEPT

    node = start(graph, Dashboard, port=0)
    user = graph.node("navigator")
    ActionServer(user, Navigate, "navigate", follow, cancel_callback=cancel)
    other = ActionClient(user, Navigate, "navigate")
    graph.wait_for(lambda: other.server_is_ready() and node._cancels.service_is_ready(), 30.0)
    graph.ask(other.send_goal_async, Navigate.Goal(instruction="find the cone"))
    graph.wait_for(lambda: followed, 30.0)
    node.instruct("STOP, please!")
    graph.wait_for(lambda: followed[0].status == GoalStatus.STATUS_CANCELED, 30.0)
    assert len(followed) == 1


@pytest.mark.ros
def test_a_goal_that_is_refused_has_not_arrived(graph: Any) -> None:
    from rclpy.action import ActionServer, GoalResponse

    from collab_llm.action import Navigate
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    ActionServer(
        graph.node("navigator"),
        Navigate,
        "navigate",
        print,
        goal_callback=lambda goal: GoalResponse.REJECT,
    )
    graph.wait_for(node._navigate.server_is_ready, 30.0)
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.state == "ended", 30.0)
    assert node.shown().goal.error == "the navigator refused it; its log says why"


@pytest.mark.ros
def test_without_motion_guard_the_page_says_so(graph: Any) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    node = start(graph, Dashboard, port=0)
    assert post(node, "/emergency_stop") == {"confirmed": False, "subscribers": 0}
    told = post(node, "/reset_emergency_stop")
    assert told == {"success": False, "message": "motion_guard is not there"}
    node.instruct("find the cone")
    graph.wait_for(lambda: node.shown().goal.error == "the navigator is not there", 30.0)


@pytest.mark.ros
def test_the_token_is_no_parameter(
    graph: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    monkeypatch.setenv("COLLAB_LLM_DASHBOARD_TOKEN", TOKEN)
    node = start(graph, Dashboard, port=0)
    assert TOKEN not in repr([p.value for p in node.get_parameters(list(node._parameters))])
    link = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    with contextlib.closing(link):
        link.request("GET", "/")
        assert link.getresponse().status == 401
    node.post(node.stop)  # there is one dashboard in a process
    graph.wait_for(lambda: not node.active, 30.0)
    file = tmp_path / "token"
    file.write_text("another token, also long\n")
    file.chmod(0o600)
    other = start(graph, Dashboard, port=0, token_file=str(file))
    link = http.client.HTTPConnection("127.0.0.1", other.port, timeout=30)
    with contextlib.closing(link):
        link.request("GET", "/motion", headers={"authorization": f"Bearer {TOKEN}"})
        answer = link.getresponse()
        assert (answer.status, answer.read()[:6]) == (401, b"log in")
        link.request("GET", "/motion", headers={"authorization": "Bearer another token, also long"})
        assert link.getresponse().status == 200


@pytest.mark.ros
@pytest.mark.parametrize("fault", ["open address", "no nicegui", "port in use", "second one"])
def test_a_dashboard_that_cannot_be_does_not_start(
    graph: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from rclpy.lifecycle import TransitionCallbackReturn
    from rclpy.parameter import Parameter

    from collab_llm_nodes.nodes.dashboard import Dashboard

    parameters: dict[str, Any] = {"port": 0}
    if fault == "open address":
        parameters["host"] = "0.0.0.0"
    elif fault == "no nicegui":
        monkeypatch.setitem(sys.modules, "collab_llm_nodes.dashboard.site", None)
    else:
        port = start(graph, Dashboard, port=0).port
        parameters["port"] = port if fault == "port in use" else 0
    overrides = [Parameter(name, value=value) for name, value in parameters.items()]
    node = Dashboard(context=graph.context, parameter_overrides=overrides)
    assert node.trigger_configure() != TransitionCallbackReturn.SUCCESS
    node.destroy_node()


# The page, in a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium without the internet."""
    selenium = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1500,1150",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    service = selenium.ChromeService(executable_path=driver)
    with selenium.Chrome(options=options, service=service) as chrome:
        chrome.set_page_load_timeout(60)
        yield chrome


class Page:
    """The page of ``node`` in ``browser``."""

    def __init__(self, browser: Any, node: Any) -> None:
        self.browser = browser
        browser.get(f"http://127.0.0.1:{node.port}/")

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.browser.find_element("css selector", selector)

    def script(self, code: str) -> Any:
        """What JavaScript returns."""
        return self.browser.execute_script(f"return {code}")

    def text(self, name: str) -> str:
        """Of an element that ``page.py`` names, or of the bar."""
        selector = f"[data-id={name}], #{name}"
        return str(self.script(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def wait(self, condition: Any, what: str) -> Any:
        """Until ``condition()``; fails after a minute with what the page shows."""
        due = time.monotonic() + 60.0
        while not (value := condition()):
            if time.monotonic() > due:
                shown = self.script("document.body.innerText")
                pytest.fail(f"{what}: not within 60 s. The page says:\n{shown}\n{self.log()}")
            threading.Event().wait(0.05)
        return value

    def log(self) -> list[str]:
        """What went wrong in the browser."""
        entries = self.browser.get_log("browser")
        return [e["message"] for e in entries if e["level"] == "SEVERE"]


class Cloud:
    """Answers of a scripted model, streamed and with their tokens' sources, as draft_vlm's are."""

    def __init__(self, graph: Any, *script: str) -> None:
        from rclpy.action import ActionServer
        from rclpy.parameter import Parameter

        from collab_llm.action import Generate
        from collab_llm.msg import Draft, GeneratedText, LinkState
        from collab_llm_nodes.ros.node import RESULT, STATE

        self.script = list(script)
        simulated = [Parameter("use_sim_time", value=True)]
        self.node = graph.node("cloud", parameter_overrides=simulated)
        self._texts = self.node.create_publisher(GeneratedText, "generated_text", RESULT)
        self._drafts = self.node.create_publisher(Draft, "draft", RESULT)
        self._links = self.node.create_publisher(LinkState, "link_state", STATE)
        self._server = ActionServer(self.node, Generate, "edge_cloud/generate", self._answer)
        self._told = 0
        self.node.create_timer(0.1, self._tell)

    def _tell(self) -> None:
        from collab_llm.msg import LinkState

        link = LinkState(state=LinkState.UP, verifier="cloud:50551", model="scripted", rtt_s=0.02)
        link.header.stamp = self.node.get_clock().now().to_msg()
        self._links.publish(link)

    def _answer(self, goal: Any) -> Any:
        from array import array

        from collab_llm.action import Generate
        from collab_llm.msg import Draft, GeneratedText

        self._told += 1
        session, header = f"session{self._told}", goal.request.header
        text = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        tokens = re.findall(r"\s?\S+", text)
        ends = list(itertools.accumulate(map(len, tokens)))
        self._drafts.publish(Draft(session_id=session, tokens=[1, 2, 3, 4], ahead=True))
        for count in (len(tokens) // 2, len(tokens)):
            text = "".join(tokens[:count])
            message = GeneratedText(header=header, session_id=session, text=text, for_motion=True)
            message.prompt, message.verified = goal.request.prompt, True
            message.tokens, message.ends = array("i", range(count)), array("I", ends[:count])
            message.sources = array("B", [(A, A, R, A, A, B)[n % 6] for n in range(count)])
            message.metrics.rounds, message.metrics.tokens = 1 + count // 3, count
            message.metrics.tau, message.metrics.total_s = 3.0, 0.04
            message.metrics.draft_s, message.metrics.wait_s = 0.01, 0.025
            message.final = count == len(tokens)
            self._texts.publish(message)
        goal.succeed()
        return Generate.Result(header=header, text=text, session_id=session, verified=True)


@pytest.mark.ros
@pytest.mark.timeout(400)
def test_a_visitor_instructs_sees_motion_and_stops(graph: Any, browser: Any) -> None:
    """The whole page, with the simulator, the real navigator and the real motion_guard."""
    from collab_llm_nodes.nodes.camera_ingest import CameraIngest
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.nodes.motion_guard import MotionGuard
    from collab_llm_nodes.nodes.navigation_action_parser import NavigationActionParser
    from collab_llm_nodes.nodes.navigator import Navigator
    from collab_llm_nodes.nodes.sim_go2 import SimGo2
    from collab_llm_nodes.robot.mission import MissionConfig

    cloud = Cloud(
        graph,
        f"{EVIL} is on the left. the next action is turn left 30 degree.",
        "the cone is ahead. the next action is move forward 75 cm.",
    )
    sim = start(graph, SimGo2, use_sim_time=True, seed=3)
    start(graph, CameraIngest, use_sim_time=True, source="compressed")
    start(graph, MotionGuard, use_sim_time=True)
    reading = {"max_age": 60.0, "grammar__reason": "lenient"}  # the answers hold no plain English
    start(graph, NavigationActionParser, use_sim_time=True, **reading)
    start(graph, Navigator, use_sim_time=True)
    node = start(graph, Dashboard, port=0, rate=10.0)

    page = Page(browser, node)
    page.wait(lambda: page.script("document.getElementById('camera')?.naturalWidth > 0"), "camera")
    page.wait(lambda: page.text("link").startswith("UP"), "link")
    page.wait(lambda: "motion allowed" in page.text("motion"), "motion_guard")
    assert "no action yet" in page.text("action")

    # Instruct, and see what happens.
    wish = page.find("[data-id=instruction]")
    wish.send_keys("   ", "\ue007")  # Enter
    page.wait(lambda: "write where to go" in page.script("document.body.innerText"), "a reaction")
    assert wish.get_attribute("maxlength") == str(MissionConfig().max_instruction)
    wish.send_keys("find the cone")
    page.find("[data-id=go]").click()
    page.wait(lambda: "step" in page.text("goal"), "the instruction is followed")
    page.wait(lambda: "ahead" in page.text("action"), "the second action")
    page.wait(lambda: cloud.script[0][:8] in page.text("answer"), "the answer")
    for name in ("accepted", "recovered", "bonus", "matched"):
        assert page.find(f"[data-id=answer] .token.{name}")
    assert "push-ahead" in page.script("document.body.innerText")
    begun = page.text("pose")
    page.wait(lambda: page.text("pose") != begun, "the robot moves")
    page.wait(lambda: page.script("document.querySelector('.overlay line') !== null"), "direction")

    # Stop by the button, while the page's own thread does not answer at all.
    page.wait(lambda: sim._base.speed > 0.1, "driving")
    held, released = threading.Event(), threading.Event()

    def lag() -> None:
        held.set()
        released.wait(60.0)

    node._site._pages.loop.call_soon_threadsafe(lag)
    assert held.wait(10.0)
    page.find("#stop").click()
    page.wait(lambda: page.text("stop-result") == "STOPPED", "the stop is confirmed")
    page.wait(lambda: sim._base.speed == 0.0, "the robot stands")
    released.set()
    page.wait(lambda: "EMERGENCY STOP" in page.text("motion"), "the state of motion")
    page.wait(lambda: "step" not in page.text("goal"), "the instruction is over")
    assert "emergency" in page.text("goal").lower()

    # Reset: asked, then done. Another instruction, cancelled; and the key.
    page.find("#reset").click()
    assert page.script("document.getElementById('confirm').open")
    page.wait(reset_by_hand(page), "reset")
    page.find("[data-id=go]").click()
    page.wait(lambda: sim._base.speed > 0.1, "driving again")
    page.find("[data-id=cancel]").click()
    page.wait(lambda: "gave the instruction up" in page.text("goal"), "cancelled")
    page.find("[data-id=instruction]").send_keys("\ue00c")  # Escape, in a text field
    page.wait(lambda: page.text("stop-result") == "STOPPED", "stopped by the key")

    # A model's text was never markup.
    assert page.script("window.evil") is None
    assert not [entry for entry in page.log() if "Refused" in entry or "NOTFOUND" in entry]


def reset_by_hand(page: Page) -> Any:
    """A condition: the emergency stop is reset; it may be too early at first."""

    def done() -> bool:
        if "motion allowed" in page.text("motion"):
            return True
        if page.script("document.getElementById('confirm').open"):
            page.find("#reset-yes").click()
        elif page.text("stop-result").startswith("not reset"):
            page.find("#reset").click()
        return False

    return done


@pytest.mark.ros
def test_a_page_behind_a_token(graph: Any, browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from collab_llm_nodes.nodes.dashboard import Dashboard

    monkeypatch.setenv("COLLAB_LLM_DASHBOARD_TOKEN", TOKEN)
    page = Page(browser, start(graph, Dashboard, port=0))
    page.find("[name=token]").send_keys(TOKEN + "\n")
    page.wait(lambda: "motion_guard was not heard" in page.text("motion"), "the bar")
    page.wait(lambda: "no odometry yet" in page.text("pose"), "the page's web socket")
    browser.delete_all_cookies()
    page.find("#stop").click()
    page.wait(lambda: "log in again" in page.text("stop-result"), "a stop that failed is told")
