"""The verifier on Ray Serve: two real replicas, the embedded pair, one of them killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import yaml
from fake_models import FakeEngine, as_engine, encode
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner
from waiting import wait_for

from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.cli import app
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError, InvalidInput, Unauthenticated, Unavailable
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud import ray_serve
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Open, Opened, ServerMessage
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import Generation
from collab_llm_nodes.protocols.edge_cloud.service import load_config, start_server
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.transport import ray_serve as transport_ray
from collab_llm_nodes.transport.wire import Failure

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -r requirements/ray.txt",
)
WAIT_S = 60.0  # upper bound of what takes seconds on an idle machine
TOKEN = "only-robots-with-this"
PASS_S = 0.03  # a pass takes at least this: answers last long enough to be interrupted
MAX_MESSAGE = 1 << 16
LAWS = (
    SamplingConfig(),
    SamplingConfig(temperature=1.0, seed=7, law="coupled"),
    SamplingConfig(temperature=1.3, seed=8, law="rejection"),
)


# --- What is refused before Ray starts ----------------------------------------------------------

GOOD = load_config("verifier_ray.yaml")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(GOOD, tls_cert="a.pem", tls_key="b.pem"), "tls_cert"),
        (replace(GOOD, address="127.0.0.1:50551"), "address"),
        (replace(GOOD, address="0.0.0.0:0"), "address"),
        (replace(GOOD, model=replace(GOOD.model, device="cuda")), "ray.gpus_per_replica"),
    ],
)
def test_what_the_ingress_cannot_honour_is_refused(config: VerifierConfig, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ray_serve.serve(config)
    assert refused.value.field == field


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"pip install 'collab_llm_nodes\[ray\]'"):
        ray_serve.serve(GOOD)


def test_replicas_are_asked_for_with_ray_only() -> None:
    result = CliRunner().invoke(app, ["verifier", "--replicas", "2", "--model", "nav-target"])
    assert result.exit_code == 2
    assert "only with --ray" in result.output


# --- What Serve is told of a replica ------------------------------------------------------------


@pytest.mark.parametrize(("failed", "draining"), [(False, False), (True, False), (False, True)])
def test_a_replica_tells_of_its_state(failed: bool, draining: bool) -> None:
    async def ask() -> None:
        verifier = Verifier(VerifierConfig(), as_engine(FakeEngine(1)), encode)
        verifier.start()
        replica: Any = SimpleNamespace(_service=verifier)
        if failed:
            verifier.failed.set()
        if draining:
            await ray_serve.Replica.__del__(replica)
        states = health_pb2.HealthCheckResponse
        answer = await ray_serve.Replica.Check(replica, b"", cast(Any, None))
        assert answer.status == (states.NOT_SERVING if failed or draining else states.SERVING)
        with pytest.raises(Unavailable) if failed else contextlib.nullcontext():
            ray_serve.Replica.check_health(replica)
        if draining:
            assert not verifier._compute._thread.is_alive()
        else:
            await verifier.stop()

    asyncio.run(ask())


class Context:
    """Stand-in for the context by which Serve's replica says how a call ends."""

    code: object = None

    def __init__(self, **metadata: str) -> None:
        self._metadata = list(metadata.items())

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: object) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        assert details


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("Check", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("Check", b"\x0a\x7f", grpc.StatusCode.INVALID_ARGUMENT),
        ("Check", b"\x0a\x03who", grpc.StatusCode.NOT_FOUND),
        ("answer", b"", grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_calls_of_strangers_leave_no_traceback(
    method: str, request_: bytes, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve logs whatever a replica raises, wrapped in an error of its own."""

    class Wrapped(Exception):
        def __init__(self, error: Exception) -> None:
            self.original_exception = error

    context = Context()
    served = logging.getLogger("ray.serve")
    served.addFilter(transport_ray._is_no_refusal)
    try:
        verifier = Verifier(VerifierConfig(token="s3cret"), as_engine(FakeEngine(1)), encode)
        replica: Any = SimpleNamespace(_service=verifier)
        replica._authenticate = lambda given: ray_serve.Replica._authenticate(replica, given)
        call: Any = getattr(ray_serve.Replica, method)
        asked = (request_, context) if method == "Check" else ("Describe", request_, context)
        with pytest.raises(transport_ray.Refusal) as refused:
            asyncio.run(call(replica, *asked))
        assert context.code is code
        for error in (refused.value, Wrapped(refused.value)):
            served.error("Request failed.", exc_info=error)
        served.error("Request failed.", exc_info=Wrapped(ValueError("a fault of ours")))
    finally:
        served.removeFilter(transport_ray._is_no_refusal)
    (record,) = [r for r in caplog.records if r.name == "ray.serve"]
    assert "a fault of ours" in str(record.exc_info)


# --- Two replicas -------------------------------------------------------------------------------


class Cluster:
    """``collab-llm verifier --ray --replicas 2`` in a session of its own (as setsid makes it)."""

    def __init__(self, folder: Path) -> None:
        self.port, self.metrics_port = free_port(), free_port(count=2)
        config = {
            "model": {"path": "nav-target"},
            "token": TOKEN,
            "limits": {"max_message_bytes": MAX_MESSAGE, "max_sessions": 16},
            "metrics_address": f"127.0.0.1:{self.metrics_port}",
            "ray": {"cpus_per_replica": 0.1, "http_port": free_port()},
        }
        (folder / "verifier.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._up, self._log = folder / "up.json", folder / "log"
        command = [
            "verifier",
            "--ray",
            "--replicas",
            "2",
            "--config",
            str(folder / "verifier.yaml"),
        ]
        command += ["--address", f"0.0.0.0:{self.port}", "--json", str(self._up)]
        command += ["--emulated-compute-s", str(PASS_S)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "collab_llm_nodes.cli", *command],
                env=_environment(folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def wait_until_up(self) -> None:
        """Returns when clients can connect."""
        wait_for(lambda: self._up.exists() or self._process.poll() is not None, 300.0)
        assert self._up.exists(), self.log
        assert json.loads(self._up.read_text())["port"] == self.port

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def client(self, token: str = TOKEN) -> VerifierClient:
        """A patient one: the ingress may be away for seconds while it takes up a replica."""
        address, link = f"127.0.0.1:{self.port}", LinkConfig(verdict_deadline_s=WAIT_S / 2)
        return VerifierClient(ClientLinkConfig(address=address, token=token, link=link))

    def metric(self, name: str) -> list[float]:
        """Its value at each replica."""
        return [_metric(self.metrics_port + rank, name) for rank in range(2)]

    def family(self) -> dict[int, str]:
        """All processes of the session, with their titles."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(folder.name)
                state, *numbers = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(numbers[2]) == self._process.pid and state != "Z":
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[pid] = title.decode("utf-8", "replace").strip()
        return found

    def replicas(self) -> list[int]:
        """Their process ids."""
        return [
            pid for pid, title in self.family().items() if title.startswith("ray::ServeReplica")
        ]

    def wait_for_both(self, prompt: Prompt) -> None:
        """Returns when clients get to either replica: the ingress may hear of one after the other.

        ``prompt``: of sessions to ask for; of several that stand at a time each replica has some.
        """
        with self.client() as client:
            vocabulary = client.describe(WAIT_S).vocabulary
        opened = Open(prompt.text, prompt.images, SamplingConfig(), 8, vocabulary)

        def both() -> bool:
            with contextlib.ExitStack() as stack:
                for client in clients_of(self, stack, 4):
                    inbox: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
                    client.open(opened, inbox.put)
                    assert isinstance(inbox.get(timeout=WAIT_S), Opened)
                try:
                    return min(self.metric("collab_llm_verifier_streams")) > 0
                except OSError:
                    return False  # one that was killed is not back yet

        wait_for(both)
        wait_for(lambda: sum(self.metric("collab_llm_verifier_streams")) == 0)

    def terminate(self) -> None:
        self._process.terminate()

    def exit_code(self) -> int:
        return self._process.wait(WAIT_S)

    def end(self) -> None:
        """End everything, whatever happened: nothing is left running."""
        if self._process.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.exit_code()
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.exit_code()


def _end_with_parent() -> None:
    """Have SIGTERM sent when the tests' process ends without a word (a time-out, SIGKILL)."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _environment(folder: Path) -> dict[str, str]:
    """Ports and folders that other clusters on this machine do not use."""
    mine = {
        name: str(free_port())
        for name in (
            "RAY_SERVE_HAPROXY_STATS_PORT",
            "RAY_SERVE_HAPROXY_METRICS_PORT",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
        )
    }
    mine |= {
        f"RAY_SERVE_HAPROXY_{name}": str(folder / file)
        for name, file in (
            ("CONFIG_FILE_LOC", "haproxy.cfg"),
            ("SOCKET_PATH", "admin.sock"),
            ("METRICS_SOCKET_PATH", "metrics.sock"),
            ("SERVER_STATE_BASE", "."),
            ("SERVER_STATE_FILE", "state"),
        )
    }
    mine |= {"RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN": uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | mine


def _metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def launched() -> Iterator[Cluster]:
    """One for all tests: it takes half a minute to start."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets lie in it: pytest's names are too long
    running = Cluster(folder)
    try:
        yield running
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def draft() -> Engine:
    return Engine(load(ModelConfig(path="nav-draft")))


@dataclass(frozen=True)
class Question:
    """A question, and the tokens that a single server gives."""

    prompt: Prompt
    sampling: SamplingConfig
    tokens: tuple[int, ...]


@pytest.fixture(scope="module")
def questions(launched: Cluster, draft: Engine) -> list[Question]:
    """Answered by one server without Ray, while the cluster starts."""
    config = VerifierConfig(model=TargetConfig(path="nav-target"), address="127.0.0.1:0")
    asked = [(p, LAWS[i % len(LAWS)]) for i, p in enumerate(scene_prompts(6, 1))]
    with (
        start_server(config) as server,
        VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}")) as client,
    ):
        runner = RemoteRunner(draft, client, gamma=2)
        return [Question(p, law, runner.generate(p, law).tokens) for p, law in asked]


@pytest.fixture(scope="module")
def cluster(launched: Cluster, questions: list[Question]) -> Cluster:
    launched.wait_until_up()
    launched.wait_for_both(questions[0].prompt)
    return launched


def answers(
    draft: Engine,
    clients: Sequence[VerifierClient],
    questions: Sequence[Question],
    on_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None,
) -> list[Generation]:
    """Question i through client i, all at the same time."""

    def ask(client: VerifierClient, question: Question) -> Generation:
        return RemoteRunner(draft, client, gamma=2).generate(
            question.prompt, question.sampling, deadline_s=WAIT_S, on_tokens=on_tokens
        )

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, clients, questions))


def meet(barrier: threading.Barrier) -> Callable[[tuple[int, ...]], None]:
    """Hold each answer at its first tokens until all the others have some; for ``on_tokens``."""
    mine = threading.local()

    def at_first_tokens(tokens: tuple[int, ...]) -> None:
        if not getattr(mine, "begun", False):
            mine.begun = True
            barrier.wait(WAIT_S)

    return at_first_tokens


def clients_of(cluster: Cluster, stack: contextlib.ExitStack, count: int) -> list[VerifierClient]:
    return [stack.enter_context(cluster.client()) for _ in range(count)]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(500)  # the first one waits for the cluster
class TestTwoReplicas:
    def test_answers_equal_those_of_a_single_server_and_both_replicas_give_some(
        self, cluster: Cluster, draft: Engine, questions: list[Question]
    ) -> None:
        standing = meet(threading.Barrier(len(questions)))  # together, so that they are spread
        with contextlib.ExitStack() as stack:
            clients = clients_of(cluster, stack, len(questions))
            given = answers(draft, clients, questions, standing)
        assert [g.tokens for g in given] == [q.tokens for q in questions]
        by_each = cluster.metric("collab_llm_verifier_tokens_total")
        assert sum(by_each) == sum(len(q.tokens) for q in questions)
        assert min(by_each) > 0

    def test_the_token_is_asked_for(self, cluster: Cluster) -> None:
        with cluster.client(token="wrong") as client:
            with pytest.raises(Unauthenticated):
                client.describe(WAIT_S)
            inbox: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
            client.open(Open("go", (), SamplingConfig(), 8, ""), inbox.put)
            told = inbox.get(timeout=WAIT_S)
        assert isinstance(told, Failure)
        assert told.code == Unauthenticated.code

    def test_the_limits_hold(self, cluster: Cluster, questions: list[Question]) -> None:
        with cluster.client() as client:
            inbox: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
            vocabulary = client.describe(WAIT_S).vocabulary
            law = SamplingConfig()
            client.open(Open("go", (bytes(2 * MAX_MESSAGE),), law, 8, vocabulary), inbox.put)
            too_large = inbox.get(timeout=WAIT_S)
            client.open(Open("x" * 9000, (), law, 8, vocabulary), inbox.put)
            too_long = inbox.get(timeout=WAIT_S)
        for told in (too_large, too_long):
            assert isinstance(told, Failure)
            assert told.code == InvalidInput.code

    def test_who_leaves_frees_the_cache(self, cluster: Cluster, questions: list[Question]) -> None:
        client = cluster.client()
        inbox: queue.SimpleQueue[ServerMessage] = queue.SimpleQueue()
        prompt = questions[0].prompt
        vocabulary = client.describe(WAIT_S).vocabulary
        client.open(Open(prompt.text, prompt.images, SamplingConfig(), 8, vocabulary), inbox.put)
        assert isinstance(inbox.get(timeout=WAIT_S), Opened)
        assert sum(cluster.metric("collab_llm_verifier_kv_caches")) == 1
        client.close()
        wait_for(lambda: sum(cluster.metric("collab_llm_verifier_kv_caches")) == 0)
        assert sum(cluster.metric("collab_llm_verifier_streams")) == 0

    def test_a_killed_replicas_sessions_go_on_at_the_other_with_the_same_tokens(
        self, cluster: Cluster, draft: Engine, questions: list[Question]
    ) -> None:
        """SIGKILL when all answers have begun, spread over both replicas."""
        begun = threading.Barrier(len(questions) + 1)

        def kill() -> None:
            begun.wait(WAIT_S)
            os.kill(victim, signal.SIGKILL)

        victim = cluster.replicas()[0]
        killer = threading.Thread(target=kill)
        killer.start()
        with contextlib.ExitStack() as stack:
            clients = clients_of(cluster, stack, len(questions))
            given = answers(draft, clients, questions, meet(begun))
            moved = sum(client.status.reconnects for client in clients)
        killer.join()
        assert [g.tokens for g in given] == [q.tokens for q in questions]
        assert 0 < moved < len(questions)

    def test_sigterm_lets_an_answer_finish_and_leaves_nothing_running(
        self, cluster: Cluster, draft: Engine, questions: list[Question]
    ) -> None:
        """The last test of this cluster. A replica that was killed must be back: meanwhile Serve
        may take its ingress away, which cuts off whoever has begun.
        """
        cluster.wait_for_both(questions[0].prompt)
        told = threading.Event()

        def terminate(tokens: tuple[int, ...]) -> None:
            if not told.is_set():
                told.set()
                cluster.terminate()

        with cluster.client() as client:
            (given,) = answers(draft, [client], questions[:1], terminate)
            assert client.status.reconnects == 0
        assert given.tokens == questions[0].tokens
        assert cluster.exit_code() == 0, cluster.log
        wait_for(lambda: not cluster.family())
