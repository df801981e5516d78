"""DAgger (Ross et al. 2011): the model drives in fresh rooms, and the expert labels its states.

A model that learns from the expert's states alone never sees the places that its own mistakes lead
to.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from collab_llm_lab.home.answers import MAX_TOKENS
from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.wording import TRAINED
from collab_llm_lab.training.nav.asks import Ask, ask
from collab_llm_lab.training.nav.driving import Episode, begin, drive
from collab_llm_lab.training.nav.models import answers, read
from collab_llm_lab.training.nav.pictures import Snapshot, snapshot, write_shard
from collab_llm_lab.training.nav.sources import draw_way, pose_asks
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.view import look

_FIRST_SEED = 3_000_000
"""Room of the first round; see ``sources``."""


@dataclass(frozen=True)
class Dagger:
    """Rounds of the model's own driving."""

    steps: tuple[int, ...] = ()
    """Of each round, the step whose model drives; rounds of one step drive side by side."""
    lag: int = 500
    """Steps after which the pictures of a round are used."""
    rooms: int = 300
    """Number of rooms of a round."""
    share: float = 0.5
    """Share of own pictures in a batch once there are any."""


def roll_out_round(model_folder: str, shard: str, first_seed: int, rooms: int) -> None:
    """Roll the model of ``model_folder`` out in ``rooms`` rooms; write the visited states."""
    torch.set_num_threads(1)
    os.environ.setdefault("LP_NUM_THREADS", "1")
    model, tokenizer = read(model_folder)
    experts: dict[int, Expert] = {}
    pictures, asks = list[Snapshot](), list[list[Ask]]()

    def episodes() -> list[Episode]:
        return [begin(*draw_way(seed, TRAINED)) for seed in range(first_seed, first_seed + rooms)]

    def visit(episode: Episode, renderer: Renderer) -> bytes:
        room, request, pose = episode.room, episode.request, episode.base.pose
        expert = experts.setdefault(room.seed, Expert(room, request))
        decision = expert.decide(look(room, pose), pose, episode.history, episode.memory)
        taken = snapshot(renderer, room, episode.viewpoint, len(episode.history))
        pictures.append(taken)
        own = ask(request.kind, request.about, episode.history, episode.memory.text, decision)
        rng = np.random.default_rng([room.seed, len(episode.history), 0xDA9])
        asks.append([own, *pose_asks(room, episode.viewpoint, rng, 1)])
        return taken.jpeg

    drive(partial(answers, model, tokenizer, max_tokens=MAX_TOKENS), episodes(), visit)
    write_shard(Path(shard), pictures, asks)


class Rounds:
    """Rounds beside a training, each in a process of its own.

    Args:
        run: folder of the training; round N writes ``snapshot-N`` and ``dagger-N`` there.
        save_model: writes a checkpoint of the model as it is now.
        ahead: steps that batches are made ahead of the training.
    """

    def __init__(
        self, run: Path, plan: Dagger, save_model: Callable[[Path], None], ahead: int = 0
    ) -> None:
        self._run, self._plan, self._save_model, self._ahead = run, plan, save_model, ahead
        self._running: dict[int, BaseProcess] = {}

    def awaited(self, step: int) -> BaseProcess | None:
        """Begin the rounds that are due at ``step``; return one that has to end before it.

        Raises:
            ModelError: a round ended without its pictures.
        """
        for number, due in enumerate(self._plan.steps):
            if step < due or self._shard(number).exists():
                continue
            running = self._running.get(number) or self._begin(number)
            if running.exitcode is not None and not self._shard(number).exists():
                raise ModelError(
                    f"DAgger round {number} ended with status {running.exitcode}",
                    field="--out",
                    remedy="see the error above; the same command goes on from here",
                )
            if step + self._ahead >= due + self._plan.lag:
                return running
        return None

    def shards(self, step: int) -> list[Path]:
        """Return the shards of own pictures to use at ``step``."""
        used = [n for n, due in enumerate(self._plan.steps) if step >= due + self._plan.lag]
        return [self._shard(number) for number in used]

    def _begin(self, number: int) -> BaseProcess:
        snapshot = self._run / f"snapshot-{number}"
        if not snapshot.exists():  # packed weights come without it: the present model drives
            self._save_model(snapshot)
        first = _FIRST_SEED + number * self._plan.rooms
        process = multiprocessing.get_context("spawn").Process(
            target=roll_out_round,
            args=(str(snapshot), str(self._shard(number)), first, self._plan.rooms),
        )
        with processes_ignoring_sigint():
            process.start()
        self._running[number] = process
        return process

    def _shard(self, number: int) -> Path:
        return self._run / f"dagger-{number}"

    def stop(self) -> None:
        """End the processes that still run; a resumed training begins their rounds again."""
        for process in self._running.values():
            process.terminate()
            process.join()
