"""``collab-llm jupiter``: a profile of two devices, and a plan made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_folder
from typer.testing import CliRunner

from collab_llm_lab.bench.jupiter.local_workers import local_workers
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import CollabError, InvalidInput, ModelError
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.jupiter.planner import JupiterPlan
from collab_llm_nodes.protocols.jupiter.profile import Profile


def run(*options: str) -> str:
    """Return the output of the command with these words."""
    found = CliRunner().invoke(app, ["jupiter", *options], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def measure(file: Path, name: str, layers: int = 4) -> str:
    model = str(tiny_folder("llama", layers=layers))
    return run("profile", "--model", model, "--name", name, "--repeats", "1", "--json", str(file))


def test_devices_are_measured_and_a_plan_is_made(tmp_path: Path) -> None:
    file, made, picture = (tmp_path / name for name in ("lab.json", "plan.json", "plan.png"))
    assert "robot: " in measure(file, "robot")
    measure(file, "laptop")
    measure(file, "robot")
    profile = Profile.load(file)
    assert [device.name for device in profile.devices] == ["robot", "laptop"]
    output = run("plan", str(file), "--lanes", "2", "--json", str(made), "--plot", str(picture))
    read = JupiterPlan.load(made)
    assert read.fingerprint == profile.model.fingerprint
    assert all(part.device in output for part in read.placements)
    assert read.config.lanes == 2
    assert picture.stat().st_size > 5000
    with pytest.raises(InvalidInput, match="the model's context has"):
        run("plan", str(file), "--prompt-tokens", "99999")
    output = run("plan", str(file), "--device", "laptop", "--answer-tokens", "0")
    assert "laptop: layers 0 to 3" in output


def test_a_profile_is_of_one_model(tmp_path: Path) -> None:
    measure(tmp_path / "lab.json", "robot")
    with pytest.raises(ModelError, match="measure a profile with this model"):
        measure(tmp_path / "lab.json", "robot", layers=3)


def test_the_link_to_a_worker_is_measured(tmp_path: Path) -> None:
    model = str(tiny_folder("llama", layers=4))
    file = tmp_path / "lab.json"
    with local_workers(1, model) as (worker,):
        words = ["--model", model, "--name", "robot", "--repeats", "1", "--json", str(file)]
        output = run("profile", *words, "--link", worker.address)
    (device,) = Profile.load(file).devices
    assert f"{worker.address}: {device.mbps:.0f} Mbit/s" in output.replace("\n", " ")
    assert device.mbps != 1000.0
    assert 0 <= device.latency_s < 1


def test_a_worker_that_is_not_there_is_an_error() -> None:
    model = str(tiny_folder("llama", layers=4))
    words = ["profile", "--model", model, "--name", "robot", "--link", f"127.0.0.1:{free_port()}"]
    with pytest.raises(CollabError, match="jupiter worker"):
        run(*words)
