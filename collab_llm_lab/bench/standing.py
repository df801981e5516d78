"""Processor time of a graph while the robot stands and has nothing to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from collab_llm.msg import LinkState, Observation
from collab_llm_lab.bench.safety.usage import Usage
from collab_llm_lab.demo.drive import robot_process
from collab_llm_nodes.processes import START_DEADLINE_S, free_port
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.qos import RESULT, STATE

WANTED_PERCENT = 20.0
"""Processor time of the robot's two processes together; 100 is one core."""
_PARAMETERS = {"sim_go2:real_time_factor": "1.0", "sim_go2:camera_rate": "10.0"}
"""The simulator at the pace of a robot: otherwise it is four times as fast."""


def measure_standing(seconds: float) -> dict[str, Any]:
    """Start the robot's two processes with the simulator, and a verifier; ask for nothing.

    Returns:
        ``processes.<graph|motion|verifier>`` as :meth:`Usage.rows` has them (the simulator and its
        camera are a part of ``motion``), ``percent`` of the robot's two together,
        ``wanted_percent``, ``camera_hz`` as it came, ``seconds``.

    Raises:
        CollabError: a process ended, or the graph did not come up.
    """
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        processes = {"verifier": stack.enter_context(verifier_process(address))}
        for name, arguments in (("graph", []), ("motion", ["--driver", "sim"])):
            process = robot_process(name, arguments, address, overrides=_PARAMETERS)
            processes[name] = stack.enter_context(process)
        client = stack.enter_context(_Client())

        def check() -> None:
            for process in processes.values():
                process.check()

        client.wait_for_graph(START_DEADLINE_S, check)
        usage = Usage({name: process.pid for name, process in processes.items()})
        pictures, elapsed = client.count_pictures(seconds, check)
        rows = usage.rows()
    return {
        "processes": rows,
        "percent": rows["graph"]["cpu_percent"] + rows["motion"]["cpu_percent"],
        "wanted_percent": WANTED_PERCENT,
        "camera_hz": pictures / elapsed,
        "seconds": elapsed,
    }


class _Client(GraphClient):
    """Observes whether the graph is up."""

    def __init__(self) -> None:
        super().__init__("standing_client")
        self._connected = False
        self._pictures = 0
        self.node.create_subscription(LinkState, "link_state", self._on_link, STATE)
        self.node.create_subscription(Observation, "observation", self._on_picture, RESULT)

    def wait_for_graph(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Wait until the verifier is connected and pictures come; ``alive`` raises on failures."""

        def ready() -> bool:
            alive()
            return self._connected and self._pictures > 0

        self.wait(ready, deadline_s, "the graph to come up")

    def count_pictures(self, seconds: float, alive: Callable[[], None]) -> tuple[int, float]:
        """Return how many pictures come in about ``seconds``, and in how many they really came."""
        began, before = time.monotonic(), self._pictures

        def over() -> bool:
            alive()
            return time.monotonic() - began >= seconds

        self.wait(over, seconds + 60.0, "the measurement")
        return self._pictures - before, time.monotonic() - began

    def _on_link(self, msg: LinkState) -> None:
        with self.changed:
            self._connected = msg.state == LinkState.UP
            self.changed.notify_all()

    def _on_picture(self, msg: Observation) -> None:
        with self.changed:
            self._pictures += 1
            self.changed.notify_all()
