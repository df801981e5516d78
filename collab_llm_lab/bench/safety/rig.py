"""The processes of ``bench safety``: real nodes and the real verifier, which can be killed cheaply.

A killed process has to come back two hundred times. So all are forked from one that has imported
what they need (``multiprocessing``'s fork server) but has started neither ROS nor gRPC nor a model.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.processes import Process, free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process

NODES = {
    "camera_ingest": "camera_ingest.CameraIngest",
    "cloud_verifier_bridge": "cloud_verifier_bridge.CloudVerifierBridge",
    "draft_vlm": "draft_vlm.DraftVlm",
    "predraft_cache": "predraft_cache.PreDraftCacheNode",
    "generate_router": "generate_router.GenerateRouter",
    "navigation_action_parser": "navigation_action_parser.NavigationActionParser",
    "navigator": "navigator.Navigator",
    "sim_go2": "sim_go2.SimGo2",
    "motion_guard": "motion_guard.MotionGuard",
}
Layout = dict[str, tuple[str, ...]]
"""Processes and the nodes composed in each."""

SCRIPTED: Layout = {
    "motion": ("sim_go2", "motion_guard"),
    "eyes": ("camera_ingest", "cloud_verifier_bridge", "navigation_action_parser"),
    "navigator": ("navigator",),
}
"""Layout without a draft model; the navigator has a process that can be killed."""
SHIPPED: Layout = {
    "motion": ("sim_go2", "motion_guard"),
    "graph": (
        "camera_ingest",
        "cloud_verifier_bridge",
        "draft_vlm",
        "predraft_cache",
        "generate_router",
        "navigation_action_parser",
        "navigator",
    ),
}
"""Layout that ``sim.launch.py`` starts."""
REAL_TIME = {
    "sim_go2:real_time_factor": "1.0",
    "sim_go2:lockstep": "false",
    "cloud_verifier_bridge:verifier.link.backoff_max_s": "0.2",
}
RELAYED = {
    "sim_go2:odom": "sim/odom",
    "sim_go2:image/compressed": "sim/image/compressed",
}


class Child:
    """A process forked from the fork server; its output goes to a file."""

    def __init__(self, name: str, log: Path, target: Callable[..., Any], *arguments: Any) -> None:
        self.name, self._log, self._target, self._arguments = name, log, target, arguments
        self._context = multiprocessing.get_context("forkserver")
        self._process: ForkServerProcess | None = None
        log.touch()
        self.start()

    @property
    def pid(self) -> int:
        """Process id of the child that runs now."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, the first time or again."""
        arguments = (str(self._log), self._target, self._arguments)
        self._process = self._context.Process(target=_in_child, args=arguments, name=self.name)
        self._process.start()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.join()

    def check(self) -> None:
        """Raise CollabError, with the end of the log, if the process is gone."""
        assert self._process is not None
        if not self._process.is_alive():
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise CollabError(
                f"{self.name} ended with status {self._process.exitcode}:\n{tail}",
                remedy="see the log above",
            )

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ten seconds."""
        assert self._process is not None
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10.0)
            self._process.kill()
        self._process.join()


@dataclass(frozen=True)
class Rig:
    """Everything that runs.

    Attributes:
        link: between bridge and verifier.
        processes: by name; ``verifier`` among them.
    """

    link: LinkProxy
    processes: dict[str, Child]

    def check(self) -> None:
        """Raise CollabError if a process has ended that should not have."""
        for process in self.processes.values():
            process.check()


@contextlib.contextmanager
def run_rig(layout: Layout, parameters: dict[str, str]) -> Iterator[Rig]:
    """Start verifier, link and nodes with the simulation's shipped configuration.

    The simulator's sensors do not reach the nodes directly: a client relays them (``RELAYED``).

    Args:
        parameters: ``node:name`` to value, on top of it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["collab_llm_lab.bench.safety.preload"]
    )
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_")))
        address = f"127.0.0.1:{free_port()}"
        processes: dict[str, Child] = {}

        def start(name: str, target: Callable[..., Any], *arguments: Any) -> None:
            processes[name] = Child(name, logs / f"{name}.log", target, *arguments)
            stack.callback(processes[name].stop)

        start("verifier", _verify, address)
        link = stack.enter_context(LinkProxy(address))
        values = {**parameters, "cloud_verifier_bridge:verifier.address": link.address}
        for name, nodes in layout.items():
            start(name, _run_nodes, nodes, _ros_arguments(values, RELAYED))
        yield Rig(link, processes)


@contextlib.contextmanager
def run_apart(parameters: dict[str, str]) -> Iterator[dict[str, Process]]:
    """Start every node and the verifier in a process of its own, as users do.

    Such processes share no memory, so that each one's usage is its own. Otherwise as ``run_rig``.
    """
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        processes = {"verifier": stack.enter_context(verifier_process(address))}
        values = {**parameters, "cloud_verifier_bridge:verifier.address": address}
        for name in NODES:
            command = [sys.executable, "-m", f"collab_llm_nodes.nodes.{name}"]
            command += _ros_arguments(values, RELAYED)
            processes[name] = stack.enter_context(run_process(name, command))
        yield processes


def _ros_arguments(parameters: dict[str, str], remappings: dict[str, str]) -> list[str]:
    arguments = ["--ros-args"]
    for file in ("embedded.yaml", "sim.yaml"):
        arguments += ["--params-file", str(config_file(file))]
    for name, value in parameters.items():
        arguments += ["-p", f"{name}:={value}"]
    for name, value in remappings.items():
        arguments += ["-r", f"{name}:={value}"]
    return arguments


# In the children.


def _in_child(log: str, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    raise SystemExit(target(*arguments))


def _end_with_parent() -> None:
    """End with the benchmark, also if it is killed: others may take its ROS domain."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_nodes(names: tuple[str, ...], arguments: list[str]) -> int:
    from collab_llm_nodes.ros.program import run

    factories = []
    for name in names:
        module, kind = NODES[name].split(".")
        factories.append(getattr(importlib.import_module(f"collab_llm_nodes.nodes.{module}"), kind))
    return run(*factories, args=arguments)


def _verify(address: str) -> int:
    from collab_llm_nodes.protocols.edge_cloud.service import load_config, serve

    serve(load_config(config_file("verifier_embedded.yaml"), address=address))
    return 0
