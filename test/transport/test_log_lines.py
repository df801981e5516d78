"""Log lines of a server that runs without Python's buffers, as in many containers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LOGS_TWICE = """
import logging
from collab_llm_nodes.transport.logs import set_up_logging
set_up_logging("json")
logging.info("one")
logging.info("two")
"""


_QUOTES_A_STRANGER = """
import logging
from collab_llm_nodes.transport.logs import set_up_logging
set_up_logging("text")
words = "no room\\x1b[2J\\u202e\\n2026-01-01 00:00:00,000 WARNING emergency stop released"
logging.warning("refused: %s", words, extra={"peer": words})
try:
    raise ValueError(words)
except ValueError:
    logging.exception("a session failed")
"""


def test_a_stranger_begins_no_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _QUOTES_A_STRANGER],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=60,
    )
    ours, failed, *traceback = done.stderr.splitlines()
    assert " WARNING refused: no room" in ours
    assert failed.endswith("ERROR a session failed")
    assert traceback
    assert all(line.startswith("  ") for line in traceback)
    assert not {*"\x1b\u202e"} & {*done.stderr}


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


@pytest.mark.parametrize(
    "command",
    [
        ["dragon-cloud", "--model", "no-such-model"],
        pytest.param(["jupiter-worker", "--model", "no-such-model"], marks=pytest.mark.exhaustive),
        pytest.param(
            ["jupiter-worker", "--config", "no-such-file.yaml"], marks=pytest.mark.exhaustive
        ),
        ["verifier", "--config", "no-such-file.yaml"],
    ],
)
def test_all_that_a_server_says_has_a_level(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "collab_llm_nodes.cli", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert lines
    assert all(line.split()[2] in {"WARNING", "ERROR"} for line in lines), done.stderr
    assert not done.stdout
