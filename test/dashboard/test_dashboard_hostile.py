"""The dashboard attacked: whatever strangers do, the right token stops the robot at once."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from dashboard_server import TOKEN, Server
from folders import SUPPORT
from hypothesis import given
from hypothesis import strategies as st
from waiting import wait_for

from collab_llm_nodes.dashboard.access import (
    Access,
    Refusal,
    Tries,
    authority,
    is_loopback,
)
from collab_llm_nodes.network import network_of

FILES = 256
"""Number of files that the attacked server may have open ..."""
CONNECTIONS = 400
"""... and how many connections the attacker keeps trying to hold."""
STOP_S = 10.0
"""A stop that takes longer has failed: a quiet machine needs some 10 ms, a busy one may stall."""

needs_nicegui = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "import nicegui"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="pip install -r requirements/dashboard.txt",
)


# Names and origins.


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("localhost", ("localhost", 80)),
        ("LocalHost:8080", ("localhost", 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:8080", ("[::1]", 8080)),
        ("go2_robot.local:65535", ("go2_robot.local", 65535)),
        ("[::1]evil.com", None),
        ("[::1].evil.com:80", None),
        ("localhost:80@evil.com", None),
        ("localhost@evil.com", None),
        ("localhost:80:80", None),
        ("localhost:", None),
        ("localhost:65536", None),
        ("localhost:8O", None),
        ("localhost:\N{ARABIC-INDIC DIGIT EIGHT}", None),
        ("localhost\n", None),
        ("localhost, localhost", None),
        ("localhost/evil.com", None),
        ("[::1", None),
        ("::1", None),
        ("[127.0.0.1]", None),
        ("[::1%eth0]", None),
        ("", None),
    ],
)
def test_a_host_is_exactly_a_name_and_a_port(text: str, parsed: tuple[str, int] | None) -> None:
    assert authority(text) == parsed


GOOD_HOSTS = ["localhost", "localhost:8080", "127.0.0.1:80", "[::1]", "[::1]:8080"]
REST = st.text("[]:@./\\#?%-_ \t\r\n,;evil.com0189", max_size=12)


@given(st.sampled_from(GOOD_HOSTS), st.integers(0, 14), st.integers(0, 14), REST)
def test_no_mutated_host_is_this_machine(host: str, begin: int, length: int, put: str) -> None:
    """A host that passes is one of this machine's names and a number, to the last character."""
    mutated = host[:begin] + put + host[begin + length :]
    if Access("127.0.0.1", 8080, "").refusal("GET", {"host": mutated}, socket=False) is None:
        name, _, port = mutated.rpartition(":") if mutated[-1] not in "]t1" else (mutated, "", "")
        whole = authority(mutated)
        assert whole is not None
        assert is_loopback(whole[0])
        assert re.fullmatch(r"localhost|127(\.[0-9]{1,3}){3}|\[[0:]*1\]", whole[0])
        assert mutated.lower() == whole[0] or mutated.lower() == f"{name.lower()}:{port}"


@given(st.sampled_from(GOOD_HOSTS), st.sampled_from(GOOD_HOSTS), REST)
def test_an_origin_is_parsed_like_a_host(here: str, there: str, put: str) -> None:
    """Only the same name and port is the same origin, whatever stands behind it."""
    access = Access("127.0.0.1", 8080, "")
    headers = {"host": here, "origin": f"http://{there}{put}"}
    assert access.same_origin(headers) == (authority(here) == authority(there + put) is not None)


def test_default_ports_are_those_of_the_origins_scheme() -> None:
    same = Access("127.0.0.1", 8080, "").same_origin
    assert same({"host": "robot.example", "origin": "https://robot.example"})  # behind a proxy
    assert same({"host": "robot.example:443", "origin": "https://robot.example"})
    assert not same({"host": "robot.example:80", "origin": "https://robot.example"})
    assert not same({"host": "robot.example", "origin": "ftp://robot.example"})
    assert not same({"host": "robot.example", "origin": "robot.example"})
    assert not same({"origin": "http://"})


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "cross-site"}, {"origin": "http://evil"}])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_other_sites_get_nothing(headers: dict[str, str], method: str) -> None:
    """Neither does a frame in their page; following a link in a tab is the visitor's own doing."""
    access, here = Access("127.0.0.1", 8080, ""), {"host": "localhost:8080", **headers}
    assert access.refusal(method, here, socket=False) is Refusal.ORIGIN
    frame = {**here, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    assert access.refusal(method, frame, socket=False) is Refusal.ORIGIN
    link = {**here, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    allowed = method != "POST" and "origin" not in headers
    assert (access.refusal(method, link, socket=False) is None) == allowed
    assert access.refusal("GET", link, socket=True) is Refusal.ORIGIN


def test_another_servers_cookie_does_not_hide_the_right_one() -> None:
    access = Access("0.0.0.0", 8080, TOKEN)
    header = access.log_in(TOKEN, secure=False)
    assert header is not None
    name, _, value = header.partition(";")[0].partition("=")
    for cookie in (f"{name}=wrong; {name}={value}", f"{name}={value};{name}=wrong"):
        assert access.refusal("GET", {"cookie": cookie}, socket=False) is None
    assert access.refusal("GET", {"cookie": f"{name}=\xff"}, socket=False) is Refusal.LOG_IN


# Guessing.


def test_a_network_is_an_address_or_a_subscriber() -> None:
    assert network_of("192.0.2.7") == network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8:1:2::3") == network_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::"
    assert network_of("2001:db8:1:3::3") != network_of("2001:db8:1:2::3")
    assert network_of("fe80::1%eth0") == "fe80::"
    assert network_of("no address") == ""


def test_wrong_tokens_are_slowed_by_address_and_in_all() -> None:
    tries = Tries()
    assert [tries.take("a", 0.0) > 0 for _ in range(200)].count(False) == Tries.AT_ONCE
    assert tries.take("b", 0.0) == 0.0, "another address has its own tries"
    wait = tries.take("a", 0.0)
    assert wait == Tries.EVERY_S
    assert tries.take("a", wait) == 0.0
    assert tries.take("a", wait) > 0
    tries.forgive("a")
    assert tries.take("a", wait) == 0.0
    everybody = Tries()
    admitted = sum(everybody.take(f"n{n}", 1e-3 * n) == 0.0 for n in range(10_000))
    assert admitted <= (Tries.NETWORKS + 1) * (Tries.AT_ONCE + 10.0 / Tries.EVERY_S)
    assert len(everybody._free_at) <= Tries.NETWORKS + 1
    assert everybody.take("much later", 1e6) == 0.0
    assert len(everybody._free_at) == 1, "those who have all their tries are forgotten"


# Places.


@dataclass(eq=False)
class Someone:
    """A connection to be given a place."""

    network: str
    closed: bool = False


def test_a_newcomer_always_gets_a_place() -> None:
    from collab_llm_nodes.dashboard.connection_limiter import Places

    places: Places[Someone] = Places(strangers=40, known=3)
    visitor = Someone("visitor")
    crowd = [Someone("attacker") for _ in range(60)]
    cut = [w for who in crowd[:20] for w in places.enter(who, 0.0)]
    assert places.enter(visitor, 0.0) == []
    cut += [w for who in crowd[20:] for w in places.enter(who, 0.0)]
    assert cut == crowd[:21], "the oldest of the network that holds most"
    many = [Someone(f"n{n}") for n in range(100)]
    cut = [w for who in many for w in places.enter(who, 1.0)]
    assert len(cut) == 100
    assert visitor not in cut[:20], "single ones go when the crowd has gone"
    assert len(places) == 40


def test_known_ones_are_not_displaced_by_strangers() -> None:
    from collab_llm_nodes.dashboard.connection_limiter import STRANGER_S, Places

    places: Places[Someone] = Places(strangers=2, known=2)
    viewer, other, third = Someone("a"), Someone("a"), Someone("a")
    for who in (viewer, other):
        assert places.enter(who, 0.0) == []
        assert places.welcome(who) == []
    for n in range(20):
        assert viewer not in places.enter(Someone(f"n{n}"), 0.0)
    assert places.overdue(STRANGER_S - 0.1) == []
    assert len(places.overdue(STRANGER_S)) == 2
    assert places.welcome(viewer) == []
    places.enter(third, 0.0)
    assert places.welcome(third) == [other], "whose last request is longest ago"
    viewer.closed = True
    places.enter(other, 0.0)
    assert places.welcome(other) == [], "a closed one takes no place"
    gone = Someone("a")
    assert places.welcome(gone) == [], "one that was cut off meanwhile does not come back"
    assert len(places) == 2


# The server under attack.


@contextlib.contextmanager
def serving(*, left: int = -1, token: str = TOKEN) -> Iterator[int]:
    """A dashboard in a process of its own that may open ``FILES`` files; its port."""
    program = SUPPORT / "dashboard_server.py"
    command = [sys.executable, str(program), str(FILES), str(left), token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()
            server.kill()


def ask(port: int, path: str, method: str = "GET", body: str = "", **headers: str) -> Any:
    """Status, and the JSON or bytes of the answer to one request on a new connection."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=STOP_S)
    with contextlib.closing(link):
        link.request(method, path, body or None, headers)
        answer = link.getresponse()
        content = answer.read()
        as_json = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(content) if as_json else content


def stop(port: int) -> float:
    """Press the emergency stop with the right bearer; how long it took [s]."""
    begun = time.monotonic()
    status, told = ask(port, "/emergency_stop", "POST", Authorization=f"Bearer {TOKEN}")
    assert (status, told["confirmed"]) == (200, True)
    return time.monotonic() - begun


class Attack:
    """Holds ``connections`` connections that begin with ``first`` until it is ended.

    ``more`` is sent on each again and again. A connection that the server ends is opened again.
    """

    def __init__(
        self,
        port: int,
        first: bytes,
        more: bytes = b"",
        sources: Iterator[str] | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        self._connections = connections
        self._port, self._first, self._more = port, first, more
        self._sources = sources or itertools.repeat("127.0.0.1")
        self._links: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attacker", daemon=True)
        self.opened = 0

    def __enter__(self) -> Attack:
        self._thread.start()
        wait_for(lambda: self.opened >= self._connections)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for link in self._links.values():
            link.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for _ in range(self._connections - len(self._links)):
                self._open()
            for number, _ in self._poll.poll(10):
                self._end(number)
            for number, link in list(self._links.items()) if self._more else ():
                try:
                    link.send(self._more)
                except BlockingIOError:
                    pass
                except OSError:
                    self._end(number)

    def _open(self) -> None:
        link = socket.socket()
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)  # reads slowly, if at all
        self.opened += 1
        try:
            link.bind((next(self._sources), 0))
            with contextlib.suppress(BlockingIOError):
                link.connect(("127.0.0.1", self._port))
            link.send(self._first)
        except OSError:  # the queue is full, or it was cut off already
            link.close()
            return
        self._links[link.fileno()] = link
        self._poll.register(link, select.POLLHUP | select.POLLERR | select.POLLRDHUP)

    def _end(self, number: int) -> None:
        if number in self._links:
            self._poll.unregister(number)
            self._links.pop(number).close()


UPGRADE = (
    b"GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket HTTP/1.1\r\nHost: robot\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FIRST, MORE = 0, 1
ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "silence": (b"", b""),
    "half a head": (b"GET / HTTP/1.1\r\nHost: robot\r\n", b""),
    "a head that does not end": (b"GET / HTTP/1.1\r\nHost: robot\r\n", b"a: b\r\n"),
    "half a log-in": (b"POST /log_in HTTP/1.1\r\nHost: r\r\nContent-Length: 99\r\n\r\ntoken=", b""),
    "a log-in in chunks": (
        b"POST /log_in HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nt\r\n",
        200 * b"1\r\nt\r\n",
    ),
    "requests in a row": (20 * b"GET / HTTP/1.1\r\nHost: robot\r\n\r\n", b""),
    "web sockets": (UPGRADE, b""),
}


def other_addresses() -> Iterator[str]:
    """Addresses of this machine, each once."""
    return (f"127.{a}.{b}.{c}" for a in range(1, 9) for b in range(256) for c in range(1, 255))


@needs_nicegui
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("sources", [None, other_addresses], ids=["one address", "many addresses"])
def test_the_stop_works_all_through(
    attack: str, sources: Callable[[], Iterator[str]] | None
) -> None:
    first, more = ATTACKS[attack]
    with serving() as port, Attack(port, first, more, sources and sources()):
        assert max(stop(port) for _ in range(8)) < STOP_S


AUTHORIZED = f"HTTP/1.1\r\nHost: robot\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
POLL = b"POST /_nicegui_ws/socket.io/?EIO=4&transport=polling " + AUTHORIZED
FRAME = b"\x01\x81\0\0\0\0a"  # one letter, of a message that does not end
KNOWN_ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "half a head": (b"GET / " + AUTHORIZED, b""),
    "bodies in chunks of one byte": (
        POLL + b"Transfer-Encoding: chunked\r\n\r\n",
        20_000 * b"1\r\na\r\n",
    ),
    "chunks with extensions": (
        POLL + b"Transfer-Encoding: chunked\r\n\r\n",
        1000 * (b"1;" + 100 * b"a=b;" + b"\r\na\r\n"),
    ),
    "endless bodies": (POLL + b"Content-Length: 999999999999\r\n\r\n", 100_000 * b"a"),
    "requests in a row": (b"", 200 * (b"GET /motion " + AUTHORIZED + b"\r\n")),
    "pages": (b"GET / " + AUTHORIZED + b"\r\n", b""),
    "pictures that are not read": (b"GET /camera.jpg " + AUTHORIZED + b"\r\n", b""),
    "web sockets in frames of one byte": (
        UPGRADE.replace(b"HTTP/1.1\r\nHost: robot\r\n", AUTHORIZED),
        FRAME + 20_000 * (b"\0" + FRAME[1:]),
    ),
    "web sockets with large frames": (
        UPGRADE.replace(b"HTTP/1.1\r\nHost: robot\r\n", AUTHORIZED),
        b"\x82\xff" + (1_000_000).to_bytes(8, "big") + b"\1\2\3\4" + 1_000_000 * b"a",
    ),
}
"""Attacks by clients that have the token, as everybody on the machine has where none is set."""


@needs_nicegui
@pytest.mark.parametrize("attack", KNOWN_ATTACKS)
def test_known_clients_do_not_delay_the_stop(attack: str) -> None:
    first, more = KNOWN_ATTACKS[attack]
    with serving() as port, Attack(port, first, more, connections=40):
        assert max(stop(port) for _ in range(7)) < STOP_S


@needs_nicegui
def test_the_stop_works_where_files_are_scarce() -> None:
    """Something else in the process has taken all but 12 files."""
    first, more = ATTACKS["half a head"]
    with serving(left=12) as port, Attack(port, first, more):
        assert max(stop(port) for _ in range(10)) < STOP_S


@needs_nicegui
def test_the_stop_does_not_wait_for_its_own_body() -> None:
    """Nor is it kept from a client that announces one, and never sends it."""
    request = (
        f"POST /emergency_stop HTTP/1.1\r\nHost: robot\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    )
    with serving() as port, socket.create_connection(("127.0.0.1", port), STOP_S) as link:
        link.sendall(request.encode())
        assert link.recv(100).startswith(b"HTTP/1.1 200")


@needs_nicegui
def test_a_guesser_does_not_lock_the_right_token_out() -> None:
    with serving() as port:
        begun = time.monotonic()
        answers = [ask(port, "/log_in", "POST", f"token=wrong{n}")[0] for n in range(200)]
        regained = (time.monotonic() - begun) / Tries.EVERY_S
        assert answers[: Tries.AT_ONCE] == [401] * Tries.AT_ONCE
        assert answers.count(401) <= Tries.AT_ONCE + regained
        assert answers.count(401) + answers.count(429) == 200
        right = "token=" + TOKEN.replace(" ", "+")
        assert ask(port, "/log_in", "POST", right)[0] == 429, "it is not even looked at"
        assert stop(port) < STOP_S
        assert ask(port, "/log_in", "POST", right)[0] == 303, "the right bearer came from there"


@needs_nicegui
def test_a_head_is_bounded_and_nobody_writes_into_the_log(capfd: Any) -> None:
    heads = [
        b"GET / HTTP/1.1\r\nHost: r\r\nA: " + 100_000 * b"a",
        b"GET /" + 100_000 * b"a",
        b"GET / HTTP/1.1\r\n" + 20_000 * b"a:b\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET http://evil/ HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: r\r\nCookie: " + 1000 * b'a="\\\\;' + b"\r\n\r\n",
        b"POST /log_in HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"GET / HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        UPGRADE.replace(b"13", b"\xff"),
        UPGRADE.replace(b"Host: robot\r\n", b""),
    ]
    with serving() as port:
        for head in heads:
            link = socket.create_connection(("127.0.0.1", port), 30.0)
            with link, contextlib.suppress(ConnectionError):
                link.sendall(head)
                while link.recv(65536):
                    """It answers in some way and closes, at the latest after STRANGER_S."""
        assert stop(port) < STOP_S
    written = capfd.readouterr()
    assert written.err == ""


@needs_nicegui
def test_pages_that_nobody_shows_are_no_viewers() -> None:
    """They take no place; web sockets from the page itself do."""
    from nicegui import Client

    before = set(Client.instances)
    server = Server()
    try:
        for _ in range(60):
            evil = server.ask("/", sec_fetch_site="cross-site", sec_fetch_mode="no-cors")
            assert evil[0] == 403
            assert server.ask("/")[0] == 200
        assert server.served.viewers == 0
        assert len(set(Client.instances) - before) <= 20
        with contextlib.ExitStack() as viewers:
            late = server.ask("/")[2].decode()
            for _ in range(2):  # max_viewers
                viewers.enter_context(watching(server, server.ask("/")[2].decode()))
            wait_for(lambda: server.served.viewers == 2)
            status, _, body = server.ask("/")
            assert status == 503
            assert b'id="stop"' in body, "the stop is on every page"
            with watching(server, late) as link:
                wait_for(lambda: '"open"' in str(link.recv(10.0)))  # sent away
                wait_for(lambda: len(set(Client.instances) - before) <= 20)
            assert server.served.viewers == 2
        wait_for(lambda: server.served.viewers == 0)
        assert server.ask("/")[0] == 200
    finally:
        server.served.close()


@contextlib.contextmanager
def watching(server: Server, page: str) -> Iterator[Any]:
    """The web socket of a page, connected."""
    from websockets.sync.client import connect

    found = re.search(r"client_id\W+([0-9a-f-]{36})", page)
    assert found is not None
    query = (
        f"EIO=4&transport=websocket&client_id={found[1]}&next_message_id=0"
        f"&implicit_handshake=true&tab_id=tab-{found[1]}&document_id=document-{found[1]}"
    )
    address = f"ws://{server.own}/_nicegui_ws/socket.io/?{query}"
    headers = {"Origin": f"http://{server.own}"}
    with connect(address, additional_headers=headers) as link:
        assert str(link.recv(10.0)).startswith("0")
        link.send("40")
        assert str(link.recv(10.0)).startswith("40")
        yield link
