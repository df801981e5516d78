"""The draft VLM on the robot: edge-cloud speculation (paper 003) for every node.

Hosts the action ``edge_cloud/generate``, its service twin ``edge_cloud_generate``, and ``predraft``
for the cache. It is also the protocol's carrier: it publishes drafts on ``draft``, and passes the
messages of bridge and cache to the decoding loop of their session.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage
from std_msgs.msg import Header

from collab_llm.msg import Draft, EarlyExit, Status, Verdict
from collab_llm.srv import CloseSession, OpenSession, PreDraft
from collab_llm_nodes.errors import CollabError, DeadlineExceeded, InvalidInput, Unavailable
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.base import Request, Resources
from collab_llm_nodes.protocols.edge_cloud import messages
from collab_llm_nodes.protocols.edge_cloud.loop import Event as LoopEvent
from collab_llm_nodes.protocols.edge_cloud.loop import PreDraftRequest
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloudConfig
from collab_llm_nodes.ros.convert import (
    deadline_from,
    draft_to_msg,
    exit_from_msg,
    raise_for,
    status_of,
    verdict_from_msg,
)
from collab_llm_nodes.ros.generation_host import HostConfig
from collab_llm_nodes.ros.managed_node import guarded
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.protocol_server import ProtocolServer
from collab_llm_nodes.ros.qos import REQUESTS, RESULT

_OPEN_S = 1.0
"""Longest wait for the service open_session, which does not wait for the verifier [s]."""


@dataclass(frozen=True)
class DraftVlmConfig(EdgeCloudConfig, HostConfig):
    """Parameters of the node."""


class _Session:
    """One answer's session at the bridge."""

    def __init__(
        self, node: DraftVlm, request: Request, receive: Callable[[LoopEvent], None]
    ) -> None:
        self.request = request
        self.header = Header(
            stamp=Time(sec=request.stamp_ns // 10**9, nanosec=request.stamp_ns % 10**9),
            frame_id=request.frame_id,
        )
        self.receive = receive
        self.bytes_up = self.bytes_down = 0
        self.closed_by_bridge = False
        self._node = node

    def send(self, draft: messages.Draft) -> None:
        self._node.drafts.publish(draft_to_msg(draft, self.header, self.request.id))

    def close(self) -> None:
        self._node.close_session(self)


class DraftVlm(ProtocolServer[DraftVlmConfig]):
    """See the module docstring."""

    queues_exits = True  # predraft_cache does

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__(
            "edge_cloud",
            name="draft_vlm",
            config_type=DraftVlmConfig,
            **node_arguments,
        )
        self._sessions: dict[str, _Session] = {}
        self.verifier_drafts = False  # as the bridge said when the last session was opened

    def resources(self) -> Resources:
        return Resources(carrier=self, log=self.get_logger())

    def enter_process(self) -> None:
        set_threads(*self.config.models())

    def configure(self) -> None:
        """Load the model and offer the interfaces; the load blocks the transition."""
        super().configure()
        self.drafts = self.create_publisher(Draft, "draft", RESULT)
        self._to_bridge = (
            self.create_client(OpenSession, "open_session", qos_profile=REQUESTS),
            self.create_client(CloseSession, "close_session", qos_profile=REQUESTS),
        )
        self._open_client, self._close_client = self._to_bridge
        self._subscriptions_made = [
            self.create_subscription(Verdict, "verdict", self._on_verdict, RESULT),
            self.create_subscription(EarlyExit, "early_exit", self._on_early_exit, RESULT),
        ]
        self._predraft = self.create_service(
            PreDraft,
            "predraft",
            self._serve_predraft,
            qos_profile=REQUESTS,
            callback_group=self.host.group,
        )

    def cleanup(self) -> None:
        subscriptions, predraft, clients = self._subscriptions_made, self._predraft, self._to_bridge

        def release() -> None:
            for subscription in subscriptions:
                self.destroy_subscription(subscription)
            self.destroy_service(predraft)
            for client in clients:
                self.destroy_client(client)

        self.host.close(release)
        self.destroy_publisher(self.drafts)

    # The carrier: called by the thread that decodes.

    def open(
        self,
        request: Request,
        opened: messages.Open,
        receive: Callable[[LoopEvent], None],
        due: float,
    ) -> _Session:
        """Open the session at the bridge."""
        session = _Session(self, request, receive)
        wait = min(_OPEN_S, due - time.monotonic())
        if not self._open_client.wait_for_service(timeout_sec=max(0.0, wait)):
            raise Unavailable(
                "the service open_session is not there",
                field="cloud_verifier_bridge",
                remedy="start and activate the bridge",
            )
        call = OpenSession.Request(
            header=session.header,
            session_id=request.id,
            text=opened.text,
            turn_roles=[turn.role for turn in opened.turns],
            turn_contents=[turn.content for turn in opened.turns],
            raw=opened.raw,
            images=[CompressedImage(format="jpeg", data=array("B", i)) for i in opened.images],
            temperature=opened.sampling.temperature,
            top_k=opened.sampling.top_k,
            top_p=opened.sampling.top_p,
            seed=opened.sampling.seed,
            law=opened.sampling.law,
            max_tokens=opened.max_tokens,
            vocabulary=opened.vocabulary,
            for_motion=opened.for_motion,
            guide_kind=opened.guide.kind if opened.guide else "",
            guide_source=opened.guide.source if opened.guide else "",
            co_located=opened.co_located,
            deadline_s=max(0.001, due - time.monotonic()),
        )
        self._sessions[request.id] = session  # before its first message can arrive
        try:
            self._call_open(call, wait)
        except Exception:
            self.close_session(session)  # it may have been opened nevertheless
            raise
        return session

    def _call_open(self, call: OpenSession.Request, wait: float) -> None:
        answered = Event()
        future = self._open_client.call_async(call)
        future.add_done_callback(lambda _: answered.set())
        if not answered.wait(max(0.0, wait)):
            self._open_client.remove_pending_request(future)
            raise DeadlineExceeded("open_session did not answer", field="cloud_verifier_bridge")
        response = future.result()
        if response is None:
            raise Unavailable("open_session gave no response", field="cloud_verifier_bridge")
        raise_for(response.status)
        self.verifier_drafts = response.verifier_draft != ""

    def close_session(self, session: _Session) -> None:
        """Drop ``session``, and have the bridge close it unless it has done so already."""
        self._sessions.pop(session.request.id, None)
        if not session.closed_by_bridge:
            self._close_client.call_async(CloseSession.Request(session_id=session.request.id))

    # Messages of other nodes go into the loop of their session.

    @guarded
    def _on_verdict(self, msg: Verdict) -> None:
        session = self._sessions.get(msg.session_id)
        if session is not None:
            session.bytes_up, session.bytes_down = msg.bytes_up, msg.bytes_down
            session.closed_by_bridge = msg.finished or msg.status.code != Status.OK
            session.receive(verdict_from_msg(msg))

    @guarded
    def _on_early_exit(self, msg: EarlyExit) -> None:
        if (session := self._sessions.get(msg.session_id)) is not None:
            session.receive(exit_from_msg(msg))

    async def _serve_predraft(
        self, request: PreDraft.Request, response: PreDraft.Response
    ) -> PreDraft.Response:
        session = self._sessions.get(request.session_id)
        try:
            if session is None:
                raise InvalidInput("no answer of this session is under way", field="session_id")
            due = time.monotonic() + deadline_from(request, math.inf)
        except CollabError as error:
            response.status = status_of(error)
            return response
        done = Future()
        wanted = PreDraftRequest(
            request.round,
            tuple(request.outcome),
            reply=lambda error: self.post(done.set_result, error),
            due=due,
        )
        session.receive(wanted)
        refused = await done
        if refused is not None:
            response.status = status_of(refused)
        return response


def main() -> int:
    """Run the node."""
    return run(DraftVlm)


if __name__ == "__main__":
    raise SystemExit(main())
