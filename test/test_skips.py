"""Skips that a test run must not pass over in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import SUPPORT

TESTS = Path(__file__).parent
SKIPPED = """
import pytest

@pytest.mark.launch_files
@pytest.mark.skipif(True, reason="a plugin said so")
def test_a_launch_file():
    pass
"""


@pytest.mark.parametrize(("distro", "status"), [(None, 0), ("jazzy", 1)])
def test_skipped_launch_tests_fail_on_an_installed_ros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distro: str | None, status: int
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(SKIPPED)
    monkeypatch.delenv("ROS_DISTRO", raising=False)
    if distro:
        monkeypatch.setenv("ROS_DISTRO", distro)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{SUPPORT}:{os.environ.get('PYTHONPATH', '')}")
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", *settings, str(file)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "a plugin said so" in done.stdout
