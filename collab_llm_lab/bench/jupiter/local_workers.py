"""Stage workers as child processes, for benchmarks and tests."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_llm_nodes.errors import CollabError, DeadlineExceeded, Unavailable
from collab_llm_nodes.processes import START_DEADLINE_S, Process, free_port, run_process
from collab_llm_nodes.protocols.jupiter.link import LinkConfig, describe
from collab_llm_nodes.transport.background import background_loop

_PAUSE_S = 0.1


@dataclass(frozen=True)
class LocalWorker:
    """A worker on this machine.

    Attributes:
        address: host:port that it listens on.
    """

    process: Process
    address: str


@contextlib.contextmanager
def local_workers(
    count: int,
    model: str,
    *,
    config: Path | None = None,
    cores: Sequence[int] = (),
    emulated_slowdown: float = 1.0,
) -> Iterator[list[LocalWorker]]:
    """Run workers on free ports of this machine; yields them once all answer.

    Args:
        config: YAML with their settings.
        cores: processor cores, assigned to workers in turn; empty: no assignment.

    Raises:
        CollabError: a worker has ended, or does not answer in time.
    """
    with contextlib.ExitStack() as stack:
        made: list[LocalWorker] = []
        for number in range(count):
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", "collab_llm_nodes.cli", "jupiter-worker"]
            command += ["--model", model, "--address", address]
            command += ["--config", str(config)] if config is not None else []
            command += ["--cores", str(cores[number % len(cores)])] if cores else []
            command += ["--emulated-slowdown", str(emulated_slowdown)]
            process = stack.enter_context(run_process(f"jupiter-worker-{number}", command))
            made.append(LocalWorker(process, address))
        due = time.monotonic() + START_DEADLINE_S * count  # they share the cores
        for worker in made:
            _wait_for(worker, due)
        yield made


def _wait_for(worker: LocalWorker, due: float) -> None:
    """Return once ``worker`` listens, also if it refuses for lack of a token."""
    while True:
        worker.process.check()
        asking = describe(LinkConfig(), worker.address)
        try:
            asyncio.run_coroutine_threadsafe(asking, background_loop()).result(START_DEADLINE_S)
            return
        except (Unavailable, DeadlineExceeded):
            if time.monotonic() > due:
                raise
            time.sleep(_PAUSE_S)
        except CollabError:
            return
