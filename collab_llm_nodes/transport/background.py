"""The process's one asyncio loop for gRPC, in a daemon thread of its own.

grpc.aio hands the events of all its loops to whichever wakes first; an event for a loop that was
closed meanwhile is an error there and holds up the rest. So there is one loop, which is started on
first use and stays, idle, until the process ends. So does gRPC's polling thread: by itself it ends
with the last channel, and is detached from the loop in whichever thread happens to collect that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

from grpc.aio import init_grpc_aio

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop; hand it work by ``asyncio.run_coroutine_threadsafe``."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.call_soon(init_grpc_aio)  # counts uses; ours never ends
            _thread = threading.Thread(target=_loop.run_forever, name="grpc-loop", daemon=True)
            _thread.start()
        return _loop


def in_background_thread() -> bool:
    """Return True in the loop's thread, where waiting for the loop would never end."""
    return threading.current_thread() is _thread


async def within(job: Awaitable[T], seconds: float | None) -> T:
    """Return the result of ``job``, or raise ``asyncio.TimeoutError`` after ``seconds``, if any.

    Not ``asyncio.wait_for``: before Python 3.12 that loses a cancellation which arrives as the job
    ends, and a client that left at that moment would keep its session.
    """
    task = asyncio.ensure_future(job)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()  # no effect on one that is done
    if not done:
        raise asyncio.TimeoutError
    return task.result()
