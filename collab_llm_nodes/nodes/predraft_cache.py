"""The pre-draft cache node: ranks early exits, and asks for drafts in that order.

It subscribes to early exits and requests a pre-draft for the most confident one at a time from
``draft_vlm`` (service ``predraft``). ``draft_vlm`` makes, keeps and sends all drafts: when the
verdict is one of these outcomes, the next draft is sent at once, so that the verifier need not wait
for the draft model (paper 003, steps 3 to 6). The graph works without this node, but more slowly.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rclpy.duration import Duration
from rclpy.task import Future

from collab_llm.msg import Draft, EarlyExit, GeneratedText, Status, Verdict
from collab_llm.srv import PreDraft
from collab_llm_nodes.protocols.edge_cloud.predraft import Answer, OutcomeQueue, PreDraftConfig
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import REQUESTS, RESULT

_PREDRAFT_S = 2.0
"""Longest wait for one pre-draft: more than any round takes [s]."""
_MAX_SESSIONS = 16
"""Sessions remembered, the oldest forgotten first: draft_vlm works on two at a time."""


@dataclass(frozen=True)
class PreDraftCacheConfig:
    """Parameters of the node."""

    cache: PreDraftConfig = field(default_factory=PreDraftConfig)


class _Session:
    """The answer by its verdicts, and the outcomes suggested by exits.

    Attributes:
        ready: answers for which ``draft_vlm`` has a pre-draft that this node requested.
    """

    def __init__(self, config: PreDraftConfig) -> None:
        self.queue = OutcomeQueue(config)
        self.ready: set[Answer] = set()
        self.answer: Answer = ()
        self.round = 0

    def grow(self, msg: Verdict) -> bool:
        """Extend the answer by a verdict; return False if it is not the next one."""
        if msg.round != self.round:
            return False
        self.answer += tuple(msg.tokens)
        self.round += 1
        self.queue.advance(self.answer)
        return True


class PreDraftCacheNode(ManagedNode[PreDraftCacheConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("predraft_cache", PreDraftCacheConfig, **node_arguments)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._pending: Future | None = None
        self._pending_until = STEADY.now()
        self.lookups = 0  # verdicts followed by another draft
        self.exits = 0
        self.predrafts = 0  # made at this node's request
        self.hits = 0  # verdicts for which one of them was ready

    def configure(self) -> None:
        self._predraft = self.create_client(PreDraft, "predraft", qos_profile=REQUESTS)
        self._subscriptions_made = [
            self.create_subscription(Draft, "draft", self._on_draft, RESULT),
            self.create_subscription(EarlyExit, "early_exit", self._on_early_exit, RESULT),
            self.create_subscription(Verdict, "verdict", self._on_verdict, RESULT),
            self.create_subscription(GeneratedText, "generated_text", self._on_text, RESULT),
        ]

    def cleanup(self) -> None:
        for subscription in self._subscriptions_made:
            self.destroy_subscription(subscription)
        self.destroy_client(self._predraft)
        self._pending = None
        self._sessions.clear()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        if self.active and not self._predraft.service_is_ready():
            level, message = Level.WARN, "draft_vlm's service predraft is not there"
        elif self.lookups and not self.exits:
            message = "no early exits: draft_vlm predicts alone (its hit_rate)"
        values = {
            "verdicts": self.lookups,
            "early_exits": self.exits,
            "predrafts": self.predrafts,
            "hits_by_exits": self.hits,
        }
        return level, message, values

    @guarded
    def _on_draft(self, msg: Draft) -> None:
        """Begin a session; one whose first draft was missed cannot be followed."""
        if msg.start > 0 or msg.session_id in self._sessions:
            return
        self._sessions[msg.session_id] = _Session(self.config.cache)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    @guarded
    def _on_early_exit(self, msg: EarlyExit) -> None:
        session = self._sessions.get(msg.session_id)
        self.exits += 1
        if session is not None and msg.round == session.round and not msg.finished:
            session.queue.push((*session.answer, *msg.tokens), msg.confidence)
            self._next()

    @guarded
    def _on_verdict(self, msg: Verdict) -> None:
        """Count whether a pre-draft was ready, and follow the answer."""
        session = self._sessions.get(msg.session_id)
        if session is None or msg.status.code != Status.OK or msg.finished or not session.grow(msg):
            return
        self._sessions.move_to_end(msg.session_id)
        self.lookups += 1
        self.hits += session.answer in session.ready
        session.ready.clear()

    @guarded
    def _on_text(self, msg: GeneratedText) -> None:
        if msg.final:
            self._sessions.pop(msg.session_id, None)
            self.get_logger().debug(
                f"answer {msg.session_id[:8]} over; in all {self.exits} early exits,"
                f" {self.predrafts} pre-drafts for them, {self.hits} of {self.lookups} verdicts hit"
            )

    def _next(self) -> None:
        """Request the next pre-draft, one at a time: there is one draft model."""
        if self._pending is not None:
            if STEADY.now() < self._pending_until:
                return
            self._predraft.remove_pending_request(self._pending)  # draft_vlm went away meanwhile
            self._pending = None
        if not self._predraft.service_is_ready():
            return
        for session_id, session in reversed(self._sessions.items()):
            answer = session.queue.pop()
            if answer is not None:
                self._ask(session_id, session, answer)
                return

    def _ask(self, session_id: str, session: _Session, answer: Answer) -> None:
        request = PreDraft.Request(
            session_id=session_id,
            round=session.round,
            outcome=array("i", answer[len(session.answer) :]),
            deadline_s=_PREDRAFT_S,
        )
        self._pending_until = STEADY.now() + Duration(seconds=_PREDRAFT_S)
        self._pending = self._predraft.call_async(request)
        self._pending.add_done_callback(partial(self._on_predraft, session, answer))

    def _on_predraft(self, session: _Session, answer: Answer, future: Future) -> None:
        if future is not self._pending:
            return  # given up
        self._pending = None
        if not self.active:
            return
        response = future.result()
        if response is not None and response.status.code == Status.OK:
            self.predrafts += 1
            session.ready.add(answer)
        self._next()


def main() -> int:
    """Run the node."""
    return run(PreDraftCacheNode)


if __name__ == "__main__":
    raise SystemExit(main())
