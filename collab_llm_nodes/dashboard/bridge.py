"""An ASGI application that lives in another thread's event loop.

The front of the dashboard (log-in, camera, emergency stop) must answer whatever the pages are
doing. Each has an event loop and a thread of its own; this hands requests and web sockets from one
to the other. Flow control passes through: a message is sent when the one before it was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def in_loop(app: App, loop: asyncio.AbstractEventLoop) -> App:
    """``app``, run in ``loop`` although called from another one."""

    async def bridged(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        here = asyncio.get_running_loop()

        async def receive_there() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_of(receive()), here))

        async def send_there(message: Message) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_of(send(message)), here))

        run = _of(app(scope, receive_there, send_there))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run, loop))

    return bridged


async def _of(awaitable: Awaitable[Any]) -> Any:
    """A coroutine, which is what another loop takes."""
    return await awaitable
