"""One session over an unreliable link, as a state machine without I/O or clock.

It keeps the Open message and the confirmed tokens, so a lost connection costs time but never
tokens: the stream is opened again with a replay, and the outstanding draft is sent again. Every
wait has a deadline; when it passes, the session ends with a typed failure.

The caller performs the returned actions and reports events:

    for action in link.start(now): perform(action)
    ... link.on_connected(now), on_disconnected(reason, now), on_message(m, now), on_tick(now)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import (
    DeadlineExceeded,
    InvalidInput,
    Replay,
    Unavailable,
)
from collab_llm_nodes.models.guide import FIELD
from collab_llm_nodes.protocols.edge_cloud.ahead import PushedDrafts, may_come
from collab_llm_nodes.protocols.edge_cloud.messages import (
    ClientMessage,
    Close,
    Draft,
    EarlyExit,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.transport import settings
from collab_llm_nodes.transport.settings import RetryConfig
from collab_llm_nodes.transport.wire import Failure


@dataclass(frozen=True)
class LinkConfig(RetryConfig):
    """Deadlines and back-off of one session's link."""

    verdict_deadline_s: float = setting(
        5.0,
        "Time from a draft to its verdict, reconnections included; for the first draft also"
        " connecting and the verifier's prefill [s].",
        low=0.01,
        high=600.0,
        read_only=True,
    )


@dataclass(frozen=True)
class Connect:
    """Open a new stream; drop the old one. Give up after ``deadline_s``."""

    deadline_s: float


@dataclass(frozen=True)
class Send:
    """Write to the current stream."""

    message: ClientMessage


@dataclass(frozen=True)
class Deliver:
    """Pass to the edge client."""

    message: ServerMessage


@dataclass(frozen=True)
class Disconnect:
    """The session is over: close the stream."""


Action = Connect | Send | Deliver | Disconnect

_UNGUIDED = Failure(
    InvalidInput.code,
    "the verifier does not know guides, and would answer with any text",
    FIELD,
    "update the verifier, or set answer.guide: none",
)


class _Phase(Enum):
    IDLE = "idle"  # no stream and none wanted
    CONNECTING = "connecting"
    OPEN = "open"
    BACKOFF = "backoff"
    DONE = "done"


_STREAMING = (_Phase.CONNECTING, _Phase.OPEN)


class SessionLink:
    """One session's state, from :meth:`start` until it is :attr:`done`."""

    def __init__(self, opened: Open, config: LinkConfig) -> None:
        self._open = opened
        self._config = config
        self._phase = _Phase.IDLE
        self._confirmed: tuple[int, ...] = opened.replay
        self._round = opened.round
        self._outstanding: Draft | None = None
        self._ahead = PushedDrafts()
        self._deadline: float | None = None
        self._retry_at: float | None = None
        self._backoff = settings.BACKOFF_S
        self._last_error = ""
        self._replayed = False  # since the last verdict
        self.reconnects = 0

    @property
    def done(self) -> bool:
        """True once the session has ended; further events are ignored."""
        return self._phase is _Phase.DONE

    @property
    def next_tick(self) -> float | None:
        """The time at which :meth:`on_tick` must be called at the latest."""
        times = [t for t in (self._deadline, self._retry_at) if t is not None]
        return min(times) if times and not self.done else None

    def start(self, now: float) -> list[Action]:
        """Connect ahead of the first draft, so that the prefill overlaps with drafting."""
        self._deadline = now + self._config.verdict_deadline_s
        return self._connect()

    def on_connected(self, now: float) -> list[Action]:
        """Handle a new stream: (re)open the session on it and repeat the outstanding draft."""
        if self._phase is not _Phase.CONNECTING:
            return []
        self._phase = _Phase.OPEN
        reopened = replace(self._open, replay=self._confirmed, round=self._round)
        outstanding = [self._outstanding] if self._outstanding else []
        return [Send(reopened), *(Send(draft) for draft in (*outstanding, *self._ahead))]

    def on_draft(self, draft: Draft, now: float) -> list[Action]:
        """Handle a draft of the edge client, for this round or a later one."""
        expected = draft.round == self._round
        if draft.after is not None:
            expected = may_come(draft, self._round, self._confirmed)
        if self.done or not expected:
            return []
        if draft.round > self._round:
            self._ahead.add(draft)
        elif self._outstanding is None:
            self._await(draft, now)
        else:
            return []
        if self._phase is _Phase.OPEN:
            return [Send(draft)]
        return self._connect() if self._phase is _Phase.IDLE else []

    def on_message(self, message: ServerMessage, now: float) -> list[Action]:
        """Handle a message on the current stream."""
        if self._phase not in _STREAMING:
            return []
        if isinstance(message, Failure):  # credentials may be refused before the stream is up
            if message.code == Replay.code and not self._replayed:
                return self._replay()
            if message.code in (Replay.code, Unavailable.code):  # another attempt may help
                return self.on_disconnected(message.message, now)
            return self._end(message)
        if self._phase is not _Phase.OPEN:
            return []
        self._backoff = settings.BACKOFF_S
        if isinstance(message, Opened):
            if self._open.guide is not None and not message.guided:
                return self._end(_UNGUIDED)
            if self._outstanding is None:
                self._deadline = None  # nothing is awaited until the next draft
            return [Deliver(message)]
        if self._outstanding is None or message.round != self._round:
            return []  # stale: from before a reconnect, or a repeated draft
        if isinstance(message, EarlyExit):
            return [Deliver(message)]
        return self._on_verdict(message, now)

    def on_disconnected(self, reason: str, now: float) -> list[Action]:
        """Handle a stream that broke or could not be made."""
        if self._phase not in _STREAMING:
            return []  # known already: a refusal is followed by the end of its stream
        self._last_error = reason
        if self._deadline is None:  # nothing is awaited: reconnect with the next draft
            self._phase = _Phase.IDLE
            return []
        self._phase = _Phase.BACKOFF
        self._retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, self._config.backoff_max_s)
        return []

    def _replay(self) -> list[Action]:
        """Reopen a session that the verifier has evicted; it is reachable, so without back-off."""
        if self._outstanding is None:
            self._phase, self._deadline = _Phase.IDLE, None
            return []
        self._replayed = True
        self.reconnects += 1
        return self._connect()

    def on_tick(self, now: float) -> list[Action]:
        """Handle the passage of time."""
        if self.done:
            return []
        if self._deadline is not None and now >= self._deadline:
            because = f"; last error: {self._last_error}" if self._last_error else ""
            late = DeadlineExceeded if self._phase is _Phase.OPEN else Unavailable
            return self._end(
                Failure(
                    late.code,
                    f"no verdict within {self._config.verdict_deadline_s:g} s{because}",
                    "verifier",
                    "check that the verifier runs and is reachable, or raise verdict_deadline_s",
                )
            )
        if self._retry_at is not None and now >= self._retry_at:
            self.reconnects += 1
            return self._connect()
        return []

    def close(self) -> list[Action]:
        """End the session, complete or not."""
        if self.done:
            return []
        was_open = self._phase is _Phase.OPEN
        self._finish()
        return [Send(Close()), Disconnect()] if was_open else [Disconnect()]

    def _connect(self) -> list[Action]:
        self._phase = _Phase.CONNECTING
        self._retry_at = None
        return [Connect(self._config.connect_deadline_s)]

    def _on_verdict(self, verdict: Verdict, now: float) -> list[Action]:
        verified, self._outstanding = self._outstanding, None
        assert verified is not None
        self._confirmed += verdict.tokens
        self._round += 1
        self._deadline = None
        self._replayed = False
        if verdict.finished:
            self._finish()
            return [Deliver(verdict), Disconnect()]
        due = self._ahead.next(verified, self._round, self._confirmed)
        if due is not None:  # the verifier has it, or will
            self._await(due, now)
        return [Deliver(verdict)]

    def _await(self, draft: Draft, now: float) -> None:
        self._outstanding = draft
        self._deadline = now + self._config.verdict_deadline_s

    def _end(self, failure: Failure) -> list[Action]:
        self._finish()
        return [Deliver(failure), Disconnect()]

    def _finish(self) -> None:
        self._phase = _Phase.DONE
        self._deadline = self._retry_at = None
