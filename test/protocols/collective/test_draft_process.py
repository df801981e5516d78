"""A draft model in a process of its own: ended, stopped, replaced."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from collective_models import config

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.protocols.collective import workers
from collab_llm_nodes.protocols.collective.messages import Ask, Draw
from collab_llm_nodes.protocols.collective.workers import DraftProcess

Told = queue.SimpleQueue[Any]


def draw(batch: int, answer: int = 1) -> Draw:
    ask = Ask("a", (5, 6, 7), (5,) * answer, 3, SamplingConfig())
    return Draw(batch, 0, (0,), (ask,))


@pytest.fixture
def told() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def worker(told: Told) -> Iterator[DraftProcess]:
    model = config().drafts.models()[0]
    made = DraftProcess(
        0,
        model,
        frozenset(),
        lambda index, asked, proposals: told.put((asked.batch, proposals)),
        lambda index, error: told.put(error),
    )
    made.vocabulary()
    yield made
    made.close()


def test_a_new_process_abstains_until_its_model_is_loaded(worker: DraftProcess, told: Told) -> None:
    worker.draw(draw(0))
    _, before = told.get(timeout=60)
    worker.recover()
    assert "ended with status -9" in str(told.get(timeout=60))
    worker.draw(draw(1))
    assert told.get(timeout=60) == (1, [None]), "nobody waits for the load"
    worker.vocabulary()
    worker.draw(draw(2))
    assert told.get(timeout=60) == (2, before), "and it knows the request anew"


def test_a_stopped_process_holds_nobody_up(worker: DraftProcess, told: Told) -> None:
    """What does not fit into the socket would block the machine's thread for ever."""
    assert worker._child is not None
    os.kill(worker._child.pid, signal.SIGSTOP)
    worker.draw(draw(0, answer=1_000_000))
    assert "ended with status -9" in str(told.get(timeout=60))


def test_a_load_that_takes_too_long_is_given_up(
    worker: DraftProcess, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_START_DEADLINE_S", 0.0)
    worker.recover()
    told.get(timeout=60)
    worker.draw(draw(0))
    answers = [told.get(timeout=60), told.get(timeout=60)]
    assert (0, [None]) in answers
    assert any("ended with status -9" in str(each) for each in answers)
