"""DAgger (Ross et al. 2011): the model drives in fresh rooms, and the expert labels its states.

A model that learns from the expert's states alone never sees the places that its own mistakes lead
to.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.evaluate import Episode, advance, start
from collab_llm_lab.training.nav.models import answers, read
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.renderer import Renderer

P = TypeVar("P")
RollOut = Callable[[str, str, int, int], None]
"""Called with the folders of model and shard, the first room seed, and the number of rooms."""


def roll_out_round(
    model_folder: str,
    shard: str,
    first_seed: int,
    rooms: int,
    together: int = 64,
) -> None:
    """Roll the model of ``model_folder`` out in ``rooms`` rooms; write the visited states."""
    torch.set_num_threads(1)
    os.environ.setdefault("LP_NUM_THREADS", "1")
    model, tokenizer = read(model_folder)
    renderer = Renderer()
    waiting, running = list(range(first_seed, first_seed + rooms)), list[Episode]()
    visited: list[data.Snapshot] = []
    while waiting or running:
        while waiting and len(running) < together:
            running.append(start(waiting.pop(0)))
        now = []
        for e in running:
            renderer.enter(e.room)
            now.append(data.snapshot(renderer, e.room, e.base.pose, e.history, e.room.target))
        texts = [user_text(e.instruction, e.history) for e in running]
        said = answers(model, tokenizer, np.stack([s.image for s in now]), texts)
        for episode, text in zip(running, said, strict=True):
            advance(episode, text)
        visited += now
        running = [e for e in running if not e.outcome]
    renderer.close()
    data.write_shard(Path(shard), visited)


class Rounds(Generic[P]):
    """DAgger rounds beside a training: rolled out from a snapshot, used some steps later.

    Args:
        run: folder of the training; round N writes ``snapshot-N`` and ``dagger-N`` there.
        steps: of each round, the step whose model is rolled out.
        lag: steps after which the pictures of a round are used.
        rooms: per round.
        save_model: writes a checkpoint of the model as it is now.
        roll_out: as ``roll_out_round``; it runs in a second process.
        read_shards: returns the pictures of several rounds.
        first_seed: room of the first round.
    """

    def __init__(
        self,
        run: Path,
        steps: Sequence[int],
        lag: int,
        rooms: int,
        save_model: Callable[[Path], None],
        roll_out: RollOut,
        read_shards: Callable[[Sequence[Path]], P],
        first_seed: int,
    ) -> None:
        self._run, self._steps, self._lag, self._rooms = run, steps, lag, rooms
        self._save_model = save_model
        self._roll_out, self._read_shards, self._first_seed = roll_out, read_shards, first_seed
        self._running: dict[int, BaseProcess] = {}
        self._joined: list[Path] = []
        self._pictures: P | None = None

    def awaited(self, step: int) -> BaseProcess | None:
        """Begin the rounds that are due at ``step``; return one that has to end before it.

        Raises:
            ModelError: a round ended without its pictures.
        """
        for number, due in enumerate(self._steps):
            shard, snapshot = self._shard(number), self._run / f"snapshot-{number}"
            if step < due or shard in self._joined:
                continue
            if step == due and not snapshot.exists():
                self._save_model(snapshot)
            if not shard.exists() and number not in self._running:
                first = self._first_seed + number * self._rooms
                process = multiprocessing.get_context("spawn").Process(
                    target=self._roll_out, args=(str(snapshot), str(shard), first, self._rooms)
                )
                with processes_ignoring_sigint():
                    process.start()
                self._running[number] = process
            running = self._running.get(number)
            if running and running.exitcode is not None and not shard.exists():
                raise ModelError(
                    f"DAgger round {number} ended with status {running.exitcode}",
                    field="--out",
                    remedy="see the error above; the same command goes on from here",
                )
            if step >= due + self._lag and running and running.is_alive():
                return running
        return None

    def pictures(self, step: int) -> P | None:
        """Return the own-trajectory pictures to use at ``step``, once none is ``awaited``."""
        for number, due in enumerate(self._steps):
            shard = self._shard(number)
            if step >= due + self._lag and shard not in self._joined:
                self._running.pop(number, None)
                self._joined.append(shard)
                self._pictures = self._read_shards(self._joined)
        return self._pictures

    def _shard(self, number: int) -> Path:
        return self._run / f"dagger-{number}"

    def stop(self) -> None:
        """End the processes that still run; a resumed training begins their rounds again."""
        for process in self._running.values():
            process.terminate()
            process.join()
