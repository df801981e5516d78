"""``ros2 run collab_llm instruct "find the red ball"``: give one instruction and watch it.

A client of the action ``navigate``, for people and launch files. Ctrl-C cancels the mission.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import rclpy
from rclpy.action import ActionClient
from rclpy.action.client import ClientGoalHandle
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from rclpy.utilities import remove_ros_args

from collab_llm.action import Navigate
from collab_llm_nodes.nodes.ros import STEADY

START_DEADLINE_S = 300.0
"""Wait for the navigator at most; models of many gigabytes may have to be loaded first."""
CANCEL_DEADLINE_S = 5.0


class _Client:
    """One goal, followed to its end by callbacks in the spinning thread."""

    def __init__(self, instruction: str) -> None:
        self.ended = threading.Event()
        self.goal: ClientGoalHandle | None = None
        self.result: Navigate.Result | None = None
        self.node = Node("instruct")
        self._action = ActionClient(self.node, Navigate, "navigate")
        self._goal = Navigate.Goal(instruction=instruction)
        self._sent = False
        self.node.create_timer(0.1, self._send, clock=STEADY)

    def _send(self) -> None:
        """Once the navigator is there."""
        if not self._sent and self._action.server_is_ready():
            self._sent = True
            sent = self._action.send_goal_async(self._goal, self._on_feedback)
            sent.add_done_callback(self._on_goal)

    def _on_feedback(self, message: Any) -> None:
        print(f"{message.feedback.step:3d}  {message.feedback.text}", flush=True)

    def _on_goal(self, future: Future) -> None:
        self.goal = future.result()
        self.goal.get_result_async().add_done_callback(self._on_result)

    def _on_result(self, future: Future) -> None:
        self.result = future.result().result
        self.ended.set()


def instruct(instruction: str) -> int:
    """Send ``instruction`` and wait for the end: 0 arrived, 1 ended otherwise, 2 no navigator."""
    interrupted, finished = threading.Event(), threading.Event()
    client = _Client(instruction)
    executor = SingleThreadedExecutor()
    executor.add_node(client.node)

    def on_signal(number: int, frame: object) -> None:
        interrupted.set()
        client.ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    spinner = threading.Thread(target=_spin, args=(executor, finished), name="ros-spin")
    spinner.start()
    started = time.monotonic()
    while not client.ended.wait(0.2) and client.goal is None:
        if time.monotonic() - started > START_DEADLINE_S:
            print(f"no navigator within {START_DEADLINE_S:g} s; is it running?", file=sys.stderr)
            break
    else:
        client.ended.wait()
    if interrupted.is_set() and client.goal is not None:
        client.ended.clear()
        executor.create_task(client.goal.cancel_goal_async)
        client.ended.wait(CANCEL_DEADLINE_S)
    finished.set()
    executor.create_task(lambda: None)  # wakes it
    spinner.join()
    client.node.destroy_node()
    result = client.result
    if result is None:
        return 1 if client.goal is not None or interrupted.is_set() else 2
    verdict = "arrived" if result.status == Navigate.Result.OK else f"ended: {result.error_msg}"
    print(f"{verdict} ({result.steps} steps, {result.distance_travelled:.2f} m)", flush=True)
    return 0 if result.status == Navigate.Result.OK else 1


def _spin(executor: SingleThreadedExecutor, finished: threading.Event) -> None:
    while not finished.is_set():
        executor.spin_once()


def main() -> int:
    """Read the instruction from the command line."""
    words = remove_ros_args(sys.argv)[1:]
    if not words or words[0] in ("-h", "--help"):
        print('usage: instruct "find the red ball" [--ros-args ...]', file=sys.stderr)
        return 0 if words else 2
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    try:
        return instruct(" ".join(words))
    finally:
        rclpy.try_shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
