"""Episodes of a model in simulated rooms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import yaml
from folders import ROOT

from collab_llm_lab.home.answers import answer
from collab_llm_lab.home.expert import Expert
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.home.wording import plain
from collab_llm_lab.training.nav.driving import (
    FIELD_OF_VIEW,
    Episode,
    begin,
    drive,
    take_picture,
)
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.rooms import make_room
from collab_llm_nodes.sim.view import look


def test_episodes_driven_with_the_experts_answers_succeed() -> None:
    said: list[str] = []
    experts: dict[int, Expert] = {}

    def visit(episode: Episode, renderer: Renderer) -> bytes:
        room, pose = episode.room, episode.base.pose
        expert = experts.setdefault(room.seed, Expert(room, episode.request))
        decision = expert.decide(look(room, pose), pose, episode.history, episode.memory)
        said.append(answer(decision))
        return take_picture(episode, renderer)

    def oracle(images: np.ndarray, prompts: Sequence[str]) -> list[str]:
        assert images.shape == (len(prompts), 112, 224, 3)
        texts, said[:] = list(said), []
        return texts

    def going(seed: int) -> Episode:
        room = make_room(seed)
        about = About(room.things[0].name)
        return begin(room, Request(Kind.GO, plain(Kind.GO, about), about))

    done = drive(oracle, [going(seed) for seed in range(4)], visit, together=3)
    assert [episode.outcome for episode in done] == ["reached"] * 4
    assert all(". search: " in prompt for episode in done for prompt, _ in episode.asked)


def test_pictures_have_the_field_of_view_that_the_robot_gives_them() -> None:
    file = (ROOT / "config" / "embedded.yaml").read_text(encoding="utf-8")
    camera = yaml.safe_load(file)["/**/camera_ingest"]["ros__parameters"]
    assert camera["field_of_view"] == FIELD_OF_VIEW


def test_episodes_end_for_the_right_reasons() -> None:
    def outcome(*answers: str) -> str:
        room = make_room(11)
        about = About(room.things[0].name)
        episode = begin(room, Request(Kind.GO, "find it", about))
        for text in answers:
            episode.advance(text)
        return episode.outcome

    ahead = "the ball is straight ahead and near. the next action is {}."
    assert outcome("blah") == "invalid"
    assert outcome(ahead.format("stop")) == "wrong place"
    assert outcome("the ball is not here. the next action is give up.") == "given up"
    assert outcome("yes. the next action is reply.") == "replied"
    assert outcome(*[ahead.format("turn left 45 degree")] * 99) == ""
    assert outcome(*[ahead.format("turn left 45 degree")] * 100) == "step limit"
