"""The dashboard's web server: two threads with an event loop each.

- The **front** (``front.py``) owns the port: gate, emergency stop, camera. It is started and ended
  with the node.
- The **pages** (``page.py``, NiceGUI) are behind it. NiceGUI is one per process and cannot be
  started twice, so its thread is started with the first site and stays to the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from typing import ClassVar

import uvicorn
from fastapi import FastAPI

from collab_llm_nodes.dashboard.access import Access
from collab_llm_nodes.dashboard.bridge import App, in_loop
from collab_llm_nodes.dashboard.door import Server
from collab_llm_nodes.dashboard.front import make_front
from collab_llm_nodes.dashboard.page import Host, install
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.errors import CollabError, ConfigError, Unavailable

_START_S = 60.0
_END_S = 5.0


class Site:
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
        listener = _listen(host, port)
        try:
            self.port = int(listener.getsockname()[1])
            access = Access(host, self.port, token)
            pages = _Pages.get()
            pages.host.serve(robot, max_viewers, rate)
            front = make_front(robot, access, in_loop(pages.app, pages.loop))
        except BaseException:  # an interrupt as well: the port must not stay taken
            listener.close()
            raise
        self._pages = pages
        config = uvicorn.Config(
            front,  # type: ignore[arg-type]
            lifespan="off",
            log_level="error",  # of strangers' requests every line would be theirs to write
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            ws_max_size=1 << 20,
        )
        self._server = Server(config, listener, max_viewers)
        self._thread = threading.Thread(
            target=self._server.run, name="dashboard-front", daemon=True
        )
        self._thread.start()
        due = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > due:
                self.close()
                listener.close()
                raise CollabError("the web server did not start", remedy="see the log above")
            time.sleep(0.01)

    @property
    def viewers(self) -> int:
        """Pages that are open."""
        return self._pages.host.viewers

    def close(self) -> None:
        """Stop listening; open pages lose their connection."""
        self._pages.host.leave()
        self._server.should_exit = True
        self._thread.join(_END_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except socket.gaierror as error:
        listener.close()
        raise ConfigError(str(error), field="host", remedy="an address of this machine") from None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is no address of this machine"
            raise ConfigError(message, field="host", remedy="one of: ip -brief address") from None
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="port",
            remedy="end who uses it, or choose another port",
        ) from None
    return listener


class _Pages:
    """NiceGUI in its thread."""

    _only: ClassVar[_Pages | None] = None

    def __init__(self) -> None:
        self.host = Host()
        self.loop = asyncio.new_event_loop()
        parent = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        install(parent, self.host)
        self.app: App = parent
        self._up = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(parent,), name="dashboard-pages", daemon=True
        )
        thread.start()
        if not self._up.wait(_START_S):
            raise CollabError("NiceGUI did not start", remedy="see the log above")

    @classmethod
    def get(cls) -> _Pages:
        """The one of this process."""
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
