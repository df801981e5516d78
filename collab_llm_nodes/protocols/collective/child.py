"""The process of one draft model: ``python -m collab_llm_nodes.protocols.collective.child FD``.

Its parent, a ``DraftProcess``, talks to it over the socket FD in lines of JSON (``wire.py``). It
ends when the parent closes the socket, or is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.collective.messages import Ask
from collab_llm_nodes.protocols.collective.models import DraftModel
from collab_llm_nodes.protocols.collective.wire import asks_from_json, line, proposals_to_json


def main(descriptor: int) -> None:
    """Serve until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    with socket.socket(fileno=descriptor) as parent, parent.makefile("rb") as lines:
        begin = json.loads(next(lines))
        try:
            config = from_mapping(ModelConfig, begin["model"])
            leave_a_core()
            set_threads(config)
            engine = Engine(load(config))
        except Exception as error:  # noqa: BLE001 - the parent tells it
            parent.sendall(line({"error": f"{type(error).__name__}: {error}"}))
            return
        try:
            parent.sendall(line({"vocabulary": engine.vocabulary}))
        except BrokenPipeError:  # it has not waited
            return
        model = DraftModel(engine, frozenset(begin["eos"]), begin["index"])
        known: dict[str, Ask] = {}
        for text in lines:
            message = json.loads(text)
            if "release" in message:
                known.pop(message["release"], None)
                model.sessions.release(message["release"])
                parent.sendall(line({"held_bytes": model.sessions.held_bytes}))
            else:
                parent.sendall(line(_answer(model, message, known)))


def leave_a_core() -> None:
    """Keep this process off one of the cores: the target's thread needs one to itself.

    Else k draft models and the target share the cores evenly, and the target, which sets the pace,
    runs at a fraction of its speed wherever there are fewer than k + 1 cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])


def _answer(model: DraftModel, message: dict[str, Any], known: dict[str, Ask]) -> dict[str, Any]:
    named = {"batch": message["batch"], "step": message["step"]}
    try:
        proposals = model.draw(asks_from_json(message, known))
    except Exception as error:  # noqa: BLE001 - the parent leaves this model out for a while
        return {**named, "error": f"{type(error).__name__}: {error}"}
    held = model.sessions.held_bytes
    return {**named, "proposals": proposals_to_json(proposals), "held_bytes": held}


if __name__ == "__main__":
    main(int(sys.argv[1]))
