"""The length limit of an answer: the same bounds, default and words wherever one can be named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collab_llm_nodes.chat.base import ChatRequest
from collab_llm_nodes.config import MAX_TOKENS
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import Request
from collab_llm_nodes.protocols.dragon.service import Limits as CloudLimits
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig, LaneAnswer

ASK = (Turn("user", "go on"),)
HAVE_IT = ("edge_cloud", "collective", "dragon", "jupiter")
"""Protocols whose requests have one limit; minions has one for each role."""


def check(protocol: str) -> Callable[[int], object]:
    entry = registry.find(protocol)
    return lambda limit: entry.check(Request("a", entry.config(), ASK, max_tokens=limit))


REQUESTS = {
    **{name: check(name) for name in HAVE_IT},
    "chat": lambda limit: ChatRequest(ASK, max_tokens=limit),
    "lane": lambda limit: LaneAnswer(0, [1], DecodeConfig(limit), eos=frozenset(), context=9),
}


@pytest.mark.parametrize("limit", [1, MAX_TOKENS])
@pytest.mark.parametrize("where", REQUESTS)
def test_the_ends_of_the_range_are_taken(where: str, limit: int) -> None:
    REQUESTS[where](limit)


@pytest.mark.parametrize("limit", [-1, MAX_TOKENS + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("where", REQUESTS)
def test_what_is_out_of_range_is_refused_in_the_same_words(where: str, limit: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        REQUESTS[where](limit)
    assert str(refused.value) == f"max_tokens: {limit} is out of range (1 to 65536)"


@pytest.mark.parametrize("protocol", HAVE_IT)
def test_zero_is_the_node_s_default(protocol: str) -> None:
    REQUESTS[protocol](0)


def limits_in(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield the settings that limit an answer; others limit what an encoder or re-ranker reads."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from limits_in(value, f"{prefix}{field.name}.")
        elif field.name == "max_tokens" and not prefix.endswith(("encoder.", "reranker.")):
            yield prefix + field.name, field


def test_every_setting_has_the_same_range() -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    from parameter_tables import nodes

    configs = [*nodes(), ("verifier", Limits), ("dragon in the cloud", CloudLimits)]
    found = {
        f"{node}.{name}": field.metadata
        for node, config in configs
        for name, field in limits_in(config())
    }
    assert len(found) >= 10
    for name, facts in found.items():
        least = 0 if name == "navigator.answer.max_tokens" else 1  # 0: the server's default
        assert (facts["low"], facts["high"]) == (least, MAX_TOKENS), name
