"""Regular looks at the ROS graph, for nodes that must not move a robot while it looks wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.managed_node import ManagedNode

LOOK_S = 0.5
"""Period of looks at the graph."""


class GraphWatch(ABC):
    """A look at the graph every ``LOOK_S``. All methods belong to the node's thread.

    Attributes:
        source: where faults come from, for the diagnostics.
        trouble: why the robot must not move, in words; or "".
    """

    source: ClassVar[str]

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
        if trouble != self.trouble:
            self.trouble = trouble
            self._report()

    def close(self) -> None:
        """Look no more; safe to call twice."""
        self._node.destroy_timer(self._looks)

    @abstractmethod
    def _read(self) -> str:
        """Read the graph; return the trouble that it shows, or ""."""

    @abstractmethod
    def _report(self) -> None:
        """Log that the trouble has changed. Not done here: rclpy throttles each line of code."""
