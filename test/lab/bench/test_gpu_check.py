"""``scripts/gpu_check``: its steps run on any CPU, and what goes wrong in one is recorded."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gpu_steps
import pytest
import torch
from folders import ROOT
from transformers import Qwen2VLForConditionalGeneration
from waiting import gone

from collab_llm_lab.bench.gpu import environment, exactness, graph, runner
from collab_llm_lab.bench.gpu.environment import NEEDS
from collab_llm_lab.bench.gpu.forms import TINY, TRUE, Sizes
from collab_llm_lab.bench.gpu.hardware import worst
from collab_llm_lab.bench.gpu.lab import Lab
from collab_llm_lab.bench.gpu.runner import (
    FAILED,
    OK,
    SKIPPED,
    STEPS,
    Step,
    run_steps,
    summary,
    write,
)
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.loading import LoadedModel

SCRIPT = ROOT / "scripts" / "gpu_check"


def _hidden_modules() -> list[str]:
    """Return all installed modules but those of ``NEEDS`` and of what these require."""
    wanted, todo = set[str](), [need.package for need in NEEDS]
    while todo:
        try:
            package = importlib.metadata.distribution(todo.pop())
        except importlib.metadata.PackageNotFoundError:
            continue  # for other systems, or other versions of Python
        if package.name not in wanted:
            wanted.add(package.name)
            for required in package.requires or ():
                if "extra ==" not in required:
                    todo += re.findall(r"^[\w.-]+", required)
    owners = importlib.metadata.packages_distributions()
    return [m for m, own in owners.items() if not wanted.intersection(own)]


@pytest.mark.slow
@pytest.mark.timeout(520)
def test_all_steps_run_on_a_bare_machine(tmp_path: Path) -> None:
    ours = ("collab_llm_nodes", "collab_llm_lab")
    hidden = [name for name in _hidden_modules() if name not in ours]
    assert {"mujoco", "matplotlib", "openai", "rclpy"} <= set(hidden)
    file = tmp_path / "found.json"
    bare = str(ROOT / "test" / "support" / "bare_machine")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--json", str(file)],
        env={**os.environ, "HIDDEN_MODULES": ",".join(hidden), "PYTHONPATH": bare},
        capture_output=True,
        text=True,
        timeout=500,  # a minute of processor time, perhaps on a busy machine
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["form"] == "tiny"
    assert found["device"] == "cpu"
    assert list(found["steps"]) == [step.name for step in STEPS]
    for name, record in found["steps"].items():
        assert record["status"] == OK, (name, record)
        assert all(verdict["ok"] for verdict in record["verdicts"].values())
        assert record["figures"], f"{name} finds something"
    for row in ("step ", *(f"{step.name} " for step in STEPS)):
        assert any(line.startswith(row) for line in done.stdout.splitlines()), said
    steps = found["steps"]
    verdicts = steps["exact"]["verdicts"]
    for prompt in ("text", "picture"):
        assert verdicts[f"{prompt}: greedy answer is that of generate"]["tokens"] == TINY.answer
        assert {f"{prompt}: {what}" for what in ("exits", "forked", "rolled back")} <= set(verdicts)
    assert set(steps["stages"]["verdicts"]) == {"prompt", "tree", "retained", "rolled back"}
    assert steps["passes"]["figures"]["64 sessions of 5 rows"]["ms"] > 0
    assert steps["graph"]["figures"]["captured"] is False
    assert len(steps["kernels"]["verdicts"]) == 6
    assert steps["serving"]["figures"]["8 robots, sampled"]["rounds"] > 0


@pytest.mark.parametrize(
    ("sizes", "weights"), [(TRUE.small, 2_208_985_600), (TRUE.large, 8_291_375_616)]
)
def test_the_true_configurations_are_those_of_qwen2_vl(sizes: Sizes, weights: int) -> None:
    lab = Lab(TRUE, torch.device("meta"), lambda message: None)
    with lab.device:
        model = Qwen2VLForConditionalGeneration._from_config(lab.configuration(sizes))
    assert sum(weight.numel() for weight in model.parameters()) == weights
    ids = lab.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|vision_start|>", "<|image_pad|>"])
    assert ids == [151_645, 151_652, 151_655]


def _wrong_engine(loaded: LoadedModel, **options: Any) -> Engine:
    """Return an engine with one matrix that is not the model's."""
    mlp: Any = decoder_parts(loaded.model).layers[1].mlp
    with torch.no_grad():
        mlp.down_proj.weight.mul_(1.5)
    return Engine(loaded, **options)


@pytest.mark.parametrize("step", [exactness.exact, exactness.precision])
@pytest.mark.parametrize("sound", [True, False])
def test_a_wrong_engine_is_found(step: Any, sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    made = Engine if sound else _wrong_engine
    monkeypatch.setattr("collab_llm_lab.bench.gpu.lab.Engine", made)
    step(Lab(TINY, torch.device("cpu"), heard.append))
    ok = {m["verdict"]: m["facts"]["ok"] for m in heard if "verdict" in m}
    # These compare the engine with itself, or tokens, which may be the same by chance.
    spared = ("in one pass", "in one call", "the same passes round alike", "greedy", "bucket")
    judged = [right for name, right in ok.items() if not any(part in name for part in spared)]
    assert judged
    assert set(judged) == {sound}
    assert all(ok.values()) == sound


def _steps(*names: str, seconds: float = 60.0) -> list[Step]:
    return [Step(name, f"{gpu_steps.__name__}:{name}", seconds, "a test") for name in names]


def _run(
    steps: list[Step], file: Path, budget_s: float = 500.0
) -> tuple[dict[str, Any], list[str]]:
    results: dict[str, Any] = {"steps": {}}
    said: list[str] = []
    run_steps(
        steps,
        gpu_steps.FakeLab,
        budget_s=budget_s,
        results=results,
        keep=lambda found: write(file, found),
        say=said.append,
    )
    assert json.loads(file.read_text(encoding="utf-8"))["steps"].keys() == results["steps"].keys()
    return results["steps"], said


def test_what_goes_wrong_in_a_step_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_START_S", 0.0)
    names = ("works", "wrong", "raises", "dies")
    steps = [*_steps(*names), *_steps("hangs", seconds=3.0), *_steps("fails_in_part")]
    last = Step("last", f"{gpu_steps.__name__}:works", 60.0, "a test")
    found, said = _run([*steps, last], tmp_path / "found.json")
    assert [record["status"] for record in found.values()] == [OK, *[FAILED] * 5, OK]
    assert found["raises"]["error"] == "RuntimeError: no kernel image"
    assert any("RuntimeError: no kernel image" in line for line in found["raises"]["log"])
    assert f"status {-signal.SIGKILL}" in found["dies"]["error"]
    assert "the last words" in found["dies"]["log"]
    assert "took longer than 6 s" in found["hangs"]["error"]
    assert any("in hangs" in line for line in found["hangs"]["log"]), "its stack is in the log"
    for name in ("raises", "dies", "hangs"):
        assert found[name]["figures"], "what was found before is kept"
    assert gone(found["hangs"]["figures"]["pid"]), "its child is ended, too"
    pids = [found[name]["figures"]["pid"] for name in ("works", "fails_in_part", "last")]
    assert len(set(pids)) == 3, "no step uses a device on which one before has failed"
    assert said[1].startswith("FAILED")
    assert "wrong: sound" in said[1]
    table = "\n".join(summary({"steps": found}))
    assert "no kernel image" in table
    file = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert file["steps"]["wrong"]["verdicts"]["sound"] == {"ok": False, "found": "nan"}


def test_a_worker_that_cannot_begin_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further one would say the same after some seconds."""
    monkeypatch.setattr(gpu_steps, "FakeLab", gpu_steps.NoLab)
    found, _ = _run(_steps("works", "wrong"), tmp_path / "found.json")
    assert list(found) == ["works"]
    assert found["works"]["error"] == "ImportError: No module named 'torch'"


def test_warnings_of_the_engine_are_recorded(tmp_path: Path) -> None:
    """Without kernels or graphs it is right, and slow."""
    found, said = _run(_steps("warns", "works"), tmp_path / "found.json")
    assert found["warns"]["warnings"] == ["no graphs"]
    assert "WARNING no graphs" in said[0]
    assert "warnings" not in found["works"]


def test_a_step_that_has_spoilt_the_device_leaves_it_to_no_other(tmp_path: Path) -> None:
    found, _ = _run(_steps("spoils", "works"), tmp_path / "found.json")
    assert [record["status"] for record in found.values()] == [OK, OK]
    assert found["spoils"]["figures"] != found["works"]["figures"], "two processes"


def test_a_result_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN compares false with everything, and so does not become the largest error by itself."""
    assert math.isnan(worst([1e-6, math.nan, 2e-6]))
    assert math.isnan(worst([]))
    assert worst([1e-6, 2e-6]) == 2e-6
    heard: list[dict[str, Any]] = []
    run = Engine.run

    def spoilt(self: Engine, feeds: Any, **options: Any) -> Any:
        results: Any = run(self, feeds, **options)
        if len(results) == 8:
            results[3] = results[3] * math.nan
        return results

    monkeypatch.setattr(Engine, "run", spoilt)
    exactness.exact(Lab(TINY, torch.device("cpu"), heard.append))
    wrong = [m["verdict"] for m in heard if "verdict" in m and not m["facts"]["ok"]]
    kinds = ("long", "short")
    assert wrong == [f"8 {kind} sessions in one pass are as alone" for kind in kinds]


def test_the_layer_loop_takes_heads_as_cuda_lays_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def as_on_cuda(*args: Any, **options: Any) -> torch.Tensor:
        return attend(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", as_on_cuda)
    heard: list[dict[str, Any]] = []
    graph.graph(Lab(TINY, torch.device("cpu"), heard.append))
    verdicts = [m["facts"]["ok"] for m in heard if "verdict" in m]
    assert verdicts
    assert all(verdicts), heard


def test_steps_share_a_worker_while_all_is_well(tmp_path: Path) -> None:
    steps = _steps("works", "wrong")
    found, _ = _run([*steps, Step("again", steps[0].function, 60.0, "")], tmp_path / "found.json")
    assert found["works"]["figures"] == found["again"]["figures"], "one process: one number"


def test_what_does_not_fit_the_budget_is_skipped(tmp_path: Path) -> None:
    steps = [*_steps("raises", seconds=100.0), *_steps("works", seconds=10.0)]
    found, said = _run(steps, tmp_path / "found.json", budget_s=60.0)
    assert [record["status"] for record in found.values()] == [SKIPPED, OK]
    assert said[0].startswith(SKIPPED)


def test_the_status_says_whether_a_step_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from collab_llm_lab.bench.gpu import __main__ as command

    def run(steps: Any, make_lab: Any, *, results: dict[str, Any], **_: Any) -> None:
        for step in steps:
            results["steps"][step.name] = {
                "status": statuses[step.name],
                "seconds": 1.0,
                "figures": {},
                "verdicts": {},
            }

    monkeypatch.setattr(runner, "run_steps", run)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--steps", "exact, passes"])
    monkeypatch.chdir(tmp_path)
    for exact, passes, code in (
        (OK, OK, 0),
        (SKIPPED, OK, 0),
        (FAILED, OK, 1),
        (SKIPPED, SKIPPED, 1),
    ):
        statuses = {"exact": exact, "passes": passes}
        assert command.main() == code
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--steps", "exat"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no step 'exat'" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    assert "--json" in capsys.readouterr().err, "said before any minute is spent"


def test_old_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.lacking() == []
    versions = {"torch": "2.9.1+cu130", "transformers": "5.17.0", "protobuf": "7.35.0"}

    def version(name: str) -> str:
        if name == "grpcio-health-checking":
            raise importlib.metadata.PackageNotFoundError
        return versions.get(name, "9999.1")

    monkeypatch.setattr(environment, "version", version)
    assert [(need.package, found) for need, found in environment.lacking()] == [
        ("torch", "2.9.1+cu130"),
        ("protobuf", "7.35.0"),
        ("grpcio-health-checking", ""),
    ]
    assert "grpcio-health-checking: missing, wants >= 1.85.1" in environment.describe()["warnings"]


def test_wheels_go_before_what_is_installed(tmp_path: Path) -> None:
    facts = "prometheus_client-2000.1.dist-info"
    with zipfile.ZipFile(tmp_path / "prometheus_client-2000.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("prometheus_client/__init__.py", "")
        wheel.writestr(
            f"{facts}/METADATA", "Metadata-Version: 2.1\nName: prometheus-client\nVersion: 2000.1\n"
        )
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    asked = [sys.executable, str(SCRIPT), "--wheels", str(tmp_path), "--needs"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("prometheus-client")]
    assert line.split() == ["prometheus-client", ">=", "0.20", "2000.1", "ok"]
    assert "transformers==5.23.0" in done.stdout
