"""The places where a model's passes are made: the caller's thread, one of their own, or a process.

A worker takes work in order and reports each result by a callback, from whatever thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from collab_llm_nodes.errors import CollabError, ModelError, Unavailable, as_collab_error
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.collective.messages import Draw, Proposal
from collab_llm_nodes.protocols.collective.models import Drafts
from collab_llm_nodes.protocols.collective.wire import draw_to_json, line, proposals_from_json

Proposed = Callable[[Draw, list[Proposal | None]], None]
"""Called with a draw, and the proposals of its model."""
Failed = Callable[[int, CollabError], None]
"""Called with the index of a draft model that has failed, and the error."""

_LOG = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-m", "collab_llm_nodes.protocols.collective.child")
STOP_DEADLINE_S = 5.0
"""Longest wait for a thread or process to end."""
_SEND_DEADLINE_S = 2
"""Longest wait for a process to read a message: one that does not read hangs."""


class Executor(Protocol):
    """Runs calls in order."""

    def __call__(self, work: Callable[[], None]) -> None:
        """Call ``work``, which raises nothing, now or later."""

    def close(self) -> None:
        """Return when all work is done."""


class Inline:
    """Run calls in the caller's thread, in order; nested calls run after the current one."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._working = False

    def __call__(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if self._working:
            return
        self._working = True
        try:
            while self._work:
                self._work.popleft()()
        finally:
            self._working = False

    def close(self) -> None:
        """Do nothing: no work is left."""


class InThread:
    """Run calls in a thread of their own."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        """Return when all work is done, or after ``STOP_DEADLINE_S`` if a pass hangs."""
        self._work.put(None)
        self._thread.join(STOP_DEADLINE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class DraftWorker(Protocol):
    """One or several draft models at work."""

    @property
    def models(self) -> Sequence[int]:
        """Their indices among all draft models."""

    @property
    def held_bytes(self) -> int:
        """Size of their KV caches, as reported last."""

    def draw(self, draws: Sequence[Draw]) -> None:
        """Have the models draft side by side; they answer by the callbacks."""

    def release(self, id: str) -> None:
        """Free the KV caches of a request."""

    def recover(self) -> None:
        """Restart a model that is silent, where that is possible."""

    def close(self) -> None:
        """Free the models."""


def divide_models(models: int, workers: int) -> list[range]:
    """Divide the models among workers as evenly as possible; return those of each.

    Args:
        workers: number of workers, at most one per model; 0: one for each core beside the
            target's.
    """
    wanted = workers or len(os.sched_getaffinity(0)) - 1
    count = min(max(wanted, 1), models)
    ends = [models * (number + 1) // count for number in range(count)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


class LocalDraft:
    """Draft models in this process."""

    def __init__(
        self, drafts: Drafts, executor: Executor, proposed: Proposed, failed: Failed
    ) -> None:
        self._drafts, self._execute = drafts, executor
        self._proposed, self._failed = proposed, failed

    @property
    def models(self) -> Sequence[int]:
        return self._drafts.indices

    @property
    def held_bytes(self) -> int:
        return self._drafts.held_bytes

    def draw(self, draws: Sequence[Draw]) -> None:
        by_model = {draw.model: draw for draw in draws}

        def work() -> None:
            asks = {model: draw.asks for model, draw in by_model.items()}
            for answers in self._drafts.answers(asks):
                for model, found in answers.items():
                    if isinstance(found, Exception):
                        self._failed(model, as_collab_error(found))
                    else:
                        self._proposed(by_model[model], found)

        self._execute(work)

    def release(self, id: str) -> None:
        self._execute(lambda: self._drafts.release(id))

    def recover(self) -> None:
        """Do nothing: a pass in this process cannot be ended from outside."""

    def close(self) -> None:
        self._execute(self._drafts.close)
        self._execute.close()


class DraftProcess:
    """Draft models in a process of their own; a new one is started when it has ended.

    While a new one loads the models, which may take longer than others wait for a draft, it
    proposes nothing.

    Args:
        models: configurations by index among all draft models.
        eos: the target's end tokens.
        load_s: time to load each model; a new process has as long for its first answer.
        log: for warnings to people.

    Raises:
        Unavailable: the system starts no further process.

    Attributes:
        models: indices of its models among all draft models.
        held_bytes: size of its KV caches, as reported last.
    """

    def __init__(
        self,
        models: Mapping[int, ModelConfig],
        eos: frozenset[int],
        proposed: Proposed,
        failed: Failed,
        load_s: float = 120.0,
        *,
        log: logging.Logger | Any = _LOG,
    ) -> None:
        self.models = tuple(models)
        self._configs, self._eos = tuple(models.values()), eos
        self._load_s = load_s * len(models)  # they are loaded one after the other
        self._proposed, self._failed = proposed, failed
        self._log = log
        self._lock = threading.Lock()  # of the child and what it knows
        self._closing = False
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    def vocabularies(self) -> list[str]:
        """Wait until the models are loaded; return the hashes of their vocabularies.

        Raises:
            ModelError: one cannot be loaded.
        """
        try:
            message = self._ready.get(timeout=self._load_s)
        except queue.Empty:
            message = {"error": f"the model is not loaded after {self._load_s:g} s"}
        if "error" in message:
            index = message.get("index", self.models[0])
            raise ModelError(str(message["error"]), field=f"drafts.paths[{index}]")
        return [str(own) for own in message["vocabularies"]]

    def draw(self, draws: Sequence[Draw]) -> None:
        with self._lock:
            loaded = self._child is not None and self._loaded
            if self._child is None:
                try:
                    self._start()
                except Unavailable as error:
                    for draw in draws:
                        self._failed(draw.model, error)
                    return
            if loaded:
                self._pending.update({(d.batch, d.step, d.model): d for d in draws})
                self._send({"draws": [draw_to_json(draw, self._known) for draw in draws]})
            elif self._child is not None and time.monotonic() > self._load_due:
                self._child.kill()
        if not loaded:
            for draw in draws:
                self._proposed(draw, [None] * len(draw.asks))

    def release(self, id: str) -> None:
        with self._lock:
            if id in self._known:
                self._known.discard(id)
                self._send({"release": id})
            if self._child is not None and self._spared and time.monotonic() > self._read_due:
                self._child.kill()

    def recover(self) -> None:
        """Kill the process; a new one is started when it has ended.

        A process that reads all contexts after its load is spared until ``_read_due``: the next one
        would have to read them again, and be killed again, for ever. A late answer brings it back
        into service. Without one it is killed when a request is released.
        """
        with self._lock:
            if self._pending and time.monotonic() < self._read_due:
                self._spared = True
            elif self._child is not None:
                self._child.kill()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            child = self._child
            if child is not None:
                with contextlib.suppress(OSError):  # the listener has just closed it
                    self._socket.shutdown(socket.SHUT_RDWR)  # the child ends by itself
        self._listener.join(3 * STOP_DEADLINE_S)  # it waits for the child, in two deadlines

    def _start(self) -> None:
        """Start a process and have it load the model; raises Unavailable where none can start."""
        try:
            ours, self._child = self._spawn()
        except OSError as error:  # no descriptors, processes or memory left: others may go on
            raise Unavailable(
                f"the process of draft model {self._names} cannot be started: {error}"
            ) from error
        limit = struct.pack("ll", _SEND_DEADLINE_S, 0)  # a timeout of Python's would hold for reads
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = ours
        self._loaded = False
        self._load_due = time.monotonic() + self._load_s
        self._read_due = -math.inf  # for its first answer, once it is loaded
        self._spared = False  # it is to be killed if it misses that
        self.held_bytes = 0
        self._known: set[str] = set()
        self._pending: dict[tuple[Any, Any, Any], Draw] = {}
        self._ready: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._send(
            {
                "models": [asdict(config) for config in self._configs],
                "eos": sorted(self._eos),
                "indices": self.models,
            }
        )
        self._listener = threading.Thread(
            target=self._listen, args=(ours, self._child), name=f"draft-{self._names}", daemon=True
        )
        self._listener.start()

    def _spawn(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Return a new process, and our end of the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return ours, subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    },
                )
            except OSError:
                ours.close()
                raise

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a process that does not read it is killed."""
        try:
            self._socket.sendall(line(message))
        except OSError:
            if self._child is not None:
                self._child.kill()

    def _listen(self, own: socket.socket, child: subprocess.Popen[bytes]) -> None:
        """Handle the messages of the child until it ends."""
        with contextlib.suppress(OSError, ValueError), own.makefile("rb") as lines:
            for text in lines:
                self._on_message(json.loads(text))
        ended = f"the process of draft model {self._names} {self._wait_for_end(child)}"
        own.close()
        self._ready.put({"error": ended})
        with self._lock:
            closing, self._child = self._closing, None
            self.held_bytes = 0
            if self._loaded and not closing:  # else it would end again: the next draw tries
                with contextlib.suppress(Unavailable):
                    self._start()
        for model in () if closing else self.models:
            self._failed(model, Unavailable(ended))

    def _wait_for_end(self, child: subprocess.Popen[bytes]) -> str:
        """Wait until a process has ended, or kill it; return a description of its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended with status {child.wait(STOP_DEADLINE_S)}"
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"was killed, and ended with status {child.wait(STOP_DEADLINE_S)}"
        end = "was killed, but does not end"  # the kernel waits, for a device or a disk, say
        self._log.error(f"the process of draft model {self._names} {end}; pid {child.pid}")
        return end

    def _on_message(self, message: Mapping[str, Any]) -> None:
        self.held_bytes = message.get("held_bytes", self.held_bytes)
        if not self._loaded:  # its first message shows whether it is
            self._read_due = time.monotonic() + self._load_s
            self._loaded = "vocabularies" in message
            if self._loaded:
                self._log.info(f"draft model {self._names} is loaded")
            self._ready.put(message)
        for answer in message.get("answers", ()):
            key = answer["batch"], answer["step"], answer["model"]
            with self._lock:
                draw = self._pending.pop(key, None)
                if not self._pending:  # all has been read
                    self._read_due, self._spared = -math.inf, False
            if "error" in answer:
                self._failed(answer["model"], ModelError(str(answer["error"])))
            elif draw is not None:
                self._proposed(draw, proposals_from_json(answer["proposals"]))

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self.models))
