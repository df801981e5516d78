"""A draft model in a process of its own: killed, stopped, replaced.

The process is a small program that speaks as ``child.py`` does, for that one takes long to load.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from signals import freeze

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.collective import workers
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Proposal
from collab_llm_nodes.protocols.collective.workers import DraftProcess, divide_models

CHILD = """
import json, os, socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as parent, parent.makefile("rb") as lines:
    next(lines)
    while not os.path.exists(sys.argv[0] + ".loads"):
        time.sleep(0.01)
    parent.sendall(b'{"vocabularies": ["v", "w"]}\\n')
    for line in lines:
        answers = []
        for draw in json.loads(line)["draws"]:
            says = {"tokens": [len(draw["asks"][0].get("first", {}))], "q": None}
            answer = {name: draw[name] for name in ("batch", "step", "model")}
            answer["proposals"] = [says]
            if draw["asks"][0]["count"] == 0:
                answer["error"] = "no memory"
            answers.append(answer)
        parent.sendall(json.dumps({"answers": answers}).encode() + b"\\n")
"""
"""Proposes 3 for a request that arrives in full (three fields), else 0.

It fails where no token is wanted. It loads as long as a file is missing.
"""
FIRST, AGAIN = [Proposal((3,))], [Proposal((0,))]

Results = queue.SimpleQueue[Any]


def draw(batch: int, answer: int = 1, count: int = 3, model: int = 4) -> list[Draw]:
    ask = Ask("a", (5, 6, 7), (5,) * answer, count, SamplingConfig())
    return [Draw(batch, 0, model, (ask,))]


@pytest.fixture
def results() -> Results:
    return queue.SimpleQueue()


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """The file that a process waits for when it loads."""
    return tmp_path / "child.py.loads"


@pytest.fixture
def worker(
    results: Results, loads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DraftProcess]:
    program = tmp_path / "child.py"
    program.write_text(CHILD, encoding="utf-8")
    loads.touch()
    monkeypatch.setattr(workers, "_COMMAND", (sys.executable, "-S", str(program)))
    made = DraftProcess(
        {4: ModelConfig(), 7: ModelConfig()},
        frozenset(),
        lambda asked, proposals: results.put((asked.batch, proposals)),
        lambda index, error: results.put((index, str(error))),
    )
    assert made.vocabularies() == ["v", "w"]
    yield made
    made.close()


def check_ended(results: Results) -> None:
    """All models of the process are left out."""
    found = [results.get(timeout=60) for _ in range(2)]
    assert [index for index, _ in found] == [4, 7]
    assert all("draft model 4, 7 ended with status -9" in error for _, error in found)


def test_the_models_of_a_process_answer_side_by_side(
    worker: DraftProcess, results: Results
) -> None:
    worker.draw([*draw(0, model=4), *draw(0, model=7)])
    assert results.get(timeout=60) == (0, FIRST)
    assert results.get(timeout=60) == (0, AGAIN), "a request is sent in full once"


@pytest.mark.parametrize(
    ("models", "workers", "cores", "expected"),
    [
        (3, 0, 2, [[0, 1, 2]]),
        (3, 0, 3, [[0], [1, 2]]),
        (3, 0, 16, [[0], [1], [2]]),
        (3, 0, 1, [[0, 1, 2]]),
        (3, 3, 2, [[0], [1], [2]]),
        (4, 2, 2, [[0, 1], [2, 3]]),
        (2, 5, 2, [[0], [1]]),
        (0, 0, 4, []),
    ],
)
def test_models_are_shared_out(
    models: int, workers: int, cores: int, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert [list(own) for own in divide_models(models, workers)] == expected


def test_a_new_process_abstains_until_its_model_is_loaded(
    worker: DraftProcess, results: Results, loads: Path
) -> None:
    worker.draw(draw(0))
    assert results.get(timeout=60) == (0, FIRST)
    worker.draw(draw(1))
    assert results.get(timeout=60) == (1, AGAIN)
    loads.unlink()
    worker.recover()
    check_ended(results)
    worker.draw(draw(2))
    assert results.get(timeout=60) == (2, [None]), "no draw waits for the load"
    loads.touch()
    worker.vocabularies()
    worker.draw(draw(3))
    assert results.get(timeout=60) == (3, FIRST), "the new one gets all in full"


def test_a_process_that_dies_is_replaced_at_once(
    worker: DraftProcess, results: Results, caplog: pytest.LogCaptureFixture
) -> None:
    """The next request, which may come much later, finds its draft models loaded."""
    assert worker._child is not None
    caplog.set_level("INFO")
    worker._child.kill()
    check_ended(results)
    worker.vocabularies()
    worker.draw(draw(0))
    assert results.get(timeout=60) == (0, FIRST)
    assert "draft model 4, 7 is loaded" in caplog.text


def test_a_draw_that_fails_is_reported_and_forgotten(
    worker: DraftProcess, results: Results
) -> None:
    """A model that fails again and again must not fill the memory with what it was asked."""
    for batch in range(3):
        worker.draw(draw(batch, count=0))
        assert results.get(timeout=60) == (4, "no memory")
    assert not worker._pending
    worker.draw(draw(3))
    assert results.get(timeout=60) == (3, AGAIN)


def test_a_stopped_process_delays_no_others(worker: DraftProcess, results: Results) -> None:
    """A message that does not fit into the socket would block the machine for ever."""
    assert worker._child is not None
    freeze(worker._child.pid)
    worker.draw(draw(0, answer=1_000_000))
    check_ended(results)


def test_a_model_that_is_not_loaded_in_time_is_refused(worker: DraftProcess, loads: Path) -> None:
    loads.unlink()
    late = DraftProcess({4: ModelConfig()}, frozenset(), Mock(), Mock(), load_s=0.01)
    with contextlib.closing(late), pytest.raises(ModelError, match="not loaded after 0.01 s"):
        late.vocabularies()


def test_a_load_that_takes_too_long_is_given_up(
    worker: DraftProcess, results: Results, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_load_s", 0.0)
    loads.unlink()
    worker.recover()
    check_ended(results)
    worker.draw(draw(0))
    answers = [results.get(timeout=60) for _ in range(3)]
    assert (0, [None]) in answers
    assert sum("ended with status -9" in str(each) for each in answers) == 2


def test_a_process_that_cannot_be_started_is_reported_and_tried_again(
    worker: DraftProcess, results: Results, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error here would end the machine, and with it all answers."""
    loads.unlink()
    with monkeypatch.context() as without:
        without.setattr(workers, "_COMMAND", ("/nonexistent/python",))
        worker.recover()
        check_ended(results)
        worker.draw(draw(0))
    assert "cannot be started" in results.get(timeout=60)[1]
    worker.draw(draw(1))
    assert results.get(timeout=60) == (1, [None])
    loads.touch()
    worker.vocabularies()
    worker.draw(draw(2))
    assert results.get(timeout=60) == (2, FIRST)


class Immortal:
    """Stands for a process in the arms of the kernel: killed, it does not end."""

    def __init__(self, worker: DraftProcess) -> None:
        assert worker._child is not None
        self.child = worker._child

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would be waited for for ever"
        raise subprocess.TimeoutExpired("child", timeout)


@pytest.fixture
def immortal(worker: DraftProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Immortal]:
    made = Immortal(worker)
    with monkeypatch.context() as own:
        own.setattr(made.child, "wait", made.wait)
        yield made
    made.child.wait(60)


def test_a_killed_process_that_does_not_end_is_replaced(
    worker: DraftProcess,
    results: Results,
    loads: Path,
    immortal: Immortal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads.unlink()
    worker.recover()
    found = [results.get(timeout=60) for _ in range(2)]
    assert [index for index, _ in found] == [4, 7]
    assert all("was killed, but does not end" in error for _, error in found)
    assert f"does not end; pid {immortal.child.pid}" in caplog.text
    worker.draw(draw(0))
    assert results.get(timeout=60) == (0, [None])
    loads.touch()
    worker.vocabularies()
    worker.draw(draw(1))
    assert results.get(timeout=60) == (1, FIRST)


def test_closing_does_not_wait_for_ever_for_a_process(
    worker: DraftProcess, immortal: Immortal, caplog: pytest.LogCaptureFixture
) -> None:
    worker.close()
    assert not worker._listener.is_alive()
    assert "does not end" in caplog.text


class Watched:
    """A process whose kills are counted, and a clock for its owner that can be put forward."""

    def __init__(self, worker: DraftProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        assert worker._child is not None
        self._pid, self._kill = worker._child.pid, worker._child.kill
        self.kills: list[int] = []
        self.ahead_s = 0.0
        monkeypatch.setattr(worker._child, "kill", self.kill)
        monkeypatch.setattr(workers, "time", self)

    def kill(self) -> None:
        self.kills.append(self._pid)
        self._kill()

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def stop(self) -> None:
        freeze(self._pid)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.fixture
def watched(worker: DraftProcess, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(worker, monkeypatch)


def test_a_process_that_reads_all_contexts_anew_is_spared(
    worker: DraftProcess, results: Results, watched: Watched
) -> None:
    """Killed for that, it would have to read them once more, for ever."""
    watched.stop()
    worker.draw(draw(0))
    worker.recover()
    assert not watched.kills
    worker.release("b")
    assert not watched.kills
    watched.go_on()
    assert results.get(timeout=60) == (0, FIRST)
    watched.stop()
    worker.draw(draw(1))
    worker.recover()
    assert watched.kills, "it has read them"
    check_ended(results)


def test_a_process_is_not_spared_for_ever(
    worker: DraftProcess, results: Results, watched: Watched
) -> None:
    watched.stop()
    worker.draw(draw(0))
    worker.recover()
    watched.ahead_s = 3600.0
    worker.release("b")
    assert watched.kills
    check_ended(results)
