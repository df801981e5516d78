"""One thread's time is shared equally by owners, whatever their jobs take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from collab_llm_nodes.serving.fair_thread import FairThread

WAIT_S = 30.0


class World:
    """A thread whose jobs take the time that they say, of a clock that only they move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.thread = FairThread("fair", lambda: self.now)

    def job(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.done.append(name)

        return run

    def held(self) -> threading.Event:
        """Have the thread wait, so that what is submitted meanwhile is there at once."""
        begun, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert goes_on.wait(WAIT_S)

        self.thread.share("nobody").submit(hold)
        assert begun.wait(WAIT_S)
        return goes_on


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.thread.shutdown()


def test_an_owner_with_little_to_do_waits_for_no_queue(world: World) -> None:
    greedy, modest = world.thread.share("greedy"), world.thread.share("modest")
    goes_on = world.held()
    for number in range(5):
        greedy.submit(world.job(f"long {number}", 10.0))

    def ask() -> None:  # asks again with each turn, as a decoder does
        world.job("short", 1.0)()
        if world.done.count("short") < 4:
            modest.submit(ask)

    modest.submit(ask)
    goes_on.set()
    greedy.submit(lambda: None).result(WAIT_S)
    # One long job begins before it is known to be long; then all short ones fit into its time.
    assert world.done[:6] == ["long 0", "short", "short", "short", "short", "long 1"]


def test_a_rest_earns_no_credit(world: World) -> None:
    """An owner that comes late shares from then on; it does not get the time that it left out."""
    early, late = world.thread.share("early"), world.thread.share("late")
    for _ in range(10):
        early.submit(world.job("before", 1.0)).result(WAIT_S)
    world.done.clear()
    goes_on = world.held()
    for _ in range(4):
        late.submit(world.job("late", 1.0))
        last = early.submit(world.job("early", 1.0))
    goes_on.set()
    last.result(WAIT_S)
    assert sorted(world.done[:4]) == ["early", "early", "late", "late"]


def test_jobs_of_one_owner_keep_their_order_and_can_be_taken_back(world: World) -> None:
    share = world.thread.share("one")
    goes_on = world.held()
    futures = [share.submit(world.job(str(number), 0.1)) for number in range(4)]
    assert futures[1].cancel()
    goes_on.set()
    futures[3].result(WAIT_S)
    assert world.done == ["0", "2", "3"]


def test_a_job_that_fails_tells_who_waits_for_it_and_nobody_else(world: World) -> None:
    share = world.thread.share("one")

    def fail() -> None:
        raise ValueError("no")

    failed, following = share.submit(fail), share.submit(lambda: 5)
    with pytest.raises(ValueError, match="no"):
        failed.result(WAIT_S)
    assert following.result(WAIT_S) == 5


def test_after_the_shutdown_jobs_are_finished_and_none_is_taken() -> None:
    world = World()
    share = world.thread.share("one")
    goes_on = world.held()
    waiting = share.submit(world.job("waiting", 1.0))
    world.thread.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        share.submit(world.job("late", 1.0))
    goes_on.set()
    waiting.result(WAIT_S)
    assert world.done == ["waiting"]
