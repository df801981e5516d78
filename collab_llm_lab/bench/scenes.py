"""Questions the robot really asks, made from seeds: the prompts of checks and benchmarks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from collab_llm_lab.home.answers import ENDS, MOVES, answer
from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.wording import TRAINED
from collab_llm_lab.training.nav.driving import begin, take_picture
from collab_llm_lab.training.nav.sources import draw_way
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.view import look

_NOISE = 0.1
"""Share of the actions that are random."""
_STEPS = 20
"""Prompts are taken at one of the first steps of a drive: about as many as it takes."""


def scene_prompts(count: int, seed: int) -> list[Prompt]:
    """One prompt from each of ``count`` rooms, at a random step of the expert's noisy drive.

    The rooms are none of the training's, their requests are in its wordings.
    """
    renderer, rng = Renderer(), np.random.default_rng([seed, 0x5CE4E])
    prompts = []
    for number in range(count):
        episode = begin(*draw_way(seed + number, TRAINED))
        room, expert = episode.room, Expert(episode.room, episode.request)
        for _ in range(int(rng.integers(_STEPS))):
            pose = episode.base.pose
            decision = expert.decide(look(room, pose), pose, episode.history, episode.memory)
            if decision.action in ENDS:
                break
            if rng.random() < _NOISE:
                decision = replace(decision, action=MOVES[int(rng.integers(len(MOVES)))])
            episode.advance(answer(decision))
        renderer.enter(room)
        prompts.append(Prompt(episode.prompt, (take_picture(episode, renderer),)))
    renderer.close()
    return prompts
