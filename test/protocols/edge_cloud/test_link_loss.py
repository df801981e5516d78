"""The emulated link, and what the protocol makes of a bad one."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from fake_models import EOS, VOCABULARY, FakeEngine, as_engine, encode
from typer.testing import CliRunner
from waiting import wait_for

from collab_llm_nodes.bench.link import LinkProfile, LinkProxy, PacketLink, packets, report
from collab_llm_nodes.bench.link.lane import Lane
from collab_llm_nodes.bench.link.packets import why_not
from collab_llm_nodes.bench.link.report import Bed, Scenario, disturb, embedded_bed, silence
from collab_llm_nodes.bench.scenes import scene_prompts
from collab_llm_nodes.cli import app
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.client import ClientConfig, EdgeClient, Source
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig, Patience, finish_alone
from collab_llm_nodes.protocols.edge_cloud.messages import Verdict
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient


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


# Packets.

needs_packets = pytest.mark.skipif(bool(why_not()), reason=why_not())


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
    assert "run as root" in why_not()
    with pytest.raises(Unavailable, match="unshare: not permitted"), PacketLink():
        pass


# The protocol over a bad link.


PROMPTS = [Prompt(f"question {i}") for i in range(8)]


@contextlib.contextmanager
def bed_of_fakes(**link: float) -> Iterator[tuple[Bed, list[tuple[int, ...]]]]:
    """A verifier around a fake behind a proxy, and what it answers undisturbed."""
    target = FakeEngine(1)
    config = ClientLinkConfig(keepalive_s=0.5, link=from_mapping(LinkConfig, link))
    server = VerifierConfig(address="127.0.0.1:0")
    with (
        start_server(server, as_engine(target), encode) as verifier,
        LinkProxy(f"127.0.0.1:{verifier.port}") as proxy,
        VerifierClient(replace(config, address=proxy.address)) as client,
    ):
        client.describe(10.0)
        draft = as_engine(FakeEngine(1, noise=0.5))
        runner = RemoteRunner(draft, client, encode=encode)
        yield (
            Bed(client, runner, VOCABULARY, proxy),
            [target.answer(encode(prompt), report.LAW, report.MAX_TOKENS) for prompt in PROMPTS],
        )


def test_twenty_cuts_cost_time_but_no_token() -> None:
    with bed_of_fakes() as (bed, truth):
        profile = LinkProfile(delay_s=0.005, jitter_s=0.002)
        bed.change(profile)
        cuts = Scenario("cuts", profile, cuts=20, outages_s=(0.0, 0.0, 0.1))
        counts = disturb(bed, PROMPTS, truth, cuts, seed=1)
    assert counts.answers >= len(PROMPTS)
    assert counts.cuts == 20
    assert (counts.wrong_tokens, counts.hangs, counts.failed) == (0, 0, 0)
    recovery = counts.row(profile)["recovery_ms"]
    assert recovery["count"] >= 10
    # The bound counts waits only; half of it more is granted to a busy machine's threads.
    late = [r["excess"] - 1.5 * r["bound"] for r in recovery["each"]]
    assert sum(ms > 0 for ms in late) <= len(late) // 4, "a machine that is busier still"


def test_a_lost_syn_costs_less_than_tcp_s_own_patience() -> None:
    """Nothing but the second attempt can connect: the first one's deadline is a minute."""
    with bed_of_fakes(connect_deadline_s=60.0) as (bed, truth):
        before = bed.link.accepted
        bed.link.swallow(1)
        bed.link.cut()
        wait_for(lambda: bed.link.accepted == before + 1)  # else a call revives the old channel
        assert bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS).tokens == truth[0]
        assert bed.link.accepted == before + 2
        wait_for(lambda: bed.link.connections == 1)  # whatever else was begun is given up


def test_refused_attempts_to_connect_come_after_ever_longer_pauses() -> None:
    with bed_of_fakes() as (bed, truth):
        bed.link.refuse()
        refused_from = bed.link.accepted
        started = time.monotonic()
        bed.link.cut()
        wait_for(lambda: bed.link.accepted >= refused_from + 5)
        assert time.monotonic() - started >= 0.05 + 0.1 + 0.2 + 0.4
        wait_for(lambda: bed.client.status.state == "DOWN")
        assert "failed to connect" in bed.client.status.error_msg
        bed.link.heal()
        assert bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS).tokens == truth[0]


def test_what_is_left_on_a_lost_connection_goes_on_with_the_next() -> None:
    """Closing a channel cancels its calls, and their tasks as if their session was over."""
    with bed_of_fakes() as (bed, truth):
        rounds: list[tuple[int, ...]] = []

        def on_tokens(tokens: tuple[int, ...]) -> None:
            rounds.append(tokens)
            if len(rounds) == 1:
                (session,) = bed.client._sessions
                assert session._task is not None
                bed.client._loop.call_soon_threadsafe(session._task.cancel)

        answer = bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS, on_tokens=on_tokens)
        assert answer.tokens == truth[0]
        assert bed.client.status.reconnects == 1


@pytest.mark.parametrize("fault", ["wrong_tokens", "failed", "hangs", ""])
def test_the_benchmark_s_exit_status_tells_of_every_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {name: int(name == fault) for name in ("wrong_tokens", "failed", "hangs")}
    monkeypatch.setattr(report, "run_link", lambda **_: {"runs": {"cuts": row}})
    assert CliRunner().invoke(app, ["bench", "link"]).exit_code == bool(fault)


def test_a_wrong_token_is_counted() -> None:
    """The comparison can fail."""
    assert report.differences((1, 2, 3), (1, 2, 3)) == 0
    assert report.differences((1, 5, 3), (1, 2, 3)) == 1
    assert report.differences((1, 2), (1, 2, 3, 4)) == 2
    with bed_of_fakes() as (bed, truth):
        wrong = [(*answer[:-1], answer[-1] + 1) for answer in truth]
        counts = disturb(bed, PROMPTS[:2], wrong[:2], Scenario("none", LinkProfile()), seed=1)
    assert counts.wrong_tokens == 2


def test_a_connection_that_falls_silent_is_replaced() -> None:
    """No reset tells of it: the keepalive must, well before the verdict's deadline."""
    with bed_of_fakes(verdict_deadline_s=10.0) as (bed, truth):
        result = silence(bed, PROMPTS[0], truth[0], bed.link.forget)
    assert result["wrong_tokens"] == result["next_answer_wrong_tokens"] == 0
    assert result["over_after_s"] < 8.0


def test_a_link_that_stays_silent_is_a_typed_error_in_time() -> None:
    with bed_of_fakes(verdict_deadline_s=1.5, connect_deadline_s=0.5) as (bed, truth):
        result = silence(bed, PROMPTS[0], truth[0], bed.link.half_open)
    assert result["error"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert result["over_after_s"] < 8.0
    assert result["next_answer_wrong_tokens"] == 0


# What becomes of an answer whose verifier cannot be reached.


def test_patience_ends_only_while_a_verdict_is_awaited() -> None:
    patience = Patience(2.0)
    assert not patience.over(1000.0)  # drafting the first draft may take its time
    patience.on_sent(10.0)
    patience.on_sent(11.0)  # another one ahead: the first is awaited still
    assert not patience.over(12.0)
    assert patience.over(12.1)
    patience.on_heard(12.1, waiting=True)  # the one ahead
    assert not patience.over(14.0)
    assert patience.over(14.2)
    patience.on_heard(14.2, waiting=False)
    assert not patience.over(1000.0)


@pytest.mark.parametrize(
    ("policy", "error", "alone"),
    [
        ("hold", Unavailable("gone"), False),
        ("draft_only", Unavailable("gone"), True),
        ("draft_only", DeadlineExceeded("silent"), True),
        ("draft_only", Unauthenticated("who are you?"), False),
        ("draft_only", InvalidInput("no picture"), False),
        ("draft_only", Cancelled("never mind"), False),
    ],
)
def test_only_a_lost_link_lets_the_draft_model_finish(
    policy: str, error: CollabError, alone: bool
) -> None:
    assert LinkLossConfig(policy=policy).finishes_alone(error) is alone


@pytest.mark.parametrize(
    ("field", "value"), [("policy", "hope"), ("after_s", 0.0), ("max_unverified", 0)]
)
def test_a_policy_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LinkLossConfig, {field: value})
    assert caught.value.field == field


LAWS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.8, seed=3),
    SamplingConfig(temperature=0.8, seed=3, law="coupled"),
]


class Alone:
    """An answer of which the verifier has confirmed ``confirmed``, finished by the draft model."""

    def __init__(
        self,
        sampling: SamplingConfig,
        confirmed: tuple[int, ...] = (),
        max_tokens: int = 100,
        max_unverified: int = 100,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = FakeEngine(1, noise=0.5)
        self.prompt = encode(Prompt("where to?"))
        drafter = Drafter(as_engine(self.model), self.prompt, sampling)
        self.client = EdgeClient(ClientConfig(max_tokens=max_tokens))
        if confirmed:  # by a verdict, after a draft that had nothing of it
            draft = drafter.draft(self.client.next_draft())
            assert draft is not None
            assert self.client.on_sent(draft)
            self.client.on_verdict(Verdict(0, confirmed, len(confirmed) - 1, False))
            drafter.advance(confirmed)
        self.said: list[int] = []
        try:
            finish_alone(
                self.client,
                drafter.alone,
                self.model.eos,
                max_unverified,
                check=check,
                on_tokens=self.said.extend,
            )
        finally:
            drafter.close()


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("confirmed", [(), (5, 7, 11)])
def test_the_rest_is_what_the_draft_model_alone_says_after_the_confirmed_part(
    sampling: SamplingConfig, confirmed: tuple[int, ...]
) -> None:
    alone = Alone(sampling, confirmed)
    expected = list(confirmed)
    while expected[-1:] != [EOS] and len(expected) < 100:
        law = distribution(alone.model.logits((*alone.prompt.ids, *expected)), sampling)
        expected.append(own_token(law, sampling, len(expected)))
    client = alone.client
    assert client.generated == expected
    assert alone.said == expected[len(confirmed) :]
    assert client.sources[len(confirmed) :] == [Source.UNVERIFIED] * len(alone.said)
    assert Source.UNVERIFIED not in client.sources[: len(confirmed)]
    assert not client.verified
    assert client.finished
    assert client.metrics.unverified == len(alone.said)
    assert client.metrics.tau == len(confirmed)  # what was not verified does not count
    assert alone.model.alive == 0


def test_an_unverified_rest_keeps_the_request_s_length() -> None:
    whole = Alone(LAWS[1]).said
    alone = Alone(LAWS[1], max_tokens=len(whole) - 1)
    assert alone.said == whole[:-1]
    assert alone.client.finished


def test_an_unverified_rest_without_an_end_is_no_answer() -> None:
    whole = Alone(LAWS[1]).said
    assert 2 < len(whole) < 100
    assert whole[-1] == EOS
    with pytest.raises(Unavailable) as caught:
        Alone(LAWS[1], max_unverified=len(whole) - 1)
    assert caught.value.field == "link_loss.max_unverified"
    assert Alone(LAWS[1], max_unverified=len(whole)).said == whole


def test_an_unverified_rest_ends_with_its_time() -> None:
    def too_late() -> None:
        raise DeadlineExceeded("too late")

    with pytest.raises(DeadlineExceeded):
        Alone(SamplingConfig(), check=too_late)


@needs_packets
def test_lost_packets_and_cuts_cost_no_token_of_the_real_pair() -> None:
    """The embedded pair, the verifier in its own process and network namespace."""
    draft = Engine(load(ModelConfig(path="nav-draft")))
    prompts = scene_prompts(3, seed=5)
    profile = LinkProfile(delay_s=0.01, jitter_s=0.01, loss=0.01, reorder=0.02)
    with embedded_bed(draft, compute_s=0.1) as bed:
        truth = [bed.runner.generate(p, report.LAW, report.MAX_TOKENS).tokens for p in prompts]
        bed.change(profile)
        counts = disturb(bed, prompts, truth, Scenario("all", profile, 4, (0.0, 0.1)), seed=1)
    assert counts.tokens == sum(map(len, truth)) > 30
    assert (counts.wrong_tokens, counts.hangs, counts.failed) == (0, 0, 0)
    assert counts.cuts == 4
