"""The dynamic programs against brute force, and plans made from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jupiter_profiles import device, facts, profile

from collab_llm_nodes.errors import ConfigError, InvalidInput, ModelError
from collab_llm_nodes.protocols.jupiter.estimate import (
    Estimate,
    FlowShop,
    decode_s,
    makespan,
    paper_latency,
    timeline,
)
from collab_llm_nodes.protocols.jupiter.partition import (
    PassShape,
    Placement,
    SequenceTable,
    best_partitions,
    equal_split,
    range_costs,
)
from collab_llm_nodes.protocols.jupiter.planner import (
    JupiterPlan,
    PlannerConfig,
    Predicted,
    plan,
    split,
    stages_for,
)
from collab_llm_nodes.protocols.jupiter.profile import Profile, Seconds
from collab_llm_nodes.protocols.jupiter.settings import JupiterConfig, PlanningConfig


def cuts(total: int, k: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to divide 0 to ``total`` into ``k`` ranges, as their bounds."""
    for inner in combinations(range(1, total), k - 1):
        yield (0, *inner, total)


def random_costs(rng: np.random.Generator, devices: int, layers: int) -> list[Seconds]:
    """Costs that grow with the range, some beyond a memory limit."""
    found = []
    for _ in range(devices):
        each, limit = rng.integers(1, 9, layers), int(rng.integers(1, layers + 1))
        cost = np.full((layers + 1, layers + 1), np.inf)
        for i in range(layers):
            for j in range(i + 1, min(layers, i + limit) + 1):
                cost[i, j] = each[i:j].sum()
        found.append(cost)
    return found


@pytest.mark.parametrize("join", [np.maximum, np.add])
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 7))
@settings(max_examples=60)
def test_partitions_equal_brute_force(join: np.ufunc, seed: int, devices: int, layers: int) -> None:
    cost = random_costs(np.random.default_rng(seed), devices, layers)

    def value(order: tuple[int, ...], bounds: tuple[int, ...]) -> float:
        return float(join.reduce([cost[d][bounds[i], bounds[i + 1]] for i, d in enumerate(order)]))

    by_set = {frozenset(one.devices): one for one in best_partitions(cost, join)}
    for count in range(1, devices + 1):
        for members in combinations(range(devices), count):
            orders = permutations(members)
            best = min((value(o, b) for o in orders for b in cuts(layers, count)), default=np.inf)
            here = by_set.pop(frozenset(members), None)
            assert (here.value if here else np.inf) == best
            if here:
                assert value(here.devices, here.bounds) == best
    assert not by_set


def test_a_stage_has_a_layer_and_fits_into_memory() -> None:
    cost = range_costs(facts(6), device(memory_mb=7.0), PassShape(4, 0, 1, lanes=1, longest=64))
    # 3 MB of embedding, 4 of the head; a layer takes 1 MB and 64 kB of keys and values.
    assert {(i, j) for i, j in np.argwhere(np.isfinite(cost))} == {
        *((0, j) for j in range(1, 4)),
        *((i, 6) for i in range(4, 6)),
        *((i, j) for i in range(1, 6) for j in range(i + 1, 6)),
    }
    lanes = range_costs(facts(6), device(memory_mb=7.0), PassShape(4, 0, 1, lanes=20, longest=64))
    assert np.isfinite(lanes).sum() < np.isfinite(cost).sum()


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=60)
def test_sub_sequences_equal_brute_force(seed: int, longest: int, most: int, least: int) -> None:
    table = np.random.default_rng(seed).integers(1, 50, (longest + 1, longest + 1)).astype(float)

    def slowest(x: np.ndarray, y: np.ndarray) -> Seconds:
        return np.asarray(table[x, y])

    found = SequenceTable(slowest, longest, most, least)
    for y in range(1, longest + 1):
        for k in range(1, most + 1):
            worst = [
                (max(table[b - a, a] for a, b in zip(bounds, bounds[1:], strict=False)), bounds)
                for bounds in cuts(y, k)
                if k == 1 or all(b - a >= least for a, b in zip(bounds, bounds[1:], strict=False))
            ]
            best = min((value for value, _ in worst), default=np.inf)
            assert found.worst[y, k] == best
            if np.isfinite(best):
                bounds = tuple(np.cumsum([0, *found.split(np.array([y]), k)[:, 0]]))
                assert (best, bounds) in worst


def test_a_coarse_table_cuts_at_multiples_of_its_step() -> None:
    def slowest(x: np.ndarray, y: np.ndarray) -> Seconds:
        return np.asarray(x * (y + x / 2.0 + 10.0))

    coarse, fine = (SequenceTable(slowest, 48, 4, 6, step) for step in (4, 1))
    assert coarse.worst[12, 1] == fine.worst[48, 1]
    for k in range(2, 5):
        lengths = coarse.split(np.array([12]), k)[:, 0]
        assert sum(lengths) == 48
        assert all(n % 4 == 0 and n >= 8 for n in lengths)
        assert fine.worst[48, k] <= coarse.worst[12, k]


def longest_path(work: FlowShop) -> float:
    """The makespan as the longest monotone path through the grid of operations."""
    k, stages = work.stage_s.shape
    steps = 2 * stages - 1  # stages and links in turn

    def taken(i: int, m: int) -> float:
        return float(work.link_s[i, m // 2] if m % 2 else work.stage_s[i, m // 2])

    best = 0.0
    for turns in combinations(range(k + steps - 2), k - 1):
        i = m = 0
        total = taken(0, 0)
        for at in range(k + steps - 2):
            if at in turns:
                i += 1
            else:
                m += 1
                total += work.latency_s[m // 2 - 1] if m % 2 == 0 else 0.0
            total += taken(i, m)
        best = max(best, total)
    return best


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=50)
def test_the_makespan_is_the_longest_path(seed: int, k: int, stages: int) -> None:
    rng = np.random.default_rng(seed)
    work = FlowShop(
        rng.random((k, stages)), rng.random((k, stages - 1)), list(rng.random(stages - 1))
    )
    assert makespan(work) == pytest.approx(longest_path(work))
    padded = FlowShop(
        np.concatenate([work.stage_s, np.zeros((2, stages))]),
        np.concatenate([work.link_s, np.zeros((2, stages - 1))]),
        work.latency_s,
    )
    assert makespan(padded) == pytest.approx(makespan(work)), "empty sub-sequences count nothing"
    stage_spans, link_spans = timeline(work)
    ends = [spans[-1][2] for spans in (*stage_spans, *link_spans)]
    assert max(ends) == pytest.approx(makespan(work))
    for spans in (*stage_spans, *link_spans):
        assert all(a[2] <= b[1] + 1e-12 for a, b in zip(spans, spans[1:], strict=False))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=50)
def test_equation_4_is_exact_for_equal_stages_and_free_links(
    seed: int, k: int, stages: int
) -> None:
    h = np.random.default_rng(seed).random(k)
    work = FlowShop(
        np.repeat(h[:, None], stages, 1), np.zeros((k, stages - 1)), [0.0] * (stages - 1)
    )
    assert makespan(work) == pytest.approx(paper_latency(h, stages))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=60)
def test_decoding_takes_what_its_passes_come_to(
    seed: int, lanes: int, stages: int, rounds: int
) -> None:
    rng = np.random.default_rng(seed)
    stage_s, link_s, latency = rng.random(stages), rng.random(stages - 1), float(rng.random())
    machines = [t for pair in zip(stage_s, [*link_s, 0.0], strict=True) for t in pair]
    free, back = [0.0] * len(machines), [0.0] * lanes
    for _ in range(rounds):
        for lane in range(lanes):
            now = back[lane]
            for m, taken in enumerate(machines):
                now = max(now, free[m]) + taken
                free[m] = now
            back[lane] = now + latency
    assert decode_s(stage_s, link_s, latency, lanes, rounds) == pytest.approx(max(back))


def all_partitions(stored: Profile) -> Iterator[tuple[Placement, ...]]:
    """Yield every partition over every order of every set of devices."""
    names, layers = [d.name for d in stored.devices], stored.model.layers
    for count in range(1, len(names) + 1):
        for order in permutations(names, count):
            for b in cuts(layers, count):
                yield tuple(Placement(n, b[i], b[i + 1]) for i, n in enumerate(order))


def cuts_of(total: int) -> list[tuple[int, ...]]:
    """Equal parts of ``total``, and some that shrink or grow."""
    parts = [tuple(int(n) for n in equal_split(np.array([total]), k)[:, 0]) for k in range(1, 7)]
    for k in (2, 3, 4):
        for lean in (1, 2, 4):
            shift = np.linspace(lean, -lean, k).round().astype(int)
            shift[-1] -= shift.sum()
            leaning = np.array(parts[k - 1]) + shift
            parts += [tuple(int(n) for n in leaning), tuple(int(n) for n in leaning[::-1])]
    return parts


@pytest.mark.parametrize("slowness", [(1.0, 1.0, 1.0), (1.0, 1.6, 3.6), (2.0, 1.0, 4.0)])
def test_the_plan_is_nearly_the_best_of_all(slowness: tuple[float, ...]) -> None:
    stored = profile(*slowness)
    made = plan(stored, PlannerConfig(prompt_tokens=48, answer_tokens=0))
    table = [
        (float(Estimate(stored, parts).prefill_s(np.array(lengths))), parts)
        for parts in all_partitions(stored)
        for lengths in (made.lengths(48), *cuts_of(48))
    ]
    best = min(seconds for seconds, _ in table)
    assert made.predicted.prefill_s <= 1.02 * best
    assert made.predicted.prefill_s <= made.predicted.paper_plan_s * (1 + 1e-9)
    assert made.predicted.prefill_s == made.prefill_s[47]
    exact = Estimate(stored, made.placements).prefill_s(np.array(made.lengths(48)))
    assert made.predicted.prefill_s == pytest.approx(float(exact))


def test_smaller_states_are_sent_faster() -> None:
    stored = profile(1.0, 1.0)
    slow = replace(stored, devices=tuple(replace(device, mbps=0.5) for device in stored.devices))
    seconds = [
        plan(slow, PlannerConfig(answer_tokens=0, states=states), ["d0", "d1"]).predicted.prefill_s
        for states in ("int8", "float16", "float32")
    ]
    assert seconds == sorted(seconds)
    placements = plan(stored, PlannerConfig(answer_tokens=0)).placements
    whole, half, quarter = (
        float(Estimate(slow.sending(states), placements).links(np.array([1]))[0, 0])
        for states in ("float32", "float16", "int8")
    )
    assert half == pytest.approx(whole / 2)
    width = stored.model.state_bytes // 4
    assert quarter == pytest.approx(whole * (width + 4) / (4 * width))


def test_every_length_has_parts_and_longer_prompts_take_longer() -> None:
    stored = profile(1.0, 1.6, 1.6)
    made = plan(stored, PlannerConfig(prompt_tokens=48, answer_tokens=0, utilisation=0.3))
    for length in range(1, 65):
        parts = made.lengths(length)
        assert sum(parts) == length
        assert len(parts) == 1 or min(parts) >= made.least
        assert len(parts) <= 4 * 3
    # The head's step from one part to the next is not smooth, so compare at some distance.
    assert all(a < b for a, b in zip(made.prefill_s, made.prefill_s[8:], strict=False))
    assert max(len(parts) for parts in made.parts) > 3
    for wrong in (0, 65):
        with pytest.raises(InvalidInput, match="plans are for 1 to 64"):
            made.lengths(wrong)


def test_a_plan_is_for_requests_of_the_configured_lengths() -> None:
    def predicted(prompt: int, answer: int) -> Predicted:
        planning = PlanningConfig(prompt_tokens=prompt, answer_tokens=answer)
        return plan(profile(1.0, 1.0), JupiterConfig(planning=planning).planner()).predicted

    typical = predicted(16, 8)
    assert predicted(48, 8).prefill_s > typical.prefill_s
    assert predicted(16, 80).decode_s > 2 * typical.decode_s > 0.0


def test_a_slow_device_is_left_out() -> None:
    made = plan(profile(1.0, 1.0, 60.0), PlannerConfig(answer_tokens=0))
    assert {part.device for part in made.placements} == {"d0", "d1"}


def test_a_single_lane_wants_one_device_and_many_lanes_want_all() -> None:
    stored, answer = profile(1.0, 1.0, 1.0), 4096
    alone = plan(stored, PlannerConfig(answer_tokens=answer, lanes=1))
    many = plan(stored, PlannerConfig(answer_tokens=answer, lanes=6))
    assert len(alone.placements) == 1
    assert len(many.placements) == 3
    assert alone.predicted.prefill_loss > 0.2, "said, not hidden"
    assert alone.predicted.decode_loss == 0.0
    assert many.predicted.prefill_loss < alone.predicted.prefill_loss


def test_stages_alone_are_as_good_as_those_of_a_plan() -> None:
    stored = profile(1.0, 1.5, 2.5)
    config = PlannerConfig(prompt_tokens=48, answer_tokens=0)
    alone = stages_for(stored, config, devices=["d0", "d2"])
    assert {part.device for part in alone} <= {"d0", "d2"}
    made = plan(stored, config, devices=["d0", "d2"])
    found = split(Estimate(stored, alone), 48, 8, made.least)
    assert found.seconds == pytest.approx(made.predicted.prefill_s, rel=0.02)


def test_memory_decides_what_may_be_where() -> None:
    small = Profile(facts(6), tuple(device(f"d{i}", memory_mb=7.0) for i in range(3)))
    made = plan(small, PlannerConfig(answer_tokens=0))
    assert len(made.placements) == 3, "3 MB, 4 MB and 6 layers need three devices"
    assert all(size <= 7_000_000 for size in made.memory_bytes)
    with pytest.raises(ModelError, match="devices: 10 MB of weights"):
        plan(small, devices=["d0", "d2"])
    with pytest.raises(ConfigError, match="no device 'd9'"):
        plan(small, devices=["d0", "d9"])


def test_the_coordinator_s_device_keeps_room_for_the_vision_encoder() -> None:
    sees = replace(facts(6), vision_bytes=4_500_000)
    lab = Profile(sees, (device("d0", 0.5, memory_mb=10.0), device("d1", memory_mb=10.0)))
    config = PlannerConfig(answer_tokens=0)
    beside = replace(config, coordinator="d0")

    def layers(made: JupiterPlan) -> dict[str, int]:
        return {part.device: part.last - part.first for part in made.placements}

    assert layers(plan(lab, config))["d0"] >= 3, "the faster device"
    made = plan(lab, beside)
    assert layers(made)["d0"] <= 2
    assert all(size <= 10_000_000 for size in made.memory_bytes)
    assert tuple(stages_for(lab, beside)) == made.placements
    full = replace(lab, model=replace(sees, vision_bytes=20_000_000))
    with pytest.raises(ModelError, match="do not fit"):
        plan(full, beside)
    with pytest.raises(ConfigError, match="no device 'd9'"):
        plan(lab, replace(config, coordinator="d9"))


def test_the_first_stage_has_the_layers_that_pictures_are_added_after() -> None:
    deep = replace(facts(6), first_layers=5)
    lab = Profile(deep, (device("d0"), device("d1")))
    config = PlannerConfig(answer_tokens=0)
    found = [plan(lab, config).placements, stages_for(lab, config, ["d1", "d0"])]
    assert all(parts[0].last >= 5 for parts in found)


def test_more_devices_than_layers() -> None:
    made = plan(profile(1.0, 1.0, 1.0, layers=2), PlannerConfig(answer_tokens=0))
    assert sum(part.last - part.first for part in made.placements) == 2


def test_a_plan_is_stored_and_checked(tmp_path: Path) -> None:
    stored = profile(1.0, 1.0)
    made = plan(stored, PlannerConfig(answer_tokens=0))
    made.save(tmp_path / "plan.json")
    read = JupiterPlan.load(tmp_path / "plan.json")
    assert read == made
    gap = (replace(made.placements[0], last=made.placements[0].last - 1), *made.placements[1:])
    with pytest.raises(ConfigError, match="stages do not cover"):
        replace(made, placements=(Placement("d0", 1, 6), Placement("d1", 6, 9)))
    with pytest.raises(ConfigError, match="do not add up"):
        replace(made, parts=((1,), (1, 2), *made.parts[2:]))
    with pytest.raises(ConfigError, match="do not add up"):
        replace(made, prefill_s=made.prefill_s[1:])
    for times in (
        {"prefill_s": (-1.0, *made.prefill_s[1:])},
        {"predicted": replace(made.predicted, decode_s=float("nan"))},
    ):
        with pytest.raises(ConfigError, match="finite and not negative"):
            replace(made, **times)
    with pytest.raises(ConfigError, match="memory_bytes"):
        replace(made, memory_bytes=())
    with pytest.raises(ConfigError, match="stages do not cover|two stages"):
        replace(made, placements=(*gap, Placement("d0", 2, 6)))
