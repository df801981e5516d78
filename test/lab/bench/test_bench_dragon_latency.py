"""The latency part of ``bench dragon``: figures that follow from what was run, with tiny sides."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dragon_bed import config_of, engine_of
from rich.console import Console
from tiny_models import tiny_folder
from typer.testing import CliRunner

from collab_llm_lab.bench.dragon import report as report_module
from collab_llm_lab.bench.dragon.case import RTT_S, plot_case
from collab_llm_lab.bench.dragon.latency import (
    LIVE,
    MACHINES,
    LatencyPlan,
    rules_of,
    run_latency,
    run_scheduler,
)
from collab_llm_lab.bench.dragon.law import law_tv
from collab_llm_lab.bench.dragon.replayed import replay, run_live
from collab_llm_lab.bench.dragon.report import GOALS, PAPER, PINNED, figures_of
from collab_llm_lab.bench.harness import Keep
from collab_llm_lab.bench.rendering import missed
from collab_llm_nodes.cli import app
from collab_llm_nodes.decoding.aggregation import AggregationLaw, Drafts, Judgement

PLAN = LatencyPlan(rtts_ms=(0, 80), decode_ms=(4.0, 4.0), questions=1, tokens=6)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    quiet = Console(file=io.StringIO())
    return run_latency(engine_of(), config_of(documents=2, temperature=0.1), PLAN, quiet)


def test_all_methods_with_the_cloud_write_one_answer(found: dict[str, Any]) -> None:
    assert found["mismatches"] == 0
    rows = found["latency"]["80"]
    tokens = {method: rows[method]["acceptance_device"] for method in MACHINES}
    assert len(set(tokens.values())) == 1  # the same drafts meet the same fate everywhere
    assert len(found["fates"]) >= 2


def test_synchronised_tokens_take_a_round_trip_each(found: dict[str, Any]) -> None:
    rows = found["latency"]["80"]
    assert rows["drdg_tw"]["ms_per_token"] >= 80 * 0.8  # the jitter is a fifth
    assert rows["dragon"]["ttft_ms"] >= 80 * 0.8
    assert rows["dragon_device"]["handovers"] == rows["dragon_cloud"]["handovers"] == 0
    assert rows["device"]["bytes_up"] == 0
    assert rows["dragon_device"]["bytes_up"] < rows["dragon_cloud"]["bytes_up"]
    for method in LIVE:
        assert rows[method]["predicted_ms"] > 0
        assert rows[method]["predicted_ttft_ms"] > 0
    assert rows["drdg_sw_full"]["predicted_ms"] > rows["drdg_sw_compact"]["predicted_ms"]


def test_each_baseline_waits_for_what_it_waits_for(found: dict[str, Any]) -> None:
    near, far = found["latency"]["0"], found["latency"]["80"]
    for method in ("drcg_text", "drcg_kv", "drdg_sw_compact", "drdg_sw_full"):
        assert far[method]["ttft_ms"] >= 0.8 * 80
    vectors_ms = 6 * 2 * 50_272 * 8 / (PLAN.mbit_s * 1e6) * 1e3  # six tokens
    assert near["drdg_sw_full"]["ttft_ms"] >= vectors_ms
    assert near["drdg_sw_full"]["bytes_down"] > 2 * 50_272
    assert near["drcg_kv"]["bytes_down"] > 10 * near["drcg_text"]["bytes_down"]
    assert near["crcg"]["bytes_up"] == near["crcg"]["bytes_down"] == 0
    reading = near["drcg_text"]["predicted_ttft_ms"] - near["drcg_kv"]["predicted_ttft_ms"]
    assert near["drcg_text"]["ttft_ms"] >= 0.8 * reading
    for method in ("crcg", "drcg_text", "drcg_kv", "drdg_sw_full"):
        assert near[method]["ms_per_token"] >= PLAN.decode_ms[0] * 0.99


def test_pinned_to_the_device_no_private_words_leave_but_in_the_answer(
    found: dict[str, Any],
) -> None:
    assert found["privacy"]["dragon_device"]["private_ngrams_outside_answer"] == 0
    assert set(found["privacy"]) == {"dragon", "dragon_device"}


def test_each_method_has_rules_of_its_own() -> None:
    chosen = {m: rules_of(m, PLAN).schedule.aggregate_on for m in MACHINES}
    assert chosen["dragon"] == "auto"
    assert chosen["dragon_follow"] == "follow"
    assert chosen["dragon_cloud"] == "cloud"
    assert rules_of("drdg_tw", PLAN).ahead.max_ahead == 1


def test_recorded_fates_are_replayed_at_every_point(found: dict[str, Any]) -> None:
    fates = [(True, False), (True, True), (False, True), (True, True)]
    points = [((0.05, 0.05), 0.3), ((0.166, 0.04), 0.0)]
    simulated = run_scheduler(fates, points, answers=3, tokens=20)
    assert set(simulated) == {"50_50_300", "166_40_0"}
    for row in simulated.values():
        assert row["best_static_ms"] == min(row["device_ms"], row["cloud_ms"])
        assert row["virtual_ms"] == row["auto_ms"]
        assert row["random_ms"] >= row["virtual_ms"]


def test_the_law_is_exact_and_a_biased_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_tv() < 1e-12
    monkeypatch.setattr(AggregationLaw, "judge", printed_judge)
    assert law_tv() > 0.05


def printed_judge(law: AggregationLaw, drafts: Drafts, position: int) -> Judgement:
    """The rule as paper 001 prints it."""
    kept = replace(law.config, law="coin", gamma=0.5, paper_faithful=True)
    printed = replace(law, config=kept)
    token = printed._toss(
        drafts,
        (printed._tempered(drafts[0].kept), printed._tempered(drafts[1].kept)),
        printed.mixture(drafts),
        position,
    )
    return Judgement(token, (False, False), (0.0, 0.0))


def test_the_case_of_figure_9_has_a_row_for_each_token(
    found: dict[str, Any], tmp_path: Path
) -> None:
    rows = found["case"]
    assert len(rows) >= 2
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0.8 * RTT_S
    for row, following in itertools.pairwise(rows):
        for side in ("accepted_device", "accepted_cloud"):
            assert following[side] - row[side] in (0, 1)
    assert {row["aggregator"] for row in rows} <= {"device", "cloud"}
    assert max(row["rtt_ms"] for row in rows) >= 0.8e3 * RTT_S
    plot_case(rows, tmp_path / "case.png")
    assert (tmp_path / "case.png").stat().st_size > 10_000


FATES = [(True, False), (True, True), (False, True), (False, False), (True, True), (True, True)]


def test_a_trace_is_replayed_live_fate_by_fate() -> None:
    with replay() as both:
        for policy in ("auto", "device", "cloud"):
            told = both.run(FATES, (0.002, 0.001), 0.02, policy)
            assert told.tokens == (0,) * len(FATES)
            assert told.metrics.accepted_device == sum(fate[0] for fate in FATES)
            told_to_device = policy != "cloud"  # a pinned aggregator keeps its own to itself
            rejected = len(FATES) - sum(fate[1] for fate in FATES)
            assert told.metrics.accepted_cloud == told_to_device * (len(FATES) - rejected)
            assert told.metrics.unverified == 0
    live = run_live([FATES], [((0.002, 0.001), 0.05)])["2_1_50"]
    assert live["live_best_static_ms"] == min(live["live_device_ms"], live["live_cloud_ms"])
    # Two rejections of each side: a static aggregator waits for the other side's new draft.
    assert live["live_best_static_ms"] * len(FATES) >= 2 * 0.8 * 50


def test_figures_and_goals(found: dict[str, Any]) -> None:
    point = {"virtual_ms": 90.0, "best_static_ms": 100.0, "random_ms": 120.0}
    replayed = {"live_ms": 60.0, "live_best_static_ms": 50.0}
    whole = {
        **found,
        "scheduler": {PAPER: point, "5_5_0": {**point, **replayed}},
        "law_tv": 0.0,
        "privacy": {"private_ngrams_outside_answer": 3},
        "second_share": {"1024": {"4": {"dragon": 0.2}, "16": {"dragon": -0.3}}},
        "unsaturated": {"second_share": {"512": {"16": {"dragon": 0.25}}}},
    }
    whole["scheduler"]["5_5_50"] = {**point, "live_ms": None}
    figures = figures_of(whole)
    assert set(figures) == {*GOALS}
    assert figures["private_ngrams_outside_answer"] == 3
    assert figures["scheduler_live_ratio"] == 1.2
    assert figures["scheduler_virtual_ratio"] == 0.9
    assert figures["scheduler_random_ratio"] == 0.75
    assert figures["device_ratio"] == 90 / 166
    assert figures["quality_second_share"] == -0.3
    assert figures["quality_second_share_unsaturated"] == 0.25
    good = dict(GOALS)
    assert not missed(good, GOALS)
    assert all(missed({**good, name: goal + 1e-9}, GOALS) == [name] for name, goal in GOALS.items())
    assert all(missed({**good, name: None}, GOALS) == [name] for name in good)


@pytest.mark.slow
def test_the_command_measures_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for quality, which needs a model that knows a chat (test_bench_dragon.py)."""
    share = {"512": {"16": {"dragon": 0.4}}}
    told = {
        "second_share": share,
        "unsaturated": {"second_share": share},
        "attack": {"chance": 0.5},
    }
    monkeypatch.setattr(report_module, "run_quality", lambda *_, **__: dict(told))
    monkeypatch.setattr(report_module, "measure_exchange", lambda *_: {"wire": {}})
    sizes = replace(report_module.QUICK, answers=1, live=(((0.002, 0.002), 0.02),))
    monkeypatch.setattr(report_module, "QUICK", sizes)
    report, plot = tmp_path / "dragon.json", tmp_path / "dragon.png"
    asked = ["bench", "dragon", "--model", str(tiny_folder("llama")), "--rtts", "0,20"]
    asked += ["--decode-ms", "3", "3", "--quick", "--tokens", "3"]
    ran = CliRunner().invoke(app, [*asked, "--json", str(report), "--plot", str(plot)])
    assert ran.exit_code in (0, 1), ran.output  # a tiny model need not meet the goals
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["ok"] == (ran.exit_code == 0)
    assert set(results["latency"]) == {"0", "20"}
    assert results["settings"]["emulated"]
    assert plot.stat().st_size > 1000
    assert "drdg_tw" in ran.output
    assert results["privacy"]["attack"] == told["attack"]
    assert results["privacy"]["private_ngrams_outside_answer"] == 0
    assert results["privacy"]["bytes_up_per_token"] > 0
    assert results["scheduler"]["2_2_20"]["live_ms"] > 0
    assert {"virtual_ms", "live_ms", "best_static_ms"} <= set(results["scheduler"][PAPER])
    assert {"decode_ms_device", "decode_ms_cloud", "mbit_s"} <= set(results["settings"])
    assert (tmp_path / "dragon_case.png").stat().st_size > 1000
    for row in results["latency"]["20"].values():
        assert {"ms_per_token", "ttft_ms", "predicted_ms", "discarded_tokens"} <= set(row)
        assert {"handovers", "acceptance_device", "acceptance_cloud"} <= set(row)


def test_a_part_that_fails_does_not_lose_what_came_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {method: dict.fromkeys(("ms_per_token", "predicted_ms"), 1.0) for method in LIVE}
    measured = {
        "settings": {"decode_ms_device": 1.0, "decode_ms_cloud": 1.0},
        "latency": {"0": row},
        "privacy": {PINNED: {"private_ngrams_outside_answer": 0}},
        "fates": [(True, False)],
    }
    monkeypatch.setattr(report_module, "run_latency", lambda *_: dict(measured))

    def quality(*_: Any, keep: Keep, **__: Any) -> dict[str, Any]:
        keep({"quality": {"0": {}}})
        raise MemoryError("the model is too large")

    monkeypatch.setattr(report_module, "run_quality", quality)
    monkeypatch.setattr(report_module, "run_live", lambda *_: {"5_5_0": {"live_ms": 6.0}})
    monkeypatch.setattr(report_module, "measure_exchange", lambda *_: {"wire": {}})
    report = tmp_path / "dragon.json"
    asked = ["bench", "dragon", "--model", str(tiny_folder("llama")), "--quick"]
    ran = CliRunner().invoke(app, [*asked, "--json", str(report)])
    assert isinstance(ran.exception, MemoryError)
    kept = json.loads(report.read_text(encoding="utf-8"))
    assert kept["scheduler"]["5_5_0"]["live_ms"] == 6.0
    assert kept["scheduler"]["5_5_0"]["virtual_ms"] >= 5.0
    assert kept["quality"] == {"0": {}}
    assert kept["privacy"]["private_ngrams_outside_answer"] == 0
    assert "ok" not in kept
