"""The profiler: fitted lines, moving slopes, links measured by what is sent anyway."""

from __future__ import annotations

import numpy as np
import pytest
from dragon_sides import VOCAB, Tables, TableSide

from collab_llm_lab.bench.dragon.simulation import (
    Delays,
    Simulation,
    TraceLaw,
    two_machines,
)
from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.dragon import profiler as profiler_module
from collab_llm_nodes.protocols.dragon.messages import Line
from collab_llm_nodes.protocols.dragon.profiler import (
    DecodeModel,
    LinkModel,
    Profiler,
    measure_passes,
)
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig


def test_least_squares_finds_the_line() -> None:
    t = np.arange(64, 256)
    model = DecodeModel.fitted(t, 0.03 + 2e-4 * t)
    assert model.at(100) == pytest.approx(0.05)
    assert model.k_c == pytest.approx(0.03)
    noise = np.random.default_rng(0).normal(0, 0.002, len(t))
    noisy = DecodeModel.fitted(t, 0.03 + 2e-4 * t + noise)
    reference = np.polyfit(t, 0.03 + 2e-4 * t + noise, 1)
    assert noisy.at(150) == pytest.approx(np.polyval(reference, 150))


def test_the_slope_moves_and_the_intercept_stays() -> None:
    model = DecodeModel.fitted([64, 128, 256], [0.0364, 0.0428, 0.0556])  # 0.03 + 1e-4 t
    k_a, k_b = model.k_a, model.k_b
    model.observe(200, 0.09, 0.25)
    slope = (0.75 * k_a + 0.25 * (0.09 - 0.03) * 200) / (0.75 * k_b + 0.25 * 200**2)  # 5.2
    assert model.at(200) == pytest.approx(0.03 + slope * 200)
    assert model.k_c == pytest.approx(0.03)
    for _ in range(100):
        model.observe(200, 0.09, 0.25)
    assert model.at(200) == pytest.approx(0.09)
    still = DecodeModel.fitted([64, 128], [0.05, 0.06])
    still.observe(100, 5.0, 0.0)
    assert still.at(100) == pytest.approx(0.05 + 36 * 0.01 / 64)


@pytest.mark.parametrize("tokens", [[], [64], [64, 64]])
def test_too_few_passes_fit_no_line(tokens: list[float]) -> None:
    with pytest.raises(InvalidInput, match="two lengths"):
        DecodeModel.fitted(tokens, [0.1] * len(tokens))


def test_latency_and_bandwidth_come_from_messages_of_several_sizes() -> None:
    link = LinkModel(0.1)
    assert not link.known
    rng = np.random.default_rng(1)
    for _ in range(200):
        size = int(rng.integers(50, 4000))
        link.observe(size, 0.2 + size / 1e5)
    assert link.latency_s == pytest.approx(0.2, rel=1e-6)
    assert link.seconds_per_byte == pytest.approx(1e-5, rel=1e-6)


def test_messages_of_one_size_say_nothing_about_bandwidth() -> None:
    link = LinkModel(0.1)
    for _ in range(20):
        link.observe(100, 0.3)
    assert link.seconds_per_byte == 0
    assert link.latency_s == pytest.approx(0.3)


def test_sides_that_may_judge_learn_the_delays_of_the_run_they_take_part_in() -> None:
    """Delays ride on drafts and targets; nothing is sent to measure them."""
    rng = np.random.default_rng(2)
    trace = [(bool(a), bool(b)) for a, b in rng.random((120, 2)) < (0.8, 0.6)]
    for place, learning in (("device", [0]), ("cloud", [1]), ("follow", [0, 1])):
        machines = two_machines(
            TraceLaw(trace), ScheduleConfig(aggregate_on=place), vocab_size=2, max_tokens=120
        )
        Simulation(
            machines, lambda *_: (np.ones(2), 0.0), Delays.constant((0.07, 0.03), 0.25)
        ).finish()
        for machine in machines:  # the lead needs only these two
            assert machine.profiler.decode_s(machine.party, 60) > 0.02
            assert machine.profiler.rtt_s == pytest.approx(0.25, rel=1e-6)
        for side in learning:
            known = machines[side].profiler.estimates(60)
            assert known is not None
            assert known.decode_s == pytest.approx((0.07, 0.03), rel=0.02)
            assert known.rtt_s == pytest.approx(0.25, rel=1e-6)
            assert known.acceptance == pytest.approx((0.8, 0.6), abs=0.35)


def test_the_side_that_has_not_decoded_is_unknown() -> None:
    profiler = Profiler(rtt_s=0.2)
    profiler.on_line(Party.CLOUD, None)
    assert profiler.estimates(0) is None
    profiler.on_pass(Party.DEVICE, 0, 0.1)
    assert profiler.estimates(0) is None
    profiler.on_pass(Party.CLOUD, 0, 0.05)
    known = profiler.estimates(0)
    assert known is not None
    assert known.rtt_s == 0.2
    profiler.on_told_rtt(0.3)
    assert profiler.rtt_s == 0.3
    profiler.on_round_trip(80, 0.4)
    profiler.on_told_rtt(0.3)
    assert profiler.rtt_s == 0.4


def test_a_line_that_was_measured_stands_from_the_beginning() -> None:
    profiler = Profiler()
    profiler.on_line(Party.DEVICE, DecodeModel.fitted([10, 20], [0.05, 0.06]).line)
    profiler.on_line(Party.CLOUD, (0.0, 1.0, 0.02))
    known = profiler.estimates(30)
    assert known is not None
    assert known.decode_s == pytest.approx((0.07, 0.02))


def test_passes_are_measured_after_growing_answers() -> None:
    """The context is filled between the lengths, and only single tokens are timed."""
    side = TableSide(Party.DEVICE, Tables())
    lengths: list[int] = []
    side.before_pass = lengths.append
    line = measure_passes(side.decoder("dummy", 8), [2, 8], VOCAB, runs=2)
    assert lengths == [0, 2, 2, 2, 8, 8, 8]
    assert 0 <= line.at(4) < 1
    with pytest.raises(InvalidInput):
        measure_passes(side.decoder("dummy", 8), [1], VOCAB)


def test_no_length_is_begun_after_the_time_is_over() -> None:
    side = TableSide(Party.DEVICE, Tables())
    lengths: list[int] = []
    side.before_pass = lengths.append
    measure_passes(side.decoder("dummy", 8), [1, 2, 4, 8], VOCAB, runs=1, budget_s=0.0)
    assert max(lengths) == 4


def test_times_that_do_not_rise_with_the_length_are_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.05, 0.0, 0.09, 0.0, 0.01, 0.0, 0.0, 0.05])
    monkeypatch.setattr(profiler_module.time, "perf_counter", lambda: next(clock, 0.0))
    decoder = TableSide(Party.DEVICE, Tables()).decoder("dummy", 8)
    line = measure_passes(decoder, [1, 2, 4, 8], VOCAB, runs=1, budget_s=1.0)
    assert line.at(1) == line.at(1000) == pytest.approx(0.05)


def test_noise_does_not_make_a_pass_take_no_time() -> None:
    falling = DecodeModel.fitted([4, 8, 16], [0.06, 0.05, 0.04])
    assert falling.at(4) == falling.at(400) == pytest.approx(0.05)
    steep = DecodeModel.fitted([4, 8, 16], [0.001, 0.01, 0.05])
    assert steep.at(0) == 0.0 < steep.at(4)


@pytest.mark.parametrize("line", [(0.0, 1.0, 0.0), (-1.0, 1.0, 0.02), (float("nan"), 1.0, 0.02)])
def test_nothing_is_planned_from_a_line_that_makes_no_sense(line: Line) -> None:
    profiler = Profiler()
    profiler.on_line(Party.DEVICE, (0.0, 1.0, 0.02))
    profiler.on_line(Party.CLOUD, line)
    assert profiler.estimates(8) is None


@pytest.mark.parametrize(("weight", "newest"), [(0.001, 2.0), (1.0, 9.0)])
def test_each_weight_is_that_of_the_newest_observation(
    weight: float, newest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ZETA", "_ACCEPTANCE_WEIGHT", "_LINK_WEIGHT"):
        monkeypatch.setattr(profiler_module, name, weight)
    profiler = Profiler()
    profiler.on_line(Party.CLOUD, (2.0, 1.0, 0.0))  # 2 s for each token read
    for _ in range(4000):
        profiler.on_judged((0.2, 0.2))
        profiler.on_round_trip(100, 2.0)
    profiler.on_judged((0.9, 0.9))
    profiler.on_round_trip(100, 9.0)
    profiler.on_pass(Party.CLOUD, 10, 90.0)
    assert profiler.acceptance[0] == pytest.approx(newest / 10, abs=0.01)
    assert profiler.rtt_s == pytest.approx(newest, abs=0.1)
    assert profiler.decode_s(Party.CLOUD, 10) == pytest.approx(10 * newest, abs=7.0)
