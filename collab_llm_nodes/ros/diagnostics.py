"""Reports of a managed node on ``/diagnostics`` (docs/diagnostics.md)."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.node import Node

from collab_llm_nodes.ros.health import DiagnosticsConfig, Faults, Level, Status, read_memory
from collab_llm_nodes.ros.qos import RESULT


class Diagnostics:
    """The reports of one node, with memory and processor time of its process.

    Attributes:
        faults: exceptions of callbacks, which were caught.
    """

    def __init__(self, node: Node) -> None:
        self.faults = Faults()
        self._node = node
        self._cpu = (time.monotonic(), time.process_time())
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", RESULT)

    @property
    def wanted(self) -> bool:
        """Return True while there is a subscriber."""
        return bool(self._publisher.get_subscription_count())

    def add_fault(self, error: Exception, where: str) -> None:
        """Count an exception that was caught in ``where``, and report it for a while."""
        kind = type(error).__name__
        self.faults.add(kind, f"{where}: {kind}: {error}", time.monotonic())

    def whole(
        self,
        diagnosis: tuple[bytes, str, dict[str, Any]],
        config: DiagnosticsConfig,
        now: float,
    ) -> Status:
        """Return the status of the node as a whole.

        Args:
            diagnosis: the node's own: level, message, values.
            config: limits of memory, and for how long a fault is reported.
            now: ``time.monotonic()``.
        """
        level, message, values = diagnosis
        failed = self.faults.recent(now, config.recent)
        if failed and level == Level.OK:
            level, message = Level.WARN, f"a callback failed: {failed}"
        (then, used), used_now = self._cpu, time.process_time()
        self._cpu = (now, used_now)
        values = {
            **values,
            "callback_errors": sum(self.faults.counts.values()),
            # It must not grow. The name is rclpy's own (Jazzy); other versions may not have it.
            "executor_tasks": len(getattr(self._node.executor, "_tasks", ())),
            "process_cpu_percent": f"{100 * (used_now - used) / max(now - then, 1e-3):.1f}",
        }
        if (memory := read_memory()) is not None:
            values["process_memory_mib"] = memory.resident >> 20
            scarce, words = memory.judge(config)
            if scarce > level:
                level, message = scarce, words
        return Status("node", Level(level), message, values)

    def publish(self, statuses: Sequence[Status], hardware_id: str) -> None:
        """Publish ``statuses`` as one message; an empty ``hardware_id`` is the host's name."""
        name = self._node.get_fully_qualified_name().lstrip("/")
        array = DiagnosticArray()
        array.header.stamp = self._node.get_clock().now().to_msg()
        array.status = [
            DiagnosticStatus(
                level=bytes(status.level),
                name=f"{name}: {status.name}",
                hardware_id=hardware_id or socket.gethostname(),
                message=status.message,
                values=[KeyValue(key=k, value=str(v)) for k, v in status.values.items()],
            )
            for status in statuses
        ]
        self._publisher.publish(array)
