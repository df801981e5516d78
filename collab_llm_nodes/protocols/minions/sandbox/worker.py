"""The sandbox process: ``python -m collab_llm_nodes.protocols.minions.sandbox.worker FD``.

It runs programs one after another, each in a fresh interpreter (pydantic-monty: a subset of Python
in Rust, without access to the machine). It serves its parent, a ``Sandbox``, over the socket FD and
ends when the parent closes it or has gone.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic_monty as monty

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS, Chunker
from collab_llm_nodes.protocols.minions.jobs import Fault
from collab_llm_nodes.protocols.minions.sandbox import confinement
from collab_llm_nodes.protocols.minions.sandbox.limits import (
    MAX_CALLS,
    MAX_CHUNK,
    MAX_TASK,
    MAX_TEXT,
    PROCESS_MB,
    SandboxLimits,
)
from collab_llm_nodes.protocols.minions.sandbox.programs import constants_in, without_yield
from collab_llm_nodes.protocols.minions.sandbox.retrieval import RETRIEVE, retrieve_top_k_chunks
from collab_llm_nodes.protocols.minions.sandbox.wire import AGGREGATE, TooLong, receive, send

_PRELUDE = """\
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple, Union

@dataclass
class JobManifest:
    chunk: str
    task: str
    advice: str = ""
    chunk_id: object = None
    task_id: object = None
    job_id: object = None

@dataclass
class JobOutput:
    explanation: str
    citation: object
    answer: object

@dataclass
class Job:
    manifest: JobManifest
    output: JobOutput

last_jobs = [
    Job(JobManifest(last_chunks[number], *requested), JobOutput(explanation, citation, answer))
    for number, *requested, explanation, citation, answer in last_jobs
]
"""
_CALL = """\
__wanted = prepare_jobs(context, last_jobs)
(__wanted[:{jobs}], len(__wanted)) if isinstance(__wanted, (list, tuple)) else None
"""
_DETERMINISTIC: monty.OSPolicy = {
    "datetime": datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc),
    "sleep": "zero",
    "random_start": {"seed": 0},
}
_MAX_REQUEST = 1 << 30
_MAX_CUTS = 4
"""Different calls of chunking functions; the host repeats each on all documents (``choice.py``)."""
_BLANK, _BLANKS = "x", 8
"""Text and number of the blank documents; programs name documents by their index."""
_FAULTS: dict[type[BaseException], Fault] = {
    SyntaxError: Fault.SYNTAX,
    TimeoutError: Fault.TIME,
    MemoryError: Fault.MEMORY,
    RecursionError: Fault.MEMORY,
}


class _Refused(Exception):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def main(descriptor: int) -> None:
    """Serve until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this
    with socket.socket(fileno=descriptor) as parent:
        limits = from_mapping(SandboxLimits, receive(parent, _MAX_REQUEST))
        confinement.limit_resources(PROCESS_MB)
        confinement.drop_rights()
        interpreters = monty.Monty(
            max_processes=1,
            max_checkouts_per_worker=1,  # a program leaves nothing to the next one
            request_timeout=limits.wall_s,
        )
        parent_gone = contextlib.suppress(EOFError, OSError)
        with interpreters as pool, parent_gone:
            send(parent, {"ready": True})
            while True:
                send(parent, _answer(pool, receive(parent, _MAX_REQUEST), limits))


def _answer(pool: monty.Monty, request: Mapping[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    try:
        return _run(pool, request, limits)
    except _Refused as refused:
        return {"fault": refused.fault}
    except monty.MontyCrashedError as error:
        return {"fault": Fault.TIME if error.timed_out else Fault.CRASHED}
    except monty.MontyError as error:
        kind = type(error.exception())
        return {"fault": next((f for c, f in _FAULTS.items() if issubclass(kind, c)), Fault.RAISED)}
    except (MemoryError, TooLong):
        return {"fault": Fault.MEMORY}


def _run(pool: monty.Monty, request: Mapping[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    program = without_yield(request["program"])
    if request["stage"] == AGGREGATE:
        return {"text": _aggregated(pool, program, request, limits)}
    functions = _Functions(request["chunkers"], request["chunk_size"], limits)
    jobs = _checked(_requested(pool, program, request, functions, limits), limits)
    texts, cuts = _for_blanks(pool, program, request, limits)
    own = constants_in(program)
    own["texts"] = list(dict.fromkeys([*own["texts"], *texts]))
    own["sizes"] = sorted({*own["sizes"], *(size for _, size in cuts)})
    return {"cuts": functions.used(jobs["chunks"]), **own, **jobs}


def _for_blanks(
    pool: monty.Monty, program: str, request: Mapping[str, Any], limits: SandboxLimits
) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the tasks, advice and calls of chunking functions of ``program`` for blank documents.

    They depend on the program alone, so they are as much its own as the constants in it, and a
    program may build its tasks from constants.
    """
    jobs = {tuple(job[1:3]) for job in request["last_jobs"]}
    blank = {
        "documents": [_BLANK] * _BLANKS,
        "last_chunks": [_BLANK],
        "last_jobs": [[0, *job, 1, 1, "", "", _BLANK, _BLANK] for job in sorted(jobs)],
    }
    functions = _Functions(request["chunkers"], request["chunk_size"], limits)
    try:
        found = _checked(_requested(pool, program, blank, functions, limits), limits)
    except (_Refused, monty.MontyError):
        return [], []  # it has only its constants, then
    return [text for _, *texts in found["jobs"] for text in texts], functions.calls


def _requested(
    pool: monty.Monty,
    program: str,
    request: Mapping[str, Any],
    functions: _Functions,
    limits: SandboxLimits,
) -> Any:
    """Return what ``prepare_jobs`` of ``program`` returns, at most ``limits.jobs`` items of it."""
    with _session(pool, request, functions, limits) as feed:
        try:
            feed(program)
            _check_defined(feed, "prepare_jobs")
            return feed(_CALL.format(jobs=limits.jobs))
        except monty.MontyError:
            if functions.exhausted:
                raise _Refused(Fault.CALLS) from None
            raise


def _aggregated(
    pool: monty.Monty, program: str, request: Mapping[str, Any], limits: SandboxLimits
) -> str:
    """Return the text that ``transform_outputs`` of ``program`` makes of the last jobs."""
    functions = _Functions(request["chunkers"], request["chunk_size"], limits)
    with _session(pool, request, functions, limits) as feed:
        feed(program)
        _check_defined(feed, "transform_outputs")
        text = feed("transform_outputs(last_jobs)")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise _Refused(Fault.NOT_JOBS)
    return text


@contextlib.contextmanager
def _session(
    pool: monty.Monty, request: Mapping[str, Any], functions: _Functions, limits: SandboxLimits
) -> Iterator[Callable[[str], Any]]:
    """Lend a function that runs code in a new interpreter, with the documents and last jobs."""
    budget: monty.ResourceLimits = {
        "max_feed_duration_secs": limits.run_s,
        "max_memory": limits.memory_mb << 20,
        "max_recursion_depth": 200,
        "max_suspensions": MAX_CALLS + 1000,
    }
    with pool.checkout(limits=budget, os_policy=_DETERMINISTIC) as session:
        if (pid := session.worker_pid) is not None:
            confinement.limit_cpu(pid, math.ceil(3 * limits.run_s) + 2)

        def feed(code: str, inputs: dict[str, Any] | None = None) -> Any:
            return session.feed_run(
                code,
                inputs=inputs or {},
                external_lookup=functions.by_name,
                print_callback=lambda stream, text: None,
            )

        last = {name: request[name] for name in ("last_chunks", "last_jobs")}
        feed(_PRELUDE, {"context": request["documents"], **last})
        yield feed


def _check_defined(feed: Callable[[str], Any], name: str) -> None:
    try:
        feed(name)
    except monty.MontyRuntimeError:
        raise _Refused(Fault.SYNTAX) from None


class _Functions:
    """Functions that a program may call, with limits of calls and time.

    Args:
        names: chunking functions that it may call.
        size: replaces any size that it requests, unless 0.

    Attributes:
        exhausted: a limit was exceeded.
    """

    def __init__(self, names: list[str], size: int, limits: SandboxLimits) -> None:
        self.exhausted = False
        self._given: dict[tuple[str, int], set[int]] = {}  # hashes of the pieces, by call
        self._calls, self._left_s = MAX_CALLS, limits.cut_s
        self._size = size
        self.by_name: dict[str, Callable[..., list[str]]] = {
            name: self._function(CHUNKERS[name]) for name in names
        }
        self.by_name[RETRIEVE] = self._retrieve

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Name and size of all calls of chunking functions."""
        return sorted(self._given)

    def used(self, chunks: list[str]) -> list[tuple[str, int]]:
        """Return name and size of the calls that gave one of ``chunks``.

        The host repeats only these, so that other calls do not cost its time.
        """
        requested = set(map(hash, chunks))
        return sorted(call for call, given in self._given.items() if given & requested)

    def _function(self, chunker: Chunker) -> Callable[..., list[str]]:
        def function(*args: Any, **kwargs: Any) -> list[str]:
            self._calls -= 1
            self._check(self._calls >= 0 and not self.exhausted)
            named = dict(zip(("doc", chunker.argument), args, strict=False)) | kwargs
            document, size = named.pop("doc", None), named.pop(chunker.argument, 0)
            documents = [document] if isinstance(document, str) else document
            if not isinstance(documents, list) or not isinstance(size, int):
                raise TypeError("wrong arguments")
            given = self._given.setdefault(
                (chunker.name, chunker.size_of(self._size or size)), set()
            )
            self._check(len(self._given) <= _MAX_CUTS)
            due = time.process_time() + self._left_s
            pieces: list[str] = []
            try:
                for text in documents:
                    self._check(time.process_time() < due)
                    for piece in chunker.cut(text, self._size or size):
                        pieces.append(piece)
                        given.add(hash(piece))
                        self._check(time.process_time() < due)
            finally:  # an error that the program catches costs time as well
                self._left_s = due - time.process_time()
            return pieces

        return function

    def _retrieve(self, *args: Any, **kwargs: Any) -> list[str]:
        self._calls -= 1
        self._check(self._calls >= 0 and not self.exhausted)
        begun = time.process_time()
        try:
            return retrieve_top_k_chunks(*args, **kwargs)
        finally:
            self._left_s -= time.process_time() - begun

    def _check(self, within: bool) -> None:
        if not within:
            self.exhausted = True
            raise RuntimeError("too much to cut")


def _checked(requested: Any, limits: SandboxLimits) -> dict[str, Any]:
    """Return the jobs that a program requests as plain data, each chunk once.

    Raises:
        _Refused: they are no jobs, or have too much text.
    """
    match requested:
        case ([*items] | (*items,), int(count)) if len(items) <= limits.jobs:
            left_out = max(count - len(items), 0)
        case _:
            raise _Refused(Fault.NOT_JOBS)
    chunks: dict[str, int] = {}
    jobs, length = [], 0
    for item in items:
        chunk, task, advice = _fields(item)
        if not chunk.strip() or len(chunk) > MAX_CHUNK:
            left_out += 1
            continue
        if max(len(task), len(advice)) > MAX_TASK:
            raise _Refused(Fault.TOO_LONG)
        length += len(task) + len(advice) + (0 if chunk in chunks else len(chunk))
        if length > MAX_TEXT:
            raise _Refused(Fault.TOO_LONG)
        number = chunks.setdefault(chunk, len(chunks))
        jobs.append([number, task, advice])
    if not jobs:
        raise _Refused(Fault.NO_JOBS)
    return {"chunks": list(chunks), "jobs": jobs, "left_out": left_out}


def _fields(item: Any) -> tuple[str, str, str]:
    found = item.attributes if isinstance(item, monty.MontyClassProxy) else item
    if isinstance(found, dict):
        fields = found.get("chunk"), found.get("task"), found.get("advice") or ""
        match fields:
            case (str(chunk), str(task), str(advice)) if task.strip():
                return chunk, task, advice
    raise _Refused(Fault.NOT_JOBS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
