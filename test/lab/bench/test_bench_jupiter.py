"""The benchmark of Jupiter: the virtual clock, emulated methods, and the planner's small cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from collab_llm_lab.bench.jupiter import (
    QUICK,
    cases,
    emulated,
    pipelines,
    report,
)
from collab_llm_lab.bench.jupiter.cases import compare, compositions, random_cluster
from collab_llm_lab.bench.jupiter.clock import Clock, Line, Mailbox, Process
from collab_llm_lab.bench.jupiter.clusters import (
    ENV_A,
    ENV_B,
    LATENCY_S,
    LLAMA_7B,
    LLAMA_13B,
    Cluster,
    Llm,
    clusters,
)
from collab_llm_lab.bench.jupiter.collectives import COLLECTIVES
from collab_llm_lab.bench.jupiter.emulated import BOTH, NAIVE, SD, SPEEDS, Bed, bed, systems
from collab_llm_lab.bench.jupiter.pipelines import Stages, World
from collab_llm_lab.bench.jupiter.plots import SYSTEMS, plot_emulated, plot_real
from collab_llm_lab.bench.jupiter.questions import OUTLINED, QUESTIONS, run_router
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.jupiter.estimate import FlowShop, decode_s, makespan
from collab_llm_nodes.protocols.jupiter.partition import Partition, Placement

SMALL = Llm("small", 6, 1024, 2816)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take their nominal time."""
    monkeypatch.setattr(pipelines, "NOISE", 0.0)


def parts_of(cluster: Cluster, *bounds: int) -> tuple[Placement, ...]:
    ends = (*bounds, cluster.model.layers)
    return tuple(
        Placement(name, first, last)
        for name, first, last in zip(cluster.names, (0, *ends), ends, strict=False)
    )


# ---------------------------------------------------------------- the clock


def test_events_happen_in_their_order() -> None:
    clock, told = Clock(), list[str]()

    def process(name: str, *waits: float) -> Process:
        for wait in waits:
            yield wait
            told.append(f"{name} {clock.now:g}")

    clock.start(process("a", 1.0, 2.0))
    clock.start(process("b", 2.0, 1.0))
    assert clock.run() == 3.0
    assert told == ["a 1", "b 2", "a 3", "b 3"]


def test_a_line_sends_one_message_after_the_other() -> None:
    clock, got = Clock(), list[tuple[object, float]]()
    line = Line(clock, bytes_per_s=100.0, latency_s=0.25)

    def read() -> Process:
        for _ in range(3):
            message = yield line.arrived
            got.append((message, clock.now))

    clock.start(read())
    for name, size in (("a", 100), ("b", 50), ("c", 0)):
        line.put(name, size)
    clock.run()
    assert got == [("a", 1.25), ("b", 1.75), ("c", 1.75)]
    assert line.bytes == 150


def test_a_mailbox_keeps_messages_until_they_are_read() -> None:
    box, got = Mailbox(), list[object]()
    box.put(1)
    box.put(2)
    box.read(got.append)
    box.read(got.append)
    box.read(got.append)
    assert got == [1, 2]
    box.put(3)
    assert got == [1, 2, 3]


# ---------------------------------------------------------------- pipelines


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("hardware", [ENV_A, ENV_B])
@pytest.mark.parametrize("lengths", [(64,), (20, 20, 24), (7, 1, 30, 16, 10)])
def test_an_emulated_prefill_takes_the_flow_shops_makespan(
    hardware: Any, lengths: tuple[int, ...]
) -> None:
    cluster = Cluster("c", SMALL, hardware[-3:], 100)
    parts = parts_of(cluster, 1, 4)
    x = np.array(lengths)
    y = x.cumsum() - x
    rows = (np.arange(len(x)) == len(x) - 1).astype(int)
    stage_s = np.stack(
        [
            device.stage(SMALL, part.last - part.first, x, y, rows if m == 2 else 0)
            for m, (part, device) in enumerate(zip(parts, cluster.hardware, strict=True))
        ],
        1,
    )
    link_s = np.repeat((x * SMALL.state_bytes / cluster.bytes_per_s)[:, None], 2, 1)
    shop = makespan(FlowShop(stage_s, link_s, [2 * LATENCY_S] * 2))
    back = 4 / cluster.bytes_per_s + 2 * LATENCY_S
    world = World(cluster, 0)
    assert Stages(world, parts).prefill(lengths) == pytest.approx(float(shop) + back)
    assert world.bytes == 2 * sum(lengths) * SMALL.state_bytes + 4, "Table I: (N - 1) S H"


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_emulated_decoding_takes_what_the_formula_says(lanes: int) -> None:
    cluster = Cluster("c", SMALL, ENV_B[1:], 100)
    parts = parts_of(cluster, 2, 4)
    taken = Stages(World(cluster, 0), parts).decode(3, 6, 0.0, 50, lanes)
    stage_s = np.array(
        [
            float(device.stage(SMALL, 2, 6, 50, 11 if m == 2 else 0))
            for m, device in enumerate(cluster.hardware)
        ]
    )
    link_s = np.full(2, 6 * SMALL.state_bytes / cluster.bytes_per_s)
    latency = 6 * LATENCY_S + 4 / cluster.bytes_per_s
    assert taken == pytest.approx(decode_s(stage_s, link_s, latency, lanes, 3))


def test_lanes_that_share_passes_are_faster_than_lanes_in_turn() -> None:
    cluster = Cluster("c", SMALL, ENV_A, 1000)
    stages = parts_of(cluster, 2, 3, 5)

    def seconds(together: int) -> float:
        return Stages(World(cluster, 0), stages).decode(4, 2, 1.0, 100, 16, together)

    assert seconds(4) < 0.8 * seconds(1)
    assert seconds(16) > seconds(4), "all in one pass leave stages idle"


# ---------------------------------------------------------------- collectives


def table_one(model: Llm, tokens: int, devices: int) -> dict[str, int]:
    """Return the numbers that methods exchange per sequence, by Table I of paper 004."""
    states = tokens * model.hidden
    return {
        "sp": 2 * model.layers * states,
        "tp": 4 * model.layers * states,
        "pipeline": (devices - 1) * states,
    }


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_bytes_sent_are_those_of_table_one(count: int) -> None:
    cluster = Cluster("c", SMALL, ENV_A[:count], 100)
    tokens = 120
    table = table_one(SMALL, tokens, count)
    sent = {}
    for method in COLLECTIVES:
        world = World(cluster, 0)
        method.run(world, tokens, 0)
        # Per device, and as if a ring had infinitely many: Table I leaves (N - 1) / N out.
        sent[method.name] = world.bytes / count * count / (count - 1) / 2
    assert sent["sp"] == pytest.approx(table["sp"])
    assert sent["tp"] == pytest.approx(table["tp"])
    assert sent["detransformer"] == pytest.approx(table["tp"] / 2)
    assert sent["galaxy"] == pytest.approx(table["tp"])
    assert table["tp"] == 2 * table["sp"]
    assert table["pipeline"] == (count - 1) * tokens * SMALL.hidden


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("method", COLLECTIVES, ids=lambda method: method.name)
@pytest.mark.parametrize("hardware", [ENV_A, ENV_B, ENV_B[:1]])
@pytest.mark.parametrize("x", [1, 96])
def test_predictions_of_collectives_are_exact_without_noise(
    method: Any, hardware: Any, x: int
) -> None:
    cluster = Cluster("c", SMALL, hardware, 100)
    run = method.run(World(cluster, 0), x, 40)
    assert method.predicted_s(cluster, x, 40) == pytest.approx(run, rel=1e-6)


def test_a_ring_of_equal_devices_takes_the_closed_form() -> None:
    cluster = Cluster("c", SMALL, ENV_A, 100)
    tp = next(method for method in COLLECTIVES if method.name == "tp")
    device, x = ENV_A[0], 96
    compute = device.attention(SMALL, x, 0, 0.25) + device.mlp(SMALL, x, 0.25)
    reduce = 6 * (x * SMALL.state_bytes / 4 / cluster.bytes_per_s + 2 * LATENCY_S)
    whole = 6 * (compute + 2 * reduce) + device.head(SMALL, 1) / 4
    assert tp.predicted_s(cluster, x, 0) == pytest.approx(float(whole))


def test_memory_is_where_the_paper_says_it_is_short() -> None:
    fits = {
        (cluster.name, method.name): method.fits(cluster, 324)
        for cluster in clusters(100)
        for method in COLLECTIVES
    }
    assert {name for name, fit in fits.items() if not fit} == {
        ("env_a_13b", "sp"),
        ("env_b_13b", "sp"),
    }
    alone = bed(Cluster("one", LLAMA_13B, ENV_A[:1], 100), 0)
    assert all("out_of_memory" in row for row in systems(alone).values())


# ---------------------------------------------------------------- the emulated part


@pytest.fixture(scope="module")
def here() -> Bed:
    return bed(Cluster("env_b", SMALL, ENV_B, 100), 3)


@pytest.fixture(scope="module")
def rows(here: Bed) -> dict[str, Any]:
    return systems(here)


def test_every_system_has_its_figures(rows: dict[str, Any]) -> None:
    assert set(rows) == set(SYSTEMS)
    for name, row in rows.items():
        assert row["total_s"] == pytest.approx(
            row["prefill_s"] + row["decode_ms"] * emulated.ANSWER / 1e3
        ), name
        assert row["predicted_s"] == pytest.approx(row["total_s"], rel=0.1), name
    assert rows["jupiter"]["total_s"] < rows["equal_split"]["total_s"]
    assert rows["edgeshard"]["total_s"] <= rows["pipeline"]["total_s"]
    found = emulated.errors({"env_b": {"100": rows}})
    assert len(found) == 2 * len(SYSTEMS)
    row = rows["tp"]
    expected = row["predicted_prefill_s"] / row["prefill_s"] - 1
    assert found["env_b.100.tp.prefill_s"] == pytest.approx(expected)


def test_planning_layers_helps_where_devices_differ(here: Bed) -> None:
    found = emulated.ablation(here, 260)
    assert found["planned_layers_planned_parts"] < found["equal_layers_planned_parts"]
    assert found["equal_layers_equal_parts"] < found["one_device_at_a_time"]


def test_fewer_points_are_used_where_memory_is_short(here: Bed) -> None:
    lanes = {
        memory: emulated.jupiter(
            replace(
                here,
                profile=replace(
                    here.profile,
                    devices=tuple(
                        replace(d, memory_bytes=int(memory * 1e6)) for d in here.profile.devices
                    ),
                ),
            )
        )[1]
        for memory in (10, 115, 1000)
    }
    assert lanes[10] == emulated.OUT_OF_MEMORY
    assert lanes[115]["points"] < lanes[1000]["points"] == BOTH.points


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_plot_and_the_tables(
    here: Bed, rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        f"{env}{suffix}{count}"
        for env in ("env_a", "env_b")
        for suffix in ("", "_13b")
        for count in ("", "_1", "_2", "_3")
    ]
    by_speed = {str(speed): {**rows, "sp": emulated.OUT_OF_MEMORY} for speed in SPEEDS}
    results: dict[str, Any] = {
        "emulated": dict.fromkeys(names, by_speed),
        "ablation": {"env_b": {"260": emulated.ablation(here, 260)}},
        "decoding": {"naive": 1000 * NAIVE.run_s(here.stages(here.equal_layers()), 260) / 64},
        "sweep": {"64": emulated.swept(here, 64)},
        "points": emulated.points(here),
        "timeline": emulated.timeline(here),
        "passes": {"sd": emulated.passes(here, SD), "both": emulated.passes(here, BOTH)},
        "prefill_by_length": {"64": {"pipeline_s": 2.0, "jupiter_s": 1.0, "speedup": 2.0}},
    }
    results["goals"] = emulated.goals(results)
    plot_emulated(results, tmp_path / "jupiter.png")
    assert (tmp_path / "jupiter.png").stat().st_size > 20_000

    def run(seed: int, told: Callable[[str], None], *, brief: bool) -> dict[str, Any]:
        told(f"seed {seed}, brief: {brief}")
        return results

    monkeypatch.setattr(report, "run_emulated", run)
    console = Console(record=True, width=160)
    found = report.run_jupiter(
        parts=["emulated"],
        sizes=QUICK,
        model="",
        seed=9,
        console=console,
        keep=lambda found: None,
    )
    assert found["ok"] == (results["goals"]["largest_error"] <= 0.1)
    told = console.export_text()
    assert "seed 9, brief: True" in told
    assert "out of memory; 53.5" in told, "beside what the paper prints"


@pytest.mark.parametrize("present", [("prefill_64",), ("decode", "quality"), ()])
def test_only_what_was_measured_is_drawn(present: tuple[str, ...], tmp_path: Path) -> None:
    seconds = dict.fromkeys(
        ("single_s", "two_threads_s", "pipeline_s", "jupiter_s", "ceiling_s"), 1.0
    )
    scored = {"naive": {"score": 0.5}, "outline": {"score": 0.25}, "router": {"score": 0.5}}
    every: dict[str, Any] = {
        "decode": {"speedup": {"naive": 1.0, "sd": 2.0}},
        "quality": {"generic": scored, "math": scored},
    }
    results = {name: every[name] for name in present if name in every}
    results["real"] = {"stages": 2} | ({"prefill_64": seconds} if "prefill_64" in present else {})
    plot_real(results, tmp_path / "real.png")
    assert (tmp_path / "real.png").exists() == bool(present)


def test_a_brief_run_leaves_clusters_out() -> None:
    brief = {cluster.name for cluster in emulated.all_clusters(brief=True)}
    assert brief == {"env_a", "env_b"}
    whole = emulated.all_clusters(brief=False)
    assert len({(cluster.name, cluster.mbps) for cluster in whole}) == len(whole) == 24
    assert brief < {cluster.name for cluster in whole}


# ---------------------------------------------------------------- planner and router


def test_compositions_are_all_and_each_once() -> None:
    found = compositions(9, 3, 5)
    columns = {tuple(int(n) for n in column if n) for column in found.T}
    assert columns == {(9,), (3, 6), (4, 5), (5, 4), (6, 3), (3, 3, 3)}
    assert found.shape == (5, 6)
    assert compositions(2, 3, 4).shape == (4, 1)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_small_case_equals_brute_force(devices: int) -> None:
    rng = np.random.default_rng(devices)
    found = [compare(random_cluster(rng, devices, 4, 32)) for _ in range(3)]
    assert all(case.equal for case in found)
    assert all(case.paper_gap >= -1e-9 and case.plan_gap >= -1e-9 for case in found)
    assert sum(case.plan_gap for case in found) <= sum(case.paper_gap for case in found)


def test_a_wrong_partition_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_device(cost: Any) -> list[Partition]:
        return [Partition(float(cost[0][0, -1]), (0,), (0, 4))]

    monkeypatch.setattr(cases, "best_partitions", one_device)
    cluster = random_cluster(np.random.default_rng(2), 2, 4, 32)
    ample = tuple(replace(d, memory_bytes=10**12) for d in cluster.devices)
    assert not compare(replace(cluster, devices=ample)).equal


def test_the_router_errs_seldom() -> None:
    found = run_router(1, samples=30)
    assert set(QUESTIONS) < set(found)
    for name, row in found.items():
        if name != "error":
            right = row["questions"] - row["wrong"]
            assert right == (
                row["questions"] - row["declined"] if name in OUTLINED else row["declined"]
            )
    assert found["error"] < 0.1


def test_the_command_runs_parts(tmp_path: Path) -> None:
    options = ["bench", "jupiter", "--part", "planner", "--part", "router", "--cases", "2"]
    options += ["--quick"]
    found = CliRunner().invoke(app, [*options, "--json", str(tmp_path / "jupiter.json")])
    assert found.exit_code == 0, found.output
    results = json.loads((tmp_path / "jupiter.json").read_text())
    assert results["planner"]["cases"] == results["planner"]["equal_to_brute_force"] == 2
    assert results["planner"]["seconds_16x4x512"] > 0
    assert "emulated" not in results
    with pytest.raises(ConfigError, match="did you mean planner"):
        CliRunner().invoke(app, ["bench", "jupiter", "--part", "planer"], catch_exceptions=False)


@pytest.fixture
def real_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results that the parts with workers find; what is raised instead, where it is an error."""
    found: dict[str, Any] = {
        "decode": {"real": {"mismatches": 0}, "stages": 4},
        "death": {
            "worker_death": {"kill": {"identical": True, "detected_s": 0.1, "restored_s": 0.2}}
        },
    }

    def find(part: str) -> Any:
        if isinstance(found[part], Exception):
            raise found[part]
        return found[part]

    monkeypatch.setattr(report, "run_decode", lambda *given, **options: find("decode"))
    monkeypatch.setattr(report, "run_death", lambda *given, **options: find("death"))
    return found


def run_parts(file: Path, *parts: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command; return its status, its output and its results."""
    options = ["bench", "jupiter", "--quick", "--json", str(file)]
    told = CliRunner().invoke(app, [*options, *(word for p in parts for word in ("--part", p))])
    return told.exit_code, told.output, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("mismatches", "identical", "ok"), [(0, True, True), (1, True, False), (0, False, False)]
)
def test_real_runs_decide_the_exit(
    mismatches: int, identical: bool, ok: bool, real_parts: dict[str, Any], tmp_path: Path
) -> None:
    real_parts["decode"]["real"]["mismatches"] = mismatches
    real_parts["death"]["worker_death"]["kill"]["identical"] = identical
    status, told, results = run_parts(tmp_path / "jupiter.json", "decode", "death")
    assert (status == 0) == results["ok"] == ok
    assert ("ANOTHER ANSWER" in told) == (not identical)
    assert set(results["seconds"]) == {"decode", "death"}


def test_a_part_that_fails_loses_no_other(real_parts: dict[str, Any], tmp_path: Path) -> None:
    real_parts["decode"] = ConfigError("no such model", field="--model")
    status, told, results = run_parts(tmp_path / "jupiter.json", "router", "decode", "death")
    assert status == 1
    assert results["failed"] == {"decode": "ConfigError: --model: no such model"}
    assert "FAILED   decode: ConfigError: --model: no such model" in told
    assert results["router"]["coding"]["questions"] == 10
    assert results["worker_death"]["kill"]["identical"]


def test_a_part_measured_again_leaves_the_others(
    real_parts: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "jupiter.json"
    whole = {
        "planner": {"cases": 3, "equal_to_brute_force": 3},
        "goals": {"largest_error": 0.04},
        "real": {"prefill_512": {"speedup": 1.4}, "mismatches": 2},
        "stages": 2,
        "failed": {"decode": "x"},
        "seconds": {"planner": 1.0, "prefill": 2.0, "decode": 3.0},
        "machine": {"cores": 128},
        "ok": False,
    }
    file.write_text(json.dumps(whole))
    status, _, results = run_parts(file, "decode")
    assert status == 0
    assert results["ok"]
    for name in ("planner", "goals", "machine"):
        assert results[name] == whole[name]
    assert results["real"] == {"prefill_512": {"speedup": 1.4}, "mismatches": 0}
    assert results["stages"] == 4
    assert results["failed"] == {}
    assert set(results["seconds"]) == {"planner", "prefill", "decode"}
    assert list(results["later"]) == ["decode"]
    assert results["later"]["decode"]["machine"]["cores"] != 128

    real_parts["decode"] = ConfigError("no such model", field="--model")
    status, _, again = run_parts(file, "decode")
    assert status == 1
    assert not again["ok"]
    assert again["real"] == results["real"]
    assert again["later"] == results["later"]
    assert list(again["failed"]) == ["decode"]


def test_the_results_are_written_after_each_part(
    real_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, seen = tmp_path / "jupiter.json", dict[str, Any]()

    def interrupted(*given: Any, **options: Any) -> dict[str, Any]:
        seen.update(json.loads(file.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run_death", interrupted)
    options = ["bench", "jupiter", "--part", "decode", "--part", "death", "--json", str(file)]
    assert CliRunner().invoke(app, options).exit_code != 0
    assert seen["real"] == {"mismatches": 0}
    assert json.loads(file.read_text()) == seen


def test_shapes_are_those_of_llama() -> None:
    for model, billions in ((LLAMA_7B, 6.74), (LLAMA_13B, 13.0)):
        weights = model.layers * (model.attention_weights + model.mlp_weights)
        assert (weights + 2 * model.head_weights) / 1e9 == pytest.approx(billions, rel=0.01)
