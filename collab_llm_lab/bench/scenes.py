"""Questions the robot really asks, made from seeds: the prompts of checks and benchmarks."""

from __future__ import annotations

import numpy as np

from collab_llm_lab.training.nav.wording import VERBS, instruction
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim.expert import decide, look
from collab_llm_nodes.sim.jpeg import to_jpeg
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import make_room


def scene_prompts(count: int, seed: int) -> list[Prompt]:
    """One prompt from each of ``count`` rooms, at a random step of the expert's drive."""
    renderer, rng = Renderer(), np.random.default_rng([seed, 0x5CE4E])
    prompts = []
    for number in range(count):
        room = make_room(seed + number)
        renderer.enter(room)
        base, history = Base(room), list[str]()
        wish = instruction(room.goal.name, number % len(VERBS))
        for _ in range(int(rng.integers(0, 6))):
            action = decide(look(room, base.pose)[room.target], history)
            if action == "stop":
                break
            base.execute(action)
            history.append(action)
        picture = to_jpeg(renderer.picture(base.pose))
        prompts.append(Prompt(user_text(wish, history), (picture,)))
    renderer.close()
    return prompts
