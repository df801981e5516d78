"""The training loop: its schedule, its end by steps or by time, and what a stopped run keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_nodes.errors import ConfigError, ModelError


def recipe(**changed: Any) -> Recipe:
    return Recipe(1, 0.1, **{"steps": 3, **changed})


class Counter(ModelLearner):
    """A learner that remembers its steps only."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(torch.nn.Linear(1, 1), recipe(**changed), torch.device("cpu"))
        self.seen: list[int] = []

    def losses(self, *batch: Any) -> dict[str, torch.Tensor]:
        raise AssertionError("it computes nothing")

    def learn(self, *batch: Any) -> dict[str, float]:
        self.seen.append(self.step)
        self.step += 1
        return {"loss": 1.0 / self.step}

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_the_rate_rises_to_its_peak_and_falls_to_two_percent() -> None:
    ours = recipe(steps=100, warmup=10)
    rates = [ours.rate(3e-3, step, 0.0) for step in range(101)]
    assert rates[0] == pytest.approx(3e-4)
    assert rates[9] == rates[10] == pytest.approx(3e-3)
    assert rates[55] == pytest.approx(3e-3 * (0.02 + 0.98 * 0.5))
    assert rates[100] == pytest.approx(0.02 * 3e-3)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_with_a_time_the_schedule_follows_the_clock() -> None:
    timed = recipe(steps=0, minutes=1.0, warmup=2)
    assert timed.rate(1.0, 500, 30.0) == pytest.approx(0.51)
    assert timed.rate(1.0, 9, 60.0) == pytest.approx(0.02)
    assert timed.done(1, 59.0) < 1 == timed.done(1, 60.0)
    both = recipe(steps=10, minutes=1.0)
    assert both.done(10, 1.0) == both.done(1, 61.0) == 1


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"steps": 5, "minutes": -1.0}])
def test_a_recipe_without_an_end_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        recipe(**wrong)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first, again = (Counter(steps=9, measure_every=4) for _ in range(2))
    assert not loop.train(first, tmp_path, first.learn, stop=lambda: first.step == 5)
    loop.restore(again, tmp_path, torch.device("cpu"))
    assert (again.step, again.seen) == (5, [0, 1, 2, 3, 4])
    assert loop.train(again, tmp_path, again.learn, measure=lambda: {"right": 0.5})
    assert again.seen == list(range(9))
    assert [point["step"] for point in again.curve] == [4, 8, 9]
    assert again.curve[-1]["right"] == 0.5
    assert loop.train(again, tmp_path, again.learn)  # over: no step more
    assert again.step == 9


@pytest.mark.parametrize("damage", ["garbage", "half", "empty", "another learner's"])
def test_a_damaged_state_is_reported_with_its_remedy(damage: str, tmp_path: Path) -> None:
    learner = Counter()
    loop.save(learner, tmp_path)
    file = tmp_path / loop.STATE
    whole = file.read_bytes()
    if damage == "another learner's":
        torch.save({"step": 3}, file)
    else:
        file.write_bytes({"garbage": b"garbage", "half": whole[: len(whole) // 2]}.get(damage, b""))
    with pytest.raises(ModelError, match="holds no state of this training") as error:
        loop.restore(learner, tmp_path, torch.device("cpu"))
    assert str(file) in str(error.value)
    assert "delete it" in error.value.remedy


def test_a_time_ends_a_run_whose_first_step_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 50.0, *(51.0 + second for second in range(100))])
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    learner = Counter(steps=0, minutes=4 / 60)
    reports: list[tuple[int, int]] = []
    assert loop.train(
        learner,
        tmp_path,
        learner.learn,
        report=lambda activity, done, total, figures: reports.append((done, total)),
    )
    assert (learner.step, learner.seconds) == (5, 4.0)
    assert reports[:2] == [(1, 1), (2, 8)]


def test_a_state_that_takes_long_to_write_is_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, saved = [0.0], []

    def advance() -> dict[str, float]:
        clock[0] += 10.0
        return learner.learn()

    def save(learner: ModelLearner, run: Path) -> None:
        saved.append(learner.step)
        clock[0] += 30.0

    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop, "save", save)
    learner = Counter(steps=70)
    assert loop.train(learner, tmp_path, advance)
    assert saved == [7, 38, 69, 70]  # after a minute; then 5 minutes apart; and at the end


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    learner = Counter()

    def diverge() -> dict[str, float]:
        learner.learn()
        return {"loss": math.nan}

    with pytest.raises(ModelError, match="loss is nan"):
        loop.train(learner, tmp_path, diverge)
    assert not (tmp_path / loop.STATE).exists()


def test_lines_replace_bars_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loop.show_progress(("loss",), every=3600.0) as show:
        report = show("target")
        for step in range(1, 5):
            report("training", step, 4, {"loss": 2.5, "other": 1.0})
        report("measuring", 4, 4, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "target: training 1/4 loss 2.500",
        "target: measuring 4/4 ",
    ]


def test_lines_say_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((1000.0, 1030.0, 1060.0, 1300.0, 1301.0, 1302.0))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(clock))
    with loop.show_progress((), every=60.0) as show:
        report = show("answers")
        for done in (40, 45, 60, 100, 100):
            report("answers", done, 100, {})
        report("judging", 1, 5, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "answers: answers 40/100 ",
        "answers: answers 60/100, 2 min left ",
        "answers: answers 100/100 ",
        "answers: judging 1/5 ",
    ]
