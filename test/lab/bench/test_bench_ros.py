"""The ROS benchmark runs, its figures agree, and it would notice a leak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from collab_llm_lab.bench import ros
from collab_llm_lab.bench.ros import MAX_SLOPE, MODES, NODES, Sample, growth_of, run_ros

ROUNDS = 1000


def grown(slope: float, *, noise: float = 0.0, later: float = 1.0) -> dict[str, object]:
    """A report on a process of 100 MB that grows by ``slope`` byte/round; the last rounds take
    ``later`` times as long as the first. The machine becomes busier all the time."""
    return growth_of(
        [
            Sample(
                rounds=n,
                rss={"leaky": int(1e8 + slope * n + noise * (-1) ** n), "calm": 10**7},
                tasks={"leaky": 1},
                round_s=(0.02 if n < ROUNDS // 2 else 0.02 * later) * (1 + n / ROUNDS),
                reference_s=0.01 * (1 + n / ROUNDS),
            )
            for n in range(25, ROUNDS + 1, 25)
        ]
    )


def test_a_leak_and_a_slowdown_are_noticed() -> None:
    assert grown(0.0, noise=2e4)["bounded"]
    assert grown(0.5 * MAX_SLOPE)["bounded"]
    leak = grown(2 * MAX_SLOPE)
    assert not leak["bounded"]
    assert leak["slope"] == pytest.approx(2 * MAX_SLOPE, rel=0.01)
    assert not grown(0.0, later=1.5)["bounded"]


@pytest.mark.ros
@pytest.mark.parametrize(
    ("modes", "rounds"),
    [(("cache", "push_ahead"), 60), pytest.param(MODES, 300, marks=pytest.mark.exhaustive)],
)
def test_the_benchmark_measures_what_it_names(
    modes: Sequence[str], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    for name in ("ROS_AUTOMATIC_DISCOVERY_RANGE", "ROS_DOMAIN_ID"):  # run_ros sets its own
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ros, "SAMPLES", 10)
    monkeypatch.setattr(ros, "MODES", {name: MODES[name] for name in modes})
    plot = tmp_path / "ros.png"
    results = run_ros(
        answers=1,
        rounds=rounds,
        standing_s=2.0,
        seed=3,
        points={"as_is": 0.0},
        plot=plot,
        console=Console(quiet=True),
    )
    rows = results["points"]["as_is"]
    assert set(rows) == set(modes)
    for row in rows.values():
        assert row["rounds"] > 0
        assert row["round_ms"]["without_ros"] > 0
        added = row["added_ms_per_round"]
        assert added["p10"] <= added["median"] <= added["p90"]
        assert sum(row["age_parts_ms"].values()) == pytest.approx(row["age_ms"]["p50"])
    assert results["added_ms_per_round"] == rows["cache"]["added_ms_per_round"]
    router = results["router"]
    assert router["direct_ms"] > 0
    assert router["routed_ms"] > 0
    assert router["answers"] == 1
    assert router["added_ms"] == pytest.approx(router["routed_ms"] - router["direct_ms"])
    standing = results["standing"]
    shares = {n: p["cpu_percent"] for n, p in standing["processes"].items()}
    assert standing["percent"] == pytest.approx(shares["graph"] + shares["motion"])
    assert min(shares.values()) > 0
    assert standing["camera_hz"] > 0
    growth = results["growth"]
    assert set(growth["processes"]) == {*NODES, "verifier"}
    for name, process in growth["processes"].items():
        assert process["slope"] < 50_000, name  # so few rounds only show what is gross
        assert all(size > 10 for size in process["rss_mb"])
    for name in NODES:
        assert max(growth["processes"][name]["executor_tasks"]) < 20, name
    assert plot.stat().st_size > 0
