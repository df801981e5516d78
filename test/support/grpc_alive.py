"""End the run where this process's gRPC has stopped working: every later test would fail too.

All clients and servers of a process share one asyncio loop and gRPC's one polling thread. A test
that stops either makes every later test with gRPC run into its time limit. conftest.py imports
this hook, which looks after each failed test and tells, with the stacks of all threads, what holds
the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import os
import threading

import grpc
import pytest

from collab_llm_nodes.transport.background import background_loop

ANSWER_S = 30.0
"""Time in which a loop that works, on however busy a machine, reports an event of a channel."""

_stderr = os.dup(2)  # the real one, which pytest's capture hides


def grpc_works(answer_s: float = ANSWER_S) -> bool:
    """Return True if the background loop gets gRPC's events within ``answer_s`` seconds."""

    async def look() -> None:
        async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
            state = channel.get_state(try_to_connect=True)
            await channel.wait_for_state_change(state)

    asked = asyncio.run_coroutine_threadsafe(look(), background_loop())
    try:
        asked.result(answer_s)
    except concurrent.futures.TimeoutError:
        asked.cancel()
        return False
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Check after a failure; with pytest-xdist in the workers, not in their controller."""
    if report.failed and not hasattr(report, "node") and not grpc_works():
        os.write(_stderr, f"\n{report.nodeid} ({report.when}) left gRPC dead:\n".encode())
        os.write(_stderr, f"{report.longreprtext}\n".encode())
        alive = sorted(thread.name for thread in threading.enumerate())
        os.write(_stderr, f"threads: {', '.join(alive)}\n".encode())
        faulthandler.dump_traceback(file=_stderr, all_threads=True)
        pytest.exit(f"gRPC no longer works in this process since {report.nodeid}", returncode=1)
