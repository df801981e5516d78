"""Regular looks at the ROS graph, for nodes that must not move a robot while it looks wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.managed_node import ManagedNode

LOOK_S = 0.5
"""Period of looks at the graph."""


class GraphWatch(ABC):
    """What a node reads from the graph every ``LOOK_S``. All methods belong to the node's thread.

    A class says by ``source`` where faults come from, and by ``alarm`` and ``relief`` what is
    logged when there is trouble, and when it is over.

    Attributes:
        trouble: why the robot must not move, in words; or "".
    """

    source: ClassVar[str]
    alarm: ClassVar[str]
    relief: ClassVar[str]

    def __init__(self, node: ManagedNode[Any]) -> None:
        self._node = node
        self.trouble = ""
        self._looks = node.create_timer(LOOK_S, self.look, clock=STEADY)

    def look(self) -> None:
        """Read the graph now."""
        try:
            trouble = self._read()
        except Exception as error:  # noqa: BLE001 without the graph the robot must not move
            self._node.note_fault(error, self.source)
            trouble = f"the graph cannot be read: {type(error).__name__}: {error}"
        if trouble == self.trouble:
            return
        self.trouble = trouble
        log = self._node.get_logger()
        if trouble:
            log.error(
                f"the robot does not move, {self.alarm}: {trouble}", throttle_duration_sec=1.0
            )
        else:
            log.info(self.relief, throttle_duration_sec=1.0)

    def close(self) -> None:
        """Look no more; safe to call twice."""
        self._node.destroy_timer(self._looks)

    @abstractmethod
    def _read(self) -> str:
        """Read the graph; return the trouble that it shows, or ""."""
