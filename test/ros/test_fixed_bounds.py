"""Bounds of what leaves the robot are fixed at the start: everybody may set parameters."""

from __future__ import annotations

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from parameter_tables import nodes

from collab_llm_nodes.ros.parameters import flatten

CONFIGS = dict(nodes())
PRIVATE = ("dragon_server", "minion_server", "minions_server")
"""Nodes that read private documents."""
HARMLESS = (
    # load, time and places
    *("health.", "deadline_s", "max_waiting", "remote_model.", "local_model.", "schedule.seed"),
    "patience.",
    # what is read into a store or kept in it, and prices
    *("library.", "side.limits.", "side.documents.", "side.plan.", "memory.", "cost."),
    # what a request may set to anything
    *("max_tokens", "store", "retrieval.method", "retrieval.temperature", "force_final", "reduce"),
    *("remote.temperature", "remote.max_tokens", "local.temperature"),
    *("side.retrieval.method", "side.retrieval.temperature", "side.relevance."),
    *("aggregation.law", "aggregation.gamma", "aggregation.paper_faithful"),
    *("worker_form", "examples", "advice", "aggregate"),
)
"""Beginnings of the names of parameters that may be set at any time."""


@pytest.mark.parametrize("node", CONFIGS)
def test_what_a_request_may_only_narrow_no_parameter_call_can_widen(node: str) -> None:
    for name, field, _ in flatten(CONFIGS[node](), ""):
        direction = field.metadata.get("per_request")
        if direction is not None and direction.label:
            assert field.metadata["read_only"], name


@pytest.mark.parametrize("node", PRIVATE)
def test_all_parameters_are_fixed_but_those_that_bound_nothing(node: str) -> None:
    """A new parameter of these nodes is fixed, or shown to be harmless above."""
    dynamic = [n for n, f, _ in flatten(CONFIGS[node](), "") if not f.metadata.get("read_only")]
    assert [name for name in dynamic if not name.startswith(HARMLESS)] == []
