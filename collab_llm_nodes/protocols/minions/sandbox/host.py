"""Host of the sandbox process, which is reused while it survives and replaced otherwise."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import Cut, Fault, Job, ProgramJobs, RequestedJob
from collab_llm_nodes.protocols.minions.sandbox.limits import MAX_SOURCE, MAX_TEXT, SandboxLimits
from collab_llm_nodes.protocols.minions.sandbox.wire import (
    AGGREGATE,
    PREPARE,
    TooLong,
    receive,
    send,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_START_DEADLINE_S = 60.0
_MAX_REPLY = 3 * MAX_TEXT + (1 << 20)
"""Longest reply of the process, in which a character may take three bytes [byte]."""


class Sandbox:
    """Sandbox for programs of the remote, one at a time; each sees only documents and last jobs.

    Each program is logged by its hash, at level DEBUG with its text.

    Attributes:
        replaced: sandbox processes that were lost, or killed for taking too long.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._turn = threading.Lock()  # one program at a time
        self._ending = threading.Lock()  # a process that was waited for must not be killed
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False  # the child was killed and must be replaced
        self._socket: socket.socket | None = None
        self.replaced = 0

    def run(
        self,
        program: str,
        documents: Sequence[str],
        last_jobs: Sequence[Job] = (),
        *,
        chunkers: Sequence[str] = tuple(CHUNKERS),
        chunk_size: int = 0,
        due: float = float("inf"),
        check: Callable[[], None] = lambda: None,
    ) -> ProgramJobs | Fault:
        """Run the function ``prepare_jobs(context, last_jobs)`` that ``program`` defines.

        Args:
            documents: the list ``context``.
            last_jobs: jobs of the last round with their outputs.
            chunkers: names of the chunking functions that exist for the program.
            chunk_size: size of all chunks; 0: as the program requests.
            due: deadline on the clock of ``time.monotonic()``.
            check: called when the process is ready, since an ``interrupt`` before that ends
                nothing; if it raises, the program is not run.

        Returns:
            The jobs that it requests, or a fixed code.

        Raises:
            ModelError: the sandbox cannot be started here.
        """
        begun = time.monotonic()
        request = {
            "stage": PREPARE,
            "program": program,
            "documents": list(documents),
            **_job_data(last_jobs),
            "chunkers": list(chunkers),
            "chunk_size": chunk_size,
        }
        result = self._in_turn(request, _program_jobs, due, check)
        name = hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        outcome = result.value if isinstance(result, Fault) else f"{len(result.jobs)} jobs"
        log.info("program %s: %s after %.3f s", name, outcome, time.monotonic() - begun)
        log.debug("program %s:\n%s", name, program)
        return result

    def start(self) -> None:
        """Start the process before the first program.

        Raises:
            ModelError: it cannot be started here.
        """
        with self._turn:
            self._started()

    @property
    def process(self) -> int:
        """Id of the process and of its group; 0 without one."""
        child = self._child
        return child.pid if child is not None else 0

    def interrupt(self) -> None:
        """End the running program from another thread; its ``run`` returns a fault."""
        with self._ending:
            if self._child is not None:
                self._interrupted = True  # ``poll`` may see its end only later
                _kill(self._child)

    def close(self) -> None:
        """End the process and its program."""
        self.interrupt()
        with self._turn:
            self._end()

    def aggregate(
        self,
        program: str,
        jobs: Sequence[Job],
        *,
        due: float = float("inf"),
        check: Callable[[], None] = lambda: None,
    ) -> str | Fault:
        """Run the function ``transform_outputs(jobs)`` that ``program`` defines.

        Args:
            jobs: all that it sees of the documents.
            due, check: as of :meth:`run`.

        Returns:
            Its text, or a fixed code.

        Raises:
            ModelError: the sandbox cannot be started here.
        """
        request = {"stage": AGGREGATE, "program": program, "documents": [], **_job_data(jobs)}
        request |= {"chunkers": [], "chunk_size": 0}
        return self._in_turn(request, _text, due, check)

    def _in_turn(
        self,
        request: dict[str, Any],
        read: Callable[[dict[str, Any]], T | Fault],
        due: float,
        check: Callable[[], None],
    ) -> T | Fault:
        if len(request["program"]) > MAX_SOURCE:
            return Fault.TOO_LONG
        wait = min(max(due - time.monotonic(), 0), threading.TIMEOUT_MAX)
        if not self._turn.acquire(timeout=wait):
            return Fault.TIME
        try:
            return self._exchange(request, read, due, check)
        finally:
            self._turn.release()

    def _exchange(
        self,
        request: dict[str, Any],
        read: Callable[[dict[str, Any]], T | Fault],
        due: float,
        check: Callable[[], None],
    ) -> T | Fault:
        peer = self._started()
        check()
        if time.monotonic() >= due:
            return Fault.TIME
        due = min(due, time.monotonic() + self._limits.wall_s)
        try:
            peer.settimeout(max(due - time.monotonic(), 1e-3))
            send(peer, request)
            return read(receive(peer, _MAX_REPLY, due))
        except TimeoutError:
            self._replace()
            return Fault.TIME
        except TooLong:
            self._replace()
            return Fault.TOO_LONG
        except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
            self._replace()
            return Fault.CRASHED

    def _started(self) -> socket.socket:
        if self._child is not None and (self._interrupted or self._child.poll() is not None):
            self._replace()  # it ended while it was idle
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "collab_llm_nodes.protocols.minions.sandbox.worker"]
        with theirs:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                # Without the rest of the environment, which may hold keys.
                env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                start_new_session=True,  # so that its interpreter is killed with it
            )
        self._socket = ours
        try:
            send(ours, asdict(self._limits))
            receive(ours, 1000, time.monotonic() + _START_DEADLINE_S)  # it is ready
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise ModelError(
                "the sandbox did not start",
                field="sandbox",
                remedy="see the log; install pydantic-monty, or set planner to plan",
            ) from error
        return ours

    def _replace(self) -> None:
        self._end()
        self.replaced += 1

    def _end(self) -> None:
        with self._ending:
            child, self._child = self._child, None
            self._interrupted = False
            if child is not None:
                _kill(child)
        if child is not None:
            child.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _job_data(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the data of jobs for a program, in the order of the prelude's dataclasses."""
    numbers: dict[str, int] = {}
    last_jobs = []
    for manifest, output in ((job.manifest, job.output) for job in jobs):
        number = numbers.setdefault(manifest.chunk, len(numbers))
        ids = (manifest.chunk_id, manifest.task_id, manifest.job_id)
        answer = (output.explanation, output.citation, output.answer)
        last_jobs.append([number, manifest.task, manifest.advice, *ids, *answer])
    return {"last_chunks": list(numbers), "last_jobs": last_jobs}


def _text(reply: dict[str, Any]) -> str | Fault:
    return Fault(reply["fault"]) if "fault" in reply else str(reply["text"])


def _program_jobs(reply: dict[str, Any]) -> ProgramJobs | Fault:
    if "fault" in reply:
        return Fault(reply["fault"])
    chunks = [str(chunk) for chunk in reply["chunks"]]
    jobs = tuple(
        RequestedJob(chunks[number], str(task), str(advice))
        for number, task, advice in reply["jobs"]
    )
    return ProgramJobs(
        jobs,
        int(reply["left_out"]),
        tuple(map(str, reply["texts"])),
        tuple(map(int, reply["sizes"])),
        tuple(map(str, reply["chunkers"])),
        tuple(Cut(str(name), int(size)) for name, size in reply["cuts"]),
    )
