"""A machine and a target that record their times, and a gate that stops them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from collab_llm_nodes.decoding.rejection import Outcome
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.protocols.collective.drawing import Drawing
from collab_llm_nodes.protocols.collective.machine import Action, Machine
from collab_llm_nodes.protocols.collective.messages import Claim, Draw, Proposal, Verdict, Verify
from collab_llm_nodes.protocols.collective.models import Target
from collab_llm_nodes.protocols.collective.requests import Draft

VOTE, MONITOR, WEIGHTS = "vote", "monitor", "weights"
PARTS = (VOTE, MONITOR, WEIGHTS)
"""Parts of the cost of collective speculation beside the models (paper 002, Figure 14)."""

Span = tuple[float, float]
Verified = Sequence[tuple[Draft, Outcome]]


class WatchedMachine(Machine):
    """A machine that records the time it takes itself, and when the models were at work.

    Attributes:
        overhead_s: CPU time of each of ``PARTS`` [s]; waits for the interpreter do not count.
        drafting, verifying: begin and end of each draw and verification [s].
        pool: (time [s], drafts that wait, requests that hold KV caches) at each step.
    """

    overhead_s: dict[str, float]
    drafting: list[Span]
    verifying: list[Span]
    pool: list[tuple[float, int, int]]
    _drawn_from = 0.0
    _target_from = 0.0

    def watch(self) -> None:
        """Start new records, while no pass is under way or the next one waits at a gate."""
        self.overhead_s = dict.fromkeys(PARTS, 0.0)
        self.drafting, self.verifying, self.pool = [], [], []

    def poll(self, now: float) -> list[Action]:
        actions = super().poll(now)
        for action in actions:
            if isinstance(action, Verify):
                self._target_from = now
        if any(isinstance(action, Draw) for action in actions):  # one for each model, or none
            self._drawn_from = now
            self.drafting.append((now, now))
        self.pool.append((now, self.pooled, self.active))
        return actions

    def on_proposals(
        self, model: int, batch: int, step: int, proposals: Sequence[Proposal | None], now: float
    ) -> None:
        if self.drafting:
            self.drafting[-1] = (self._drawn_from, now)  # until the slowest model has answered
        super().on_proposals(model, batch, step, proposals, now)

    def on_verdicts(self, batch: int, verdicts: Sequence[Verdict], now: float) -> None:
        self.verifying.append((self._target_from, now))
        super().on_verdicts(batch, verdicts, now)

    def _vote(self, drawing: Drawing) -> None:
        with self._timed(VOTE):
            super()._vote(drawing)

    def _monitor(self, verified: Verified, now: float) -> None:
        with self._timed(MONITOR):
            super()._monitor(verified, now)

    def _reweigh(self, verified: Verified) -> None:
        with self._timed(WEIGHTS):
            super()._reweigh(verified)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self.overhead_s[part] += time.thread_time() - begun


class Gate:
    """Makes the passes of the target wait between two runs; its clock stops meanwhile.

    Attributes:
        on_wait: called when a pass begins to wait, by the thread that makes it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut = False
        self._lasting = False  # it stays open
        self._since: float | None = None  # a pass waits
        self._waited_s = 0.0
        self.on_wait: Callable[[], None] = lambda: None

    def clock(self) -> float:
        """Return the time, without that in which a pass has waited [s]."""
        with self._changed:
            now = time.monotonic() if self._since is None else self._since
            return now - self._waited_s

    def shut(self) -> None:
        """Make the next pass wait."""
        with self._changed:
            self._shut = not self._lasting

    def open(self, *, for_good: bool = False) -> None:
        """Let passes go on.

        Args:
            for_good: the gate is never shut again.
        """
        with self._changed:
            self._shut = False
            self._lasting = self._lasting or for_good
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the gate is open; called before each pass."""
        with self._changed:
            if not self._shut:
                return
            self._since = time.monotonic()
            self.on_wait()
            self._changed.wait_for(lambda: not self._shut)
            self._waited_s += time.monotonic() - self._since
            self._since = None


class WatchedTarget(Target):
    """A target that records the size of its KV caches.

    Attributes:
        held: (time [s], bytes) after each verification.
        gate: makes its passes wait.
    """

    held: list[tuple[float, int]]

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.gate = Gate()

    def verify(self, claims: Sequence[Claim]) -> list[Verdict]:
        self.gate.wait()
        verdicts = super().verify(claims)
        self.held.append((self.gate.clock(), self.sessions.held_bytes))
        return verdicts
