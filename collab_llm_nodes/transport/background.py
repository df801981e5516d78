"""The process's one asyncio loop for gRPC, in a daemon thread of its own.

grpc.aio hands the events of all its loops to the first one that wakes; an event for a loop that was
closed meanwhile is an error there and delays the others. So there is one loop, which is started on
first use and stays until the process ends. gRPC's polling thread stays as well: otherwise it would
end with the last channel, in whichever thread collects that as garbage.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from typing import TypeVar

from grpc.aio import init_grpc_aio

T = TypeVar("T")
_log = logging.getLogger(__name__)

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, for ``asyncio.run_coroutine_threadsafe``."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.call_soon(init_grpc_aio)  # counts uses; ours never ends
            _thread = threading.Thread(target=_run, args=(_loop,), name="grpc-loop", daemon=True)
            _thread.start()
        return _loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for ever: a job that asks the process to exit must not end all the others."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt):  # asyncio hands on these two only
            _log.exception("a job of the background loop asked to exit")


def in_background_thread() -> bool:
    """Return True in the loop's thread, which must not wait for the loop."""
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
