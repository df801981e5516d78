"""Steps of a GPU check that work, are wrong, raise, die and hang; for tests of the runner."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from collab_llm_lab.bench.gpu.worker import Send


class FakeLab:
    """What these steps are handed."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def tidy(self) -> None:
        """Nothing to do."""


class NoLab:
    """What cannot be made, as where a package is missing."""

    def __init__(self, send: Send) -> None:
        raise ImportError("No module named 'torch'")


def figure(lab: Any, value: Any) -> None:
    lab.send({"figure": "pid", "value": value})


def works(lab: Any) -> None:
    """Find something right."""
    figure(lab, os.getpid())
    lab.send({"verdict": "sound", "facts": {"ok": True, "found": 0.5}})


def wrong(lab: Any) -> None:
    """Find something wrong."""
    lab.send({"verdict": "sound", "facts": {"ok": False, "found": float("nan")}})


def warns(lab: Any) -> None:
    """Warn as the product does, from a thread of its own."""
    log = logging.getLogger("collab_llm_nodes.engine.cuda")
    thread = threading.Thread(target=log.warning, args=("no %s", "graphs"))
    thread.start()
    thread.join()


def spoils(lab: Any) -> None:
    """Report that the device is of no use any more."""
    figure(lab, os.getpid())
    lab.send({"spoilt": True})


def fails_in_part(lab: Any) -> None:
    """Report that a part has raised something."""
    figure(lab, os.getpid())
    lab.send({"verdict": "part", "facts": {"ok": False, "exception": "RuntimeError"}})


def raises(lab: Any) -> None:
    """Find something, then raise."""
    figure(lab, 1)
    raise RuntimeError("no kernel image")


def dies(lab: Any) -> None:
    """Find something, then die as of a fault in a driver."""
    figure(lab, 1)
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(lab: Any) -> None:
    """Start a process, report its number, and wait for ever."""
    figure(lab, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    threading.Event().wait()
