"""ROS domains of graphs that must be isolated from others on the same machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.errors import Unavailable

DOMAINS = range(1, 102)
"""Never 0, a robot's default. DDS maps a domain to UDP ports; those of these lie below Linux's
ephemeral ones."""

_held = contextlib.ExitStack()  # until the process ends


def isolate_ros(*, shared_memory: bool = True) -> None:
    """Isolate this process's graph: no simulated velocity may reach a robot.

    Args:
        shared_memory: False: messages go through UDP alone, where processes are to be killed
            (docs/safety.md says why).
    """
    for name in ("ROS_DISCOVERY_SERVER", "ROS_STATIC_PEERS"):
        os.environ.pop(name, None)
    stay_on_this_machine()
    if not shared_memory and on_fast_dds():
        # For Fast DDS LOCALHOST always means shared memory; the profile does without.
        os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "SYSTEM_DEFAULT"
        for name in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"):
            os.environ[name] = str(config_file("fastdds_loopback.xml"))
    os.environ["ROS_DOMAIN_ID"] = str(_held.enter_context(own_domain(os.getpid())))


def on_fast_dds() -> bool:
    """Return True if ROS's middleware here is Fast DDS."""
    from rclpy.utilities import get_rmw_implementation_identifier

    return str(get_rmw_implementation_identifier()).startswith("rmw_fastrtps")


def stay_on_this_machine() -> None:
    """Confine participants made from now on, also in child processes, to this machine."""
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    if os.environ.get("ROS_DISTRO") == "humble":
        os.environ["ROS_LOCALHOST_ONLY"] = "1"  # it does not know the other one
    else:
        os.environ.pop("ROS_LOCALHOST_ONLY", None)  # which would overrule it


@contextlib.contextmanager
def own_domain(first: int) -> Iterator[int]:
    """Hold a domain that no other caller on this machine gets meanwhile.

    Args:
        first: index to begin with; consecutive callers should differ, since a domain takes a moment
            to forget its participants.

    Raises:
        Unavailable: all are taken.
    """
    for n in range(len(DOMAINS)):
        domain = DOMAINS[(first + n) % len(DOMAINS)]
        lock = _lock(Path(tempfile.gettempdir()) / f"collab_llm_domain_{domain}")
        if lock is not None:
            try:
                yield domain
            finally:
                os.close(lock)  # which unlocks it
            return
    raise Unavailable(f"all {len(DOMAINS)} ROS domains are in use", remedy="stop other graphs")


def _lock(file: Path) -> int | None:
    """Return a descriptor of the locked file, or None if it is held.

    Any user may put a link or a pipe in its place: it is neither followed, waited for nor written.
    """
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(file, flags, 0o600)
    except OSError:  # a link, or another user's
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
