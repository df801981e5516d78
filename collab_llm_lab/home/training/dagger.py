"""DAgger (Ross et al. 2011) in the home: the model drives, and the expert labels its states."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.training.asks import Ask, ask
from collab_llm_lab.home.training.driving import Episode, begin, drive
from collab_llm_lab.home.training.models import MAX_TOKENS
from collab_llm_lab.home.training.pictures import Snapshot, snapshot, write_shard
from collab_llm_lab.home.training.sources import draw_way, pose_asks
from collab_llm_lab.home.wording import TRAINED
from collab_llm_lab.training.nav.models import answers, read
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.view import look

FIRST_SEED = 3_000_000
"""Room of the first round; see ``sources``."""


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
