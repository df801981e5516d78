"""Log lines of a server that runs without Python's buffers, as in many containers."""

from __future__ import annotations

import os
import subprocess
import sys

_LOGS_TWICE = """
import logging
from collab_llm_nodes.transport.logs import set_up_logging
set_up_logging("json")
logging.info("one")
logging.info("two")
"""


def test_a_line_and_its_end_are_one_write() -> None:
    # Each read of a pipe of packets (O_DIRECT) returns what one write has put in.
    reads, writes = os.pipe2(os.O_DIRECT)
    with os.fdopen(writes, "wb") as log:
        subprocess.run(
            [sys.executable, "-u", "-c", _LOGS_TWICE],
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            timeout=60,
        )
    packets = []
    while packet := os.read(reads, 4096):
        packets.append(packet)
    os.close(reads)
    assert len(packets) == 2
    assert all(packet.startswith(b"{") and packet.endswith(b"}\n") for packet in packets)
