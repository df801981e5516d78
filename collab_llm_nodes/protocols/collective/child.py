"""The process of draft models: ``python -m collab_llm_nodes.protocols.collective.child FD``.

Its parent, a ``DraftProcess``, talks to it over the socket FD in lines of JSON (``wire.py``). It
ends when the parent closes the socket, or is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import freeze_startup_objects
from collab_llm_nodes.protocols.collective.messages import Ask
from collab_llm_nodes.protocols.collective.models import Drafts
from collab_llm_nodes.protocols.collective.wire import asks_from_json, line, proposals_to_json


def main(descriptor: int) -> None:
    """Serve until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),  # the parent has left
        socket.socket(fileno=descriptor) as parent,
        parent.makefile("rb") as lines,
    ):
        begin = json.loads(next(lines))
        avoid_one_core()
        engines: list[Engine] = []
        for index, fields in zip(begin["indices"], begin["models"], strict=True):
            try:
                config = from_mapping(ModelConfig, fields)
                set_threads(config)
                engines.append(Engine(load(config)))
                engines[-1].warm_up()
            except Exception as error:  # noqa: BLE001 - the parent reports it
                failure = {"error": f"{type(error).__name__}: {error}", "index": index}
                parent.sendall(line(failure))
                return
        freeze_startup_objects()
        parent.sendall(line({"vocabularies": [engine.vocabulary for engine in engines]}))
        _serve(parent, lines, Drafts(engines, frozenset(begin["eos"]), begin["indices"]))


def _serve(parent: socket.socket, lines: Iterable[bytes], drafts: Drafts) -> None:
    """Answer the messages of the parent until it closes the socket."""
    known: dict[str, Ask] = {}
    for text in lines:
        message = json.loads(text)
        if "release" in message:
            known.pop(message["release"], None)
            drafts.release(message["release"])
            if (
                not drafts.held_bytes
            ):  # else it comes with the next answer: each message wakes the parent
                parent.sendall(line({"held_bytes": 0}))
        else:
            for answers in _answers(drafts, message["draws"], known):
                parent.sendall(line({"answers": answers, "held_bytes": drafts.held_bytes}))


def _answers(
    drafts: Drafts, draws: Sequence[dict[str, Any]], known: dict[str, Ask]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the answers to the draws, those of one group of models at a time."""
    asks = {draw["model"]: asks_from_json(draw, known) for draw in draws}
    named = {draw["model"]: {k: draw[k] for k in ("batch", "step", "model")} for draw in draws}
    for answers in drafts.answers(asks):
        found = []
        for model, given in answers.items():
            if isinstance(given, Exception):  # the parent leaves it out for a while
                result: dict[str, Any] = {"error": f"{type(given).__name__}: {given}"}
            else:
                result = {"proposals": proposals_to_json(given)}
            found.append({**named[model], **result})
        yield found


def avoid_one_core() -> None:
    """Keep this process off one core, so that the target's thread has it to itself.

    The target sets the pace. Where there are fewer cores than models, sharing them evenly would
    slow it to a fraction of its speed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
