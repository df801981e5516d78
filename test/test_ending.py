"""SIGINT and SIGTERM end a process, whichever of its threads the kernel hands them to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import environment

from collab_llm_nodes.ending import ended_at_once

END_S = 110.0
"""Much more than an end takes, for a machine that is busy."""

# In each, a thread other than the main one gets the signal while the main one waits.
SEND = """
import signal, threading
def send():
    signal.pthread_kill(threading.get_ident(), signal.{name})
"""
REQUEST = """
from collab_llm_nodes.ending import EndRequest

end = EndRequest()
threading.Timer(0.5, send).start()
end.wait()
"""
NODE = """
from collab_llm_nodes.nodes.navigation_action_parser import ParserConfig
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.program import run

class Node(ManagedNode):
    def activate(self):
        self.create_timer(0.1, send)

assert run(lambda: Node("node", ParserConfig)) == 0
"""
VERIFIER = """
import asyncio
from collab_llm_nodes.transport.server import run_until_signal

class Service:
    name, sessions, failed = "service", 0, asyncio.Event()

class Server:
    port, service = 1, Service

    async def start(self):
        pass

    async def stop(self, grace_s):
        return True

later = lambda port: threading.Timer(0.5, send).start()
asyncio.run(run_until_signal(Server(), 1.0, later))
"""

# Each of these gets the signal where its exception is swallowed, as some imports do.
SWALLOW = """
import os, signal, sys

def swallow(*_):
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException:
        pass
    print("went on", flush=True)
    os._exit(3)
"""
IMPORTS = """
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            swallow()

sys.meta_path.insert(0, Finder())
"""
LOADS = """
from collab_llm_nodes.protocols.edge_cloud import service

service.make_verifier = swallow
"""
STARTS = """
from collab_llm_nodes import cli

sys.argv = ["collab-llm", "verifier", "--model", "nav-target", "--address", "127.0.0.1:0"]
cli.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "held_up", [pytest.param(IMPORTS, id="imports"), pytest.param(LOADS, id="loads")]
)
def test_a_verifier_that_is_ended_while_it_starts_does_not_go_on(held_up: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOW.format(name=name) + held_up + STARTS],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-getattr(signal, name), ""), done.stderr


def test_a_signal_that_is_ignored_stays_so_and_others_get_their_handler_back() -> None:
    taken: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGTERM: lambda *_: None,
    }
    before = {number: signal.signal(number, handler) for number, handler in taken.items()}
    try:
        with ended_at_once():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert {number: signal.getsignal(number) for number in taken} == taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(REQUEST, id="request"),
        pytest.param(NODE, id="node", marks=pytest.mark.ros),
        pytest.param(VERIFIER, id="verifier"),
    ],
)
def test_a_signal_to_another_thread_ends_the_process(
    request: pytest.FixtureRequest, waits: str, name: str
) -> None:
    if waits == NODE:
        request.getfixturevalue("ros_context")
    done = subprocess.run(
        [sys.executable, "-c", SEND.format(name=name) + waits],
        env=environment(Path(__file__).parent),
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_request_outlives_signals_before_the_wait() -> None:
    """None is lost between the look at ``asked`` and the wait."""
    code = "import signal; from collab_llm_nodes.ending import EndRequest; end = EndRequest();"
    code += "signal.raise_signal(signal.SIGTERM); end.ask(); end.wait(); assert end.asked"
    subprocess.run([sys.executable, "-c", code], timeout=END_S, check=True)


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    code = "import sys; from collab_llm_nodes.ending import EndRequest, end_within\n"
    code += "end = EndRequest(lambda: end_within(0.5, 0)); print('ready', flush=True)\n"
    code += "while True: sys.stderr.write('x' * 65536)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.wait(END_S) == 0


def test_a_program_ends_orderly_beside_threads_in_cpp(tmp_path: Path) -> None:
    """The interpreter's own exit aborts (-6), or crashes (-11), when they come back to Python."""
    (tmp_path / "busy.py").write_text(
        "import atexit, sys, threading, time, torch\n"
        "matrix = torch.randn(300, 300)\n"
        "def work():\n"
        "    while True: torch.mm(matrix, matrix)\n"
        "def main():\n"
        "    for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "    atexit.register(print, 'cleaned up')\n"
        "    time.sleep(0.05)\n"
        "    sys.exit(3)\n"
    )
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
    start += "from collab_llm_nodes.programs import _program; sys.exit(_program('busy')())"
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=END_S, check=False
    )
    assert (done.returncode, done.stdout) == (3, "cleaned up\n"), done.stderr
