"""Closed forms against timelines: Eq. 7 and 8, Table 1, Theorem 6.2, figures 3, 4, 8 and A.3."""

from __future__ import annotations

import math
import random
from functools import cache
from statistics import fmean

import pytest
from dragon_timeline import aggregated_at
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from collab_llm_lab.bench.dragon.simulation import (
    Delays,
    Simulation,
    TraceLaw,
    simulate_trace,
    two_machines,
)
from collab_llm_nodes.decoding.aggregation import Pair, Party
from collab_llm_nodes.protocols.dragon.machine import MOST_AHEAD, AheadConfig
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN, Estimates
from collab_llm_nodes.protocols.dragon.scheduler import (
    ScheduleConfig,
    Scheduler,
    delta_z,
    per_token,
    per_token_ahead,
    per_token_following,
)

DEVICE, CLOUD = Party.DEVICE, Party.CLOUD
COSTS = st.floats(0.01, 3.0)
SHARES = st.floats(0.0, 1.0)


def random_trace(rates: Pair, tokens: int, seed: int) -> list[tuple[bool, bool]]:
    chance = random.Random(seed)
    return [(chance.random() < rates[0], chance.random() < rates[1]) for _ in range(tokens)]


_AT_LEAST = 20


def settling(decode_s: Pair, trans_s: Pair) -> float:
    """Return the tokens until the slower side sets the pace: at first it may have a lead."""
    difference = abs(decode_s[0] - decode_s[1])
    return _AT_LEAST + (sum(trans_s) / difference if difference else 0.0)


def steady(acceptance: tuple[bool, bool], decode_s: Pair, trans_s: Pair) -> float:
    """Time per token when one case of Table 1 goes on for ever, judged by the device."""
    first = math.ceil(settling(decode_s, trans_s))
    delays = Delays(lambda party, now: decode_s[party], lambda party, now: trans_s[party])
    schedule = ScheduleConfig(aggregate_on="device")
    run = simulate_trace([acceptance], delays, schedule, tokens=first + 40, ahead=AheadConfig(16))
    return (run.known_s[-1] - run.known_s[first]) / (len(run.known_s) - 1 - first)


# ------------------------------------------------------- the machines' timeline is the recurrences'


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    rates=st.tuples(SHARES, SHARES),
    decode_s=st.tuples(COSTS, COSTS),
    trans_s=st.tuples(COSTS, COSTS),
    ahead=st.integers(1, 6),
    moves=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_simulation_keeps_the_recurrences(
    seed: int, rates: Pair, decode_s: Pair, trans_s: Pair, ahead: int, moves: float
) -> None:
    """Each position is judged exactly when a timeline written anew says, for any hand-overs."""
    tokens = 25
    trace = random_trace(rates, tokens, seed)
    chance = random.Random(seed)
    judges = [int(chance.random() < 0.5)]
    for _ in range(tokens):
        judges.append(1 - judges[-1] if chance.random() < moves else judges[-1])
    machines = two_machines(
        TraceLaw(trace), ScheduleConfig(), vocab_size=2, max_tokens=tokens, ahead=AheadConfig(ahead)
    )
    judged: list[float] = []
    delays = Delays(lambda party, now: decode_s[party], lambda party, now: trans_s[party])
    world = Simulation(machines, lambda party, prefix: (TraceLaw(trace)._kept.probs, 0.0), delays)

    class Follows(Scheduler):
        def choose(self, *_: object) -> Party:
            judged.append(world.now)
            return Party(judges[len(judged)])

    for machine in machines:
        machine.aggregator = Party(judges[0])
        machine._scheduler = Follows(ScheduleConfig())
    world.finish()
    expected = aggregated_at(trace, judges[:tokens], decode_s, trans_s, ahead)
    assert judged == pytest.approx(expected, abs=1e-9)


# ------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("accepted", "decode_s", "trans_s", "figure"),
    [
        ((False, True), (1.0, 1.5), (1.2, 1.8), 10),
        ((True, False), (2.0, 2.0), (1.5, 1.0), 11),
        ((True, True), (1.0, 1.5), (1.5, 1.8), 12),
        ((False, False), (2.0, 1.0), (1.5, 1.8), 13),
    ],
)
def test_the_four_pipelines_of_appendix_a3(
    accepted: tuple[bool, bool], decode_s: Pair, trans_s: Pair, figure: int
) -> None:
    said = {10: 1.5, 11: 4.5, 12: 1.5, 13: 4.3}[figure]  # max(...) of A.3 with the figure's delays
    assert steady(accepted, decode_s, trans_s) == pytest.approx(said)
    rtt = sum(trans_s)
    assert per_token(*decode_s, rtt, float(accepted[1])) == pytest.approx(said)


@settings(max_examples=40)
@given(
    accepted=st.tuples(st.booleans(), st.booleans()),
    decode_s=st.tuples(COSTS, COSTS),
    trans_s=st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)),
)
def test_a_case_that_repeats_takes_what_equation_7_says(
    accepted: tuple[bool, bool], decode_s: Pair, trans_s: Pair
) -> None:
    """The device's own drafts make no difference (Corollary 6.5)."""
    predicted = per_token(*decode_s, sum(trans_s), float(accepted[1]))
    needed = sum(trans_s) / min(decode_s) + 2
    assume(needed < 16)  # else the lead of this simulation is too short for the link
    assume(settling(decode_s, trans_s) < 500)  # else it takes too long
    assert steady(accepted, decode_s, trans_s) == pytest.approx(predicted, rel=1e-6)


@settings(max_examples=300)
@given(c_l=COSTS, c_r=COSTS, rtt=st.floats(0.0, 3.0), a_l=SHARES, a_r=SHARES)
def test_equation_8_is_the_difference_of_equation_7(
    c_l: float, c_r: float, rtt: float, a_l: float, a_r: float
) -> None:
    difference = per_token(c_l, c_r, rtt, a_r) - per_token(c_r, c_l, rtt, a_l)
    assert delta_z(c_l, c_r, rtt, a_l, a_r) == pytest.approx(difference, abs=1e-9)
    assert delta_z(c_r, c_l, rtt, a_r, a_l) == pytest.approx(-difference, abs=1e-9)


# ------------------------------------------------------- policies


def test_delta_z_moves_for_a_gain_and_no_less() -> None:
    scheduler = Scheduler(ScheduleConfig(aggregate_on="delta_z"))
    better_there = Estimates((0.05, 0.05), 0.3, (0.9, 0.5))
    better_here = Estimates((0.05, 0.05), 0.3, (0.5, 0.9))
    alike = Estimates((0.05, 0.05), 0.3, (0.71, 0.70))
    both = (True, True)
    assert scheduler.choose(DEVICE, both, better_there) is CLOUD
    assert scheduler.choose(DEVICE, both, better_here) is DEVICE
    assert scheduler.choose(CLOUD, both, better_here) is DEVICE
    assert scheduler.choose(DEVICE, both, alike) is DEVICE
    assert scheduler.choose(CLOUD, both, alike) is CLOUD
    assert scheduler.choose(CLOUD, both, None) is CLOUD
    bottleneck = Estimates((0.5, 0.05), 0.3, (1.0, 0.0))  # the slow side always judges
    assert scheduler.choose(DEVICE, both, bottleneck) is DEVICE


def test_auto_begins_on_the_better_side_and_moves_without_a_reason_only_before_a_rejection() -> (
    None
):
    scheduler = Scheduler(ScheduleConfig(aggregate_on="auto"))
    better_there = Estimates((0.005, 0.005), 0.3, (0.85, 0.8))  # both rules gain by following
    both, cloud_rejected = (True, True), (True, False)
    assert scheduler.choose(DEVICE, both, better_there, fresh=True) is CLOUD
    assert scheduler.choose(DEVICE, both, better_there) is DEVICE
    assert scheduler.choose(DEVICE, cloud_rejected, better_there) is CLOUD
    assert scheduler.choose(CLOUD, both, better_there, fresh=True) is CLOUD


@pytest.mark.parametrize("rates", [(1.0, 0.9), (0.99, 0.85)])
def test_what_is_remembered_spares_the_first_hand_over_behind_a_rejection(rates: Pair) -> None:
    """At 5 ms per token, half a round trip of 300 ms is a twentieth of an answer."""
    delays = Delays.sinusoidal((0.005, 0.005), 0.3)

    def mean(policy: str, *, remembers: bool) -> float:
        times, acceptance = [], UNKNOWN
        for seed in range(6):
            run = simulate_trace(
                random_trace(rates, 100, seed),
                delays,
                ScheduleConfig(aggregate_on=policy),
                acceptance=acceptance if remembers else UNKNOWN,
            )
            acceptance = run.acceptance
            times.append(run.total_s)
        return fmean(times)

    best = mean("cloud", remembers=False)
    assert mean("auto", remembers=True) <= best
    assert mean("auto", remembers=False) > 1.02 * best


def test_follow_goes_to_the_side_that_alone_was_rejected() -> None:
    scheduler = Scheduler(ScheduleConfig(aggregate_on="follow"))
    for here in Party:
        assert scheduler.choose(here, (True, False), None) is CLOUD
        assert scheduler.choose(here, (False, True), None) is DEVICE
        assert scheduler.choose(here, (True, True), None) is here
        assert scheduler.choose(here, (False, False), None) is here


@cache  # several tests compare with the same runs
def total(policy: str, rates: Pair, decode_s: Pair, rtt_s: float, traces: int = 4) -> float:
    """Mean time of 100 tokens with the jitter of figure 8 [s]."""
    delays = Delays.sinusoidal(decode_s, rtt_s)
    return fmean(
        simulate_trace(
            random_trace(rates, 100, seed), delays, ScheduleConfig(aggregate_on=policy, seed=seed)
        ).total_s
        for seed in range(traces)
    )


POINTS = [
    ((0.98, 0.91), (0.166, 0.04), 0.3),  # Eq. 7 sees no use in a slow side's drafts made ahead
    ((0.6, 0.6), (0.166, 0.04), 0.3),
    ((0.9, 0.5), (0.05, 0.05), 0.3),
    ((0.5, 0.9), (0.1, 0.085), 0.05),
    ((0.8, 0.8), (0.005, 0.005), 0.3),
]


@pytest.mark.parametrize("policy", ["delta_z", "auto"])
def test_figure_8_live_scheduling_is_as_good_as_the_best_static_side(policy: str) -> None:
    ours, chance = [], []
    for point in POINTS[policy == "delta_z" :]:
        best = min(total("device", *point), total("cloud", *point))
        ours.append(total(policy, *point))
        chance.append(total("random", *point))
        assert ours[-1] <= 1.05 * best, point
    assert fmean(ours) < fmean(chance)


def test_following_rejections_beats_both_static_sides_where_the_link_dominates() -> None:
    point = ((0.8, 0.8), (0.005, 0.005), 0.3)
    best = min(total("device", *point), total("cloud", *point))
    assert total("follow", *point) < 0.75 * best


@pytest.mark.parametrize("rates", [(0.6, 0.6), (0.9, 0.5), (0.8, 0.8), (0.98, 0.91)])
@pytest.mark.parametrize("decode_s", [(0.166, 0.04), (0.05, 0.05), (0.1, 0.085), (0.04, 0.166)])
def test_estimates_beyond_equation_7_are_near_the_timeline(rates: Pair, decode_s: Pair) -> None:
    """Estimates of a static device with drafts made ahead, and of following rejections."""
    rtt = 0.3
    simulated = total("device", rates, decode_s, rtt) / 100
    estimated = per_token_ahead(*decode_s, rtt, *rates)
    assert estimated == pytest.approx(simulated, rel=0.15)
    assert estimated <= per_token(*decode_s, rtt, rates[1]) + 1e-12
    simulated = total("follow", rates, decode_s, rtt) / 100
    assert per_token_following(decode_s, rtt, rates) == pytest.approx(simulated, rel=0.25)


def test_drafts_made_ahead_count_only_for_a_slower_side_whose_drafts_stand() -> None:
    assert per_token_ahead(0.05, 0.1, 0.3, 0.9, 0.7) == pytest.approx(
        per_token(0.05, 0.1, 0.3, 0.7)
    )
    assert per_token_ahead(0.1, 0.05, 0.3, 0.0, 0.7) == per_token(0.1, 0.05, 0.3, 0.7)
    assert per_token_ahead(0.1, 0.05, 0.3, 1.0, 0.7) == pytest.approx(0.05 + 0.3 * 0.3)
    assert per_token_following((0.1, 0.05), 0.3, (1.0, 1.0)) == pytest.approx(0.1)


def test_token_wise_synchronisation_is_a_lead_of_one() -> None:
    """DRDG/TW: nothing is drafted ahead, so each token takes max(c_l, c_r + rtt)."""
    trace = random_trace((0.7, 0.7), 40, 1)
    run = simulate_trace(
        trace,
        Delays.constant((0.05, 0.04), 0.3),
        ScheduleConfig(aggregate_on="device"),
        ahead=AheadConfig(1),
    )
    assert run.total_s == pytest.approx(39 * 0.34 + 0.19)
    assert MOST_AHEAD > 1
