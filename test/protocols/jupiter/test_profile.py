"""Stored profiles of devices, and the times read from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jupiter_profiles import BEFORES, LENGTHS, device, facts, profile

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.protocols.jupiter.profile import Profile, least_length, transfer_s


def test_noise_beyond_the_calibration_makes_no_time_negative() -> None:
    falling = replace(
        device("a"),
        lengths=(1, 2),
        befores=(0, 8),
        layer_s=((3.0, 1.0), (2.0, 1.0)),
        pass_s=(2.0, 1.0),
        embedding_s=(0.0, 0.0),
        head_s=(1.0, 0.5),
    )
    assert float(falling.layer(1000, 0)) == 2.0
    assert float(falling.layer(1000, 1000)) == 1.0
    assert float(falling.layer(1, 4)) == 2.0
    assert float(falling.by_length(falling.pass_s, 1000)) == 1.0
    assert float(falling.stage(3, 1000, 1000, first=True, rows=9)) == 4.5


def test_times_are_those_measured_and_lines_between_them() -> None:
    one = device()
    for i, x in enumerate(LENGTHS):
        for j, y in enumerate(BEFORES):
            assert one.layer(x, y) == pytest.approx(one.layer_s[i][j])
    assert one.layer(10, 40) == pytest.approx(
        (one.layer(4, 16) + one.layer(16, 16) + one.layer(4, 64) + one.layer(16, 64)) / 4
    )
    slope = (one.layer(64, 64) - one.layer(16, 64)) / 48
    assert one.layer(100, 64) == pytest.approx(one.layer(64, 64) + 36 * slope)
    lengths, befores = np.array([[1, 7], [30, 64]]), np.array([[0, 5], [70, 2]])
    singly = [float(one.layer(a, b)) for a, b in zip(lengths.flat, befores.flat, strict=True)]
    assert one.layer(lengths, befores).ravel() == pytest.approx(singly)


def test_one_calibration_length_serves_all() -> None:
    only = replace(
        device(),
        lengths=(1,),
        befores=(0,),
        layer_s=((0.5,),),
        pass_s=(0.1,),
        embedding_s=(0.2,),
        head_s=(0.3,),
    )
    assert only.layer(30, 99) == 0.5
    assert only.stage(2, 30, 99, first=True, rows=1) == pytest.approx(1.6)


def test_a_stage_is_its_layers_and_its_ends() -> None:
    one = device()
    inner = 3 * one.layer(16, 16) + one.pass_s[2]
    assert one.stage(3, 16, 16) == pytest.approx(inner)
    assert one.stage(3, 16, 16, first=True) == pytest.approx(inner + one.embedding_s[2])
    assert one.stage(3, 16, 16, rows=4) == pytest.approx(inner + one.head_s[1])
    assert one.stage(3, 0, 16, first=True) == 0, "no tokens, no pass"


def test_the_least_length_uses_every_device_well() -> None:
    quick = device("quick")
    lazy = replace(device("lazy"), layer_s=tuple(tuple(s + 0.02 for s in r) for r in quick.layer_s))
    for share in (0.3, 0.8):
        for one in (quick, lazy):
            b = one.least_length(share)
            x = np.arange(1, LENGTHS[-1] + 1)
            speed = x / one.layer(x, 0)
            assert speed[b - 1] >= share * speed.max() > (speed[b - 2] if b > 1 else 0)
        assert least_length([quick, lazy], share) == lazy.least_length(share)
    assert quick.least_length(0.8) < lazy.least_length(0.8)


def test_the_slower_link_decides() -> None:
    near, far = device("near", mbps=1000.0), replace(device("far", mbps=100.0), latency_s=0.01)
    for one, other in ((near, far), (far, near)):
        occupied, delay = transfer_s(one, other, 12_500)
        assert occupied == pytest.approx(0.001)
        assert delay == pytest.approx(0.0102)


def test_tied_embeddings_are_held_twice_but_by_one_device_once() -> None:
    tied, untied = facts(tied=True), facts(tied=False)
    assert tied.weight_bytes(0, 3) == 6_000_000
    assert tied.weight_bytes(3, 6) == 7_000_000
    assert tied.weight_bytes(0, 6) == 10_000_000
    assert untied.weight_bytes(0, 6) == 13_000_000
    more = tied.stage_bytes(2, 4, lanes=3, tokens=10) - tied.weight_bytes(2, 4)
    assert more == 2 * 1000 * 64 * 3 + 500 * 10


def test_a_profile_is_stored_and_read(tmp_path: Path) -> None:
    stored = profile(1.0, 2.0)
    stored.save(tmp_path / "here" / "profile.json")
    assert Profile.load(tmp_path / "here" / "profile.json") == stored
    again = device("d1", 3.0)
    assert stored.with_device(again).device("d1") == again
    assert len(stored.with_device(device("d2")).devices) == 3


def test_unknown_devices_models_and_versions_are_refused(tmp_path: Path) -> None:
    stored, file = profile(1.0, 2.0), tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="no device 'dd1'.*did you mean d1"):
        stored.device("dd1")
    with pytest.raises(ConfigError, match="measured: d0, d1"):
        stored.device("robot")
    with pytest.raises(ModelError, match="the profile is of model aaaaaaaaaaaa, this is bbbbbb"):
        stored.check_model(replace(facts(), fingerprint="b" * 64))
    stored.check_model(stored.model)
    stored.save(file)
    content = json.loads(file.read_text())
    for change, message in (
        ({"version": 2, "new": 1}, "has version 2, this program reads 1"),
        ({"version": None}, "is no profile"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"devices": [{**content["devices"][0], "memory_bytes": "much"}]}, r"devices\[0\]"),
        ({"devices": [content["devices"][0]] * 2}, "two devices have one name"),
    ):
        file.write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=message):
            Profile.load(file)
    for text in ("{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot read"):
            Profile.load(file)
    with pytest.raises(ConfigError, match="cannot read"):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"lengths": (2, 4, 16, 64)},
        {"lengths": (1, 16, 4, 64)},
        {"befores": (1, 16, 64)},
        {"layer_s": ((1.0,),)},
        {"pass_s": (1.0,)},
        {"head_s": (1.0, 2.0, float("nan"), 4.0)},
        {"embedding_s": (1.0, 2.0, -3.0, 4.0)},
        {"layer_s": ((0.0,) * 3,) * 4},
        {"memory_bytes": 0},
        {"mbps": 0.0},
        {"latency_s": -1.0},
    ],
)
def test_impossible_figures_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="measure the device's profile again"):
        replace(device(), **wrong)


@pytest.mark.parametrize(
    "wrong", [{"kv_bytes": -1}, {"head_bytes": -1}, {"shared_bytes": 10**12}, {"layers": 0}]
)
def test_impossible_sizes_of_a_model_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="measure the profile again"):
        replace(facts(tied=True), **wrong)
