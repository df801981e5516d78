"""Log lines: those of the protocols reach ROS's log with a level, and repeats are limited."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from collab_llm_nodes.ros.logs import Repeats

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


def test_a_line_is_logged_once_a_second_whatever_is_logged_beside_it() -> None:
    repeats = Repeats()
    assert repeats.admit("a", 0.0)
    assert repeats.admit("b", 0.1)
    assert not repeats.admit("a", 0.9)
    assert repeats.admit("a", 1.0)
    assert not repeats.admit("b", 1.05)
    assert repeats.admit("b", 1.1)


def test_callers_cannot_fill_the_log_with_lines_of_their_own() -> None:
    repeats = Repeats(most=3)
    lines = [(f"line {i}", i / 64.0) for i in range(192)]
    logged = [line for line, now in lines if repeats.admit(line, now)]
    assert logged == [f"line {i}" for i in (0, 1, 2, 64, 65, 66, 128, 129, 130)]
