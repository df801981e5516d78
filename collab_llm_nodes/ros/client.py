"""Client of a running graph, with deadlines; demo, benchmarks and replay share it.

The caller's thread waits; callbacks run in the executor's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import rclpy
from rclpy.action import ActionClient
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node

from collab_llm_nodes.errors import DeadlineExceeded, Unavailable
from collab_llm_nodes.ros.goals import SentGoal

Self = TypeVar("Self", bound="GraphClient")
_CANCEL_S = 10.0


class GraphClient:
    """Use as a context manager; every wait has a deadline.

    Attributes:
        node: for publishers, subscriptions and clients; made in the constructor of a subclass.
        changed: lock and condition of the state that ``wait`` checks; callbacks notify it.
    """

    def __init__(self, name: str) -> None:
        self._context = rclpy.Context()
        self._context.init()
        self.node = Node(name, context=self._context)
        self.changed = threading.Condition()
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, name=name)

    def __enter__(self: Self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._executor.shutdown()
        self._thread.join()
        self.node.destroy_node()
        self._context.try_shutdown()

    def result(self, call: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """Return the result of the future that ``call`` makes.

        ``call`` runs in the executor's thread: rclpy's action client has no lock, and would miss an
        answer that arrives at once.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
        """
        results: list[Any] = []

        def take(future: Any) -> None:
            with self.changed:
                results.append(future.result())
                self.changed.notify_all()

        self._executor.create_task(lambda: call().add_done_callback(take))
        self.wait(lambda: results, deadline_s, what)
        return results[0]

    def carry_out(self, client: ActionClient, goal: Any, deadline_s: float, what: str) -> Any:
        """Return the result of ``goal``, which is cancelled if it is late.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
            Unavailable: the server refused the goal, or lost it.
        """
        ended: list[Any] = []
        sent: list[SentGoal] = []
        given_up = threading.Event()

        def take(result: Any) -> None:
            with self.changed:
                ended.append(result)
                self.changed.notify_all()

        def send() -> None:
            if not given_up.is_set():
                sent.append(SentGoal(self.node, client, goal, take))

        def cancel() -> None:
            given_up.set()  # tasks may run in another order
            for each in sent:
                each.cancel()

        self._executor.create_task(send)
        try:
            self.wait(lambda: ended, deadline_s, what)
        except DeadlineExceeded:
            self._executor.create_task(cancel)
            with contextlib.suppress(DeadlineExceeded):
                self.wait(lambda: ended, _CANCEL_S, "the cancellation")
            raise
        if ended[0] is None:
            refused = "refused it" if sent[0].refused else "was restarted"
            words = f"no {what}: {type(goal).__qualname__}: the server {refused}"
            raise Unavailable(words, remedy="see the log of the node")
        return ended[0]

    def wait(self, condition: Callable[[], Any], deadline_s: float, what: str) -> None:
        """Wait until ``condition()`` is true.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
        """
        due = time.monotonic() + deadline_s
        with self.changed:
            while not condition():
                left = due - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"waited {deadline_s:g} s for {what}", remedy="see the graph's log"
                    )
                self.changed.wait(min(left, 0.1))  # discovery notifies nothing

    def _spin(self) -> None:
        with contextlib.suppress(ExternalShutdownException):
            self._executor.spin()
