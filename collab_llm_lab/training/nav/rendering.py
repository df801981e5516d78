"""Shards rendered by other processes, beside a training that uses the first of them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from collab_llm_lab.training import loop
from collab_llm_lab.training.nav.sources import Source
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.renderer import Renderer

_POLL_S = 0.2


class Rendering:
    """Processes that render shards; they end when all of them are there.

    Args:
        counts: how many shards of each source.
        processes: each takes every so many-th of the missing shards.
    """

    def __init__(self, data: Path, counts: Mapping[Source, int], processes: int) -> None:
        self._data, self._counts = data, counts
        missing = [
            (source, number)
            for number in range(max(counts.values()))
            for source, count in counts.items()
            if number < count and not source.folder(data, number).exists()
        ]
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=_render, args=(data, missing[part::processes]))
            for part in range(min(processes, len(missing)))
        ]
        with processes_ignoring_sigint():
            for process in self._processes:
                process.start()

    def wait(
        self, count: int, stop: loop.Stop, report: loop.Progress = loop.ignore_progress
    ) -> bool:
        """Wait until ``count`` shards of each source are there; return True if ``stop`` did first.

        Raises:
            CollabError: a process ended without them.
        """
        wanted = [
            source.folder(self._data, number)
            for source, most in self._counts.items()
            for number in range(min(count, most))
        ]
        while not stop():
            ended = [process.exitcode for process in self._processes]
            there = sum(folder.exists() for folder in wanted)
            if there == len(wanted):
                return False
            if any(ended) or None not in ended:
                raise CollabError(
                    f"rendering ended with status {max(map(abs, filter(None, ended)), default=0)}",
                    field="--data",
                    remedy="see the error above; the same command goes on from here",
                )
            report("rendering", there, len(wanted), {})
            time.sleep(_POLL_S)
        return True

    def end(self) -> None:
        """End the processes; later ones go on with the shards that are missing."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _render(data: Path, shards: Sequence[tuple[Source, int]]) -> None:
    os.environ.setdefault("LP_NUM_THREADS", "1")
    renderer = Renderer()
    for source, number in shards:
        source.make_shard(data, number, renderer)
    renderer.close()


@contextmanager
def rendering(data: Path, counts: Mapping[Source, int], processes: int) -> Iterator[Rendering]:
    """Render the first shards of each source beside what is done within the context."""
    running = Rendering(data, counts, processes)
    try:
        yield running
    finally:
        running.end()
