"""The choice between the two ways to ask vLLM for scores."""

from __future__ import annotations

from collab_llm_nodes.protocols.edge_cloud.stock.methods import ONE_REQUEST, PROBES, MethodChoice

SIZES = {PROBES: 5_000, ONE_REQUEST: 20_000}


def used(choice: MethodChoice, rounds: int, seconds: dict[str, float]) -> list[str]:
    methods = []
    for _ in range(rounds):
        methods.append(choice.next())
        choice.learn(methods[-1], seconds[methods[-1]], SIZES[methods[-1]])
    return methods


def test_both_are_tried_and_the_faster_one_is_used() -> None:
    for fast, slow in ((PROBES, ONE_REQUEST), (ONE_REQUEST, PROBES)):
        methods = used(MethodChoice("auto"), 100, {fast: 0.1, slow: 0.2})
        assert methods[:4].count(slow) == 2
        assert methods[4:].count(fast) > 90


def test_a_method_that_has_become_faster_is_found() -> None:
    choice = MethodChoice("auto")
    used(choice, 50, {PROBES: 0.1, ONE_REQUEST: 0.12})
    methods = used(choice, 400, {PROBES: 0.3, ONE_REQUEST: 0.1})
    assert methods[-50:].count(ONE_REQUEST) > 40


def test_bytes_that_have_a_price_count_in_the_choice() -> None:
    seconds = {PROBES: 0.2, ONE_REQUEST: 0.1}
    for price_s, chosen in ((1.0, ONE_REQUEST), (10.0, PROBES)):
        methods = used(MethodChoice("auto", price_s / 1e6), 100, seconds)
        assert methods[4:].count(chosen) > 80


def test_a_method_that_is_set_is_used_alone() -> None:
    assert set(used(MethodChoice(PROBES), 20, {PROBES: 9.0})) == {PROBES}
