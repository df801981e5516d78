"""The emulated link of the benchmarks: lanes, proxy, packets."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
from packet_links import needs_packets

from collab_llm_lab.bench.link import LinkProfile, LinkProxy, PacketLink, packets
from collab_llm_lab.bench.link.lane import Lane
from collab_llm_lab.bench.link.packets import unavailable_reason
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, Unavailable
from collab_llm_nodes.processes import free_port


def listen(
    serve: Callable[[socket.socket], None], host: str = "127.0.0.1"
) -> tuple[socket.socket, str]:
    """A server at a port of its own; each connection is served in a thread."""
    listener = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener, f"{host}:{listener.getsockname()[1]}"


def echo(connection: socket.socket) -> None:
    try:
        while data := connection.recv(65536):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        connection.close()


@pytest.fixture
def echo_server() -> Iterator[str]:
    listener, address = listen(echo)
    yield address
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(address: str, timeout_s: float = 5.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(65536)
        assert more, "the connection ended"
        data += more
    return data


def ask(connection: socket.socket, question: bytes) -> float:
    """Seconds until ``question`` came back."""
    started = time.perf_counter()
    connection.sendall(question)
    assert receive(connection, len(question)) == question
    return time.perf_counter() - started


def hear_from(address: str) -> None:
    with connect(address) as connection:
        connection.recv(1)


# One direction, without I/O.


def test_a_lane_delays_within_its_jitter_and_keeps_the_order() -> None:
    lane = Lane(LinkProfile(delay_s=0.1, jitter_s=0.03), "up")
    due = [lane.leaves(now=0.001 * i, size=100) for i in range(2000)]
    times = [t for t in due if t is not None]
    assert len(times) == 2000
    assert times == sorted(times)
    late = [t - 0.001 * i for i, t in enumerate(times)]
    assert min(late) >= 0.07
    assert max(late) <= 0.13
    assert max(late) - min(late) > 0.02


def test_a_lane_has_a_capacity() -> None:
    lane = Lane(LinkProfile(delay_s=0.1, rate_bps=8000.0), "up")
    assert [lane.leaves(0.0, 100) for _ in range(3)] == pytest.approx([0.2, 0.3, 0.4])
    assert lane.backlog(0.1) == pytest.approx(0.2)
    assert lane.leaves(5.0, 100) == pytest.approx(5.2)  # idle capacity is not saved up


def test_a_lane_loses_and_reorders_packets_as_often_as_it_should() -> None:
    lane = Lane(LinkProfile(delay_s=0.1, loss=0.1, reorder=0.2, seed=3), "up")
    due = [lane.leaves(0.0, 100, packet=True) for _ in range(10_000)]
    assert lane.lost == due.count(None) == pytest.approx(1000, rel=0.1)
    assert lane.reordered == due.count(0.0) == pytest.approx(1800, rel=0.1)
    again = Lane(LinkProfile(delay_s=0.1, loss=0.1, reorder=0.2, seed=3), "up")
    assert [again.leaves(0.0, 100, packet=True) for _ in range(10_000)] == due


def test_a_full_queue_drops_packets() -> None:
    lane = Lane(LinkProfile(rate_bps=8000.0, queue_s=0.5), "up")
    due = [lane.leaves(0.0, 100, packet=True) for _ in range(20)]
    assert due[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert due[6:] == [None] * 14


@pytest.mark.parametrize("field", [f.name for f in fields(LinkProfile)])
def test_a_profile_out_of_range_names_its_field(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LinkProfile, {field: -1})
    assert caught.value.field == field


# The proxy.


@pytest.mark.parametrize("field", ["loss", "reorder"])
def test_a_proxy_cannot_lose_packets(field: str) -> None:
    profile = from_mapping(LinkProfile, {field: 0.1})
    with pytest.raises(ConfigError) as caught:
        LinkProxy("127.0.0.1:1", profile)
    assert caught.value.field == field
    assert "PacketLink" in str(caught.value)


def test_bytes_come_through_in_order_and_are_counted(echo_server: str) -> None:
    blob = bytes(range(256)) * 8192  # 2 MiB
    with LinkProxy(echo_server, LinkProfile(delay_s=0.002, jitter_s=0.002)) as link:
        with connect(link.address) as c:
            sender = threading.Thread(target=c.sendall, args=(blob,))
            sender.start()
            assert receive(c, len(blob)) == blob
            sender.join()
            assert link.connections == 1
            c.shutdown(socket.SHUT_WR)
            assert c.recv(1) == b""  # the end comes through as well
        assert (link.bytes_up, link.bytes_down) == (len(blob), len(blob))


def test_the_delay_is_what_was_asked_for(echo_server: str) -> None:
    with LinkProxy(echo_server) as link, connect(link.address) as c:
        ask(c, b"warm up")
        assert min(ask(c, b"x" * 200) for _ in range(21)) < 0.003
        link.change(LinkProfile(delay_s=0.02))
        took = [ask(c, b"x" * 200) for _ in range(11)]
    assert 0.04 <= min(took) < 0.046


def test_a_connection_takes_a_round_trip_to_make(echo_server: str) -> None:
    """SYN, SYN-ACK and the first data: a question on a new connection costs two round trips."""
    took = []
    with LinkProxy(echo_server, LinkProfile(delay_s=0.03)) as link:
        for _ in range(15):
            started = time.perf_counter()
            with connect(link.address) as c:
                ask(c, b"hello")
            took.append(time.perf_counter() - started)
    assert 0.12 <= min(took) < 0.16


def test_a_throttled_link_takes_its_time(echo_server: str) -> None:
    blob = b"x" * 50_000
    with LinkProxy(echo_server) as link, connect(link.address) as c:
        assert min(ask(c, blob) for _ in range(5)) < 0.1
        link.throttle(2e6)  # 0.2 s for the blob; both directions work at the same time
        assert 0.18 < min(ask(c, blob) for _ in range(3)) < 0.35
        link.throttle(0.0)
        assert min(ask(c, blob) for _ in range(5)) < 0.1


def test_a_receiver_that_does_not_read_holds_its_sender_up() -> None:
    """The proxy's memory stays bounded."""
    listener, address = listen(lambda connection: None)
    with LinkProxy(address) as link, connect(link.address, timeout_s=0.5) as c:
        with pytest.raises(TimeoutError):
            c.sendall(b"x" * (64 << 20))
        assert link.bytes_up < 32 << 20
    listener.close()


def test_a_cut_resets_both_ends(echo_server: str) -> None:
    with LinkProxy(echo_server) as link, connect(link.address) as c:
        ask(c, b"hello")
        link.cut()
        with pytest.raises(ConnectionResetError):
            c.recv(1)
        assert link.connections == 0
        with connect(link.address) as again:
            ask(again, b"hello")


def test_refused_connections_are_reset_until_it_heals(echo_server: str) -> None:
    with LinkProxy(echo_server) as link, connect(link.address) as standing:
        ask(standing, b"hello")
        link.refuse()
        with pytest.raises(ConnectionResetError):
            hear_from(link.address)
        ask(standing, b"still there")
        link.heal()
        with connect(link.address) as again:
            ask(again, b"hello")


def test_a_half_open_link_is_silent_and_loses_nothing(echo_server: str) -> None:
    with LinkProxy(echo_server, LinkProfile(delay_s=0.01)) as link, connect(link.address) as c:
        ask(c, b"hello")
        link.half_open()
        with connect(link.address) as new:
            for connection in (c, new):
                connection.settimeout(0.2)
                connection.sendall(b"are you there?")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
            link.heal()
            for connection in (c, new):
                connection.settimeout(5.0)
                assert receive(connection, 14) == b"are you there?"


def test_a_target_that_is_gone_resets_the_client() -> None:
    with LinkProxy(f"127.0.0.1:{free_port()}") as link, pytest.raises(ConnectionResetError):
        hear_from(link.address)


@contextlib.contextmanager
def packet_echo(profile: LinkProfile) -> Iterator[tuple[PacketLink, socket.socket]]:
    """A packet link and a connection over it to an echo server at the far end."""
    with PacketLink(profile) as link:
        with link.at_far():
            listener, address = listen(echo, link.FAR)
        with link.at_near():
            connection = connect(address)
        with connection:
            ask(connection, b"warm up")
            yield link, connection
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@needs_packets
def test_packets_take_the_delay_and_leave_nothing_behind() -> None:
    before = set(os.listdir("/sys/class/net"))
    with packet_echo(LinkProfile(delay_s=0.02)) as (link, c):
        took = [ask(c, b"x" * 200) for _ in range(11)]
        assert set(os.listdir("/sys/class/net")) == before  # the devices are in their namespaces
        assert link.carried > 22
    assert 0.04 <= min(took) < 0.046
    assert set(os.listdir("/sys/class/net")) == before


@needs_packets
def test_tcp_over_lost_and_reordered_packets_is_late_but_whole() -> None:
    blob = random.Random(1).randbytes(400_000)
    with packet_echo(LinkProfile(delay_s=0.002, loss=0.02, reorder=0.05, seed=1)) as (link, c):
        sender = threading.Thread(target=c.sendall, args=(blob,))
        sender.start()
        assert receive(c, len(blob)) == blob
        sender.join()
        assert link.lost > 0
        assert link.reordered > 0


@needs_packets
def test_a_throttled_packet_link_takes_its_time() -> None:
    with packet_echo(LinkProfile()) as (link, c):
        ask(c, b"x" * 50_000)
        link.throttle(2e6)
        assert 0.18 < ask(c, b"x" * 50_000) < 1.0


@needs_packets
def test_a_dead_packet_link_is_silent_and_tcp_survives_it() -> None:
    with packet_echo(LinkProfile(delay_s=0.002)) as (link, c):
        link.half_open()
        c.settimeout(0.2)
        c.sendall(b"are you there?")
        with pytest.raises(TimeoutError):
            c.recv(1)
        link.heal()
        c.settimeout(10.0)
        assert receive(c, 14) == b"are you there?"


@needs_packets
def test_a_proxy_can_be_the_way_into_a_packet_link() -> None:
    with PacketLink(LinkProfile(delay_s=0.01)) as link:
        with link.at_far():
            listener, address = listen(echo, link.FAR)
        with LinkProxy(address, enter=link.enter_near) as way_in, connect(way_in.address) as c:
            assert ask(c, b"hello") >= 0.02
            way_in.cut()
            with pytest.raises(ConnectionResetError):
                c.recv(1)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_without_the_right_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(name: str, *arguments: int) -> None:
        raise PermissionError(1, f"{name}: not permitted")

    monkeypatch.setattr(packets, "_call", denied)
    assert "run as root" in unavailable_reason()
    with pytest.raises(Unavailable, match="unshare: not permitted"), PacketLink():
        pass
