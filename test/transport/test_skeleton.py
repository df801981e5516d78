"""The skeletons of servers and clients carry another protocol: an echo, in a page of code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Certificates
from grpc_health.v1 import health_pb2
from proxies import environment_proxy
from waiting import wait_for

from collab_llm_lab.bench import wire
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.transport import server, streams
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.client import Client
from collab_llm_nodes.transport.heartbeat import CHECK
from collab_llm_nodes.transport.server import ServerHandle
from collab_llm_nodes.transport.settings import ClientConfig, ServerConfig, StreamLimits
from collab_llm_nodes.transport.streams import ClientSession, StreamService, Unary

WAIT_S = 30.0
SERVICE = "test.Echo"
TALK, SHOUT = f"/{SERVICE}/Talk", f"/{SERVICE}/Shout"

# --- The protocol -------------------------------------------------------------------------------


class Echo(StreamService[bytes]):
    """Says what it hears, from a thread of its own; "bye" is the last word."""

    name, full_name, stream = "echo", SERVICE, "Talk"

    async def serve_stream(self, client: ClientSession[bytes]) -> None:
        word = await self.read_first(client)
        client.open()
        while word is not None:
            if word == b"rude":
                raise InvalidInput("no such words", field="word", remedy="be polite")
            threading.Thread(target=client.post, args=(word,), daemon=True).start()
            word = await self.read(client)

    def encode(self, message: bytes | CollabError) -> bytes:
        if isinstance(message, CollabError):
            return f"{message.code}: {message}".encode()
        return message

    def is_last(self, message: bytes) -> bool:
        return message == b"bye"

    def unary(self) -> Mapping[str, Unary]:
        return {"Shout": self._shout}

    async def _shout(self, request: bytes) -> bytes:
        if not request:
            raise InvalidInput("nothing to shout", field="word", remedy="say something")
        return request.upper()


class EchoClient(Client):
    """Asks, and talks word by word."""

    name = "echo"

    def shout(self, word: bytes) -> bytes:
        return self.ask(SHOUT, word, WAIT_S)

    def talk(self, *words: bytes) -> list[bytes]:
        """Return the answer to each of ``words``, each said when the one before is answered."""

        async def speak() -> list[bytes]:
            call = (await self.connected()).stream_stream(TALK)(metadata=self.metadata)
            heard = []
            for word in words:
                await call.write(word)
                heard.append(await call.read())
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            return heard

        said = asyncio.run_coroutine_threadsafe(within(speak(), WAIT_S), self._loop)
        return said.result(2 * WAIT_S)


# --- What the skeletons add ---------------------------------------------------------------------


Serve = Callable[..., ServerHandle[Echo]]
Connect = Callable[..., EchoClient]


@pytest.fixture
def running() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(running: contextlib.ExitStack) -> Serve:
    def start(**options: Any) -> ServerHandle[Echo]:
        config = ServerConfig(**{"address": "127.0.0.1:0", **options})
        return running.enter_context(ServerHandle(Echo(config)))

    return start


@pytest.fixture
def connect(running: contextlib.ExitStack) -> Connect:
    def make(server: ServerHandle[Echo], **options: Any) -> EchoClient:
        config = ClientConfig(**{"address": f"localhost:{server.port}", **options})
        return running.enter_context(EchoClient(config))

    return make


def test_another_protocol_is_served(serve: Serve, connect: Connect) -> None:
    server = serve()
    client = connect(server)
    assert client.shout(b"hello") == b"HELLO"
    assert client.talk(b"one", b"two", b"bye") == [b"one", b"two", b"bye"]
    wait_for(lambda: client.connection_state == ("UP", None))
    wait_for(lambda: server.sessions == 0)


def test_a_process_drains_for_the_time_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained = []

    async def run_until_signal(_: Any, drain_s: float, on_listening: Any) -> None:
        drained.append(drain_s)

    monkeypatch.setattr(server, "run_until_signal", run_until_signal)
    monkeypatch.setattr(server, "freeze_startup_objects", lambda: None)
    config = ServerConfig(address="127.0.0.1:0", drain_s=3.5)
    server.serve_until_signal(config, lambda: Echo(config), print)
    assert drained == [3.5]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_is_not_asked_for_this_machine(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    server = serve()
    with environment_proxy(monkeypatch) as proxy:
        address, through = f"{host}:{server.port}", f"http://{proxy.host_and_port}"
        assert connect(server, address=address).shout(b"hello") == b"HELLO"
        assert connect(server, address=address, proxy=through).shout(b"hello") == b"HELLO"
    assert proxy.seen == []


def test_only_a_proxy_that_is_set_is_asked_for_other_machines(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, far = serve(), "echo.invalid:443"  # a name that only a proxy could reach
    with environment_proxy(monkeypatch) as proxy:
        with pytest.raises(Unavailable):
            connect(server, address=far).ask(SHOUT, b"hello", 1.0)
        assert proxy.seen == []
        through = f"http://{proxy.host_and_port}"
        with pytest.raises(Unavailable):
            connect(server, address=far, proxy=through).ask(SHOUT, b"hello", 1.0)
        wait_for(lambda: proxy.seen)
    assert proxy.seen[0].startswith(b"CONNECT echo.invalid:443")
    with pytest.raises(ConfigError, match="proxy"):
        ClientConfig(proxy="socks5://localhost:1080")


def test_errors_are_typed_on_streams_and_off(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    one, refused = client.talk(b"one", b"rude")
    assert one == b"one"
    assert refused.startswith(b"INVALID_INPUT: word: no such words")
    with pytest.raises(InvalidInput, match="nothing to shout"):
        client.shout(b"")


def test_a_stranger_s_question_is_refused_before_it_is_read(serve: Serve) -> None:
    port = serve(token="s3cret").port

    async def begin_and_send_nothing() -> None:
        connection = await wire.connect(f"127.0.0.1:{port}", token="guess")
        try:
            with pytest.raises(Unavailable, match="the call has ended"):
                await connection.call(SHOUT, WAIT_S).read()
        finally:
            connection.close()

    asyncio.run(begin_and_send_nothing())


def test_a_question_that_is_given_up_leaves_no_trace(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()

    async def begin_and_give_up() -> None:
        connection = await wire.connect(f"127.0.0.1:{server.port}")
        for _ in range(20):
            connection.call(SHOUT, WAIT_S).reset()
        connection.close()

    asyncio.run(begin_and_give_up())
    assert connect(server).shout(b"hello") == b"HELLO"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("request_", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x7f"])
def test_a_malformed_health_check_costs_no_line_of_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    """Anybody may send it, without a token, a thousand times a second."""
    server = serve(token="s3cret")
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        check = channel.unary_unary(CHECK)
        with pytest.raises(grpc.RpcError) as refused:
            check(request_, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert check(b"", timeout=WAIT_S)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_method_that_nobody_serves_is_refused(serve: Serve) -> None:
    with grpc.insecure_channel(f"localhost:{serve().port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{SERVICE}/Whisper")(b"", timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_only_who_has_the_token_is_served(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    server = serve(token_file=str(secret))
    known, stranger = connect(server, token="s3cret"), connect(server, token="guess")
    assert known.talk(b"bye") == [b"bye"]
    with pytest.raises(Unauthenticated) as refused:
        stranger.shout(b"hello")
    assert refused.value.remedy == "give the token that the echo expects"
    with pytest.raises(grpc.aio.AioRpcError, match="wrong or missing token"):
        stranger.talk(b"hello")


def test_both_sides_know_each_other_by_certificates(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    pki = Certificates(tmp_path, "own")
    (cert, key), (robot, its_key) = pki.issue("server"), pki.issue("robot")
    server = serve(tls_cert=cert, tls_key=key, tls_client_ca=pki.ca)
    known = connect(server, tls=True, tls_ca=pki.ca, tls_cert=robot, tls_key=its_key)
    assert known.talk(b"bye") == [b"bye"]
    unknown = connect(server, tls=True, tls_ca=pki.ca)
    with pytest.raises(Unavailable):
        unknown.ask(SHOUT, b"hello", 1.0)


def test_health_is_asked_without_a_token(serve: Serve) -> None:
    server = serve(token="s3cret")
    request = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        answer = channel.unary_unary(CHECK)(request, timeout=WAIT_S)
    states = health_pb2.HealthCheckResponse
    assert states.FromString(answer).status == states.SERVING


def test_an_open_session_may_finish_and_a_new_one_is_refused(serve: Serve) -> None:
    server = serve()
    states = health_pb2.HealthCheckResponse
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        replies = channel.stream_stream(TALK)(iter(words.get, None), timeout=WAIT_S)
        words.put(b"one")
        assert next(replies) == b"one"
        ending = threading.Thread(target=server.stop, args=(WAIT_S,))
        ending.start()
        check = channel.unary_unary(CHECK)
        wait_for(lambda: states.FromString(check(b"")).status == states.NOT_SERVING)
        late = channel.stream_stream(TALK)(iter([b"late"]), timeout=WAIT_S)
        assert next(late).startswith(b"UNAVAILABLE: session: the echo is shutting down")
        words.put(b"bye")
        assert next(replies) == b"bye"
        words.put(None)
        ending.join(WAIT_S)
        assert not ending.is_alive()


def test_a_silent_client_loses_its_session(serve: Serve) -> None:
    server = serve(limits=StreamLimits(idle_s=0.05))
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        replies = channel.stream_stream(TALK)(iter(words.get, None), timeout=WAIT_S)
        words.put(b"one")
        assert b"nothing came for 0.05 s" in list(replies)[-1]
        words.put(None)


def test_metrics_bear_the_name_of_the_service(serve: Serve, connect: Connect) -> None:
    server = serve(metrics_address="127.0.0.1:0")
    connect(server).talk(b"rude")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        text = page.read().decode()
    assert 'collab_llm_echo_failures_total{code="INVALID_INPUT"} 1.0' in text
    assert "collab_llm_echo_streams" in text


def test_a_flood_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNANSWERED", 3)
    monkeypatch.setattr(Echo, "is_answer", lambda self, message: False)
    with grpc.insecure_channel(f"localhost:{serve().port}") as channel:
        replies = channel.stream_stream(TALK)(iter([b"word"] * 5), timeout=WAIT_S)
        assert list(replies)[-1].startswith(f"{Busy.code}: message: 4 messages".encode())


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.0.0.2:0", "localhost:0"])
def test_who_listens_beyond_this_machine_is_warned(
    serve: Serve, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    serve(address=address)
    assert "anyone" not in caplog.text
    serve(address="0.0.0.0:0")
    assert "anyone may use it" in caplog.text
    assert "without TLS" in caplog.text


def test_a_port_in_use_is_a_typed_error(serve: Serve) -> None:
    with pytest.raises(ConfigError) as refused:
        serve(address=f"127.0.0.1:{serve().port}")
    assert refused.value.field == "address"


def test_a_client_connects_again(serve: Serve, connect: Connect) -> None:
    first = serve()
    client = connect(first)
    wait_for(lambda: client.connection_state[0] == "UP")
    first.stop()
    wait_for(lambda: client.connection_state[0] != "UP")
    with pytest.raises(Unavailable):
        client.ask(SHOUT, b"hello", 0.2)
    serve(address=f"127.0.0.1:{first.port}")
    assert client.shout(b"again") == b"AGAIN"
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.shout(b"late")


def test_a_client_limits_the_size_of_a_message(serve: Serve, connect: Connect) -> None:
    client = connect(serve(), max_message_bytes=4096)
    assert client.shout(b"a" * 4000) == b"A" * 4000
    with pytest.raises(CollabError):
        client.shout(b"a" * 5000)
