"""Fixtures shared by the tests: ROS 2 graphs that neither hear nor disturb one another."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from certificates import Certificates
from domains import hold_domain
from grpc_alive import pytest_runtest_logreport  # noqa: F401  hook
from hypothesis import settings
from time_limits import (  # noqa: F401  hooks
    pytest_configure,
    pytest_runtest_teardown,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
)

from collab_llm_nodes.ros.domain import stay_on_this_machine

if TYPE_CHECKING:
    from rclpy.context import Context
    from rclpy.executors import Executor
    from rclpy.node import Node

    from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox

# Before anything opens a DDS participant: stay on this machine, whatever the shell says.
stay_on_this_machine()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Triton is imported: its kernels run in Python, on tensors of the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell starts what runs in the background with SIGINT ignored, and all children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; `pytest --hypothesis-profile=search` looks for new ones. No time
# limit for an example: a stalled machine is no failure.
settings.register_profile("search", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_MANY_CONTEXTS = 8
"""More contexts of ended tests are collected before the next test begins.

Nodes lie in reference cycles, and a node that is not collected keeps its DDS participant. Fast DDS
looks for the first 32 participants of a process only: beyond them, two in one process never meet.
"""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_next_domain = itertools.count(int(os.environ.get("ROS_DOMAIN_ID") or os.getpid()) + 50 * _worker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail launch tests that are skipped on an installed ROS 2: only there can they run."""
    report = yield
    if "ROS_DISTRO" in os.environ and report.skipped and item.get_closest_marker("launch_files"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though ROS 2 is installed: {report.longrepr}"
    return report


class Graph:
    """Nodes of one test, spun by one executor in a thread of its own.

    Attributes:
        context: the nodes' context; give it to every node the test makes.
        domain_id: its DDS domain; ``ROS_DOMAIN_ID`` is set to it for child processes.
    """

    def __init__(self, context: Context, domain_id: int) -> None:
        from rclpy.executors import SingleThreadedExecutor

        self.context = context
        self.domain_id = domain_id
        self._executor: Executor = SingleThreadedExecutor(context=context)
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._nodes: list[Node] = []
        self._thread: threading.Thread | None = None

    def add(self, node: Node) -> Node:
        """Spin ``node`` from now on; it is destroyed when the test ends."""
        self._nodes.append(node)
        self._executor.add_node(node)
        if self._thread is None:
            self._thread = threading.Thread(target=self._spin, name="test-executor", daemon=True)
            self._thread.start()
        return node

    def node(self, name: str, **options: Any) -> Node:
        """A plain node for the test's own publishers, subscriptions and clients."""
        from rclpy.node import Node

        return self.add(Node(name, context=self.context, **options))

    def collect(self, node: Node, message_type: type, topic: str, qos: Any = 10) -> list[Any]:
        """Subscribe; the returned list grows as messages arrive (see ``wait_for``)."""
        received: list[Any] = []

        def on_message(message: Any) -> None:
            received.append(message)
            self._notify()

        node.create_subscription(message_type, topic, on_message, qos)
        return received

    def wait_for(self, condition: Callable[[], Any], timeout: float = 30.0) -> Any:
        """Block until ``condition()`` is true and return its value; fail after ``timeout`` s.

        It is looked at whenever ``collect`` receives a message, and every 20 ms for conditions
        that nothing announces (a match of publisher and subscription, a lifecycle state).
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (value := condition()):
                left = deadline - time.monotonic()
                if left <= 0:
                    pytest.fail(f"condition not met within {timeout} s", pytrace=True)
                self._changed.wait(min(left, 0.02))
            return value

    def result(self, future: Any, timeout: float = 30.0) -> Any:
        """The result of ``future``; fails if it has none after ``timeout`` s."""
        future.add_done_callback(self._notify)
        self.wait_for(future.done, timeout)
        return future.result()

    def do(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``call(*args)`` in the thread that runs the callbacks."""
        return self.result(self._executor.create_task(call, *args))

    def ask(self, call: Callable[..., Any], *args: Any, timeout: float = 30.0) -> Any:
        """Return the result of the future that ``call(*args)`` makes; fail after ``timeout`` s.

        It is made by ``do``: rclpy's action client, which has no lock, takes an answer that comes
        before the question is noted for a stray one.
        """
        return self.result(self.do(call, *args), timeout)

    def close(self) -> None:
        """Stop spinning, then destroy the nodes."""
        self._ended.set()
        self._executor.create_task(lambda: None)  # wakes it; shutdown() here would race with it
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._executor.shutdown(timeout_sec=5.0)
        for node in self._nodes:
            node.destroy_node()

    def _notify(self, *_: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _spin(self) -> None:
        from rclpy.executors import ExternalShutdownException

        # Where the context was shut down first, the test is over as well.
        with contextlib.suppress(ExternalShutdownException):
            while not self._ended.is_set():
                self._executor.spin_once()


@pytest.fixture
def ros_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """A context in a DDS domain of its own, which child processes inherit."""
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    from rclpy.context import Context

    if len(_contexts) >= _MANY_CONTEXTS:
        gc.collect()
    context = Context()
    domain_id = hold_domain(context, next(_next_domain))
    monkeypatch.setenv("ROS_DOMAIN_ID", str(domain_id))
    _contexts.add(context)
    context.init(domain_id=domain_id)
    yield context
    context.try_shutdown()


@pytest.fixture
def ros_graph(ros_context: Context) -> Iterator[Graph]:
    """A running graph to put nodes into."""
    graph = Graph(ros_context, ros_context.get_domain_id())
    yield graph
    graph.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    """Two authorities: the right one and a stranger's."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    return Certificates(folder, "ours"), Certificates(folder, "theirs")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox for programs of MinionS, with limits for a machine that stalls."""
    from minions_world import PATIENT

    from collab_llm_nodes.protocols.minions.sandbox import host

    running = host.Sandbox(PATIENT)
    yield running
    running.close()
