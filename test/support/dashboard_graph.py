"""A graph for the node ``dashboard``, and hostile text to show on its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from started_nodes import stopped_at_the_end

from collab_llm_nodes.protocols.edge_cloud.client import Source

A, R, B, U = Source.ACCEPTED, Source.RECOVERED, Source.BONUS, Source.UNVERIFIED
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=2</script>'


@pytest.fixture
def graph(ros_graph: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The running graph; nodes started in it are stopped in the thread that ran them."""
    pytest.importorskip("nicegui", reason="pip install -r requirements/dashboard.txt")
    monkeypatch.delenv("COLLAB_LLM_DASHBOARD_TOKEN", raising=False)
    with stopped_at_the_end(ros_graph):
        yield ros_graph
