"""A machine and a target that note the time of what they do, and a gate that holds them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
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
    """A machine that tells the time it takes itself, and when the models were at work.

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
        """Begin anew; call it before the first request, and while nothing is under way."""
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
    """Holds the passes of the target between two turns; its clock stands meanwhile."""

    def __init__(self) -> None:
        self._shut = False
        self._held = threading.Event()
        self._goes = threading.Event()
        self._stood_s = 0.0
        self._since = 0.0

    def clock(self) -> float:
        """Return the time, without that for which passes were held [s]."""
        now = self._since if self._held.is_set() else time.monotonic()
        return now - self._stood_s

    def shut(self) -> None:
        """Hold the next pass. Only the thread that makes the passes calls this."""
        self._goes.clear()
        self._shut = True

    def let_through(self) -> None:
        """Wait until the gate is open; called before each pass."""
        if self._shut:
            self._since = time.monotonic()
            self._held.set()
            self._goes.wait()

    def await_held(self, timeout_s: float) -> bool:
        """Wait until a pass is held; False if none is within this time [s]."""
        return self._held.wait(timeout_s)

    def open(self) -> None:
        """Let passes through; one that is held goes on."""
        if self._held.is_set():
            self._stood_s += time.monotonic() - self._since
        self._shut = False
        self._held.clear()
        self._goes.set()


class WatchedTarget(Target):
    """A target that tells the size of its KV caches.

    Attributes:
        held: (time [s], bytes) after each verification.
        gate: holds its passes.
    """

    held: list[tuple[float, int]]

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.gate = Gate()

    def verify(self, claims: Sequence[Claim]) -> list[Verdict]:
        self.gate.let_through()
        verdicts = super().verify(claims)
        self.held.append((self.gate.clock(), self.sessions.held_bytes))
        return verdicts
