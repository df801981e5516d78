"""The host's side of the sandbox: a process that is reused while it survives, and replaced."""

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
from typing import Any

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.jobs import Cut, Fault, Job, ProgramJobs, WantedJob
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits
from collab_llm_nodes.protocols.minions.sandbox.wire import TooLong, receive, send

log = logging.getLogger(__name__)

_START_DEADLINE_S = 60.0


class Sandbox:
    """Runs programs of the remote, one at a time. Each sees the documents and the last jobs only.

    The log tells of each program; at level DEBUG it holds the programs as well.

    Attributes:
        replaced: sandbox processes that were lost, or killed for taking too long.
        landlock: version of Landlock that keeps the process from all files; 0: the kernel has none.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._turn = threading.Lock()  # one program at a time
        self._ending = threading.Lock()  # nobody kills a process that has been waited for
        self._child: subprocess.Popen[bytes] | None = None
        self._interrupted = False  # the child has been killed, and is to be replaced
        self._socket: socket.socket | None = None
        self.replaced = 0
        self.landlock = 0

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
            last_jobs: those of the last round, with their outputs.
            chunkers: names of the chunking functions that the program finds.
            chunk_size: size of all chunks; 0: as the program asks.
            due: ``time.monotonic()`` by which the program must have ended.
            check: called when the process is ready; what it raises ends this. An ``interrupt`` that
                came before the process existed had nothing to end.

        Returns:
            the jobs that it wants, or a fixed code.

        Raises:
            ModelError: the sandbox cannot be started here.
        """
        begun = time.monotonic()
        result = self._run(program, documents, last_jobs, chunkers, chunk_size, due, check)
        name = hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        wanted = result.value if isinstance(result, Fault) else f"{len(result.jobs)} jobs"
        log.info("program %s: %s after %.3f s", name, wanted, time.monotonic() - begun)
        log.debug("program %s:\n%s", name, program)
        return result

    def start(self) -> None:
        """Have the process ready before the first program.

        Raises:
            ModelError: it cannot be started here.
        """
        with self._turn:
            self._started()

    @property
    def process(self) -> int:
        """Number of the process and of its group; 0 while there is none."""
        child = self._child
        return child.pid if child is not None else 0

    def interrupt(self) -> None:
        """End the program that is running, from another thread; it returns a code."""
        with self._ending:
            if self._child is not None:
                self._interrupted = True  # it may take a while to be seen dead
                _kill(self._child)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.interrupt()
        with self._turn:
            self._end()

    def _run(
        self,
        program: str,
        documents: Sequence[str],
        last_jobs: Sequence[Job],
        chunkers: Sequence[str],
        chunk_size: int,
        due: float,
        check: Callable[[], None],
    ) -> ProgramJobs | Fault:
        if len(program) > self._limits.source_characters:
            return Fault.TOO_LONG
        request = {
            "program": program,
            "documents": list(documents),
            **_told(last_jobs),
            "chunkers": list(chunkers),
            "chunk_size": chunk_size,
        }
        wait = min(max(due - time.monotonic(), 0), threading.TIMEOUT_MAX)
        if not self._turn.acquire(timeout=wait):
            return Fault.TIME
        try:
            return self._answered(request, due, check)
        finally:
            self._turn.release()

    @property
    def _max_bytes(self) -> int:
        return (3 * self._limits.output_mb + 1) << 20  # a character may take several bytes

    def _answered(
        self, request: dict[str, Any], due: float, check: Callable[[], None]
    ) -> ProgramJobs | Fault:
        peer = self._started()
        check()
        if time.monotonic() >= due:
            return Fault.TIME
        due = min(due, time.monotonic() + self._limits.wall_s)
        try:
            peer.settimeout(max(due - time.monotonic(), 1e-3))
            send(peer, request)
            return _program_jobs(receive(peer, self._max_bytes, due))
        except TimeoutError:
            self._lose()
            return Fault.TIME
        except TooLong:
            self._lose()
            return Fault.TOO_LONG
        except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
            self._lose()
            return Fault.CRASHED

    def _started(self) -> socket.socket:
        if self._child is not None and (self._interrupted or self._child.poll() is not None):
            self._lose()  # something has ended it while it was idle
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
                # No more of the environment: it may hold keys.
                env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                start_new_session=True,  # so that its interpreter is killed with it
            )
        self._socket = ours
        try:
            send(ours, asdict(self._limits))
            hello = receive(ours, 1000, time.monotonic() + _START_DEADLINE_S)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            raise ModelError(
                "the sandbox did not start",
                field="sandbox",
                remedy="see the log; install pydantic-monty, or set planner to plan",
            ) from error
        self.landlock = hello["landlock"]
        return ours

    def _lose(self) -> None:
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


def _told(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what a program may know of jobs, in the order of the prelude's dataclasses."""
    numbers: dict[str, int] = {}
    last_jobs = []
    for wanted, output in ((job.manifest, job.output) for job in jobs):
        number = numbers.setdefault(wanted.chunk, len(numbers))
        ids = (wanted.chunk_id, wanted.task_id, wanted.job_id)
        answer = (output.explanation, output.citation, output.answer)
        last_jobs.append([number, wanted.task, wanted.advice, *ids, *answer])
    return {"last_chunks": list(numbers), "last_jobs": last_jobs}


def _program_jobs(reply: dict[str, Any]) -> ProgramJobs | Fault:
    if "fault" in reply:
        return Fault(reply["fault"])
    chunks = [str(chunk) for chunk in reply["chunks"]]
    jobs = tuple(
        WantedJob(chunks[number], str(task), str(advice)) for number, task, advice in reply["jobs"]
    )
    return ProgramJobs(
        jobs,
        int(reply["cut"]),
        tuple(map(str, reply["texts"])),
        tuple(map(int, reply["sizes"])),
        tuple(map(str, reply["chunkers"])),
        tuple(Cut(str(name), int(size)) for name, size in reply["cuts"]),
    )
