"""The bridge between the ROS graph and the verifier in the cloud, or a stock server in its place.

One stream per session: drafts go up, early exits and verdicts come down. ``SessionLink`` in the
client handles deadlines, reconnection and replay; this node translates messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from std_msgs.msg import Header

from collab_llm.msg import Draft, EarlyExit, LinkState, Verdict
from collab_llm.srv import CloseSession, OpenSession
from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    DeadlineExceeded,
    Inactive,
    InvalidInput,
)
from collab_llm_nodes.protocols.edge_cloud import messages
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.sessions import (
    LinkStatus,
    SessionClient,
    SessionHandle,
)
from collab_llm_nodes.protocols.edge_cloud.stock.opening import open_client
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.convert import (
    deadline_from,
    draft_from_msg,
    exit_to_msg,
    guide_in,
    images_from,
    sampling_from,
    status_of,
    turns_from,
    verdict_to_msg,
)
from collab_llm_nodes.ros.health import LinkHealth, LinkLimits, Status
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import REQUESTS, RESULT, STATE
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig
from collab_llm_nodes.transport.wire import Failure

MAX_SESSIONS = 8
"""Sessions open at a time, those for motion and all others counted apart.

draft_vlm has one of each; the rest is for sessions of a draft_vlm that died.
"""
_STATE_PERIOD_S = 0.1
"""Period of link_state [s]; motion_guard takes its silence for a lost link."""
_SESSION_S = 60.0
"""Life of a session whose opener names no deadline [s]."""
_NO_FAULTS = (Cancelled.code, Inactive.code)
"""Errors that end a session on request, and are no faults of the link."""


@dataclass(frozen=True)
class BridgeConfig:
    """Parameters of the node."""

    verifier: TargetLinkConfig = field(default_factory=TargetLinkConfig)
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    health: LinkLimits = field(default_factory=LinkLimits)


@dataclass
class _Session:
    handle: SessionHandle
    header: Header
    sampling: SamplingConfig
    for_motion: bool
    due: float  # time.monotonic() at which its opener stops waiting


class CloudVerifierBridge(ManagedNode[BridgeConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("cloud_verifier_bridge", BridgeConfig, **node_arguments)
        self._client: SessionClient[Any] | None = None
        self._sessions: dict[str, _Session] = {}
        self._health = LinkHealth(time.monotonic())
        self._logged_state = ""  # of the link

    def configure(self) -> None:
        self._exits = self.create_publisher(EarlyExit, "early_exit", RESULT)
        self._verdicts = self.create_publisher(Verdict, "verdict", RESULT)
        self._link_states = self.create_publisher(LinkState, "link_state", STATE)
        # After the publishers: its first report may come at once, from its own thread.
        self._client = open_client(
            self.config.verifier,
            on_state=lambda state: self.post(self._publish_link),
            heartbeat=self.config.heartbeat,
        )
        self._draft_subscription = self.create_subscription(Draft, "draft", self._on_draft, RESULT)
        self._offered = [
            self.create_service(OpenSession, "open_session", self._open, qos_profile=REQUESTS),
            self.create_service(CloseSession, "close_session", self._close, qos_profile=REQUESTS),
        ]
        self._periodic = [
            self.create_timer(_STATE_PERIOD_S, self._publish_link, clock=STEADY),
            self.create_timer(1.0, self._end_overdue, clock=STEADY),
        ]

    def deactivate(self) -> None:
        for session_id in list(self._sessions):
            self._on_message(session_id, Failure.of(Inactive("the bridge was deactivated")))

    def cleanup(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        for timer in self._periodic:
            self.destroy_timer(timer)
        for service in self._offered:
            self.destroy_service(service)
        self.destroy_subscription(self._draft_subscription)
        for publisher in (self._exits, self._verdicts, self._link_states):
            self.destroy_publisher(publisher)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        return level, message, {"sessions": len(self._sessions)}

    def details(self, now: float) -> list[Status]:
        """Return the status of the link, with recent faults."""
        link = self._client.status if self._client is not None else LinkStatus()
        error = f"{link.error_code}: {link.error_msg}" if link.error_msg else ""
        limits, recent = self.config.health, self.common.diagnostics.recent
        status = self._health.status(link.state, link.rtt_s, error, limits, now, recent)
        status.values.update(
            verifier=self.config.verifier.server,
            model=link.model,
            reconnects=link.reconnects,
            bytes_up=link.bytes_up,
            bytes_down=link.bytes_down,
        )
        return [status]

    # Sessions: service callbacks must answer in any state.

    def _open(
        self, request: OpenSession.Request, response: OpenSession.Response
    ) -> OpenSession.Response:
        """Start a session; does not wait for the verifier, so that drafting starts at once."""
        if not self.active or self._client is None:
            response.status = status_of(Inactive("the bridge is not active"))
            return response
        rivals = sum(s.for_motion == request.for_motion for s in self._sessions.values())
        if rivals >= MAX_SESSIONS:
            error = Busy(f"{rivals} sessions are open", field="session_id", remedy="close others")
            response.status = status_of(error)
            return response
        session_id = request.session_id
        try:
            if not session_id or session_id in self._sessions:
                raise InvalidInput(
                    "must be new and not empty", field="session_id", remedy="use a random UUID"
                )
            if not request.vocabulary:
                raise InvalidInput(
                    "is empty", field="vocabulary", remedy="the hash of the draft's vocabulary"
                )
            max_tokens = request.max_tokens or EdgeClientConfig.max_tokens
            check_max_tokens(max_tokens)
            sampling = sampling_from(request)
            opened = messages.Open(
                text=request.text,
                images=images_from(request),
                sampling=sampling,
                max_tokens=max_tokens,
                vocabulary=request.vocabulary,
                replay=tuple(request.replay),
                round=request.round,
                turns=turns_from(request),
                raw=request.raw,
                for_motion=request.for_motion,
                guide=guide_in(request),
                co_located=request.co_located,
            )
            allowed_s = deadline_from(request, _SESSION_S)
            handle = self._client.open(
                opened, lambda message: self.post(self._on_message, session_id, message)
            )
        except CollabError as error:
            response.status = status_of(error)
            return response
        response.verifier_draft = self._client.draft
        due = time.monotonic() + allowed_s
        self._sessions[session_id] = _Session(
            handle, request.header, sampling, request.for_motion, due
        )
        self.get_logger().debug(f"session {session_id[:8]}: opened, {len(self._sessions)} open")
        return response

    def _close(
        self, request: CloseSession.Request, response: CloseSession.Response
    ) -> CloseSession.Response:
        """End a session early; closing an unknown or ended one is no error."""
        self._end(request.session_id)
        return response

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.handle.close()
            self.get_logger().debug(f"session {session_id[:8]}: closed")

    @guarded
    def _on_draft(self, msg: Draft) -> None:
        session = self._sessions.get(msg.session_id)
        if session is None:
            return  # ended, or another robot's bridge serves it
        try:
            session.handle.send(draft_from_msg(msg, session.sampling))
        except CollabError as error:
            self._on_message(msg.session_id, Failure.of(error))

    @guarded
    def _on_message(self, session_id: str, message: messages.ServerMessage) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        if isinstance(message, messages.EarlyExit):
            self._exits.publish(exit_to_msg(message, session.header, session_id))
        elif isinstance(message, (messages.Verdict, Failure)):
            if isinstance(message, Failure) and message.code not in _NO_FAULTS:
                self._health.faults.add(message.code, message.message, time.monotonic())
            over = isinstance(message, Failure) or message.finished
            self.get_logger().debug(f"session {session_id[:8]}: {_description(message)}")
            msg = verdict_to_msg(message, session.header, session_id)
            msg.bytes_up, msg.bytes_down = session.handle.bytes_up, session.handle.bytes_down
            self._verdicts.publish(msg)
            if over:
                self._end(session_id)

    @guarded
    def _end_overdue(self) -> None:
        """End sessions whose deadline has passed; their opener may have died."""
        now = time.monotonic()
        for session_id in [i for i, s in self._sessions.items() if now > s.due]:
            late = DeadlineExceeded("the session's deadline has passed", field="deadline_s")
            self._on_message(session_id, Failure.of(late))

    def _publish_link(self) -> None:
        if self._client is None:
            return
        link = self._client.status
        self._health.on_state(link.state, time.monotonic())
        if link.state != self._logged_state:
            self._logged_state = link.state
            self.get_logger().debug(f"link to {self.config.verifier.server}: {link.state}")
        msg = LinkState(
            state=getattr(LinkState, link.state),
            verifier=self.config.verifier.server,
            rtt_s=link.rtt_s,
            bytes_up=link.bytes_up,
            bytes_down=link.bytes_down,
            reconnects=link.reconnects,
            sessions=link.sessions,
            vocabulary=link.vocabulary,
            model=link.model,
            error_code=link.error_code,
            error_msg=link.error_msg,
        )
        msg.header.stamp = self.get_clock().now().to_msg()
        self._link_states.publish(msg)


def _description(message: messages.Verdict | Failure) -> str:
    """Return a description of ``message`` for the log."""
    if isinstance(message, Failure):
        return f"failed: {message.code}: {message.message!r}"
    return (
        f"round {message.round}: {len(message.tokens)} tokens, {message.accepted} of them drafted"
    )


def main() -> int:
    """Run the node."""
    return run(CloudVerifierBridge)


if __name__ == "__main__":
    raise SystemExit(main())
