"""``ros2 run collab_llm instruct "find the red ball"``: give one instruction and watch it.

A client of the action ``navigate``, for people and launch files. Ctrl-C cancels the mission.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import rclpy
from rclpy.action import ActionClient
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from collab_llm.action import Navigate

START_DEADLINE_S = 60.0
"""Wait for the navigator at most; a model may have to be loaded first."""
CANCEL_DEADLINE_S = 5.0


def instruct(instruction: str) -> int:
    """Send ``instruction`` and wait for the end: 0 arrived, 1 ended otherwise, 2 no navigator."""
    ended, interrupted = threading.Event(), threading.Event()
    state: dict[str, Any] = {}

    def on_feedback(message: Any) -> None:
        feedback = message.feedback
        print(f"{feedback.step:3d}  {feedback.text}", flush=True)

    def on_result(future: Any) -> None:
        state["result"] = future.result().result
        ended.set()

    def on_goal(future: Any) -> None:
        state["goal"] = future.result()
        future.result().get_result_async().add_done_callback(on_result)

    def on_signal(number: int, frame: object) -> None:
        interrupted.set()
        ended.set()

    node = Node("instruct")
    client = ActionClient(node, Navigate, "navigate")
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    spinner = threading.Thread(target=_spin, args=(executor,), daemon=True)
    spinner.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    if not client.wait_for_server(timeout_sec=START_DEADLINE_S):
        print(f"no navigator within {START_DEADLINE_S:g} s; is it running?", file=sys.stderr)
        return 2
    goal = Navigate.Goal(instruction=instruction)
    client.send_goal_async(goal, on_feedback).add_done_callback(on_goal)
    ended.wait()
    if interrupted.is_set() and "goal" in state:
        ended.clear()
        state["goal"].cancel_goal_async()
        ended.wait(CANCEL_DEADLINE_S)
    result = state.get("result")
    if result is None:
        return 1
    verdict = "arrived" if result.status == Navigate.Result.OK else f"ended: {result.error_msg}"
    print(f"{verdict} ({result.steps} steps, {result.distance_travelled:.2f} m)", flush=True)
    return 0 if result.status == Navigate.Result.OK else 1


def _spin(executor: SingleThreadedExecutor) -> None:
    try:
        executor.spin()
    except ExternalShutdownException:
        return


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
