"""The robot's sessions at a verifier: one connection, one session per answer, for any thread.

Each session is a ``SessionLink`` (deadlines, back-off, replay). This module performs its actions;
``verifier_client.py`` carries them over gRPC, ``stock/client.py`` over HTTP to stock servers.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import Cancelled, CollabError
from collab_llm_nodes.protocols.edge_cloud.link import (
    Action,
    Connect,
    Deliver,
    Disconnect,
    LinkConfig,
    Send,
    SessionLink,
)
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Draft,
    Open,
    ServerMessage,
)
from collab_llm_nodes.transport.client import CLOSE_GRACE_S, KeptConnection
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig
from collab_llm_nodes.transport.settings import ClientConfig
from collab_llm_nodes.transport.wire import Failure

log = logging.getLogger(__name__)

Connection = TypeVar("Connection")
Outbox = asyncio.Queue["ClientMessage | None"]


@dataclass(frozen=True)
class ClientLinkConfig(ClientConfig):
    """Address of the verifier, TLS and time limits. File names are PEM files.

    Read when the connection is made, hence read-only as parameters: a new value needs a new node.
    """

    address: str = setting("127.0.0.1:50551", "Verifier, host:port.", read_only=True)
    link: LinkConfig = field(default_factory=LinkConfig)


@dataclass(frozen=True)
class LinkStatus:
    """State of the connection; counters are since the client was made.

    Attributes:
        state: "UP" if the verifier has answered Describe on the present connection, else
            "CONNECTING" or "DOWN" (names of LinkState.msg).
        rtt_s: smoothed time from draft to verdict without the verifier's own [s]; 0 while unknown.
        bytes_up, bytes_down: message bytes of all sessions.
        reconnects: number of streams that replaced a broken one.
        sessions: number of open sessions.
        model, vocabulary: of the verifier; empty while unknown.
        error_code, error_msg: reason why the state is not UP; the message ends with the remedy.
    """

    state: str = "DOWN"
    rtt_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    reconnects: int = 0
    sessions: int = 0
    model: str = ""
    vocabulary: str = ""
    error_code: str = ""
    error_msg: str = ""


class SessionHandle(ABC):
    """One answer's session; made by :meth:`SessionClient.open`. Public methods are thread-safe.

    A subclass carries the messages of a stream: it takes them from the outbox, which ends with
    None, and reports what comes back.
    """

    def __init__(
        self, client: SessionClient[Any], opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> None:
        self._client = client
        self._link = SessionLink(opened, client.config.link)
        self._on_message = on_message
        self._outbox: Outbox = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def reconnects(self) -> int:
        """Number of streams that replaced a broken one."""
        return self._link.reconnects

    def send(self, draft: Draft) -> None:
        """Have ``draft`` verified; does not block."""
        self._client.post(self._draft, draft)

    def close(self) -> None:
        """End the session; no message is delivered once the background thread has handled this."""
        self._client.post(self._close)

    # Everything below runs in the background thread.

    def _start(self) -> None:
        if self._client.closed:
            self._give_up()
            return
        self._client.sessions.add(self)
        self._perform(self._link.start(self._now()))

    def _draft(self, draft: Draft) -> None:
        self._perform(self._link.on_draft(draft, self._now()))

    def _close(self) -> None:
        self._perform(self._link.close())

    def _give_up(self) -> None:
        self._deliver(Failure(Cancelled.code, "the link to the verifier was closed"))
        self._close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Connect):
                self._connect(action.deadline_s)
            elif isinstance(action, Send):
                self._send(action.message)
            elif isinstance(action, Deliver):
                self._deliver(action.message)
            elif isinstance(action, Disconnect):
                self._disconnect()
        if self._link.done:  # release the receiver, which may hold pictures and caches
            self._on_message = _to_nobody
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._link.next_tick
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._perform(self._link.on_tick(self._now()))

    def _connect(self, deadline_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            self._client.reconnects += 1
        self._outbox = asyncio.Queue()
        self._task = self._client.spawn(self._run_stream(self._outbox, deadline_s))

    def _send(self, message: ClientMessage) -> None:
        self._outbox.put_nowait(message)

    def count(self, up: int, down: int) -> None:
        """Count bytes of this session."""
        self.bytes_up += up
        self.bytes_down += down
        self._client.bytes_up += up
        self._client.bytes_down += down

    def _disconnect(self) -> None:
        self._client.sessions.discard(self)
        self._outbox.put_nowait(None)
        if self._task is not None:
            # Not at once: this may be the task that has just received the last verdict.
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._task.cancel)

    def _deliver(self, message: ServerMessage) -> None:
        try:
            self._on_message(message)
        except Exception:  # a fault of the receiver must not end the other sessions
            log.exception("a receiver of verifier messages failed")

    async def _run_stream(self, outbox: Outbox, deadline_s: float) -> None:
        """Run one stream, from connecting to its end. Cancelled when the next one replaces it."""
        try:
            await self._exchange(outbox, deadline_s)
            self._lost("the verifier ended the stream")
        except CollabError as error:  # no connection, or an invalid message
            self._failed(error)
        except asyncio.CancelledError:
            if outbox is self._outbox:  # cancelled with its lost connection, not replaced by us
                self._lost("the connection was lost")
            raise

    @abstractmethod
    async def _exchange(self, outbox: Outbox, deadline_s: float) -> None:
        """Connect within ``deadline_s``, then exchange messages until the server ends the stream.

        Raises:
            CollabError: why it ends.
        """

    def _connected(self) -> bool:
        """Report that the stream stands; return False if the session is over."""
        if not self._link.done:
            self._perform(self._link.on_connected(self._now()))
        return not self._link.done

    def receive(self, message: ServerMessage) -> None:
        """Handle a message of the present stream."""
        self._client.heard()
        self._perform(self._link.on_message(message, self._now()))

    def _lost(self, reason: str) -> None:
        self._perform(self._link.on_disconnected(reason, self._now()))

    def _failed(self, error: CollabError) -> None:
        self._perform(self._link.on_message(Failure.of(error), self._now()))


class SessionClient(KeptConnection[Connection]):
    """A connection to one verifier, or to a server in its place, and the sessions on it.

    Args:
        on_state: called in the background thread whenever state or error change.
        heartbeat: see ``KeptConnection``.
    """

    name = "verifier"

    def __init__(
        self,
        config: ClientLinkConfig,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        heartbeat: HeartbeatConfig | None = None,
    ) -> None:
        self.config = config
        self.bytes_up = 0
        self.bytes_down = 0
        self.reconnects = 0
        self.model = self.vocabulary = ""
        self.draft = ""  # the verifier's own draft model, by name
        self.sessions: set[SessionHandle] = set()
        self._on_state = on_state
        super().__init__(config, heartbeat)

    @property
    def status(self) -> LinkStatus:
        """The present status."""
        state, error = self.connection_state
        return LinkStatus(
            state=state,
            rtt_s=self.rtt_s,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            reconnects=self.reconnects,
            sessions=len(self.sessions),
            model=self.model,
            vocabulary=self.vocabulary,
            error_code=error.code if error is not None else "",
            error_msg=str(error) if error is not None else "",
        )

    def open(self, opened: Open, on_message: Callable[[ServerMessage], None]) -> SessionHandle:
        """Start a session; does not block. It connects at once, so the prefill overlaps drafting.

        Args:
            on_message: called with ``Opened`` (again after each reconnection), early exits,
                verdicts and, last, a ``Failure`` if the session cannot continue. Must not block.

        Raises:
            Unavailable: this client is closed.
        """
        self.check_open()
        session = self.make_session(opened, on_message)
        self.post(session._start)
        return session

    @abstractmethod
    def make_session(
        self, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> SessionHandle:
        """Return a session that is not started yet."""

    # Everything below runs in the background thread.

    def on_change(self) -> None:
        try:
            self._on_state(self.status)
        except Exception:  # a fault of the receiver must not end the link
            log.exception("a receiver of link states failed")

    def end_sessions(self) -> None:
        for session in list(self.sessions):
            session._give_up()


def _to_nobody(message: ServerMessage) -> None:
    """Ignore a message of a session that has ended."""
