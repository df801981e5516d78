"""The script that installs the verifier in the images, in a bare Debian in a chroot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import ROOT

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None,
        reason="a chroot needs root and debootstrap",
    ),
]
HOSTS = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
"""How this machine reaches packages; the chroot does alike."""


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a bare Debian with the source tree in /src."""
    root = tmp_path_factory.mktemp("debian")
    root.chmod(0o755)  # the verifier's user must get in
    bootstrap = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm"]
    made = subprocess.run([*bootstrap, str(root)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stderr or made.stdout[-300:]}")
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    for name in (*HOSTS, wheels):
        source, to = Path(name), root / name.lstrip("/")
        if name and source.is_file():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to)
        elif name and source.is_dir():
            shutil.copytree(source, to)
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, tracked.stdout.split("\0")):
        (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / "src" / name)
    return root


@pytest.fixture(scope="module")
def installed(debian: Path) -> Path:
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        ["chroot", str(debian), "/src/deploy/install.sh", "verifier"],
        env={**environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return debian


@pytest.fixture
def verifier(installed: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The verifier as an image starts it: by its user."""
    (installed / "var/lib/collab_llm/port.json").unlink(missing_ok=True)
    # With /proc, in a mount namespace that ends with the process.
    command = 'mount -t proc proc "$1/proc" && exec chroot --userspec=collab_llm "$@"'
    arguments = ["--address", "127.0.0.1:0", "--json", "/var/lib/collab_llm/port.json"]
    program = [str(installed), "/opt/collab_llm/bin/collab-llm", "verifier", *arguments]
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command, "sh", *program],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/var/lib/collab_llm"},
    ) as process:
        yield process
        process.kill()


def test_the_installed_verifier_serves_drains_and_has_no_ros(
    installed: Path, verifier: subprocess.Popen[bytes]
) -> None:
    written = installed / "var/lib/collab_llm/port.json"
    due = time.monotonic() + 300
    while not written.exists() and time.monotonic() < due and verifier.poll() is None:
        time.sleep(0.2)
    port = json.loads(written.read_text())["port"]
    health = ["/opt/collab_llm/bin/python", "/opt/collab_llm/health.py"]

    def check(address: str) -> int:
        return subprocess.run(["chroot", str(installed), *health, address], check=False).returncode

    assert check(f"127.0.0.1:{port}") == 0
    assert check("127.0.0.1:9") == 1
    verifier.send_signal(signal.SIGTERM)
    assert verifier.wait(60) == 0
    assert not (installed / "opt/ros").exists()
