"""Shards rendered in a second process, beside a training that uses the first of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from collab_llm_lab.home.training.sources import Source, make_shards
from collab_llm_lab.training import loop
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_nodes.errors import CollabError


class Rendering:
    """The second process; it ends when all shards are there."""

    def __init__(self, data: Path, counts: Mapping[Source, int]) -> None:
        self._data, self._counts = data, counts
        self._process = multiprocessing.get_context("spawn").Process(
            target=_render, args=(data, dict(counts))
        )
        if not self._all_there(max(counts.values())):
            with processes_ignoring_sigint():
                self._process.start()

    def _all_there(self, count: int) -> bool:
        return all(
            source.folder(self._data, min(count, most) - 1).exists()
            for source, most in self._counts.items()
        )

    def wait(self, count: int, stop: loop.Stop) -> bool:
        """Wait until ``count`` shards of each source are there; return True if ``stop`` did first.

        Raises:
            CollabError: the process ended without them.
        """
        while not stop():
            if self._all_there(count):
                return False
            self._process.join(1.0)
            if self._process.exitcode is not None and not self._all_there(count):
                raise CollabError(
                    f"rendering ended with status {self._process.exitcode}",
                    field="--data",
                    remedy="see the error above; the same command goes on from here",
                )
        return True

    def end(self) -> None:
        """End the process; a later one goes on from the last whole shard."""
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join()


def _render(data: Path, counts: Mapping[Source, int]) -> None:
    os.environ.setdefault("LP_NUM_THREADS", "1")
    make_shards(data, counts)


@contextmanager
def rendering(data: Path, counts: Mapping[Source, int]) -> Iterator[Rendering]:
    """Render the first shards of each source beside what is done within the context."""
    process = Rendering(data, counts)
    try:
        yield process
    finally:
        process.end()
