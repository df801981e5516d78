"""The engine's benchmark runs, and what it says of itself is consistent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from collab_llm_lab.bench import engine
from collab_llm_lab.bench.engine import BRANCHES, SESSIONS, run_engine
from collab_llm_nodes.cli import app
from collab_llm_nodes.protocols.edge_cloud.messages import EarlyExit
from collab_llm_nodes.protocols.edge_cloud.server import VerifierSession


def test_the_benchmark_measures_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previewed: Counter[int] = Counter()
    preview = VerifierSession.preview

    def counted(self: VerifierSession, layer: int, *args: Any) -> EarlyExit:
        previewed[layer] += 1
        return preview(self, layer, *args)

    monkeypatch.setattr(VerifierSession, "preview", counted)
    monkeypatch.setattr(engine, "LANES", (3, 640))
    monkeypatch.setattr(engine, "RECURRENT_LAYERS", 4)
    plot = tmp_path / "engine.png"
    results = run_engine(
        answers=1,
        repeats=1,
        threads=(1,),
        seed=3,
        paper_layers=0,
        plot=plot,
        console=Console(quiet=True),
    )
    row = results["threads"]["1"]
    assert results["mismatches"] == 0
    assert set(row["autoregressive"]) == {"nav_target", "llama_12x384"}
    for found in (*row["autoregressive"].values(), row["speculation"]):
        assert found["tokens"] > 0
    assert 1 <= row["speculation"]["tau"] <= 5
    assert set(row["exits"]["nav_target"]) == {"0", "2", "4"}
    assert set(row["exits"]["llama_12x384"]) == {"0", "2", "4", "11"}
    assert set(row["predraft"]["ratio"]) == {str(k) for k in BRANCHES}
    for law in ("greedy", "sampled"):
        assert set(row["drafter"][law]["ratio"]) == {str(k) for k in BRANCHES}
    assert set(row["sessions"]["ratio"]) == {str(n) for n in SESSIONS}
    (picture,) = row["pictures"].values()
    assert picture["over_one"] == {
        n: pytest.approx(int(n) * picture["ms"]["1"] / ms) for n, ms in picture["ms"].items()
    }
    assert picture["kv_mib"] > 0.5
    lanes = results["lanes"]["3x640"]
    assert lanes["over_limit"] == pytest.approx(lanes["step_ms"] / lanes["read_once_ms"])
    assert 0 < lanes["read_once_ms"] < lanes["step_ms"], "a step reads all of it and computes"
    forks = results["forks"]["3x640"]
    for base in ("copies", "one_by_one"):
        assert forks[f"over_{base}"] == pytest.approx(forks["together_ms"] / forks[f"{base}_ms"])
    assert 0 < 2 * forks["forks_mb"] < forks["copies_mb"], "forks hold one prefix, copies three"
    rollbacks = row["rollbacks"]["ms"]
    assert {"1", "5", "rollback", *(f"after {i}" for i in (1, 2, 3, 4))} == set(rollbacks)
    assert 0 < rollbacks["rollback"] < rollbacks["5"], "to restore states needs no pass"
    assert set(previewed) >= set(range(1, 12)), (
        "exits are timed with what the verifier makes of them"
    )
    assert plot.stat().st_size > 0


@pytest.mark.parametrize(("mismatches", "status"), [(0, 0), (1, 1)])
def test_answers_that_differ_are_an_error_status(
    mismatches: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "run_engine", lambda **_: {"mismatches": mismatches})
    assert CliRunner().invoke(app, ["bench", "engine"]).exit_code == status
