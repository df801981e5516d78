"""Detection of foreign publishers: nodes that publish on a topic that belongs to another node.

Their messages look like the owner's, so guard and driver name them and keep the robot still. This
finds mistakes (a gamepad on ``cmd_vel``, a bag played into a running graph). Against a node that
takes the owner's name only SROS 2 helps (docs/safety.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from collab_llm_nodes.ros.graph_watch import GraphWatch
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.unitree import request_topic, response_topic

NAMELESS = ("_NODE_NAME_UNKNOWN_", "_CREATED_BY_BARE_DDS_APP_")
"""Names that rmw gives to publishers without a node, such as the Go2's own programs, and to those
whose node it has not discovered yet."""

MOTION_TOPICS: Mapping[str, tuple[str, ...]] = {
    "cmd_vel": ("motion_guard",),
    "motion_state": ("motion_guard",),
    "navigation_action": ("navigation_action_parser",),
    "generated_text": (
        "draft_vlm",
        "collective_server",
        "dragon_server",
        "edge_cloud_server",
        "jupiter_server",
        "minion_server",
        "minions_server",
    ),
    "draft": ("draft_vlm",),
    "verdict": ("cloud_verifier_bridge",),
    "early_exit": ("cloud_verifier_bridge",),
    "link_state": ("cloud_verifier_bridge",),
    "observation": ("camera_ingest",),
    "image": ("sim_go2",),
    "image/compressed": ("sim_go2",),
    "camera_info": ("sim_go2",),
    "odom": ("go2_driver", "sim_go2"),
    "obstacle_avoidance": ("go2_driver",),
}
"""Topics on which motion depends; one of the nodes named publishes it."""

GO2_TOPICS: Mapping[str, tuple[str, ...]] = {
    request_topic("sport"): ("go2_driver", "motion_watchdog", "navigator", *NAMELESS),
    request_topic("obstacles_avoid"): ("go2_driver", "navigator", *NAMELESS),
    response_topic("sport"): NAMELESS,
    response_topic("obstacles_avoid"): NAMELESS,
    response_topic("videohub"): NAMELESS,
}
"""Topics of the Go2 and their owners, except its state, whose topic is a parameter."""

_LOOKS, _NAMELESS_LOOKS = 2, 10
"""Looks in a row before a publisher counts as foreign; the graph shows its topic before its name.
"""


class Strangers(GraphWatch):
    """Foreign publishers, as the node sees them.

    Args:
        owners: topics, each with the names of the nodes that may publish it. A single other node
            may take the owner's place, unless ``node`` is an owner itself.
        on_change: called when ``trouble`` has changed.

    Attributes:
        publishers: nodes that publish each of the topics.
    """

    source = "strangers"

    def __init__(
        self,
        node: ManagedNode[Any],
        owners: Mapping[str, Collection[str]],
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(node)
        self._owners, self._on_change = owners, on_change
        self.publishers: dict[str, str] = {}
        self._seen: Counter[tuple[str, str]] = Counter()

    def _report(self) -> None:
        log = self._node.get_logger()
        if self.trouble:
            log.error(
                f"the robot does not move, a motion topic has a foreign publisher: {self.trouble}",
                throttle_duration_sec=1.0,
            )
        else:
            log.info(
                "the motion topics have no foreign publisher any more", throttle_duration_sec=1.0
            )
        self._on_change()
        self._node.report_health()

    def _read(self) -> str:
        """Return the foreign publishers that count by now, in words."""
        present, resolve = set[tuple[str, str]](), self._node.resolve_topic_name
        for topic, owners in self._owners.items():
            names = {
                f"{found.node_namespace.rstrip('/')}/{found.node_name}"
                for found in self._node.get_publishers_info_by_topic(resolve(topic))
            }
            self.publishers[topic] = " ".join(sorted(names))
            if len(names) > 1 or self._node.get_name() in owners:
                present |= {(topic, n) for n in names if n.rpartition("/")[2] not in owners}
        self._seen = Counter({each: self._seen[each] + 1 for each in present})
        found = sorted(each for each, looks in self._seen.items() if looks >= _needed(each[1]))
        return "; ".join(f"{topic} by {name}" for topic, name in found)


def _needed(name: str) -> int:
    return _NAMELESS_LOOKS if name.rpartition("/")[2] in NAMELESS else _LOOKS
