"""The cloud's side as a process: ``collab-llm dragon-cloud``, and as a child for benchmarks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import Process, run_process
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.service import DragonService
from collab_llm_nodes.protocols.dragon.settings import DragonCloudConfig
from collab_llm_nodes.protocols.dragon.sides import load_side, measured
from collab_llm_nodes.transport.server import serve_until_signal


def serve(
    config: DragonCloudConfig, version: str, on_listening: Callable[[int], None] = lambda port: None
) -> None:
    """Load model and documents and serve like ``serve_until_signal``.

    Args:
        version: of this package.

    Raises:
        ModelError: the model cannot be loaded.
    """
    with contextlib.ExitStack() as stack:

        def make_service() -> DragonService:
            set_threads(config.model)
            side, _ = load_side(config.model, config.side)
            stack.callback(side.close)
            name = Path(config.model.path).name
            return DragonService(config, side, name, version, measured(side))

        serve_until_signal(config, make_service, on_listening)


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
