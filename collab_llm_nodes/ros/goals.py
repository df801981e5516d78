"""Goals that do not get lost with the answer to them.

An action server may know a new client later than that client knows it. Its answer then reaches
nobody, and the goal is carried out all the same: a robot drives, and who sent it does not know. So
a goal's id is chosen here; with it the goal can be called off, and its result be asked for, whether
or not its acceptance is known.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.action.client import ClientGoalHandle
from rclpy.node import Node
from rclpy.task import Future
from unique_identifier_msgs.msg import UUID

from collab_llm.action import Generate
from collab_llm_nodes.ros.clock import STEADY

ANSWER_S = 3.0
"""A goal that is not answered for so long is asked about: it may be carried out, or never have
arrived."""
RESULT_S = 15
"""Time for which a server keeps a goal that is over, for its caller to ask for the result [s].
rclpy's default is 15 minutes; and announcing a goal leaks memory in proportion to the goals that
are kept."""


def drop_contents(goal: Generate.Goal) -> None:
    """Free the pictures and documents of a goal that is over: rclpy keeps it for ``RESULT_S``."""
    goal.images, goal.document_contents = [], []


def ask_for_life(client: ActionClient) -> Future:
    """Ask the server of ``client`` for a sign of life; the future is done when it comes.

    Every action server answers the cancellation of a goal that it never had: there is none. To
    expect the answer no longer, cancel the future.
    """
    goal_id = UUID(uuid=list(uuid.uuid4().bytes))
    return ClientGoalHandle(client, goal_id, None).cancel_goal_async()


class SentGoal:
    """One goal on its way, or being carried out. Belongs to the thread that spins ``node``.

    Args:
        on_end: called with the result; None: the server refused the goal (``refused``) or does not
            know it, such as one that was restarted.
        on_feedback: called with feedback messages.

    Attributes:
        answered: the server has accepted or refused it; False: it may never have arrived.
        refused: the server would not have it; ROS has no words for why, so its log may say it.
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
        self.answered = self._asked = self._called_off = self.refused = False
        self.status: int = GoalStatus.STATUS_UNKNOWN
        self._results: list[Future] = []
        self._node = node
        self._timer = node.create_timer(ANSWER_S, self._ask_once, clock=STEADY)
        client.send_goal_async(goal, on_feedback, goal_id).add_done_callback(self._on_answer)

    def call_off(self) -> None:
        """Have it cancelled; its result will tell."""
        self._called_off = True
        self._handle.cancel_goal_async()

    def ask_again(self) -> None:
        """Ask a server for the result again, in case it was restarted since it was asked."""
        if self._asked:  # else it may not have arrived there yet
            self._ask()

    def forget(self) -> None:
        """Expect nothing more; to be called when the goal is over, or its client is destroyed.

        A result that never comes would keep the goal, with its pictures, as long as the client.
        """
        self._node.destroy_timer(self._timer)
        for result in self._results:
            result.cancel()

    def _on_answer(self, answer: Future) -> None:
        self.answered = True
        self.refused = not answer.result().accepted
        self._ask_once()

    def _ask_once(self) -> None:
        if not self._asked:
            self._asked = True
            self._node.destroy_timer(self._timer)
            if self._called_off:  # that may have come before the goal, and found nothing
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
        if not known and not self.answered:  # should it arrive yet, nobody wants it any more
            self._handle.cancel_goal_async()
        self._on_end(response.result if known else None)
