"""The cloud's side as a process: ``collab-llm dragon-cloud``, and as a child for benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from collab_llm_nodes.ending import ended_at_once
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import Process, freeze_startup_objects, run_process
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.service import DragonService
from collab_llm_nodes.protocols.dragon.settings import DragonCloudConfig
from collab_llm_nodes.protocols.dragon.sides import load_side, measured
from collab_llm_nodes.transport.server import Server, check_port_free, run_until_signal


def serve(
    config: DragonCloudConfig, version: str, on_listening: Callable[[int], None] = lambda port: None
) -> None:
    """Load model and documents and serve until SIGTERM or SIGINT; then drain. In the main thread.

    Args:
        version: of this package.
        on_listening: called with the port once devices can connect.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the address is in use, or a file cannot be read.
        CollabError: the compute thread failed; a supervisor must restart the process.
    """
    for name in ("address", "metrics_address"):
        check_port_free(getattr(config, name), name)  # a model takes minutes to load
    with ended_at_once():
        set_threads(config.model)
        side, _ = load_side(config.model, config.side)
        line = measured(side)
        service = DragonService(config, side, Path(config.model.path).name, version, line)
        server = Server(service)
    freeze_startup_objects()
    asyncio.run(run_until_signal(server, config.drain_s, on_listening))
    side.close()


def cloud_process(config: Path) -> contextlib.AbstractContextManager[Process]:
    """Run the cloud's side as a child process, as the file ``config`` says."""
    command = [sys.executable, "-m", "collab_llm_nodes.cli", "dragon-cloud"]
    return run_process("dragon-cloud", [*command, "--config", str(config)])


def wait_for_cloud(client: DragonClient, process: Process) -> None:
    """Wait until the cloud answers.

    Raises:
        CollabError: its process ended, or it did not answer in time.
    """
    process.wait_for(lambda: client.describe(5.0))
