"""The process's one loop for gRPC."""

from __future__ import annotations

import asyncio

import pytest
from grpc_alive import grpc_works

from collab_llm_nodes.transport.background import background_loop


def test_a_job_that_exits_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    asked = asyncio.run_coroutine_threadsafe(leave(), background_loop())
    with pytest.raises(SystemExit):
        asked.result(60.0)
    assert grpc_works()
    assert "asked to exit" in caplog.text
