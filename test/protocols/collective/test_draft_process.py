"""A draft model in a process of its own: killed, stopped, replaced.

The process is a small program that speaks as ``child.py`` does, for that one takes long to load.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.collective import workers
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Proposal
from collab_llm_nodes.protocols.collective.workers import DraftProcess

CHILD = """
import json, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as parent, parent.makefile("rb") as lines:
    next(lines)
    parent.sendall(b'{"vocabulary": "v"}\\n')
    for line in lines:
        told = json.loads(line)
        says = {"tokens": [len(told["asks"][0].get("first", {}))], "q": None}
        answer = {"batch": told["batch"], "step": told["step"], "proposals": [says]}
        if told["asks"][0]["count"] == 0:
            answer["error"] = "no memory"
        parent.sendall(json.dumps(answer).encode() + b"\\n")
"""
"""Proposes 3 for a request that it is told about in full (three fields), else 0.

It fails where no token is wanted.
"""
FIRST, AGAIN = [Proposal((3,))], [Proposal((0,))]

Told = queue.SimpleQueue[Any]


def draw(batch: int, answer: int = 1, count: int = 3) -> Draw:
    ask = Ask("a", (5, 6, 7), (5,) * answer, count, SamplingConfig())
    return Draw(batch, 0, 0, (ask,))


@pytest.fixture
def told() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def worker(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftProcess]:
    program = tmp_path / "child.py"
    program.write_text(CHILD, encoding="utf-8")
    monkeypatch.setattr(workers, "_COMMAND", (sys.executable, "-S", str(program)))
    made = DraftProcess(
        0,
        ModelConfig(),
        frozenset(),
        lambda asked, proposals: told.put((asked.batch, proposals)),
        lambda index, error: told.put(str(error)),
    )
    assert made.vocabulary() == "v"
    yield made
    made.close()


def test_a_new_process_abstains_until_its_model_is_loaded(worker: DraftProcess, told: Told) -> None:
    worker.draw(draw(0))
    assert told.get(timeout=60) == (0, FIRST)
    worker.draw(draw(1))
    assert told.get(timeout=60) == (1, AGAIN)
    worker.recover()
    assert "ended with status -9" in told.get(timeout=60)
    worker.draw(draw(2))
    assert told.get(timeout=60) == (2, [None]), "nobody waits for the load"
    worker.vocabulary()
    worker.draw(draw(3))
    assert told.get(timeout=60) == (3, FIRST), "the new one is told all anew"


def test_a_draw_that_fails_is_told_and_forgotten(worker: DraftProcess, told: Told) -> None:
    """A model that fails again and again must not fill the memory with what it was asked."""
    for batch in range(3):
        worker.draw(draw(batch, count=0))
        assert told.get(timeout=60) == "no memory"
    assert not worker._pending
    worker.draw(draw(3))
    assert told.get(timeout=60) == (3, AGAIN)


def test_a_stopped_process_holds_nobody_up(worker: DraftProcess, told: Told) -> None:
    """A message that does not fit into the socket would block the machine for ever."""
    assert worker._child is not None
    os.kill(worker._child.pid, signal.SIGSTOP)
    worker.draw(draw(0, answer=1_000_000))
    assert "ended with status -9" in told.get(timeout=60)


def test_a_load_that_takes_too_long_is_given_up(
    worker: DraftProcess, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_load_s", 0.0)
    worker.recover()
    told.get(timeout=60)
    worker.draw(draw(0))
    answers = [told.get(timeout=60), told.get(timeout=60)]
    assert (0, [None]) in answers
    assert any("ended with status -9" in str(each) for each in answers)


def test_a_process_that_cannot_be_started_is_told_and_tried_again(
    worker: DraftProcess, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error here would end the machine, and with it all answers."""
    worker.recover()
    told.get(timeout=60)
    with monkeypatch.context() as without:
        without.setattr(workers, "_COMMAND", ("/nonexistent/python",))
        worker.draw(draw(0))
    assert "cannot be started" in told.get(timeout=60)
    worker.draw(draw(1))
    assert told.get(timeout=60) == (1, [None])
    worker.vocabulary()
    worker.draw(draw(2))
    assert told.get(timeout=60) == (2, FIRST)
