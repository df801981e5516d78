"""HAProxy before the verifier, with the shipped configuration: what reaches the verifier.

Strangers come from an address of their own, as on the internet: 127.0.0.2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Certificates
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from raw_client import RawClient
from raw_http2 import WAIT_S, RawConnection, call
from waiting import wait_for

from collab_llm_lab.bench.http2 import HEADERS, reset
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import Unauthenticated
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import Open, Opened, ServerMessage
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import start_server
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.transport.admission import Shares
from collab_llm_nodes.transport.wire import Failure

HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    HAPROXY is None, reason="HAProxy is not installed: apt-get install haproxy"
)
TOKEN = "only-robots-with-this"
OPEN = Open("go to the red box", (), SamplingConfig(), 24, VOCABULARY)
STRANGER = "127.0.0.2"
SESSION = codec.SESSION.encode()
CHECK = "/grpc.health.v1.Health/Check"


class Front:
    """HAProxy on ``port``, with TLS by the authority ``ca``; what is behind it is at ``behind``."""

    def __init__(self, folder: Path, certificates: Certificates, robots_ca: str = "") -> None:
        self.port, self.behind, self.ca = free_port(), free_port(), certificates.ca
        own = folder / "own.pem"
        own.write_text("".join(Path(file).read_text() for file in certificates.issue("front")))
        tokens = folder / "tokens"
        tokens.write_text(f"Bearer {TOKEN}\n")
        text = config_file("haproxy_verifier.cfg").read_text(encoding="utf-8")
        if robots_ca:
            text = text.replace("alpn h2\n", f"alpn h2 ca-file {robots_ca} verify required\n")
        config = folder / "haproxy.cfg"
        config.write_text(text)
        environment = {
            "VERIFIER_LISTEN": f":{self.port}",
            "VERIFIER_CERT": str(own),
            "VERIFIER_TOKENS": str(tokens),
            "VERIFIER_ADDRESS": f"127.0.0.1:{self.behind}",
        }
        self._log = (folder / "haproxy.log").open("wb")
        self._process = subprocess.Popen(
            [str(HAPROXY), "-db", "-f", str(config)], env=environment, stderr=self._log
        )
        wait_for(self._listens, WAIT_S)

    def robot(self, **settings: Any) -> VerifierClient:
        """A robot's client; its link asks for signs of life by itself."""
        known = {"tls": True, "tls_ca": self.ca, "token": TOKEN, **settings}
        return VerifierClient(ClientLinkConfig(f"localhost:{self.port}", **known))

    def channel(self) -> grpc.Channel:
        """A connection of its own, without a token."""
        credentials = grpc.ssl_channel_credentials(Path(self.ca).read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"localhost:{self.port}", credentials, options)

    def stranger(self) -> RawConnection:
        """Somebody who has shaken hands, and no more."""
        return RawConnection(self.port, self.ca, STRANGER)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()

    def _listens(self) -> bool:
        assert self._process.poll() is None, "HAProxy has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


@pytest.fixture
def front(tmp_path: Path, certificates: tuple[Certificates, Certificates]) -> Iterator[Front]:
    """HAProxy with nothing behind it yet."""
    running = Front(tmp_path, certificates[0])
    yield running
    running.close()


@pytest.fixture
def target(front: Front) -> Iterator[FakeEngine]:
    """The model of a verifier behind ``front``."""
    engine = FakeEngine(1)
    config = VerifierConfig(
        address=f"127.0.0.1:{front.behind}",
        token=TOKEN,
        client_header="x-client",
        limits=Limits(max_sessions=16, max_streams=16),
        shares=Shares(0.25, 0.5),
    )
    with start_server(config, as_engine(engine), encode):
        yield engine


def check_answers(front: Front, target: FakeEngine, count: int = 3) -> None:
    """A robot that connects now gets right answers, and its signs of life all the while."""
    with front.robot() as client:
        runner = RemoteRunner(as_engine(FakeEngine(1, noise=0.5)), client, encode=encode)
        for number in range(count):
            prompt = Prompt(f"go to box {number}")
            answer = runner.generate(prompt, SamplingConfig(), 24)
            assert answer.tokens == target.answer(encode(prompt), SamplingConfig(), 24)


def test_robots_get_their_answers(front: Front, target: FakeEngine) -> None:
    check_answers(front, target, 10)


def status(front: Front, path: str, token: str = "") -> grpc.StatusCode:
    with front.channel() as channel:
        metadata = [("authorization", f"Bearer {token}")] if token else []
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(b"", timeout=WAIT_S, metadata=metadata)
        code: grpc.StatusCode = caught.value.code()
        return code


def test_nothing_without_a_token_and_no_other_path_gets_behind_it(front: Front) -> None:
    """Nothing listens there: what is passed on is UNAVAILABLE, whatever it is."""
    code = grpc.StatusCode
    assert status(front, codec.DESCRIBE, TOKEN) is code.UNAVAILABLE
    assert status(front, CHECK) is code.UNAVAILABLE
    for wrong in ("", "wrong", TOKEN + "x", TOKEN[:-1]):
        assert status(front, codec.DESCRIBE, wrong) is code.UNAUTHENTICATED
        assert status(front, codec.SESSION, wrong) is code.UNAUTHENTICATED
    for path in ("/grpc.health.v1.Health/Watch", f"{CHECK}/", "/", "/no.such/Method"):
        assert status(front, path, TOKEN) is code.UNIMPLEMENTED


def test_a_robot_is_told_that_its_token_is_wrong(front: Front, target: FakeEngine) -> None:
    with front.robot(token="wrong") as client, pytest.raises(Unauthenticated):
        client.describe(WAIT_S)


def test_mutual_tls(tmp_path: Path, certificates: tuple[Certificates, Certificates]) -> None:
    ours, theirs = certificates
    front = Front(tmp_path, ours, robots_ca=ours.ca)
    engine = FakeEngine(1)
    config = VerifierConfig(address=f"127.0.0.1:{front.behind}", token=TOKEN)
    try:
        with start_server(config, as_engine(engine), encode):
            for authority, known in ((ours, True), (theirs, False)):
                cert, key = authority.issue("robot")
                with front.robot(tls_cert=cert, tls_key=key) as client:
                    refused = contextlib.nullcontext() if known else pytest.raises(Exception)
                    with refused:
                        assert client.describe(5.0).model == "fake"
    finally:
        front.close()


def test_silent_connections_take_no_others_place(front: Front, target: FakeEngine) -> None:
    address, silent = ("127.0.0.1", front.port), list[socket.socket]()
    for _ in range(280):
        with contextlib.suppress(ConnectionResetError):  # at once
            silent.append(socket.create_connection(address, WAIT_S, (STRANGER, 0)))
    check_answers(front, target)
    held = 0
    for connection in silent:
        connection.settimeout(0.0)
        try:
            held += connection.recv(1) != b""
        except BlockingIOError:
            held += 1
        except ConnectionResetError:
            pass
        connection.close()
    assert held <= 32


@contextlib.contextmanager
def flood(front: Front, frames: Callable[[int], bytes]) -> Iterator[threading.Event]:
    """A stranger sends ``frames`` of calls 1, 3, 5, ... as fast as it can, on new connections too.

    Yields:
        An event that is set once it has sent more than an address may.
    """
    under_way, over = threading.Event(), threading.Event()

    def send() -> None:
        sent = 0
        while not over.is_set():
            with contextlib.suppress(OSError), front.stranger() as stranger:
                for first in range(1, 200_000, 40):
                    if over.is_set() or not stranger.send(
                        b"".join(frames(number) for number in range(first, first + 40, 2))
                    ):
                        break
                    sent += 20
                    if sent > 2500:
                        under_way.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield under_way
    finally:
        over.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize(
    "frames",
    [
        lambda number: call(number, SESSION),
        lambda number: call(number, SESSION) + reset(number),
        lambda number: call(number, CHECK.encode()) + reset(number),
        lambda number: call(number, b"/\xff\xfe"),
    ],
    ids=["headers", "rapid reset", "rapid reset of signs of life", "paths"],
)
def test_floods_disturb_no_robot(
    front: Front, target: FakeEngine, frames: Callable[[int], bytes]
) -> None:
    with flood(front, frames) as under_way:
        assert under_way.wait(WAIT_S)
        check_answers(front, target, 5)


def test_shares_are_those_of_true_clients_whatever_they_say(
    front: Front, target: FakeEngine
) -> None:
    with contextlib.ExitStack() as stack:

        def streams(count: int) -> list[ServerMessage]:
            channel = stack.enter_context(front.channel())
            metadata = [("authorization", f"Bearer {TOKEN}")]
            said = []
            for number in range(count):
                pretended = ("x-client", f"10.0.0.{number}:{number}")
                client = RawClient(channel, [*metadata, pretended])
                stack.callback(client.half_close)
                client.send(OPEN)
                said.append(client.next())
            return said

        greedy = streams(5)
        assert [type(message) for message in greedy] == [Opened] * 4 + [Failure]
        assert "one connection" in str(greedy[-1])
        streams(4)
        last = streams(1)[0]
        assert isinstance(last, Failure)
        assert "one address" in last.message


def test_more_than_a_hundred_requests_in_a_second_are_refused(front: Front) -> None:
    with front.channel() as channel:
        call = channel.unary_unary(codec.SESSION)
        asked = [call.future(b"") for _ in range(1000)]  # 2000 in ten seconds are too many as well
        codes = Counter(future.exception(WAIT_S).code() for future in asked)
    assert codes[grpc.StatusCode.UNAUTHENTICATED] >= 50  # by the proxy itself: there is no token
    assert codes[grpc.StatusCode.UNAVAILABLE] >= 50


def test_ten_streams_at_once_reach_the_verifier_and_the_rest_of_a_burst_is_refused(
    front: Front,
) -> None:
    """Nothing listens there: what is passed on comes back as 503."""
    with front.stranger() as stranger:
        bearer = {"authorization": f"Bearer {TOKEN}".encode()}
        stranger.send(*(call(number, SESSION, bearer) for number in range(1, 121, 2)))
        stranger.send(*(call(number, CHECK.encode()) for number in range(121, 161, 2)))
        answers = dict[int, bytes]()
        while len(answers) < 80:
            kind, _, number, payload = stranger.next()
            if kind == HEADERS:
                answers[number] = payload
    passed = {number for number, answer in answers.items() if b"503" in answer}
    assert all(b"429" in answers[number] for number in answers.keys() - passed)
    assert passed >= {*range(1, 21, 2), *range(121, 161, 2)}  # signs of life are not counted
    assert len(passed) <= 20 + 20  # 10 more, where HAProxy takes more than 100 ms for them
