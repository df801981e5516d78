"""What the pair is measured by."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from collab_llm_lab.home.answers import reply
from collab_llm_lab.home.requests import QUESTIONS, Kind
from collab_llm_lab.home.wording import HELD_OUT
from collab_llm_lab.training.nav import driving, gates
from collab_llm_lab.training.nav.driving import Episode, as_shown
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.sim.rooms import HELD_OUT_PAIRS
from collab_llm_nodes.sim.view import look


def test_gates_ask_for_what_they_mean() -> None:
    for seed in range(20):
        missing = gates.absent(seed)
        assert not any(missing.request.about.matches(part.name) for part in missing.room.parts)
        held_out = gates.STARTS["held_out_pairs"](seed)
        assert tuple(held_out.request.about.name.split()) in HELD_OUT_PAIRS
        assert gates.stopping(seed).request.kind is Kind.STOP
        assert gates.unknown(seed).request.about.name in HELD_OUT["verb"].nouns
        question = gates.questioning(seed)
        assert question.request.kind in QUESTIONS
        question.advance(gates.expected(question))
        assert question.outcome == "replied"
        assert gates.STARTS["perturbed.late"](seed).room.camera.late
        assert gates.STARTS["perturbed.height_high_beyond"](seed).room.camera.height == 0.54


@pytest.mark.parametrize("seed", [360, 679, 700, 740])
def test_a_question_is_about_what_the_picture_shows(seed: int) -> None:
    """These rooms have a wide camera, and something in view that is cropped away."""
    question = gates.questioning(seed)
    room = as_shown(question.room)
    assert room.camera.half_fov < question.room.camera.half_fov
    view = look(room, room.start)
    said = reply(question.request, view)
    assert gates.expected(question) == f"{said}. the next action is reply."


def test_shares_are_those_of_the_outcomes() -> None:
    def driven(key: str, outcomes: str) -> list[Episode]:
        made = [gates.STARTS[key](seed) for seed in range(len(outcomes))]
        for episode, letter in zip(made, outcomes, strict=True):
            name = {"r": "reached", "w": "wrong place", "g": "given up", "p": "replied"}[letter]
            episode.outcome = name
        return made

    episodes = {key: driven(key, "rrwg") for key in gates.STARTS}
    for number, question in enumerate(episodes["questions"]):
        right = gates.expected(question)
        question.asked = [("", right if number else "yes. the next action is reply.")]
    other = "the red ball is straight ahead and close. the next action is stop."
    episodes["unknown_false_arrival"][0].asked = [("", other)]
    found = gates._shares(episodes)
    assert found["wording"]["trained"] == found["wording"]["held_out"] == 0.5
    assert found["held_out_pairs"] == found["perturbed"]["late"] == 0.5
    assert found["absent"] == {"not_found": 0.25, "false_arrival": 0.75}
    assert found["stop_words"] == found["unknown_false_arrival"] == 0.75
    assert found["robot"] == {"stop_words": 1.0, "unknown_false_arrival": 0.5}
    assert found["questions_exact"] == 0.75
    assert gates._outcomes(episodes["large"]) == {
        "success_rate": 0.5,
        "steps": 0.0,
        "given_up": 0.25,
        "wrong_place": 0.25,
    }


@pytest.mark.parametrize(
    ("kind", "said", "right"),
    [
        (Kind.IS_THERE, "yes, a red ball is on the left", "yes, a red ball is straight ahead"),
        (
            Kind.WHAT_DO_YOU_SEE,
            "i see a sofa and a red mug",
            "i see a red mug on the left and a sofa",
        ),
    ],
)
def test_a_question_is_answered_if_its_facts_are_right(kind: Kind, said: str, right: str) -> None:
    end = ". the next action is reply."
    assert gates._facts(kind, said + end) == gates._facts(kind, right + end)
    assert gates._facts(Kind.HOW_MANY, said + end) != gates._facts(Kind.HOW_MANY, right + end)
    assert gates._facts(kind, said + ". the next action is stop.") is None


def test_the_shipped_pair_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure, by two steps in one room for each key; of the perturbations one."""
    some = {key: start for key, start in gates.STARTS.items() if "perturbed" not in key}
    late = {"perturbed.late": gates.STARTS["perturbed.late"]}
    monkeypatch.setattr(gates, "STARTS", some | late)
    monkeypatch.setattr(gates, "PERTURBED", ("late",))
    monkeypatch.setattr(driving, "MAX_STEPS", 2)
    learnt = partial(gates.BlindDraft.of_expert, rooms=1)
    monkeypatch.setattr(gates.BlindDraft, "of_expert", learnt)
    found = gates.eval_nav(rooms=1, seed=7)
    flat = gates.measured(json.loads(json.dumps(found)))
    shown = {key for key in gates.GOALS if "perturbed" not in key} | {"perturbed.late"}
    assert shown <= flat.keys()
    assert {"in_view_direction", "not_in_view", "borderline", "tau_blind"} <= flat.keys()
    assert flat["action_mismatches"] == 0
    assert all(np.isfinite(value) for value in flat.values())


def test_rooms_of_the_training_are_refused() -> None:
    with pytest.raises(ConfigError, match="seed"):
        gates.eval_nav(rooms=2, seed=499_999)
    assert gates.reached((">=", 0.9), 0.9)
    assert not gates.reached(("<=", 0.02), 0.03)
