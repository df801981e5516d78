"""DAgger (Ross et al. 2011): the model's own way through fresh rooms, labelled by the expert.

A model that learns from the expert's states alone does not know the places that its own mistakes
lead to; its own states, with the expert's answers, teach them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.answering import answers
from collab_llm_lab.training.nav.evaluate import Episode, advance, start
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.renderer import Renderer


def roll_out_round(
    model_folder: str,
    shard: str,
    first_seed: int,
    rooms: int,
    progress: Callable[[int, int], None] | None = None,
    together: int = 64,
) -> None:
    """Roll the model of ``model_folder`` out in ``rooms`` rooms; write the visited states."""
    torch.set_num_threads(1)
    os.environ.setdefault("LP_NUM_THREADS", "1")
    model = Qwen2VLForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
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
        if progress is not None:
            progress(rooms - len(waiting) - len(running), rooms)
    renderer.close()
    data.write_shard(Path(shard), visited)
