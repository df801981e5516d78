"""The threads of the runner: the order of the target's passes, and what a failed start leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from collective_models import config, drafts, ignore, in_time, request, running, target

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import Cancelled, ConfigError, InvalidInput
from collab_llm_nodes.protocols.base import Progress, Resources
from collab_llm_nodes.protocols.collective import running as running_module
from collab_llm_nodes.protocols.collective.models import Drafts
from collab_llm_nodes.protocols.collective.running import Collective
from collab_llm_nodes.protocols.collective.settings import DraftsConfig
from collab_llm_nodes.protocols.collective.workers import Executor


class Preempting:
    """An executor before which the first thread stops until it may go on."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._calls = 0
        self.stopped, self.overtaken = threading.Event(), threading.Event()
        self.go_on, self.gone_on = threading.Event(), threading.Event()

    def __call__(self, work: Callable[[], None]) -> None:
        self._calls += 1
        if self._calls > 1:
            self._inner(work)
            self.overtaken.set()
            return
        self.stopped.set()
        assert self.go_on.wait(60)
        self._inner(work)
        self.gone_on.set()

    def close(self) -> None:
        self._inner.close()


def test_a_thread_that_is_overtaken_does_not_change_the_order_of_passes() -> None:
    """A ``Verify`` after its request's ``Release`` would open a KV cache that is never freed."""
    with running(config(pipeline="thread")) as collective:
        runner = collective._runner
        passes = runner._verify = Preempting(runner._verify)
        control, ended = in_time(), threading.Event()

        def ask() -> None:
            with pytest.raises(Cancelled):
                collective.run(request(0), ignore, control)
            ended.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert passes.stopped.wait(60)  # with the verification of the first draft in hand
        control.cancel()
        runner._serve()  # as a thread does that brings a proposal
        assert passes.overtaken.wait(60)
        passes.go_on.set()
        assert passes.gone_on.wait(60)
        asking.join(60)
        assert ended.is_set()
        done = threading.Event()
        passes(done.set)  # after all passes
        assert done.wait(60)
        assert collective._verifier.sessions.peak_bytes > 0, "the verification was made"
        assert collective._verifier.sessions.held_bytes == 0


def test_a_start_that_is_refused_leaves_no_thread() -> None:
    other = Engine(drafts()[0].loaded)
    other.vocabulary = "another"
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        Collective(target(), [other], config(pipeline="thread"), Resources())
    assert set(threading.enumerate()) <= before


def test_draft_models_that_do_not_fit_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first share of the models has its place already when the second one fails."""

    def made(engines: Any, eos: frozenset[int], indices: range) -> Drafts:
        if 0 not in indices:
            raise MemoryError("no memory")
        return Drafts(engines, eos, indices)

    monkeypatch.setattr(running_module, "Drafts", made)
    before = set(threading.enumerate())
    chosen = config(pipeline="thread", drafts=DraftsConfig(workers=2))
    with pytest.raises(MemoryError):
        Collective(target(), drafts()[:2], chosen, Resources())
    assert set(threading.enumerate()) <= before


def handled(collective: Collective) -> None:
    """Return when the runner has handled all that was asked of it before."""
    collective.run(request(9, max_tokens=1), ignore, in_time())


def test_an_answer_whose_listener_fails_is_cancelled() -> None:
    def gone(progress: Progress) -> None:
        raise RuntimeError("the publisher is gone")

    with running(config()) as collective:
        with pytest.raises(RuntimeError, match="publisher"):
            collective.run(request(0, max_tokens=900), gone, in_time())
        handled(collective)
        assert collective.machine.active == 0


def test_a_name_that_is_taken_is_refused_and_its_answer_goes_on() -> None:
    """To give up the one that is refused must not give up the other."""
    refused: list[InvalidInput] = []

    def ask_again(progress: Progress) -> None:
        if not refused:
            with pytest.raises(InvalidInput, match="under way") as caught:
                collective.run(request(0), ignore, in_time())
            refused.append(caught.value)
            handled(collective)

    with running(config()) as collective:
        answer = collective.run(request(0, max_tokens=200), ask_again, in_time())
    assert refused
    assert answer.error is None
