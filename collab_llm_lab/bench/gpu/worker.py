"""The child process that runs steps, one after another, and reports each finding at once."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SPARE_S = 2.0
"""Before a step's end, the stacks of its threads go to the log."""

Send = Callable[[dict[str, Any]], None]


def work(connection: Connection, log: Path, make_lab: Callable[[Send], Any]) -> None:
    """Run the steps whose functions the parent names, until it closes the connection.

    Args:
        make_lab: makes the argument of each step, given the function that reports findings.

    Messages in: (function, seconds). Messages out: findings of ``lab.Lab`` and warnings of the
    product, then {"done": seconds}, or {"raised": message, "hopeless": bool} of a step that raised
    something, or could not begin.
    """
    os.setsid()  # the parent ends this process together with its children
    with log.open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    tempfile.tempdir = str(log.parent)  # the parent removes the files of a killed step
    faulthandler.enable()
    send = _one_by_one(connection.send)
    logging.getLogger("collab_llm_nodes").addHandler(_Warnings(send))
    lab: Any = None
    while True:
        try:
            function, seconds = connection.recv()
        except EOFError:
            return
        begun = time.monotonic()
        faulthandler.dump_traceback_later(max(1.0, seconds - _SPARE_S))
        try:
            if lab is None:
                lab = make_lab(send)
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(lab)
            lab.tidy()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the step's result
            traceback.print_exc()
            hopeless = lab is None  # a package or the device is missing
            send({"raised": f"{type(error).__name__}: {error}", "hopeless": hopeless})
        else:
            send({"done": time.monotonic() - begun})
        faulthandler.cancel_dump_traceback_later()
        sys.stderr.flush()


def _one_by_one(send: Send) -> Send:
    """Return ``send`` for several threads: a connection would mix their messages up."""
    lock = threading.Lock()

    def send_alone(message: dict[str, Any]) -> None:
        with lock:
            send(message)

    return send_alone


class _Warnings(logging.Handler):
    """Reports what the product warns of, such as that it runs without kernels or graphs."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"warning": record.getMessage()})


def true_or_tiny(form: str, device: str, send: Send) -> Any:
    """Return the ``lab.Lab`` of a form; a package that cannot be imported is the step's error."""
    import torch

    from collab_llm_lab.bench.gpu.forms import TINY, TRUE
    from collab_llm_lab.bench.gpu.lab import Lab
    from collab_llm_nodes.models.devices import find_device

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    chosen = find_device(f"{device}:0" if device == "cuda" else device)  # as ``load`` prepares it
    return Lab(TINY if form == "tiny" else TRUE, chosen, send)
