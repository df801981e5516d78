"""One robot, one guard on a machine: the lock, and what may lie where its file should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from collab_llm_nodes.robot.host_lock import HostLock

NAME = "motion_guard.0"
FILE = f"collab_llm.{NAME}.lock"
HOLDER = """
import sys
from pathlib import Path
from collab_llm_nodes.robot.host_lock import HostLock

lock = HostLock(sys.argv[1], Path(sys.argv[2]))
print(repr(lock.take()), flush=True)
sys.stdin.read()
"""


def test_who_comes_second_is_told_the_process_that_has_it(tmp_path: Path) -> None:
    one, other = HostLock(NAME, tmp_path), HostLock(NAME, tmp_path)
    assert one.take() == ""
    assert one.take() == ""
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert f"process {os.getpid()} has locked {tmp_path / FILE}" in other.take()
    assert HostLock(f"{NAME}.robot2", tmp_path).take() == ""
    other.release()  # it has nothing
    assert other.take()
    one.release()
    one.release()
    assert not (tmp_path / FILE).exists()
    assert other.take() == ""


def test_a_killed_process_has_it_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, NAME, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"''\n"
        lock = HostLock(NAME, tmp_path)
        assert f"process {holder.pid} has" in lock.take()
        holder.kill()
        holder.wait()
        assert lock.take() == ""
        assert (tmp_path / FILE).read_text() == str(os.getpid())


def test_no_other_file_is_locked_or_changed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    for plant in (os.symlink, os.link):
        plant(precious, tmp_path / FILE)
        assert FILE in HostLock(NAME, tmp_path).take()
        assert precious.read_text() == "as it was"
        (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    assert FILE in HostLock(NAME, tmp_path).take()
    (tmp_path / FILE).unlink()
    assert "cannot be locked" in HostLock(NAME, tmp_path / "not there").take()
