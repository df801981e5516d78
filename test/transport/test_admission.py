"""Limits on what one client can take from the others, before and after it has shown a token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from certificates import Certificates
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from hypothesis import given
from hypothesis import strategies as st
from raw_client import RawClient
from raw_http2 import WAIT_S, RawConnection, call
from typer.testing import CliRunner
from waiting import wait_for

from collab_llm_lab.bench.http2 import goaway
from collab_llm_lab.bench.wire import Call
from collab_llm_lab.bench.wire import connect as dial
from collab_llm_nodes.cli import app
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, Unavailable
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import Open, Opened
from collab_llm_nodes.protocols.edge_cloud.service import start_server
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.transport import server as server_module
from collab_llm_nodes.transport.admission import (
    PATIENCE_S,
    Admission,
    Allowance,
    Peer,
    Place,
    Shares,
)
from collab_llm_nodes.transport.background import background_loop
from collab_llm_nodes.transport.server import Server, ServerHandle
from collab_llm_nodes.transport.streams import ClientSession, StreamService
from collab_llm_nodes.transport.wire import Failure

OPEN = Open("go to the red box", (), SamplingConfig(), 24, VOCABULARY)
SESSION = codec.SESSION.encode()


def robot(number: int, host: str = "10.0.0.1") -> Peer:
    return Peer.of(f"ipv4:{host}:{number}")


# --- The machine --------------------------------------------------------------------------------


def filled(admission: Admission, peers: Sequence[Peer], now: float = 0.0) -> list[Place]:
    """Take places until there are none for these peers; all send Open."""
    places = []
    for peer in peers:
        while True:
            try:
                place, lost = admission.enter(peer, now)
            except Unavailable:
                break
            assert lost is None
            place.opened = True
            places.append(place)
    return places


def test_a_subscriber_of_ipv6_is_one_address() -> None:
    near = [Peer.of(f"ipv6:%5B2001:db8:1:2::{n:x}%5D:40312") for n in range(3)]
    assert {peer.address for peer in near} == {"2001:db8:1:2::"}
    proxied = Peer.behind("ipv4:127.0.0.1:1", {"x-client": "2001:db8:1:2::7:40312"}, "x-client")
    assert proxied.address == "2001:db8:1:2::"
    assert Peer.of("ipv6:%5B2001:db8:1:3::1%5D:40312").address == "2001:db8:1:3::"


def test_one_connection_and_one_address_leave_room_for_others() -> None:
    admission = Admission(512, Shares(0.25, 0.5))
    assert len(filled(admission, [robot(1)])) == 128
    with pytest.raises(Unavailable, match="all 128 streams of one connection are taken") as refused:
        admission.enter(robot(1), 0.0)
    assert refused.value.field == "session"
    assert "shares.connection" in refused.value.remedy
    assert len(filled(admission, [robot(n) for n in range(2, 9)])) == 128
    with pytest.raises(Unavailable, match="all 256 streams of one address are taken"):
        admission.enter(robot(9), 0.0)
    admission.enter(robot(1, "10.0.0.2"), 0.0)


def test_clients_that_are_not_known_share_all_places() -> None:
    admission = Admission(8, Shares())
    assert len(filled(admission, [Peer()])) == 8
    with pytest.raises(Unavailable, match="all 8 streams are taken"):
        admission.enter(Peer(), 0.0)


def test_a_small_verifier_has_a_stream_for_everybody() -> None:
    assert len(filled(Admission(1, Shares()), [robot(1)])) == 1


def test_who_says_nothing_loses_its_place_where_there_is_no_other() -> None:
    admission = Admission(2, Shares(1.0, 1.0))
    first, _ = admission.enter(robot(1), 0.0)
    second, _ = admission.enter(robot(2), 0.0)
    with pytest.raises(Unavailable):
        admission.enter(robot(3), 0.9 * PATIENCE_S)
    second.opened = True
    third, lost = admission.enter(robot(3), PATIENCE_S)
    assert lost is first
    with pytest.raises(Unavailable):  # the third has only begun
        admission.enter(robot(1), PATIENCE_S)
    admission.leave(third)
    assert admission.enter(robot(1), PATIENCE_S)[1] is None


def test_silent_streams_of_one_client_make_room_for_another_at_once() -> None:
    admission = Admission(8, Shares(0.5, 1.0))
    greedy = [admission.enter(robot(1 + i // 4), 0.0)[0] for i in range(8)]
    _, lost = admission.enter(robot(3), 0.0)
    assert lost is greedy[0]
    _, lost = admission.enter(robot(3), 0.0)
    assert lost is not None
    assert lost.peer == robot(2), "which had most of them then"
    with pytest.raises(Unavailable):  # as fair as can be
        admission.enter(robot(3), 0.0)
    for place in admission._places:
        place.opened = True
    with pytest.raises(Unavailable):
        admission.enter(robot(4), 9.0)


def test_who_waits_for_its_turn_is_not_silent() -> None:
    admission = Admission(2, Shares(1.0, 1.0))
    first, _ = admission.enter(robot(1), 0.0)
    second, _ = admission.enter(robot(2), 0.1)
    first.since = math.inf
    assert admission.enter(robot(3), 0.1 + PATIENCE_S)[1] is second


def test_a_robot_with_a_slow_uplink_keeps_its_place() -> None:
    """It uploads 300 kB at 4 Mbit/s, while opened sessions of others hold all other places."""
    admission = Admission(64, Shares(1.0, 0.5))
    attackers = [robot(number, f"10.0.0.{number}") for number in (2, 3)]
    filled(admission, attackers[:1])
    place, _ = admission.enter(robot(1), 0.0)
    filled(admission, attackers[1:])
    for now in (0.35, 0.6):
        with pytest.raises(Unavailable):
            admission.enter(robot(4, "10.0.0.4"), now)
    assert place in admission._places


def test_a_share_that_is_full_costs_none_but_its_own_client_a_place() -> None:
    admission = Admission(8, Shares(0.25, 1.0))
    silent, _ = admission.enter(robot(1), 0.0)
    filled(admission, [robot(2)])
    with pytest.raises(Unavailable, match="one connection"):
        admission.enter(robot(2), 2 * PATIENCE_S)
    admission.leave(silent)
    assert len(admission) == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans(), st.floats(0.0, 0.5)),
        max_size=60,
    )
)
def test_in_any_order_nobody_has_more_than_a_share_and_none_is_lost(
    events: list[tuple[int, int, bool, float]],
) -> None:
    admission = Admission(8, Shares(0.25, 0.5))
    held: list[Place] = []
    now = 0.0
    for connection, host, leaves, wait in events:
        now += wait
        if leaves and held:
            admission.leave(held.pop(connection % len(held)))
            continue
        try:
            place, lost = admission.enter(robot(connection, f"10.0.0.{host}"), now)
        except Unavailable:
            continue
        place.opened = connection % 2 == 0
        if lost is not None:
            assert not lost.opened
            held.remove(lost)
        held.append(place)
        assert len(admission) == len(held) <= 8
        assert max(Counter(p.peer.connection for p in held).values()) <= 2
        assert max(Counter(p.peer.address for p in held).values()) <= 4


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 30.0)), min_size=1, max_size=60))
def test_an_address_uses_no_more_than_its_allowance(uses: list[tuple[float, float]]) -> None:
    allowance, now, total = Allowance(per_s=10.0), 0.0, 0.0
    for wait, amount in uses:
        now += wait
        if not allowance.wait_s("a", now):
            assert total <= 10.0 * (now + 2.0) * (1 + 1e-9)
            allowance.use("a", amount, now)
            total += amount
        assert allowance.wait_s("b", now) == 0.0


def test_who_has_used_up_its_allowance_waits_as_long_as_it_takes_to_earn() -> None:
    allowance = Allowance(per_s=10.0)
    allowance.use("a", 20.0, 100.0)  # two seconds' worth at once
    assert allowance.wait_s("a", 100.0) == 0.0
    allowance.use("a", 10.0, 100.0)
    assert allowance.wait_s("a", 100.25) == pytest.approx(0.75)
    assert allowance.wait_s("a", 101.0) == 0.0
    allowance.use("", 1e9, 100.0)
    assert allowance.wait_s("", 100.0) == 0.0


def test_addresses_that_owe_nothing_are_forgotten() -> None:
    allowance = Allowance(per_s=10.0)
    for number in range(5000):
        allowance.use(str(number), 1.0, float(number))
    assert len(allowance._paid_until) < 2000


@pytest.mark.parametrize(
    ("given_", "address"),
    [
        ("ipv4:10.0.0.7:40312", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:40312", "2001:db8::"),
        ("client:2001:db8::1:40312", "2001:db8::"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_a_peers_address_is_read(given_: str, address: str) -> None:
    assert Peer.of(given_) == Peer(given_, address)


def test_a_proxy_is_believed_only_if_there_is_one() -> None:
    said = {"x-client": "10.0.0.7:1"}
    proxy = "ipv4:127.0.0.1:2"
    assert Peer.behind(proxy, said, "x-client").address == "10.0.0.7"
    assert Peer.behind(proxy, said, "").address == "127.0.0.1"
    assert Peer.behind(proxy, {}, "x-client").address == "127.0.0.1"


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_shares_are_shares(share: float) -> None:
    with pytest.raises(ConfigError, match="address"):
        Shares(address=share)


# --- The server ---------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ServerHandle]:
    config = VerifierConfig(
        address="127.0.0.1:0",
        limits=Limits(max_sessions=16, max_streams=16),
        shares=Shares(0.25, 1.0),
        metrics_address="127.0.0.1:0",
    )
    with start_server(config, as_engine(FakeEngine(1)), encode) as running:
        yield running


def channel(port: int) -> grpc.Channel:
    """One with a connection of its own."""
    return grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])


def answers(port: int) -> bool:
    """Return True if a robot that connects now gets a session."""
    client = RawClient(channel(port))
    client.send(OPEN)
    said = client.next()
    client.close()
    return isinstance(said, Opened)


@pytest.mark.parametrize("opens", [True, False])
def test_streams_of_one_connection_leave_others_theirs(server: ServerHandle, opens: bool) -> None:
    with channel(server.port) as greedy:
        streams = [RawClient(greedy) for _ in range(24)]
        if opens:
            for stream in streams:
                stream.send(OPEN)
            said = [stream.next() for stream in streams]
            refused = [message for message in said if isinstance(message, Failure)]
            assert len(refused) == 20
            assert {f.code for f in refused} == {"UNAVAILABLE"}
            assert {f.field for f in refused} == {"session"}
            assert "one connection" in refused[0].message
        assert answers(server.port)
        for stream in streams:
            stream.half_close()


async def hold_empty_streams(address: str, source: str, ended: threading.Event) -> None:
    """Hold as many streams as are given, on four connections, and say nothing on any of them."""
    connections = [await dial(address, source=source) for _ in range(4)]
    calls: list[list[Call]] = [[] for _ in connections]
    while not ended.is_set():
        for connection, held in zip(connections, calls, strict=True):
            held[:] = [stream for stream in held if not stream.ended]
            held += [connection.call(codec.SESSION, WAIT_S) for _ in range(24 - len(held))]
        await asyncio.sleep(0.05)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("attackers", [["127.0.0.66", "127.0.0.67", "127.0.0.68"], ["127.0.0.1"]])
def test_streams_that_say_nothing_cost_others_no_answer(attackers: list[str]) -> None:
    """Silent streams, of other addresses or of the same one."""
    ended = threading.Event()
    with start_server(
        VerifierConfig(address="127.0.0.1:0"), as_engine(FakeEngine(1)), encode
    ) as server:
        attacks = [
            asyncio.run_coroutine_threadsafe(
                hold_empty_streams(f"127.0.0.1:{server.port}", source, ended), background_loop()
            )
            for source in attackers
        ]
        try:
            service = server.service
            wait_for(lambda: len(service._admission) >= 32)
            assert all(answers(server.port) for _ in range(30))
        finally:
            ended.set()
            for attack in attacks:
                attack.result(WAIT_S)


async def speak_late(address: str, after_s: float, message: bytes) -> None:
    """Open 400 streams on four connections, and say something on each of them only later."""
    connections = [await dial(address, source="127.0.0.66") for _ in range(4)]
    calls = [each.call(codec.SESSION, WAIT_S) for each in connections for _ in range(100)]
    await asyncio.sleep(after_s)
    writing = [asyncio.ensure_future(call.write(message)) for call in calls]
    await asyncio.wait(writing, timeout=1.0)
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing, return_exceptions=True)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("max_streams", [64, 512])
def test_streams_that_are_opened_first_and_speak_later_stay_within_the_allowance(
    max_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB may come at once, a megabyte on each of the eight streams that have a turn, and of the
    eight refused ones that are read at a time."""
    heard: list[tuple[float, int]] = []  # when, bytes
    receive = StreamService._receive

    async def noted(service: StreamService[object], client: ClientSession[object]) -> bytes | None:
        data = await receive(service, client)
        if not client.late:  # after a stall, gRPC holds the message of a stream that is just ended
            heard.append((time.monotonic(), len(data or b"")))
        return data

    monkeypatch.setattr(StreamService, "_receive", noted)
    config = VerifierConfig(address="127.0.0.1:0", limits=Limits(max_streams=max_streams))
    with start_server(config, as_engine(FakeEngine(1)), encode) as server:
        attack = speak_late(f"127.0.0.1:{server.port}", 1.9, bytes(1_000_000))
        asyncio.run_coroutine_threadsafe(attack, background_loop()).result(WAIT_S)
    times, sizes = zip(*heard, strict=True)
    assert sum(sizes) <= 24e6 + (max(times) - min(times)) * config.shares.bytes_per_s


@pytest.mark.parametrize(
    ("shares", "field"),
    [
        (Shares(sessions_per_s=0.1), "shares.sessions_per_s"),
        (Shares(bytes_per_s=1000.0), "shares.bytes_per_s"),
    ],
)
def test_who_asks_too_much_at_once_is_told_so_and_others_are_not(
    shares: Shares, field: str
) -> None:
    config = VerifierConfig(address="127.0.0.1:0", shares=shares, client_header="x-client")
    asked = replace(OPEN, text=5000 * "x")  # five seconds' worth of bytes, ten of sessions
    with start_server(config, as_engine(FakeEngine(1)), encode) as server:

        def answer(address: str) -> object:
            client = RawClient(channel(server.port), metadata=(("x-client", f"{address}:1"),))
            client.send(asked)
            said = client.next()
            client.close()
            return said

        assert isinstance(answer("10.0.0.1"), Opened)
        refused = answer("10.0.0.1")
        assert isinstance(refused, Failure)
        assert refused.code == "BUSY"
        assert field in refused.remedy
        assert isinstance(answer("10.0.0.2"), Opened)


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_says_nothing_is_closed(
    tls: bool, certificates: tuple[Certificates, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.5)
    cert, key = certificates[0].issue("verifier") if tls else ("", "")
    config = VerifierConfig(address="127.0.0.1:0", tls_cert=cert, tls_key=key)
    with (
        start_server(config, as_engine(FakeEngine(1)), encode) as server,
        socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent,
    ):
        while silent.recv(4096):  # without TLS the server speaks first
            pass


def test_a_path_that_is_no_text_ends_no_server(server: ServerHandle) -> None:
    with RawConnection(server.port) as stranger:
        stranger.send(call(1, b"/no\xff\xfe"), call(3, b"/no.such/Method"))
        stranger.send(call(5, b"\xff"))
        assert stranger.socket.recv(1)
        assert answers(server.port)
    with channel(server.port) as other, pytest.raises(grpc.RpcError) as caught:
        other.unary_unary("/no.such/Method")(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_end_of_grpc_itself_is_a_failure_of_the_verifier() -> None:
    """A process that nobody can reach has to end, so that a supervisor starts another."""

    async def run() -> None:
        config = VerifierConfig(address="127.0.0.1:0")
        server = Server(Verifier(config, as_engine(FakeEngine()), encode))
        await server.start()
        await server._server.stop(0.0)  # as its own loop does when it cannot go on
        await asyncio.wait_for(server.service.failed.wait(), WAIT_S)
        await server.stop(0.0)

    asyncio.run(run())


def test_half_sent_requests_for_metrics_take_neither_threads_nor_the_place_of_whole_ones(
    server: ServerHandle,
) -> None:
    port = server.metrics_port
    tasks = Path(f"/proc/{os.getpid()}/task")
    before = len(list(tasks.iterdir()))
    halves = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(400)]
    for half in halves:
        half.sendall(b"GET /metrics HT")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        assert b"collab_llm_verifier_streams" in answer.read()
    assert len(list(tasks.iterdir())) < before + 10
    for half in halves:  # all are ended, the last ones after two seconds
        with contextlib.suppress(ConnectionResetError):
            assert half.recv(1) == b""
        half.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics?name=x HTTP/1.0\r\nhost: x\r\n\r\n", b"200"),
        (b"GET /elsewhere HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"404"),
        (b"GET /" + 20_000 * b"x", b""),
    ],
)
def test_metrics_are_for_get(server: ServerHandle, request_: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.metrics_port), WAIT_S) as asking:
        asking.sendall(request_)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := asking.recv(65536):
                answer += part
    assert answer[9:12] == status


# --- The program --------------------------------------------------------------------------------


def test_strangers_write_nothing_into_the_log(tmp_path: Path) -> None:
    """The log is that of ``collab-llm verifier``: gRPC's core decides at import what it says."""
    config = tmp_path / "verifier.yaml"
    port = free_port()
    config.write_text(
        f"address: 127.0.0.1:{port}\nmodel: {{path: nav-target, exits: beside}}\n"
        "token: s3cret\nlog_format: json\ndrain_s: 0.0\n"
    )
    log, told = tmp_path / "log", tmp_path / "told.json"
    command = [sys.executable, "-m", "collab_llm_nodes.cli", "verifier"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--config", str(config), "--json", str(told)], stderr=file
        )
    try:
        wait_for(lambda: told.exists() or process.poll() is not None, 110.0)
        for words in (b"x\n{}\ny", b"x\r\n2026-01-01 INFO all is well"):
            with RawConnection(port) as stranger:
                stranger.send(goaway(words))
                stranger.heard()
        with RawConnection(port) as stranger:
            stranger.send(
                call(1, SESSION, {"x": b"\xff\xfe"}),
                call(3, SESSION, {"authorization": b"\xff\n"}),
                call(5, SESSION, {"grpc-timeout": b"junk"}),
                call(7, b"/\xff"),
            )
            with VerifierClient(ClientLinkConfig(f"127.0.0.1:{port}", token="s3cret")) as client:
                assert client.describe(WAIT_S).model == "nav-target"
    finally:
        process.terminate()
        process.wait(WAIT_S)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert {line["level"] for line in lines} == {"INFO"}, lines
    assert {line["logger"].partition(".")[0] for line in lines} == {"collab_llm_nodes"}, lines


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check lossless --seed 18446744073709551615", "--seed"),
        ("check lossless --samples 1", "--samples"),
        ("check lossless --samples 79", "--samples"),
        ("demo --seed 4294967296", "--seed"),
        ("bench engine --seed 18446744073709551615", "--seed"),
    ],
)
def test_arguments_out_of_range_are_refused_before_the_work(command: str, option: str) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert option in result.output
