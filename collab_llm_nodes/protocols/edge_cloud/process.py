"""The verifier as a child process, for demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.processes import Process, run_process
from collab_llm_nodes.protocols.edge_cloud.verifier_client import VerifierClient


def verifier_process(
    address: str, *, compute_s: float = 0.0, config: Path | None = None, model: str = ""
) -> contextlib.AbstractContextManager[Process]:
    """Run the verifier with the embedded target; a pass takes at least ``compute_s`` (emulation).

    Args:
        config: a configuration file instead of the shipped one.
        model: the target instead of that of the configuration.
    """
    command = [sys.executable, "-m", "collab_llm_nodes.cli", "verifier"]
    command += ["--config", str(config or config_file("verifier_embedded.yaml"))]
    command += ["--address", address]
    if model:
        command += ["--model", model]
    if compute_s:
        command += ["--emulated-compute-s", str(compute_s)]
    return run_process("verifier", command)


def wait_for_verifier(client: VerifierClient, process: Process) -> None:
    """Wait until the verifier answers.

    Raises:
        CollabError: its process ended, or it did not answer in time.
    """
    process.wait_for(lambda: client.describe(5.0))
