"""The profiler: a fake clock gives back what was put in; real stages give figures that fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_family import write_family
from tiny_models import tiny_folder

from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError
from collab_llm_nodes.models.architectures import ARCHITECTURES
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.trained import trained_files
from collab_llm_nodes.protocols.jupiter.profile import DeviceProfile, Profile
from collab_llm_nodes.protocols.jupiter.profiler import (
    ProfilerConfig,
    link_speed,
    measure,
    model_facts,
)

FACTS = model_facts(ModelConfig(path=str(tiny_folder("llama"))))


class TimedStage:
    """Layers on a clock of their own: each pass takes what a formula says."""

    clock = 0.0
    least = 1
    vocab_size = 50
    device = torch.device("cpu")

    def __init__(self, first: int, last: int) -> None:
        assert last >= self.least or first >= self.least, "features cross to another stage"
        self.first, self.last = first, last
        self.length = 0

    @staticmethod
    def layer(x: int, y: int) -> float:
        return 1e-3 + 1e-4 * x + 1e-6 * x * y

    def open(self) -> TimedStage:
        return self

    def close(self) -> None:
        self.length = -1

    def feed(self, rows: Sequence[int] | torch.Tensor, last: int) -> None:
        x = len(rows)
        assert isinstance(rows, torch.Tensor) == (self.first > 0)
        taken = 5e-4 + (self.last - self.first) * self.layer(x, self.length)
        taken += 2e-5 * x * (self.first == 0) + 3e-4 * last * (self.last == 4)
        TimedStage.clock += taken
        self.length += x


@pytest.mark.parametrize(("architecture", "least"), [("llama", 1), ("qwen3_vl", 2)])
def test_differences_of_stages_are_layers_ends_and_the_constant_part(
    architecture: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedStage, "least", least)
    config = ProfilerConfig(
        "robot",
        lengths=(8, 1, 64, 4096),
        befores=(0, 100, 4096),
        memory_mb=5.0,
        mbps=10.0,
        latency_s=0.001,
    )
    model = ModelConfig(path=str(tiny_folder(architecture)))
    found = measure(config, model, stage_of=TimedStage, clock=lambda: TimedStage.clock)
    assert found.lengths == (1, 8, 64)
    assert found.befores == (0, 100), "4096 does not fit into 1,024"
    assert (found.name, found.memory_bytes, found.mbps) == ("robot", 5_000_000, 10.0)
    for i, x in enumerate(found.lengths):
        for j, y in enumerate(found.befores):
            assert found.layer_s[i][j] == pytest.approx(TimedStage.layer(x, y))
        assert found.pass_s[i] == pytest.approx(5e-4)
        assert found.embedding_s[i] == pytest.approx(2e-5 * x)
        assert found.head_s[i] == pytest.approx(3e-4 * x)


def slowed(slowness: Callable[[int], float]) -> tuple[DeviceProfile, int]:
    """Measure a device whose pass ``n`` takes ``slowness(n)`` times as long; count the loads."""
    loads: list[tuple[int, int]] = []
    passes = 0

    class Slowed(TimedStage):
        def __init__(self, first: int, last: int) -> None:
            super().__init__(first, last)
            loads.append((first, last))

        def feed(self, rows: Sequence[int] | torch.Tensor, last: int) -> None:
            nonlocal passes
            begun = TimedStage.clock
            super().feed(rows, last)
            TimedStage.clock = begun + (TimedStage.clock - begun) * slowness(passes)
            passes += 1

    config = ProfilerConfig("robot", lengths=(1, 8, 64), befores=(0, 100))
    model = ModelConfig(path=str(tiny_folder("llama")))
    found = measure(config, model, stage_of=Slowed, clock=lambda: TimedStage.clock)
    return found, len(loads)


def test_a_steady_device_is_measured_once() -> None:
    quiet, loads = slowed(lambda number: 1.0)
    assert quiet.spread == pytest.approx(0.0, abs=1e-6)
    assert Profile(FACTS, (quiet,)).warnings() == []
    odd, once = slowed(lambda number: 30.0 if number % 20 == 7 else 1.0)  # an interrupt
    assert once == loads
    assert odd.layer_s == pytest.approx(np.array(quiet.layer_s))


def test_a_load_that_passes_is_waited_out() -> None:
    quiet, loads = slowed(lambda number: 1.0)
    rng = np.random.default_rng(1)
    found, more = slowed(lambda number: 1.0 + 4.0 * rng.random() if number < 60 else 1.0)
    assert more == 2 * loads
    assert found.layer_s == pytest.approx(np.array(quiet.layer_s))
    assert found.spread == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    "slowness",
    [
        lambda number: 1.0 + (number * 7919 % 13) / 3,
        lambda number: 1.0 + 0.01 * number,
        lambda number: 5.0 if number // 100 % 2 else 1.0,
    ],
    ids=["passes differ", "grows", "comes and goes"],
)
def test_a_load_that_stays_is_reported(slowness: Callable[[int], float], tmp_path: Path) -> None:
    _, loads = slowed(lambda number: 1.0)
    found, more = slowed(slowness)
    assert more == 3 * loads
    Profile(FACTS, (found,)).save(tmp_path / "lab.json")
    known = Profile.load(tmp_path / "lab.json")
    (warning,) = known.warnings(["robot", "laptop"])
    assert "robot was measured while other programs computed" in warning
    assert known.warnings(["laptop"]) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_real_stages_are_measured(architecture: str) -> None:
    model = ModelConfig(path=str(tiny_folder(architecture)))
    config = ProfilerConfig("here", lengths=(4, 32), befores=(16,), repeats=1)
    found = measure(config, model)
    assert found.lengths == (1, 4, 32)
    assert found.befores == (0, 16)
    assert np.min(found.layer_s) > 0
    assert found.memory_bytes > 1e6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_are_those_that_stages_load(architecture: str, dtype: str) -> None:
    model = ModelConfig(path=str(tiny_folder(architecture)), dtype=dtype)
    facts = model_facts(model)
    for first, last in ((0, 4), (0, facts.first_layers), (2, 3), (2, 4)):
        assert facts.weight_bytes(first, last) == Stage(model, first, last).bytes


def test_drafting_heads_count_as_memory_of_the_head(tmp_path: Path) -> None:
    target = write_family(tmp_path) / "text-target"
    facts = model_facts(ModelConfig(path=str(target)))
    weights, description = trained_files(target, "medusa")
    weights.rename(tmp_path / "away")
    without = model_facts(ModelConfig(path=str(target)))
    (tmp_path / "away").rename(weights)
    width = facts.state_bytes // 4
    assert facts.head_bytes - without.head_bytes == 5 * width**2 * 4
    assert facts.fingerprint != without.fingerprint
    description.write_text(json.dumps({"heads": "many"}))
    with pytest.raises(ModelError, match="export the heads again"):
        model_facts(ModelConfig(path=str(target)))


def test_the_fingerprint_is_of_shapes_and_types() -> None:
    def of(seed: int = 0, **options: Any) -> str:
        return model_facts(ModelConfig(path=str(tiny_folder("llama", seed)), **options)).fingerprint

    assert of() == of(seed=1), "other weights of the same shape take as long"
    assert of() != of(dtype="bfloat16")
    four, three = (
        model_facts(ModelConfig(path=str(tiny_folder("llama", layers=n)))) for n in (4, 3)
    )
    assert four.fingerprint != three.fingerprint


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --name"):
        ProfilerConfig("")
    with pytest.raises(ConfigError, match="cannot be divided"):
        measure(ProfilerConfig("x"), ModelConfig(path=str(tiny_folder("llama", layers=1))))


def test_a_device_that_is_not_there_is_refused() -> None:
    model = ModelConfig(str(tiny_folder("llama")), device="cuda:99")
    with pytest.raises(ModelError, match="device 'cuda:99' cannot be used"):
        measure(ProfilerConfig("robot"), model)


def test_the_speed_of_a_link_is_the_line_through_its_samples() -> None:
    sizes = (1_000, 100_000, 1_000_000)
    speed, delay = link_speed([(size, 0.002 + size * 8e-6 / 250) for size in sizes])
    assert speed == pytest.approx(250)
    assert delay == pytest.approx(0.002)
    with pytest.raises(InvalidInput, match="several sizes"):
        link_speed([(10, 1.0), (10, 2.0)])
    with pytest.raises(InvalidInput, match="did not take longer"):
        link_speed([(10, 2.0), (20, 1.0)])
