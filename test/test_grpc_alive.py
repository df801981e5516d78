"""A test that stops the process's gRPC ends the run, which says who did and where it hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT, environment

CONFTEST = """
import functools
import grpc_alive
from grpc_alive import pytest_runtest_logreport

grpc_alive.grpc_works = functools.partial(grpc_alive.grpc_works, 2.0)
"""
TESTS = """
import threading
from collab_llm_nodes.transport.background import background_loop

def wait_for_ever():
    threading.Event().wait()

def test_that_fails():
    assert not "whole"

def test_that_stops_the_loop():
    {stops}
    raise AssertionError

def test_after_them():
    pass
"""


@pytest.mark.parametrize("stops", ["background_loop().call_soon_threadsafe(wait_for_ever)", "pass"])
def test_the_run_ends_where_grpc_does(stops: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS.format(stops=stops))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-v"]
    ended = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=environment(ROOT),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    text = ended.stdout + ended.stderr
    dead = stops != "pass"
    assert ("test_that_stops_the_loop (call) left gRPC dead" in text) == dead, text
    assert ("in wait_for_ever" in text) == dead
    assert ("test_after_them PASSED" in text) != dead
    assert ended.returncode == 1
