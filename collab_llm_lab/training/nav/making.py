"""Batches of the coming steps, made by other processes beside a training on a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.pool import AsyncResult

import numpy as np
import torch

from collab_llm_lab.training.nav.batches import Batch, Batches, Shards
from collab_llm_lab.training.stopping import processes_ignoring_sigint

_LONGEST_S = 300.0
"""Time that a batch may take; the first one of a process reads its shards."""


class Making:
    """Makes the batch of each step: here, or ahead of it in other processes.

    Args:
        make_batches: called here, or in each process.
        shards: returns the shards of a step, which must be there ``ahead`` steps before it.
        processes: 0: here.

    Attributes:
        ahead: number of batches that are made before they are asked for.
    """

    def __init__(
        self, make_batches: Callable[[], Batches], shards: Callable[[int], Shards], processes: int
    ) -> None:
        self.ahead = 2 * processes
        self._shards = shards
        self._coming: dict[int, AsyncResult[list[np.ndarray]]] = {}
        if processes:
            context = multiprocessing.get_context("spawn")
            with processes_ignoring_sigint():
                self._pool = context.Pool(processes, _begin, (make_batches,))
        else:
            self._here = make_batches()

    def make(self, step: int) -> Batch:
        """Return the batch of a step, and have those of the next ones made.

        Raises:
            multiprocessing.TimeoutError: it takes too long.
        """
        if not self.ahead:
            return self._here.make(self._shards(step), step)
        for number in range(step, step + self.ahead + 1):
            if number not in self._coming:
                self._coming[number] = self._pool.apply_async(_make, (self._shards(number), number))
        made = self._coming.pop(step).get(_LONGEST_S)
        return Batch(*map(torch.from_numpy, made))

    def end(self) -> None:
        """End the processes."""
        if self.ahead:
            self._pool.terminate()
            self._pool.join()


_batches: Batches
"""Of this process."""


def _begin(make_batches: Callable[[], Batches]) -> None:
    global _batches
    torch.set_num_threads(1)
    _batches = make_batches()


def _make(shards: Shards, step: int) -> list[np.ndarray]:
    """Return a batch as arrays; tensors would go through shared memory, which containers lack."""
    return [part.numpy() for part in _batches.make(shards, step)]
