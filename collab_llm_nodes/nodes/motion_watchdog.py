"""Stops a Go2 whose driver was killed: a process that can send StopMove and nothing else.

It subscribes to the velocities sent to the robot, by any node. When these break off without a
stop, it sends StopMove after 0.4 s, and again for two seconds (``robot/go2/watchdog.py``); at once
if it is itself shut down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from collab_llm_nodes.robot.go2.sport import Api, Call, Requests
from collab_llm_nodes.robot.go2.watchdog import Watchdog
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import CAMERA
from collab_llm_nodes.ros.unitree import Services, request_topic, vendor

_TICK_S = 0.05


@dataclass(frozen=True)
class MotionWatchdogConfig:
    """No parameters but those of every node."""


class MotionWatchdog(ManagedNode[MotionWatchdogConfig]):
    """See the module docstring."""

    shares_memory = False  # as motion_guard

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("motion_watchdog", MotionWatchdogConfig, **node_arguments)
        self._watchdog = Watchdog()
        self._stops = 0

    def configure(self) -> None:
        kind = vendor("unitree_api").Request
        self._api = Services(self, Requests(1.0), (Api.STOP_MOVE,), lambda *_: None)
        # Best effort: the driver must not wait for this node.
        self._heard = [
            self.create_subscription(
                kind, request_topic(service), partial(self._on_request, service), CAMERA
            )
            for service in (Api.MOVE.service, Api.AVOID_MOVE.service)
        ]
        self._ticks = self.create_timer(_TICK_S, self._tick, clock=STEADY)
        self._ticks.cancel()

    def deactivate(self) -> None:
        self._send(self._watchdog.on_end(wall()))

    def cleanup(self) -> None:
        self.destroy_timer(self._ticks)
        for subscription in self._heard:
            self.destroy_subscription(subscription)
        self._api.destroy()

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        return level, message, {"moves": self._watchdog.watches, "stops": self._stops}

    @guarded
    def _on_request(self, service: str, msg: Any) -> None:
        identity = msg.header.identity
        api = (service, identity.api_id)
        self._watchdog.on_request(api, identity.id, msg.parameter, wall())
        if self._watchdog.watches and self._ticks.is_canceled():
            self._ticks.reset()

    def _tick(self) -> None:
        """Send the stop that is due. Not guarded: a stop goes on after deactivation."""
        if stops := self._watchdog.tick(wall()):
            self._send(stops)
            self.get_logger().error(
                "the robot's driver fell silent during a motion: StopMove sent",
                throttle_duration_sec=3.0,
            )
        if not self._watchdog.watches:
            self._ticks.cancel()

    def _send(self, calls: list[Call]) -> None:
        self._api.send(calls)
        self._stops += len(calls)


def main() -> int:
    """Run the node."""
    return run(MotionWatchdog)


if __name__ == "__main__":
    raise SystemExit(main())
