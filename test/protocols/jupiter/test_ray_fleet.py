"""Workers that Ray places and restarts: an answer survives one, and the next chain has it again."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
from folders import environment
from jupiter_bed import PATIENT, WAIT_S, alone, control, folder, prompt, settings
from waiting import wait_for

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.jupiter.generation import Asked, answer
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig
from collab_llm_nodes.protocols.jupiter.ray_fleet import RayFleet

TOKENS = 16


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"pip install 'collab_llm_nodes\[ray\]'"):
        RayFleet(settings(), 1)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_worker_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    ids = prompt(30)
    right = alone(ids, TOKENS)
    config = settings(model=replace(settings().model, path=str(folder())), token="of-the-fleet")
    link = replace(PATIENT, token="of-the-fleet", silence_s=3.0)
    fleet = RayFleet(replace(config, next=link), 2, cpus=0.1)
    try:
        with Pipeline(PipelineConfig(link=link), workers=fleet.addresses) as made:
            before = fleet.addresses()
            assert len(before) == 2
            victim = fleet._actors[1]
            killed: list[int] = []

            def kill(lanes: object) -> None:
                if not killed:
                    killed.append(ray.get(victim.process.remote()))
                    os.kill(killed[0], signal.SIGKILL)

            assert answer(made, ids, Asked(TOKENS), control(), kill).tokens == right
            assert [loss.device for loss in made.losses] == before[1:]
            wait_for(lambda: len(fleet.addresses()) == 2, 200.0)
            assert ray.get(victim.process.remote()) != killed[0]

            def whole_again() -> bool:
                chain = made.current
                here = {part.device for part in chain.parts} if chain is not None else set()
                return here == set(fleet.addresses())

            wait_for(whole_again, WAIT_S)
            assert answer(made, ids, Asked(TOKENS), control()).tokens == right
    finally:
        fleet.close()
