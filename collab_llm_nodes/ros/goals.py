"""Actions: clients and servers with one quality of service, and goals that cannot get lost.

An action server may discover a new client later than that client discovers it. Its answer then
reaches nobody, and the goal is executed all the same: the robot drives, and the caller does not
know. So ``SentGoal`` chooses the goal's id itself. With it the goal can be cancelled, and its
result be requested, whether or not its acceptance arrives.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from action_msgs.msg import GoalStatus
from action_msgs.srv import CancelGoal
from rclpy.action import ActionClient, ActionServer, CancelResponse
from rclpy.action.client import ClientGoalHandle
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.client import Client
from rclpy.node import Node
from rclpy.task import Future
from unique_identifier_msgs.msg import UUID

from collab_llm.action import Generate
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.qos import REQUESTS

ANSWER_S = 3.0
"""A goal that is not answered for so long is asked about: it may be executing, or never have
arrived."""
RESULT_S = 15
"""Time for which a server keeps a goal that is over, so that its caller can request the result [s].
rclpy's default is 15 minutes; and announcing a goal leaks memory in proportion to the goals that
are kept."""
ALL_GOALS = CancelGoal.Request()
"""Names no goal, and so has a server cancel every goal."""
_SERVICES = {f"{name}_service_qos_profile": REQUESTS for name in ("goal", "result", "cancel")}


def action_client(node: Node, kind: Any, name: str, **options: Any) -> ActionClient:
    """Return a client of the action ``name`` whose queues hold a burst of answers."""
    return ActionClient(node, kind, name, **_SERVICES, **options)


def action_server(
    node: Node,
    kind: Any,
    name: str,
    execute: Callable[[ServerGoalHandle], Any],
    on_cancel: Callable[[ServerGoalHandle], CancelResponse],
    **options: Any,
) -> ActionServer:
    """Return a server of the action ``name`` whose queues hold a burst of requests."""
    return ActionServer(
        node,
        kind,
        name,
        execute,
        cancel_callback=on_cancel,
        result_timeout=RESULT_S,
        **_SERVICES,
        **options,
    )


def cancel_client(node: Node, name: str) -> Client:
    """Return a client of the service that cancels goals of the action ``name``, whoever sent them.

    Only the sender of a goal has its handle; ``ALL_GOALS`` needs none.
    """
    return node.create_client(CancelGoal, f"{name}/_action/cancel_goal")


def drop_contents(goal: Generate.Goal) -> None:
    """Free the pictures and documents of a goal that is over: rclpy keeps it for ``RESULT_S``."""
    goal.images, goal.document_contents = [], []


def end_goal(goal: ServerGoalHandle, *, succeeded: bool) -> None:
    """End ``goal``: as succeeded, else as cancelled if that was requested, else as aborted."""
    if succeeded:
        goal.succeed()
    elif goal.is_cancel_requested:
        goal.canceled()
    else:
        goal.abort()


def ask_for_life(client: ActionClient) -> Future:
    """Ask the server of ``client`` for a sign of life; the future is done when it arrives.

    Every action server answers the cancellation of a goal that it never had: there is none. To stop
    waiting, cancel the future.
    """
    goal_id = UUID(uuid=list(uuid.uuid4().bytes))
    return ClientGoalHandle(client, goal_id, None).cancel_goal_async()


class SentGoal:
    """One goal that was sent, until its end. Belongs to the thread that spins ``node``.

    Args:
        on_end: called with the result; None: there will be none, for the reason ``loss``.
        on_feedback: called with feedback messages.

    Attributes:
        answered: the server has accepted or refused the goal; False: it may never have arrived.
        refused: the server refused the goal. ROS carries no reason; the server's log may have it.
        status: how it ended, a ``GoalStatus``; set before ``on_end`` is called.
    """

    def __init__(
        self,
        node: Node,
        client: ActionClient,
        goal: Any,
        on_end: Callable[[Any | None], None],
        on_feedback: Callable[[Any], None] | None = None,
    ) -> None:
        goal_id = UUID(uuid=list(uuid.uuid4().bytes))
        self._handle = ClientGoalHandle(client, goal_id, None)
        self._on_end = on_end
        self.answered = self._asked = self._unwanted = self.refused = False
        self.status: int = GoalStatus.STATUS_UNKNOWN
        self._results: list[Future] = []
        self._node = node
        # In a group of its own, which goes with it: the node's would keep a trace of every timer.
        group = MutuallyExclusiveCallbackGroup()
        self._timer = node.create_timer(ANSWER_S, self._ask_once, group, clock=STEADY)
        client.send_goal_async(goal, on_feedback, goal_id).add_done_callback(self._on_answer)

    @property
    def loss(self) -> str:
        """Return why there is no result, in words that follow the name of the server."""
        if self.refused:
            return "refused the goal"
        return "was restarted during the goal" if self.answered else "does not have the goal"

    def cancel(self) -> None:
        """Have the server cancel the goal; ``on_end`` is still called."""
        self._unwanted = True
        self._handle.cancel_goal_async()

    def ask_again(self) -> None:
        """Request the result again, in case the server was restarted since the last request."""
        if self._asked:  # else the goal may not have arrived there yet
            self._ask()

    def forget(self) -> None:
        """Expect nothing more; to be called when the goal is over, or its client is destroyed.

        A result that never arrives would keep the goal, with its pictures, as long as the client.
        """
        self._node.destroy_timer(self._timer)
        for result in self._results:
            result.cancel()

    def _on_answer(self, answer: Future) -> None:
        self.answered = True
        self.refused = not answer.result().accepted
        if self._unwanted and not self.refused:  # the cancellation came before the goal
            self._handle.cancel_goal_async()
        self._ask_once()

    def _ask_once(self) -> None:
        if not self._asked:
            self._asked = True
            self._node.destroy_timer(self._timer)
            if self._unwanted and not self.answered:  # the goal may have come after it
                self._handle.cancel_goal_async()
            self._ask()

    def _ask(self) -> None:
        result = self._handle.get_result_async()
        self._results.append(result)
        result.add_done_callback(self._on_result)

    def _on_result(self, ended: Future) -> None:
        if ended.cancelled():
            return
        response = ended.result()
        self.status = response.status
        known = response.status != GoalStatus.STATUS_UNKNOWN
        self._unwanted = True  # should it still arrive
        if not known and not self.answered:
            self._handle.cancel_goal_async()
        self._on_end(response.result if known else None)
