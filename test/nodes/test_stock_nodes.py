"""The nodes of edge-cloud decoding with a stock server in the verifier's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from edge_cloud_graph import MAX_TOKENS, Edge
from fake_vllm import MODEL, FakeVllm, Reply

from collab_llm.msg import LinkState, Status
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm(Reference.load(MODEL)) as serving:
        yield serving


@pytest.fixture
def edge(ros_graph: Any, server: FakeVllm) -> Iterator[Edge]:
    bridge = {
        "verifier.kind": "vllm",
        "verifier.url": f"http://127.0.0.1:{server.port}",
        "verifier.model": MODEL,
        "verifier.tokenizer": MODEL,
        "verifier.link.verdict_deadline_s": 15.0,
    }
    graph = Edge(ros_graph, 1, bridge=bridge, **{"model.path": "text-worker"})
    yield graph
    graph.stop()


@pytest.mark.ros
def test_an_answer_of_a_stock_server_through_the_whole_graph(edge: Edge, server: FakeVllm) -> None:
    result = edge.generate(images=[])
    assert result.status.code == Status.OK, result.status.message
    prompt = server.reference.encode(Prompt(edge.goal().prompt))
    assert tuple(result.tokens) == server.greedy(prompt, MAX_TOKENS)
    assert result.verified
    up = edge.graph.wait_for(lambda: [s for s in edge.links if s.state == LinkState.UP])[-1]
    assert (up.verifier, up.model) == (f"http://127.0.0.1:{server.port}", MODEL)
    assert not edge.exits


@pytest.mark.ros
def test_a_refused_key_is_the_status_of_the_answer(edge: Edge, server: FakeVllm) -> None:
    edge.graph.wait_for(lambda: [s for s in edge.links if s.state == LinkState.UP])
    server.fault = lambda path, body, honest: Reply(401, b'{"error": {"message": "no key"}}')
    result = edge.generate(images=[])
    assert result.status.code == Status.UNAUTHENTICATED
    assert not result.text
