"""A test that takes too long fails, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from folders import ROOT, environment

CONFTEST = """
import time_limits
from time_limits import *

time_limits.TEARDOWN_S = time_limits.GRACE_S = 0.5
"""
HANGS = """
import threading
import pytest

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_that_hangs():
    threading.Event().wait()

def test_that_hangs_in_its_teardown_too(stuck):
    threading.Event().wait()

def test_after_them():
    pass
"""
DEAF = """
import signal
import threading

def test_that_serves_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()
"""


def run_pytest(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` with this project's settings of pytest, and a limit of 0.5 s."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-v"]
    command += ["--rootdir", str(folder), "--timeout", "0.5", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, HANGS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_that_hangs FAILED" in done.stdout
    assert "test_that_hangs_in_its_teardown_too FAILED" in done.stdout
    assert "test_that_hangs_in_its_teardown_too ERROR" in done.stdout
    assert "test_after_them PASSED" in done.stdout


def test_one_that_serves_no_signal_ends_the_run_with_its_stack(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, DEAF)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in test_that_serves_no_signal" in done.stderr
