"""Processes: children with a log, confined ones, and the garbage of long-lived ones."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable

START_DEADLINE_S = 120.0
_PR_SET_PDEATHSIG = 1

_ports = itertools.count(random.randrange(20_000, 30_000))


class Process:
    """A child process with its log; ended, then killed, when the context ends.

    Attributes:
        log: the file of its standard output and error.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self._name, self.log = name, log
        # One thread each: on a small machine two pools of threads fight for the same cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [*_with_parent(), *command], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def pid(self) -> int:
        """Number of the child's process."""
        return self._child.pid

    def check(self) -> None:
        """Raise CollabError, with the end of the log, if the process is gone."""
        if self._child.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise CollabError(
                f"{self._name} ended with status {self._child.returncode}:\n{tail}",
                remedy="see the log above",
            )

    def wait_for(self, ask: Callable[[], object]) -> None:
        """Wait until ``ask`` gets an answer from the process.

        Raises:
            CollabError: the process ended, ``ask`` got no answer in time, or another error.
        """
        due = time.monotonic() + START_DEADLINE_S
        while True:
            self.check()
            try:
                ask()
                return
            except (DeadlineExceeded, Unavailable):
                if time.monotonic() > due:
                    raise

    def stop(self, timeout_s: float = 10.0) -> float:
        """Send SIGTERM, and SIGKILL if that has no effect; return the seconds its end took."""
        begun = time.monotonic()
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return time.monotonic() - begun


def _with_parent() -> list[str]:
    """Return the command of util-linux that sends its program SIGTERM when the parent is gone.

    Nothing is sent if the parent is killed in the few milliseconds before `setpriv` has asked.
    """
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "TERM", "--"] if found else []


@contextlib.contextmanager
def run_process(name: str, command: Sequence[str]) -> Iterator[Process]:
    """Run ``command`` as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        process = Process(name, command, Path(folder) / f"{name}.log")
        try:
            yield process
        finally:
            process.stop()


def free_port(count: int = 1) -> int:
    """Return a TCP port nobody listens on just now, the first of ``count`` in a row.

    It is below the range of outgoing connections: one of those might take it before the process
    that is to listen there has started.
    """
    while True:
        ports = list(itertools.islice(_ports, count))
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports[0]


def module_environment() -> dict[str, str]:
    """Return the environment in which ``python -m`` finds the modules of this process.

    Never those of a folder that it happens to be started in. Give the child another ``cwd`` too.
    """
    paths = [path for path in sys.path if os.path.isabs(path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def confine(memory: int) -> None:
    """Limit the memory of this process, and let it end with its parent.

    For a process that reads untrusted data. SIGPROF ends it, so that a timer can. Linux ends it as
    soon as the thread that started it ends: start it from one that lasts as long as the process.

    Args:
        memory: address space beyond its present one [bytes] (on Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/statm", encoding="ascii") as file:
            memory += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # passes of the model go first
    # Ctrl-C and systemd signal the whole group; the parent still needs its worker while it drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def freeze_startup_objects() -> None:
    """Exclude all objects alive now from garbage collection.

    Call it once everything long-lived is there: modules, models, nodes. Otherwise each full
    collection walks all of these objects, which takes as long as several passes of a model. And it
    runs rarely, only after the number of new objects reaches a quarter of the old ones, which are
    the leftovers of thousands of answers.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # resets the count of old objects, a quarter of which the collector waits for
