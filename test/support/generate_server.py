"""A server of ``<protocol>/generate`` that says what tests tell it; in this process or its own."""

from __future__ import annotations

import sys
from typing import Any

import rclpy
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.node import Node
from rclpy.task import Future

from collab_llm.action import Generate
from collab_llm.msg import Status


class GenerateServer:
    """Serves goals by their prompt: ``say a b c`` answers at once; ``wait a b`` says its words,
    then waits for ``release`` or a cancellation; ``refuse`` is refused, and ``fail`` fails.

    Attributes:
        requests: of the goals, as they came.
        statuses: of the goals, as they ended.
    """

    def __init__(self, node: Node, protocol: str) -> None:
        self.requests: list[Generate.Goal] = []
        self.statuses: list[int] = []
        self.waiting: list[Future] = []
        self.action = ActionServer(
            node,
            Generate,
            f"{protocol}/generate",
            self._execute,
            goal_callback=self._on_goal,
            cancel_callback=self._on_cancel,
        )

    def release(self) -> None:
        """Let all goals that wait go on."""
        for each in self.waiting:
            each.set_result(None)
        self.waiting.clear()

    def _on_goal(self, request: Generate.Goal) -> GoalResponse:
        refused = request.prompt == "refuse"
        return GoalResponse.REJECT if refused else GoalResponse.ACCEPT

    def _on_cancel(self, goal: Any) -> CancelResponse:
        self.release()
        return CancelResponse.ACCEPT

    async def _execute(self, goal: Any) -> Generate.Result:
        self.requests.append(goal.request)
        command, *words = goal.request.prompt.split()
        header, text = goal.request.header, ""
        for word in words:
            text += f"{word} "
            goal.publish_feedback(
                Generate.Feedback(header=header, session_id="s1", text=text, delta=f"{word} ")
            )
        if command == "wait":
            self.waiting.append(Future())
            await self.waiting[-1]
        if goal.is_cancel_requested:
            goal.canceled()
        elif command == "fail":
            goal.abort()
        else:
            goal.succeed()
        self.statuses.append(goal.status)
        return Generate.Result(
            header=header, session_id="s1", text=text, status=Status(message=command)
        )


def main() -> None:
    """Serve the protocol that the command line names, until killed."""
    rclpy.init()
    node = Node("generate_server")
    server = GenerateServer(node, sys.argv[1])
    print("ready", flush=True)
    rclpy.spin(node)
    server.action.destroy()


if __name__ == "__main__":
    main()
