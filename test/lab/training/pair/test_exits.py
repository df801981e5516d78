"""``train exits``: losses, hidden states and their cache, stops and kills, the choice that pays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from collected_answers import collect_answers
from safetensors.torch import load_file
from tiny_models import tiny_folder, tiny_model
from typer.testing import CliRunner

from collab_llm_lab import reference
from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.pair import frozen
from collab_llm_lab.training.pair.choosing import Operation, choose
from collab_llm_lab.training.pair.data import Data, read_data
from collab_llm_lab.training.pair.exits import (
    ExitLearner,
    ExitsConfig,
    LeastSquares,
    candidate_layers,
    train_exits,
)
from collab_llm_lab.training.pair.heads import HeadsConfig, train_heads
from collab_llm_lab.training.pair.held_out import HeldOut
from collab_llm_lab.training.pair.states import HiddenStates
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, ModelError
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import ModelConfig, TargetConfig, load, with_exits
from collab_llm_nodes.models.prompt import encode
from collab_llm_nodes.models.trained import trained_files

OPERATION = Operation(pass_ms=100.0, draft_ms=10.0, exit_ms=0.01)


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect_answers(tmp_path_factory.mktemp("text"), "llama", 90)


@pytest.fixture
def config(data_folder: Path, tmp_path: Path) -> ExitsConfig:
    return ExitsConfig(
        ModelConfig(str(tiny_folder("llama"))),
        data_folder,
        tmp_path / "run",
        epochs=2,
        operation=OPERATION,
    )


@contextmanager
def states_of(
    data: Data, folder: Path, budget: int, model: str = "llama"
) -> Iterator[HiddenStates]:
    states = HiddenStates(tiny_model(model), data, (1, 3, 4), folder, budget)
    yield states
    states.close()


# ------------------------------------------------------------ hidden states


@pytest.mark.parametrize("model", ["llama", "qwen2_vl"])
def test_states_are_those_of_transformers_at_the_answer(tmp_path: Path, model: str) -> None:
    data, loaded = read_data(collect_answers(tmp_path, model, 2)), tiny_model(model)
    sample = data.samples[0]
    prompt = encode(data.prompt(sample), loaded)
    with torch.no_grad():
        arguments = reference.inputs(loaded, prompt, sample.answer[:-1])
        output = loaded.model(**arguments, output_hidden_states=True)
    with states_of(data, tmp_path / "states", 0, model) as states:
        found = states.of(sample)
    assert found.shape == (3, len(sample.answer), 32)
    at = slice(len(prompt.ids) - 1, None)
    for state, layer in zip(found[:2], (1, 3), strict=True):
        torch.testing.assert_close(state, output.hidden_states[layer][0, at])
    logits = decoder_parts(loaded.model).logits(found[2])
    torch.testing.assert_close(logits, output.logits[0, at], atol=1e-4, rtol=1e-4)
    assert logits.argmax(-1).tolist() == list(sample.answer)


@pytest.mark.parametrize("model", ["qwen3_vl", "gemma3", "smolvlm", "qwen3_5_text"])
def test_the_last_states_of_any_model_say_its_answer(tmp_path: Path, model: str) -> None:
    data = read_data(collect_answers(tmp_path, model, 2))
    parts = decoder_parts(tiny_model(model).model)
    with states_of(data, tmp_path / "states", 0, model) as states:
        for sample in data.samples:
            logits = parts.logits(states.of(sample)[-1])[:, : tiny_model(model).vocab_size]
            assert logits.argmax(-1).tolist() == list(sample.answer)


def test_the_cache_stays_within_its_budget(data_folder: Path, tmp_path: Path) -> None:
    data = read_data(data_folder)
    few = data.samples[:6]
    with states_of(data, tmp_path / "none", 0) as uncached:
        right = [uncached.of(sample) for sample in few]
        assert uncached.held == 0
        assert not (tmp_path / "none").exists()
    budget = right[0].nbytes + right[1].nbytes + 600
    for _ in range(2):  # the second one reads what the first has left
        with states_of(data, tmp_path / "some", budget) as cached:
            for sample, state in zip(few, right, strict=True):
                torch.testing.assert_close(cached.of(sample), state)
                torch.testing.assert_close(cached.of(sample), state, atol=0, rtol=0)
            assert 0 < cached.held <= budget
        files = list((tmp_path / "some").iterdir())
        assert 0 < len(files) < len(few)
    files[0].write_bytes(b"x")
    damaged = next(s for s in few if s.key == files[0].stem)
    with (
        states_of(data, tmp_path / "some", budget) as cached,
        pytest.raises(ModelError, match="cannot read"),
    ):
        cached.of(damaged)


# ------------------------------------------------------------ losses


def shaken_learner(rows: int, monkeypatch: pytest.MonkeyPatch) -> ExitLearner:
    loaded = tiny_model("llama")
    width = decoder_parts(loaded.model).head.out_features
    monkeypatch.setattr(frozen, "_LOGITS", rows * width)
    torch.manual_seed(0)
    adapters = ExitAdapters(32, (1, 3))
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return ExitLearner(loaded, adapters, Recipe(1, 1e-3, steps=1))


def test_the_loss_is_the_divergence_however_it_is_divided(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read_data(data_folder)
    with states_of(data, tmp_path, 0) as states:
        rows = torch.cat([states.of(sample) for sample in data.samples[:3]], dim=1)
    found = []
    for size in (1, 5, 1000):
        learner = shaken_learner(size, monkeypatch)
        losses = learner.losses(rows)
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in learner.adapters.parameters()]
        found.append([losses["loss"], losses["exit_3"], *gradients])
        same, sure = learner.judge(rows)
        assert same.mean(axis=1)[1] == pytest.approx(losses["exit_3"].item())
        assert ((sure > 0) & (sure <= 1)).all()
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two)
    parts, vocabulary = decoder_parts(tiny_model("llama").model), tiny_model("llama").vocab_size
    law = parts.logits(rows[-1])[:, :vocabulary].log_softmax(-1)
    right = torch.zeros(())
    for layer, hidden in zip((1, 3), rows, strict=False):
        said = parts.logits(learner.adapters(layer, hidden))[:, :vocabulary].log_softmax(-1)
        right = right + F.kl_div(said, law, reduction="batchmean", log_target=True)
    expected = [right, *torch.autograd.grad(right, list(learner.adapters.parameters()))]
    for one, two in zip([found[0][0], *found[0][2:]], expected, strict=True):
        torch.testing.assert_close(one, two)


def test_a_linear_relation_is_found_by_least_squares() -> None:
    torch.manual_seed(0)
    last, turns = torch.randn(200, 8), torch.linalg.qr(torch.randn(2, 8, 8)).Q
    own = last @ turns
    squares = LeastSquares()
    for part in torch.cat([own, last[None]]).split(50, dim=1):
        squares.add(part)
    found = own + own @ squares.solve()
    torch.testing.assert_close(found, last.expand(2, -1, -1), atol=0.05, rtol=0.05)


def test_a_confident_exit_is_measured_against_its_hits() -> None:
    same = [np.array([[True, True, False, False]]), np.array([[True, True]])]
    sure = [np.full((1, 4), 0.95, np.float32), np.full((1, 2), 0.55, np.float32)]
    found = HeldOut(same, sure)
    assert found.agreement() == pytest.approx([4 / 6])
    assert found.calibration_error() == pytest.approx([4 / 6 * 0.45 + 2 / 6 * 0.45])
    assert found.rounds(2).tolist() == [[True, False, False, True]]
    assert found.rounds(5).shape == (1, 0)


# ------------------------------------------------------------ training


def test_trained_exits_agree_more_and_load_with_their_target(config: ExitsConfig) -> None:
    report = train_exits(replace(config, epochs=12, learning_rate=5e-3))
    assert report is not None
    assert list(report["exits"]) == ["1", "2", "3"]
    assert report["operation"] == asdict(OPERATION)
    gains = [each["agreement"] - each["agreement_before"] for each in report["exits"].values()]
    assert max(gains) > 0.1, report["exits"]
    assert report["chosen"]
    assert report["round_ms"] < report["round_ms_without_exits"]
    assert json.loads((config.out / "report.json").read_text()) == report
    loaded = load(with_exits(config.target, str(config.out)))
    assert loaded.adapters is not None
    assert list(loaded.adapters.layers) == report["chosen"]
    with pytest.raises(ModelError, match="adapters of model"):
        load(TargetConfig(str(tiny_folder("llama", seed=1)), exits=str(config.out)))


def _is_empty(steps: Iterator[int]) -> bool:
    return next(steps, None) is None


def test_a_stopped_or_killed_training_ends_as_an_undisturbed_one(
    config: ExitsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_exits(replace(config, out=config.out / "undisturbed")) is not None
    fitted = len(read_data(config.data).parts()[0])
    for asked in (3, fitted + 7):  # stopped in the least squares, then in the steps
        left = iter(range(asked))
        assert train_exits(config, partial(_is_empty, left)) is None
    saved = config.out / "exits" / "state.pt"
    assert saved.exists()
    shutil.copy(saved, saved.with_suffix(".early"))
    steps = iter(range(5))
    assert train_exits(config, lambda: next(steps, None) is None) is None
    shutil.copy(saved.with_suffix(".early"), saved)  # as a kill after these steps would leave it
    assert train_exits(config) is not None
    folders = (config.out, config.out / "undisturbed")
    both = [load_file(trained_files(folder, "adapters")[0]) for folder in folders]
    assert both[0].keys() == both[1].keys()
    for name, value in both[0].items():
        torch.testing.assert_close(value, both[1][name], atol=0, rtol=0)


def test_the_same_command_chooses_again_without_training(config: ExitsConfig) -> None:
    report = train_exits(config)
    assert report is not None
    state = (config.out / "exits" / "state.pt").read_bytes()
    again = train_exits(replace(config, operation=replace(OPERATION, missed=0.0)))
    assert again is not None
    assert again["chosen"] == []
    assert not list(config.out.glob("adapters.*"))
    assert again["exits"] == report["exits"]
    assert (config.out / "exits" / "state.pt").read_bytes() == state


def test_data_of_another_target_is_refused(config: ExitsConfig) -> None:
    other = ModelConfig(str(tiny_folder("llama", seed=1)))
    with pytest.raises(InvalidInput, match="has other weights") as caught:
        train_exits(replace(config, target=other))
    assert caught.value.field == "--data"
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"layers": (4,)}, ModelError),
        ({"layers": (0, 2)}, ModelError),
        ({"data": Path("/absent")}, InvalidInput),
        ({"target": ModelConfig("/absent")}, ModelError),
    ],
)
def test_what_cannot_be_trained_is_a_typed_error(
    config: ExitsConfig, changed: dict[str, Any], error: type[CollabError]
) -> None:
    with pytest.raises(error):
        train_exits(replace(config, **changed))
    assert not config.out.exists()


def test_another_training_in_the_same_folder_is_refused(
    config: ExitsConfig, tmp_path: Path
) -> None:
    assert train_exits(config, lambda: True) is None
    other = shutil.copytree(config.data, tmp_path / "other")
    lines = (other / "samples.jsonl").read_text().splitlines(keepends=True)
    (other / "samples.jsonl").write_text("".join(lines[1:]))  # its states would be others
    for changed in ({"layers": (1,)}, {"epochs": 9.0}, {"data": other}):
        with pytest.raises(ConfigError, match="begun with"):
            train_exits(replace(config, **changed))
    heads = HeadsConfig(config.target, config.data, config.out, config.epochs)
    with pytest.raises(ConfigError, match="begun with 'train exits', not 'train heads'"):
        train_heads(heads)


@pytest.mark.parametrize("count", [2, 4, 28, 30])
def test_candidates_are_intermediate_layers(count: int) -> None:
    layers = candidate_layers(count)
    assert layers
    assert set(layers) <= set(range(1, count))
    if count > 9:
        assert len(layers) == 7


def command_says(config: ExitsConfig, *options: str) -> str:
    words = ["--target", config.target.path, "--data", str(config.data), "--out", str(config.out)]
    given = [*words, "--layers", "2,1", "--epochs", "1", "--device", "cpu", *options]
    done = CliRunner().invoke(app, ["train", "exits", *given])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_every_exit(config: ExitsConfig, tmp_path: Path) -> None:
    assert "fitted" in command_says(config, "--json", str(tmp_path / "r.json"))
    assert list(json.loads((tmp_path / "r.json").read_text())["exits"]) == ["1", "2"]


def test_the_command_names_exits_that_its_steps_made_worse(config: ExitsConfig) -> None:
    said = command_says(config, "--learning-rate", "1")
    assert "after layers 1, 2 the least squares alone agreed more" in said


# ------------------------------------------------------------ the choice


def hits(*shares: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[exits, 1000]: each exit foresees its share of the rounds, and those of exits before it."""
    draws = np.random.default_rng(0).random(1000)
    return np.array([draws < share for share in shares])


@pytest.mark.parametrize("exit_ms", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("rtt_ms", [0.0, 60.0, 400.0])
def test_the_choice_is_the_fastest_of_all(exit_ms: float, rtt_ms: float) -> None:
    operation = replace(OPERATION, exit_ms=exit_ms, rtt_ms=rtt_ms)
    layers, right = (4, 8, 12, 16), hits(0.2, 0.5, 0.7, 0.75)
    found = choose(right, layers, 20, operation)
    every = [
        choose(right[list(chosen)], [layers[i] for i in chosen], 20, operation)
        for size in range(5)
        for chosen in combinations(range(4), size)
    ]
    assert found.round_ms == pytest.approx(min(each.round_ms for each in every))
    assert found.round_ms <= found.without_ms


def test_times_are_measured_where_they_are_not_given() -> None:
    loaded = tiny_model("llama")
    adapters = ExitAdapters(32, (1, 3))
    found = Operation().measured(loaded, adapters)
    assert found.pass_ms > 0
    assert found.exit_ms >= 0
    assert found.draft_ms == pytest.approx(found.pass_ms / 8)
    assert Operation(pass_ms=500.0).measured(loaded, adapters).pass_ms == 500
    assert replace(OPERATION, draft_ms=0.0).measured(loaded, adapters).draft_ms == 12.5


def test_an_exit_that_costs_more_than_it_saves_is_left_out() -> None:
    free, dear = (
        choose(hits(0.2, 0.6), (5, 10), 20, replace(OPERATION, exit_ms=cost)) for cost in (0, 80)
    )
    assert free.layers
    assert dear.layers == ()
    assert dear.foreseen == 0
    assert dear.round_ms == dear.without_ms


def test_exits_that_foresee_nothing_do_not_pay() -> None:
    assert choose(hits(0.0, 0.0), (5, 10), 20, OPERATION).layers == ()
    nothing = np.zeros((2, 0), bool)
    assert choose(nothing, (5, 10), 20, OPERATION).layers == ()
