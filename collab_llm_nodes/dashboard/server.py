"""The dashboard's web server: two threads with an event loop each.

- The **connection limiter** owns the port and answers the requests that must never wait
  (``http_api.py``): access, emergency stop, camera. It starts and ends with the node.
- The **pages** (``page.py``, NiceGUI) get connections from it, each for one request or web socket.
  NiceGUI is one per process and cannot be started twice, so its thread starts with the first server
  and runs to the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.middleware.base import RequestResponseEndpoint
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from collab_llm_nodes.dashboard.access import Access
from collab_llm_nodes.dashboard.connection_limiter import ConnectionLimiter
from collab_llm_nodes.dashboard.http_api import HEADERS, HttpApi
from collab_llm_nodes.dashboard.page import Host, install
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.network import listen

_START_S = 60.0


class DashboardServer:
    """Serves ``robot``'s pages from construction until :meth:`close`.

    Attributes:
        port: the one it listens on.

    Raises:
        ConfigError: the address is none of this machine's.
        Unavailable: the port is in use, or not allowed.
    """

    def __init__(
        self, robot: Robot, host: str, port: int, token: str, *, max_viewers: int, rate: float
    ) -> None:
        listener = listen(host, port)
        try:
            self.port = int(listener.getsockname()[1])
            api = HttpApi(robot, Access(host, self.port, token))
            self._pages = _Pages.get()
            self._pages.host.serve(robot, max_viewers, rate)
            try:
                self._limiter = ConnectionLimiter(listener, api, self._pages.take, max_viewers)
            except BaseException:
                self._pages.host.leave()
                raise
        except BaseException:  # an interrupt as well: the port must not stay taken
            listener.close()
            raise

    @property
    def viewers(self) -> int:
        """Pages that are open."""
        return self._pages.host.viewers

    def close(self) -> None:
        """Stop listening; open pages lose their connection."""
        self._pages.host.leave()
        self._limiter.close()
        self._pages.drop()


class _Pages:
    """NiceGUI in its thread."""

    _only: ClassVar[_Pages | None] = None

    def __init__(self) -> None:
        self.host = Host()
        self.loop = asyncio.new_event_loop()
        parent = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

        @parent.middleware("http")
        async def confine(request: Request, answer: RequestResponseEndpoint) -> Response:
            response = await answer(request)
            response.headers.update(HEADERS)
            return response

        install(parent, self.host)
        self._config = uvicorn.Config(
            parent,
            lifespan="off",
            log_level="error",  # anybody could write lines of requests
            access_log=False,
            ws_max_size=1 << 20,
        )
        self._state = ServerState()
        self._up = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(parent,), name="dashboard-pages", daemon=True
        )
        thread.start()
        if not self._up.wait(_START_S):
            raise CollabError("NiceGUI did not start", remedy="see the log above")

    @classmethod
    def get(cls) -> _Pages:
        """Return the instance of this process."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def _run(self, parent: FastAPI) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._live(parent))

    async def _live(self, parent: FastAPI) -> None:
        async with parent.router.lifespan_context(parent):
            self._up.set()
            await asyncio.Event().wait()  # the process's end

    # From any thread.

    def take(self, connection: socket.socket, received: bytes) -> Callable[[], object]:
        """Serve a connection from which ``received`` was read; return a function that closes it."""

        def cut() -> None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

        asyncio.run_coroutine_threadsafe(self._serve(connection, received), self.loop)
        return partial(self.loop.call_soon_threadsafe, cut)

    def drop(self) -> None:
        """End all connections."""
        self.loop.call_soon_threadsafe(
            lambda: [each.shutdown() for each in [*self._state.connections]]
        )

    async def _serve(self, connection: socket.socket, received: bytes) -> None:
        try:
            _, http = await self.loop.connect_accepted_socket(
                lambda: H11Protocol(self._config, self._state, {}), connection
            )
            http.data_received(received)
        except OSError:  # it has left again
            connection.close()
