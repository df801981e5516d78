"""Log records of the protocols reach ROS's log, with a level and on lines of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

pytestmark = pytest.mark.ros

_LOGS = """
import logging, warnings
import rclpy.logging
from collab_llm_nodes.ros.logs import pass_on_logging
pass_on_logging(rclpy.logging.get_logger("jupiter_server"))
log = logging.getLogger("collab_llm_nodes.protocols.jupiter.pipeline")
log.info("not shown")
log.warning("worker %s is lost", "a\\n[INFO] [1.0] [guard]: emergency stop released")
try:
    raise ValueError("oops")
except ValueError:
    log.exception("a pass failed")
warnings.warn("deprecated")
"""


def test_every_line_of_a_protocol_has_a_level() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOGS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=120,
    )
    begun = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in begun] == ["[WARN]", "[ERROR]", "[WARN]"]
    assert all("[jupiter_server]" in line for line in begun)
    assert "worker a\\n[INFO]" in begun[0]
    assert "ValueError: oops" in done.stderr
