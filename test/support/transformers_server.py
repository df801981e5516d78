"""A real server of chat completions, ``transformers serve``, over a tiny random model."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tiny_models import tiny_folder
from waiting import comes_true

SERVE = "from transformers.cli.transformers import main; main()"
START_S = 110.0


@dataclass(frozen=True)
class Served:
    """A server, and the model that it serves."""

    url: str
    model: str


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def transformers_server(folder: Path) -> Iterator[Served]:
    """Serve a copy of the tiny llama from ``folder``."""
    model, log, port = folder / "model", folder / "log", free_port()
    shutil.copytree(tiny_folder("llama"), model)
    generation = model / "generation_config.json"
    samples = {**json.loads(generation.read_text()), "do_sample": True}  # else it never samples
    generation.write_text(json.dumps(samples))
    place = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", str(model), *place],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        assert comes_true(lambda: healthy(port) or server.poll() is not None, START_S)
        assert server.poll() is None, log.read_text(errors="replace")[-3000:]
        yield Served(f"http://127.0.0.1:{port}/v1", str(model))
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)


def healthy(port: int) -> bool:
    """Return True once the server answers."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
