"""One address for all protocols: passes goals of ``generate`` on to ``<protocol>/generate``.

Feedback, cancellations and the result are copied unchanged. The router adds typed errors for an
unknown protocol, for a server that is not there, and for one that dies during a goal. The navigator
does not use it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient, CancelResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.task import Future

from collab_llm.action import Generate
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    Inactive,
    Unavailable,
)
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.convert import deadline_from, status_of
from collab_llm_nodes.ros.goals import (
    SentGoal,
    action_client,
    action_server,
    ask_for_life,
    drop_contents,
    end_goal,
)
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import RESULT

_WATCH_S = 0.05
"""Period at which deadlines and servers are checked [s]."""
_PROBE_S = 1.0
"""A server that has been silent for so long is asked for a sign of life."""
_LONGEST_S = 3600.0
"""Longest wait for the result of a goal without a deadline, which its server chooses: as long as
any server may be configured to take."""
_GONE_S = 0.5
"""Grace period for the result of a server that has left the graph."""


@dataclass(frozen=True)
class GenerateRouterConfig:
    """Parameters of the node."""

    protocols: tuple[str, ...] = setting(
        tuple(registry.PROTOCOLS),
        "Protocols that a goal may name, each served at <protocol>/generate; by default all of the"
        " package. A goal that names none gets the first.",
        read_only=True,
    )
    discovery_s: float = setting(
        2.0, "Longest wait for a protocol's server that is not there [s].", low=0.1, high=60.0
    )
    silence_s: float = setting(
        5.0,
        "A server without a sign of life for so long during a goal is lost [s].",
        low=1.5,
        high=600.0,
    )
    grace_s: float = setting(
        1.0,
        "Grace period of a server after a goal's deadline, or a cancellation [s].",
        low=0.0,
        high=60.0,
    )
    max_goals: int = setting(
        64,
        "Most goals at a time, those for motion and all others counted apart; more are refused as"
        " BUSY.",
        low=1,
        high=4096,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.protocols or len(set(self.protocols)) < len(self.protocols):
            raise ConfigError("names none, or one twice", field="protocols")
        for name in self.protocols:
            if not (name.isascii() and name.isidentifier()):
                raise ConfigError(
                    f"{name!r} is no name", field="protocols", remedy="letters, digits and _"
                )


@dataclass(eq=False)
class _Server:
    """One protocol's server, and its signs of life."""

    protocol: str
    client: ActionClient
    heard_at: float = -math.inf
    seen_at: float = -math.inf
    probe: Future | None = None

    def look(self, now: float, silence_s: float) -> str:
        """Return why the server is lost, or ""; probe a silent one."""
        if self.client.server_is_ready():
            self.seen_at = now
        elif now - self.seen_at > _GONE_S:
            return "has gone"
        if now - self.heard_at > silence_s:
            return f"has given no sign of life for {silence_s:g} s"
        if self.probe is None and now - self.heard_at > _PROBE_S:
            self.probe = ask_for_life(self.client)
            self.probe.add_done_callback(self._on_life)
        return ""

    def forgive(self, now: float, stall_s: float) -> None:
        """Do not count a stall of this process as silence of the server."""
        self.heard_at = min(now, self.heard_at + stall_s)
        self.seen_at = min(now, self.seen_at + stall_s)

    def expect(self, now: float) -> None:
        """Begin to expect signs of life, of which the server had no reason to give any before."""
        self.heard_at = self.seen_at = now
        if self.probe is not None:
            probe, self.probe = self.probe, None
            probe.cancel()

    def _on_life(self, probe: Future) -> None:
        if probe is self.probe:
            self.probe = None
            self.heard_at = time.monotonic()


@dataclass(eq=False)
class _Passage:
    """One goal that is passed on.

    Attributes:
        due: the router's own deadline; that of the server is ``grace_s`` earlier.
        sent: the goal as it went to the server; None before.
        over: done with the server's result, or with an error in its place.
    """

    goal: ServerGoalHandle
    server: _Server
    begun: float
    due: float
    over: Future = field(default_factory=Future)
    sent: SentGoal | None = None
    last: Any = None
    asked_again: float = 0.0
    cancelled: bool = False

    def end(self, outcome: Any) -> None:
        """Take the first outcome; later ones do not count."""
        if not self.over.done():
            self.over.set_result(outcome)

    def cancel(self, due: float) -> None:
        """Have the server cancel it, by ``due``; at once where it was not sent."""
        self.cancelled, self.due = True, min(self.due, due)
        if self.sent is None:
            self.end(Cancelled("the caller gave the goal up"))
        else:
            self.sent.cancel()

    def on_feedback(self, message: Any) -> None:
        """Copy the server's feedback to the caller."""
        self.server.heard_at = time.monotonic()
        if not self.over.done():
            self.last = message.feedback
            self.goal.publish_feedback(message.feedback)

    def on_end(self, result: Any | None) -> None:
        """Take the server's result; None: it refused the goal, or has lost it."""
        assert self.sent is not None
        if result is not None:
            self.end(result)
            return
        remedy = "see the log of its server" if self.sent.answered else "send the goal again"
        field = f"{self.server.protocol}/generate"
        self.end(Unavailable(f"it {self.sent.loss}", field=field, remedy=remedy))


class GenerateRouter(ManagedNode[GenerateRouterConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("generate_router", GenerateRouterConfig, **node_arguments)
        self._servers: dict[str, _Server] = {}  # those that a goal has asked for
        self._met: set[str] = set()  # protocols whose server was there once
        self._passages: dict[bytes, _Passage] = {}
        self._watched_at = time.monotonic()
        self.passed = 0
        self.failed = 0

    # Lifecycle.

    def configure(self) -> None:
        self._watching = self.create_timer(_WATCH_S, self._watch, clock=STEADY)
        self._action = action_server(
            self,
            Generate,
            "generate",
            self._execute,
            self._on_cancel,
            feedback_pub_qos_profile=RESULT,
        )

    def deactivate(self) -> None:
        for passage in list(self._passages.values()):
            if passage.sent is not None:
                passage.sent.cancel()
            passage.end(Inactive("generate_router was deactivated", remedy="activate it"))

    def cleanup(self) -> None:
        self.destroy_timer(self._watching)
        # Callers still get their results: what answers them goes when they have them.
        action, servers, due = self._action, list(self._servers.values()), time.monotonic() + 1.0
        self._servers = {}

        def retire() -> None:
            if self._passages and time.monotonic() < due:
                return
            self.destroy_timer(timer)
            action.destroy()
            for server in servers:
                server.client.destroy()

        timer = self.create_timer(0.02, retire, clock=STEADY)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        """Warn of a missing server only if it was there before, or no other is there."""
        level, message, _ = super().diagnose()
        protocols = self.config.protocols
        there = {p for p in protocols if self.count_publishers(f"{p}/generate/_action/status")}
        self._met |= there
        missed = [name for name in protocols if name not in there]
        if there:
            missed = [name for name in missed if name in self._met]
        if self.active and missed:
            level, message = Level.WARN, f"not there: {', '.join(f'{p}/generate' for p in missed)}"
        values = {
            "served": " ".join(sorted(there)),
            "in_progress": len(self._passages),
            "passed_on": self.passed,
            "failed": self.failed,
        }
        return level, message, values

    # Goals. All are accepted, because a refusal carries no reason.

    async def _execute(self, goal: ServerGoalHandle) -> Generate.Result:
        key = bytes(goal.goal_id.uuid)
        passage: _Passage | None = None
        try:
            passage = self._passages[key] = self._admit(goal)
            if goal.is_cancel_requested:  # it came before this coroutine began
                passage.cancel(time.monotonic())
            self._watching.reset()
            self._send(passage)
            outcome = await passage.over
        except CollabError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - rclpy would end the goal with the status OK
            outcome = self.fault_of("generate", error)
        finally:
            self._passages.pop(key, None)
            drop_contents(goal.request)
            if passage is not None and passage.sent is not None:
                passage.sent.forget()
        if isinstance(outcome, CollabError):
            return self._fail(goal, passage, outcome)
        assert passage is not None
        assert passage.sent is not None
        self.passed += 1
        if passage.sent.status == GoalStatus.STATUS_SUCCEEDED:
            goal.succeed()
        elif passage.sent.status == GoalStatus.STATUS_CANCELED and goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.abort()
        return outcome

    def _fail(
        self, goal: ServerGoalHandle, passage: _Passage | None, error: CollabError
    ) -> Generate.Result:
        """End ``goal`` by an error of the router's own, with the text so far."""
        self.failed += 1
        self.warn_of("generate", error)
        result = Generate.Result(header=goal.request.header)
        result.status = status_of(error)
        if passage is not None and passage.last is not None:
            last = passage.last
            result.session_id, result.text, result.metrics = (
                last.session_id,
                last.text,
                last.metrics,
            )
        end_goal(goal, succeeded=False)
        return result

    def _on_cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        passage = self._passages.get(bytes(goal.goal_id.uuid))
        if passage is not None:
            passage.cancel(time.monotonic() + self.config.grace_s)
        return CancelResponse.ACCEPT

    def _admit(self, goal: ServerGoalHandle) -> _Passage:
        """Return the passage of a goal that the router accepts; raises CollabError."""
        request, now = goal.request, time.monotonic()
        if not self.active:
            raise Inactive("generate_router is not active", remedy="activate it (lifecycle)")
        passages = self._passages.values()
        rivals = sum(each.goal.request.for_motion == request.for_motion for each in passages)
        if rivals >= self.config.max_goals:
            raise Busy(f"{rivals} goals are under way", remedy="retry, or raise max_goals")
        request.protocol = request.protocol or self.config.protocols[0]
        if request.protocol not in self.config.protocols:
            raise registry.unknown(request.protocol, self.config.protocols)
        allowed_s = deadline_from(request, _LONGEST_S)
        server = self._server(request.protocol)
        return _Passage(goal, server, now, now + allowed_s + self.config.grace_s)

    def _server(self, protocol: str) -> _Server:
        """Return a protocol's server, whose client is made by its first goal.

        A client receives the feedback of all goals, even of those that bypass the router.
        """
        if protocol not in self._servers:
            client = action_client(
                self, Generate, f"{protocol}/generate", feedback_sub_qos_profile=RESULT
            )
            self._servers[protocol] = _Server(protocol, client)
        return self._servers[protocol]

    def _send(self, passage: _Passage) -> None:
        """Pass a goal on if its server is there, with the time that is left."""
        if passage.over.done() or not passage.server.client.server_is_ready():
            return
        now, request = time.monotonic(), passage.goal.request
        if request.deadline_s:
            request.deadline_s = max(0.001, request.deadline_s - (now - passage.begun))
        if not any(each.server is passage.server and each.sent for each in self._others(passage)):
            passage.server.expect(now)
        passage.asked_again = now
        passage.sent = SentGoal(
            self, passage.server.client, request, passage.on_end, passage.on_feedback
        )

    def _others(self, passage: _Passage) -> list[_Passage]:
        return [each for each in self._passages.values() if each is not passage]

    def _watch(self) -> None:
        """Check the goals under way. One timer for all, since rclpy leaks memory with each."""
        if not self._passages:
            self._watching.cancel()  # until the next one
        now, config = time.monotonic(), self.config
        stall_s, self._watched_at = max(0.0, now - self._watched_at - 2 * _WATCH_S), now
        for server in self._servers.values():
            server.forgive(now, stall_s)
        for passage in list(self._passages.values()):
            if passage.sent is None:
                self._send(passage)
        busy = {passage.server for passage in self._passages.values() if passage.sent}
        lost = {server: server.look(now, config.silence_s) for server in busy}
        for passage in list(self._passages.values()):
            if passage.sent is None:
                late = min(passage.due - config.grace_s, passage.begun + config.discovery_s)
                if now >= late:
                    passage.end(_lost(passage.server, "is not there"))
                continue
            if why := lost[passage.server]:
                passage.sent.cancel()  # the server may be only out of reach
                passage.end(_lost(passage.server, why))
            elif now >= passage.due:
                passage.sent.cancel()
                passage.end(_late(passage))
            elif now - passage.asked_again > config.silence_s:
                passage.asked_again = now  # a restarted server does not know the goal
                passage.sent.ask_again()


def _lost(server: _Server, why: str) -> Unavailable:
    return Unavailable(
        f"the server of {server.protocol} {why}",
        field=f"{server.protocol}/generate",
        remedy="start it, or see its log",
    )


def _late(passage: _Passage) -> CollabError:
    if passage.cancelled:
        return Cancelled("the caller gave the goal up; its server did not answer in time")
    return DeadlineExceeded(
        f"the server of {passage.server.protocol} gave no result in time",
        field="deadline_s",
        remedy="raise it, or see the server's log",
    )


def main() -> int:
    """Run the node."""
    return run(GenerateRouter)


if __name__ == "__main__":
    raise SystemExit(main())
