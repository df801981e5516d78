"""Nodes that publish on a topic that belongs to another node.

Nobody can tell their messages from the owner's, so whoever moves the robot names them and stands
still. This finds mistakes (a gamepad on ``cmd_vel``, a bag played into a running graph); against
somebody who takes the owner's name only SROS 2 helps (docs/safety.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.unitree import request_topic

MOTION_TOPICS: Mapping[str, Collection[str]] = {
    "cmd_vel": ("motion_guard",),
    "motion_state": ("motion_guard",),
    "navigation_action": ("navigation_action_parser",),
    "observation": ("camera_ingest",),
    "link_state": ("cloud_verifier_bridge",),
    "odom": ("go2_driver", "sim_go2"),
}
"""Topics on which motion depends, and the nodes of which one publishes it."""

GO2_TOPICS: Mapping[str, Collection[str]] = {
    request_topic("sport"): ("go2_driver", "motion_watchdog", "navigator"),
    request_topic("obstacles_avoid"): ("go2_driver", "navigator"),
}
"""Topics of the Go2 and their owners. Its own programs publish there too, without names."""

_NAMELESS_NODES = ("_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_")
"""Names that rmw gives to publishers whose node it does not know yet, or that have none."""

_LOOK_S = 0.5
_NAMED, _NAMELESS = 2, 10
"""Looks in a row before a stranger counts; the graph shows a topic before the name of its node."""


class Strangers:
    """Looks for strangers, in the node's thread.

    Args:
        node: who looks.
        owners: topics, and the names of the nodes that may publish it.
        on_change: called when ``trouble`` has changed.
        of_robot: the topics are the robot's own. Its programs publish there without the name of a
            node, and are no strangers; a single node that is no owner is one. Of other topics a
            single node may take the owner's place.

    Attributes:
        trouble: topics and strangers, in words; or "".
        publishers: nodes that publish each of the topics.
    """

    def __init__(
        self,
        node: ManagedNode[Any],
        owners: Mapping[str, Collection[str]],
        on_change: Callable[[], None],
        *,
        of_robot: bool = False,
    ) -> None:
        self._node, self._owners, self._on_change = node, owners, on_change
        self._of_robot = of_robot
        self.trouble = ""
        self.publishers: dict[str, str] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._looks = node.create_timer(_LOOK_S, self._look, clock=STEADY)

    def close(self) -> None:
        """Look no more; safe to call twice."""
        self._node.destroy_timer(self._looks)

    def _look(self) -> None:
        try:
            trouble = self._found()
        except Exception as error:  # noqa: BLE001 who cannot see others must not move the robot
            self._node.note_fault(error, "strangers")
            trouble = f"the graph cannot be read: {type(error).__name__}: {error}"
        if trouble == self.trouble:
            return
        self.trouble = trouble
        told = f"the robot does not move, a motion topic has a foreign publisher: {trouble}"
        if trouble:
            self._node.get_logger().error(told, throttle_duration_sec=1.0)
        else:
            self._node.get_logger().info(
                "the motion topics have no foreign publisher any more", throttle_duration_sec=1.0
            )
        self._on_change()
        self._node.report_health()

    def _found(self) -> str:
        """Return topics and strangers that count by now, in words."""
        present, resolve = set[tuple[str, str]](), self._node.resolve_topic_name
        for topic, owners in self._owners.items():
            names = {
                f"{found.node_namespace.rstrip('/')}/{found.node_name}"
                for found in self._node.get_publishers_info_by_topic(resolve(topic))
                if not (self._of_robot and _is_nameless(found.node_name))
            }
            self.publishers[topic] = " ".join(sorted(names))
            if self._of_robot or len(names) > 1:
                present |= {(topic, n) for n in names if n.rpartition("/")[2] not in owners}
        self._seen = Counter({each: self._seen[each] + 1 for each in present})
        found = sorted(each for each, looks in self._seen.items() if looks >= _needed(each[1]))
        return "; ".join(f"{topic} by {name}" for topic, name in found)


def _is_nameless(name: str) -> bool:
    return name in _NAMELESS_NODES


def _needed(name: str) -> int:
    return _NAMELESS if _is_nameless(name.rpartition("/")[2]) else _NAMED
