"""Predicted latencies of the baselines against timelines that are run event by event."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from collab_llm_lab.bench.dragon.closed_forms import METHODS, Costs, predict
from collab_llm_lab.bench.dragon.simulation import Delays, simulate_trace
from collab_llm_nodes.decoding.aggregation import Party
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.dragon.machine import AheadConfig
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig

# The setting inferred from paper 001: 166 and 40 ms per token, 300 ms, two documents of 64 tokens.
COSTS = Costs(
    decode_s=(0.166, 0.040),
    context_decode_s=0.150,
    retrieve_s=(0.053, 0.040),
    read_s=(0.20, 0.05),
    prefill_s=0.012,
    rtt_s=0.3,
    bytes_per_s=5e6,
    documents=2,
    document_tokens=64,
    text_bytes=4.0,
    kv_bytes=29_000.0,
    draft_bytes=60.0,
    acceptance=(0.7, 0.8),
    tokens=20,
)


def timeline(costs: Costs, ahead: int) -> list[float]:
    """Times at which the device knows each token, with the machines in virtual time."""
    rtt_s = costs.rtt_s + costs.draft_bytes / costs.bytes_per_s
    begun: set[Party] = set()

    def decode(party: Party, now: float) -> float:
        if party in begun:
            return costs.decode_s[party]
        begun.add(party)
        query_travels = rtt_s / 2 if party is Party.CLOUD else 0.0
        return query_travels + costs.retrieve_s[party] + costs.read_s[party]

    chance = random.Random(3)
    trace = [
        (chance.random() < costs.acceptance[0], chance.random() < costs.acceptance[1])
        for _ in range(costs.tokens)
    ]
    delays = Delays(decode, lambda party, now: rtt_s / 2)
    schedule = ScheduleConfig(aggregate_on="device")
    return simulate_trace(trace, delays, schedule, ahead=AheadConfig(ahead)).known_s


def test_the_first_token_comes_when_the_slower_side_has_read() -> None:
    for rtt in (0.0, 0.3, 1.0):
        costs = replace(COSTS, rtt_s=rtt)
        assert timeline(costs, 0)[0] == pytest.approx(predict("dragon", costs).first_s)
        assert timeline(costs, 1)[0] == pytest.approx(predict("drdg_tw", costs).first_s)
    # the query leaves before anything is retrieved: the device's own time hides the cloud's
    near = replace(COSTS, rtt_s=0.1)
    assert predict("dragon", near).first_s == predict("device", near).first_s


def test_token_wise_synchronisation_takes_what_is_predicted() -> None:
    for decode_s in ((0.166, 0.04), (0.5, 0.04), (0.005, 0.005)):
        costs = replace(COSTS, decode_s=decode_s)
        known = timeline(costs, 1)
        per_token = (known[-1] - known[0]) / (len(known) - 1)
        assert per_token == pytest.approx(predict("drdg_tw", costs).per_token_s)


@pytest.mark.parametrize("decode_s", [(0.05, 0.05), (0.005, 0.005), (0.1, 0.085)])
def test_dragon_takes_what_equation_7_predicts(decode_s: tuple[float, float]) -> None:
    """On average: what a rejection costs depends on the tokens before it, which Eq. 7 ignores."""
    costs = replace(COSTS, decode_s=decode_s, tokens=600)
    known = timeline(costs, 0)
    per_token = (known[-1] - known[0]) / (len(known) - 1)
    assert per_token == pytest.approx(predict("dragon", costs).per_token_s, rel=0.12)


def test_sequence_wise_synchronisation_waits_for_all_of_it() -> None:
    """Two sides that write alone; the cloud's drafts then travel together."""
    for vector in (60.0, 50_272 * 2.0):
        costs = replace(COSTS, draft_bytes=vector)
        ends = []
        for side in (0, 1):
            now = costs.rtt_s / 2 if side else 0.0
            now += costs.retrieve_s[side] + costs.read_s[side]
            for _ in range(costs.tokens - 1):
                now += costs.decode_s[side]
            ends.append(now)
        arrival = ends[1] + costs.rtt_s / 2 + costs.tokens * vector / costs.bytes_per_s
        predicted = predict("drdg_sw", costs)
        assert predicted.mean_s(20) * 20 == pytest.approx(max(ends[0], arrival))


def test_figure_6_orders_the_methods_as_the_paper_does() -> None:
    at_300 = {method: predict(method, COSTS).per_token_s for method in METHODS}
    assert at_300["dragon"] < at_300["drdg_tw"]
    assert at_300["dragon"] / at_300["device"] < 1.25  # the paper reports 1.16 to 1.20
    lan = replace(COSTS, rtt_s=0.01)
    assert predict("dragon", lan).per_token_s == pytest.approx(0.166)


def test_figure_7_fetching_documents_delays_the_first_token() -> None:
    first = {method: predict(method, COSTS).first_s for method in METHODS}
    assert first["dragon"] < first["drcg_kv"] < first["drcg_text"]
    slow = replace(COSTS, bytes_per_s=1e6)
    assert predict("drcg_kv", slow).first_s > predict("drcg_text", slow).first_s
    ours = max(first["device"], COSTS.rtt_s + COSTS.retrieve_s[1] + COSTS.read_s[1])
    assert first["dragon"] <= 1.1 * ours


def test_an_unknown_method_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="drdg_tw"):
        predict("drdg", COSTS)
