"""One thread that runs the jobs of many owners in equal shares of its time.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): each owner's next job has a tag, the
time that the owner has used so far; a newcomer's is that of the running job. The smallest tag comes
next. So an owner with little work waits for the running job only, however many jobs another owner
has and however long they take.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class FairThread:
    """The thread and its queue. It ends after :meth:`shutdown`, when all jobs are done.

    Args:
        clock: measures the duration of jobs [s].
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Job]] = {}  # by owner; those without a job are not in it
        self._used: dict[str, float] = {}  # end of each owner's last job, in virtual time [s]
        self._now = 0.0  # the tag of the job under way, or of the last one
        self._over = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def share(self, owner: str) -> Executor:
        """Return an executor for the jobs of ``owner``."""
        return _Share(self, owner)

    def shutdown(self) -> None:
        """Refuse new jobs; does not wait for those that were submitted."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _put(self, owner: str, job: _Job) -> None:
        with self._changed:
            if self._over:
                raise RuntimeError("cannot schedule new jobs after shutdown")
            self._waiting.setdefault(owner, deque()).append(job)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._over):
                    self._changed.wait()
                if not self._waiting:
                    return
                owner, job = self._next()
            begun = self._clock()
            job.run()
            with self._changed:
                self._used[owner] = self._now + self._clock() - begun
                self._used = {o: used for o, used in self._used.items() if used > self._now}

    def _next(self) -> tuple[str, _Job]:
        """Return the job with the smallest tag; of equals, that of the longest waiting owner."""
        owner = min(self._waiting, key=self._tag)
        self._now = self._tag(owner)
        jobs = self._waiting.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._waiting[owner] = jobs  # at the end: others have waited longer
        return owner, job

    def _tag(self, owner: str) -> float:
        return max(self._now, self._used.get(owner, 0.0))


class _Job:
    def __init__(self, call: Callable[[], object]) -> None:
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self._call()
        except BaseException as error:  # noqa: BLE001 - passed on by the future
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class _Share(Executor):
    """One owner's jobs, in order."""

    def __init__(self, thread: FairThread, owner: str) -> None:
        self._thread, self._owner = thread, owner

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call of ``fn``; raises RuntimeError after the shutdown."""
        job = _Job(lambda: fn(*args, **kwargs))
        self._thread._put(self._owner, job)
        return job.future
