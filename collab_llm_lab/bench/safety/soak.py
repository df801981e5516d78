"""The shipped graph drives through rooms while faults occur at random.

Crashes are processes that end by themselves; hangs are instructions that neither end nor move on.
The witness (``watch.py``) counts motions that were not permitted. In the first third processes are
killed as well; memory is watched after it.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from collab_llm_lab.bench.safety.rig import REAL_TIME, SHIPPED, Rig, run_apart, run_rig
from collab_llm_lab.bench.safety.trials import CONTROL_PERIOD_S
from collab_llm_lab.bench.safety.usage import Usage, growth, rss_mb
from collab_llm_lab.bench.safety.watch import MotionWatch
from collab_llm_lab.home.requests import About, Kind
from collab_llm_lab.home.wording import TRAINED
from collab_llm_nodes.errors import CollabError, DeadlineExceeded
from collab_llm_nodes.processes import START_DEADLINE_S
from collab_llm_nodes.sim.rooms import make_room

if TYPE_CHECKING:
    from collab_llm_lab.bench.safety.client import SafetyClient

_GOAL_S = 90.0
"""An instruction that has not ended by then hangs."""
_DEADLINE_S = 75.0
"""Time for an instruction: a search through a home may take minutes."""
_LIMITS = {
    "navigator:mission.deadline": str(_DEADLINE_S),
    "navigator:mission.outage_timeout": "60.0",
}
_STEP_S = 0.1
_SAMPLE_S = 10.0


def drive_undisturbed(seconds: float, seed: int, console: Console) -> dict[str, Any]:
    """Every node in a process of its own, in real time: what they use, how old actions are.

    Returns:
        ``nodes.<name>.{cpu_percent, rss_mb}`` and ``camera_to_action_age`` (``median``, ``p95``,
        ``count``; ``to_velocity`` likewise) [s], from a picture's arrival at the camera node.
    """
    from collab_llm_lab.bench.safety.client import SafetyClient

    watch = MotionWatch(CONTROL_PERIOD_S)
    with (
        run_apart(REAL_TIME) as processes,
        SafetyClient(watch, scripted=False) as client,
        console.status("every node in a process of its own, nothing disturbed ..."),
    ):
        chance = random.Random(seed)

        def check() -> None:
            for process in processes.values():
                process.check()

        _next_room(client, chance, START_DEADLINE_S)
        client.wait_for_motion(0.0, START_DEADLINE_S, check)
        client.ages.clear()
        usage = Usage({name: process.pid for name, process in processes.items()})
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            check()
            if client.ended is not None:
                _next_room(client, chance, 10.0)
            time.sleep(_STEP_S)
        ages, velocities = zip(*client.ages, strict=True)
        return {
            "nodes": usage.rows(),
            "camera_to_action_age": {**_spread(ages), "to_velocity": _spread(velocities)},
        }


def run_soak(minutes: float, seed: int, console: Console) -> dict[str, Any]:
    """Drive under random faults for ``minutes``.

    Returns:
        ``minutes``, ``instructions``, ``endings`` (by status), ``faults`` (by name), ``crashes``,
        ``hangs``, ``unintended_motions`` and what they were, ``memory.<process>`` (``growth`` of
        ``usage.py``), ``leaks``, ``ok``.
    """
    from collab_llm_lab.bench.safety.client import SafetyClient

    watch = MotionWatch(CONTROL_PERIOD_S)
    with (
        run_rig(SHIPPED, {**REAL_TIME, **_LIMITS}) as rig,
        SafetyClient(watch, scripted=False) as client,
        console.status("") as status,
    ):
        soak = _Soak(rig, client, random.Random(seed), 60.0 * minutes)
        while soak.goes_on:
            soak.step()
            status.update(f"soak: {soak.elapsed / 60:.1f} of {minutes:g} min, {soak.summary()}")
        results = soak.results()
    results["unintended_motions"] = len(watch.violations)
    results["unintended"] = [words for _, _, words in watch.violations]
    results["minutes"] = minutes
    results["ok"] = not (
        results["crashes"] or results["hangs"] or results["leaks"] or watch.violations
    )
    return results


class _Soak:
    """One soak: instructions one after the other, at most one fault at a time."""

    def __init__(
        self, rig: Rig, client: SafetyClient, chance: random.Random, seconds: float
    ) -> None:
        self._rig, self._client, self._chance, self._seconds = rig, client, chance, seconds
        self._endings: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._crashes: list[str] = []
        self._down: set[str] = set()  # killed on purpose
        self._hangs = 0
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._mend: tuple[float, Callable[[], None]] | None = None
        self._fault_at = 0.0
        _next_room(client, chance, START_DEADLINE_S)
        client.wait_for_motion(0.0, START_DEADLINE_S, rig.check)
        self._began = self._instructed = time.monotonic()
        self._sampled = -math.inf

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def goes_on(self) -> bool:
        return self.elapsed < self._seconds and len(self._crashes) < 3

    def summary(self) -> str:
        faults = sum(self._faults.values())
        violations = len(self._client.watch.violations)
        return f"{faults} faults, {len(self._crashes)} crashes, {violations} unintended motions"

    def step(self) -> None:
        """Look after everything, once in ``_STEP_S``."""
        time.sleep(_STEP_S)
        now = self.elapsed
        self._look_for_crashes()
        if now - self._sampled >= _SAMPLE_S:
            self._sampled = now
            if not self._down:
                sizes = {name: rss_mb(p.pid) for name, p in self._rig.processes.items()}
                self._samples.append((now, sizes))
        if self._mend is not None and now >= self._mend[0]:
            mend = self._mend[1]
            self._mend, self._fault_at = None, now + self._chance.uniform(2.0, 8.0)
            mend()
        elif self._mend is None and now >= self._fault_at:
            self._break_something(now)
        self._look_after_the_instruction()

    def results(self) -> dict[str, Any]:
        later = [s for s in self._samples if s[0] > self._seconds / 3]
        times = [t for t, _ in later]
        memory = {name: growth(times, [sizes[name] for _, sizes in later]) for name in later[0][1]}
        return {
            "instructions": sum(self._endings.values()),
            "endings": dict(self._endings),
            "faults": dict(self._faults),
            "crashes": len(self._crashes),
            "crashed": self._crashes,
            "hangs": self._hangs,
            "memory": memory,
            "leaks": sum(row["leaks"] for row in memory.values()),
        }

    def _look_for_crashes(self) -> None:
        for name, process in self._rig.processes.items():
            if name in self._down:
                continue
            try:
                process.check()
            except CollabError as error:
                self._crashes.append(str(error))
                process.start()
                if name == "graph":
                    self._client.forget_goal()
                    self._instruct()

    def _look_after_the_instruction(self) -> None:
        if ending := self._client.ending:
            if not self._client.state.emergency_stop:  # it would end at once
                self._endings[ending] += 1
                self._instruct()
        elif time.monotonic() - self._instructed > _GOAL_S:
            self._hangs += 1
            self._client.cancel()
            self._instructed = time.monotonic()

    def _instruct(self) -> None:
        _next_room(self._client, self._chance, START_DEADLINE_S)
        self._instructed = time.monotonic()

    # What breaks.

    def _break_something(self, now: float) -> None:
        faults: list[Callable[[], tuple[float, Callable[[], None]]]] = [
            self._press,
            self._cut,
            self._reset_link,
            lambda: self._silence("camera"),
            lambda: self._silence("odometry"),
            self._hang_verifier,
            self._cancel,
            self._nonsense,
        ]
        if now < self._seconds / 3:
            faults += [lambda: self._kill("verifier"), lambda: self._kill("graph")]
        lasts, mend = self._chance.choice(faults)()
        self._mend = (now + lasts, mend)

    def _press(self) -> tuple[float, Callable[[], None]]:
        self._faults["emergency stop"] += 1
        self._client.broken("the emergency stop")
        self._client.press()
        return self._chance.uniform(0.7, 2.0), self._unpress

    def _unpress(self) -> None:
        self._client.wait(self._client.reset, 10.0, "the reset")
        self._client.mended("the emergency stop")

    def _cut(self) -> tuple[float, Callable[[], None]]:
        self._faults["link silent"] += 1
        self._client.broken("the silence of the link")
        self._rig.link.half_open()

        def heal() -> None:
            self._client.mended("the silence of the link")
            self._rig.link.heal()

        return self._chance.uniform(0.2, 5.0), heal

    def _reset_link(self) -> tuple[float, Callable[[], None]]:
        self._faults["connections reset"] += 1
        self._rig.link.cut()
        return 0.5, lambda: None

    def _silence(self, sensor: str) -> tuple[float, Callable[[], None]]:
        self._faults[f"{sensor} silent"] += 1
        self._client.silent.add(sensor)
        self._client.broken(f"the silence of the {sensor}")

        def heal() -> None:
            self._client.mended(f"the silence of the {sensor}")
            self._client.silent.discard(sensor)

        return self._chance.uniform(0.2, 3.0), heal

    def _hang_verifier(self) -> tuple[float, Callable[[], None]]:
        self._faults["verifier hangs"] += 1
        self._client.broken("the silence of the verifier")
        verifier = self._rig.processes["verifier"]
        verifier.signal(signal.SIGSTOP)

        def heal() -> None:
            self._client.mended("the silence of the verifier")
            verifier.signal(signal.SIGCONT)

        return self._chance.uniform(0.2, 3.0), heal

    def _cancel(self) -> tuple[float, Callable[[], None]]:
        self._faults["instruction cancelled"] += 1
        try:
            self._client.cancel()
        except DeadlineExceeded:
            self._hangs += 1
        return 0.5, lambda: None

    def _nonsense(self) -> tuple[float, Callable[[], None]]:
        self._faults["velocities that are no numbers"] += 1
        self._client.send_nonsense()
        return 0.5, lambda: None

    def _kill(self, name: str) -> tuple[float, Callable[[], None]]:
        self._faults[f"{name} killed"] += 1
        self._client.broken(f"the death of the {name}")
        self._down.add(name)
        process = self._rig.processes[name]
        process.kill()

        def bring_back() -> None:
            self._client.mended(f"the death of the {name}")
            process.start()
            self._down.discard(name)
            if name == "graph":
                self._client.forget_goal()
                self._instruct()

        return self._chance.uniform(0.7, 2.0), bring_back


def _next_room(client: SafetyClient, chance: random.Random, deadline_s: float) -> None:
    room = make_room(chance.randrange(1_000_000))
    client.enter(room.seed)
    thing = chance.choice(room.things).name
    request = TRAINED.draw(np.random.default_rng(room.seed), Kind.GO, About(thing))
    client.instruct(request, deadline_s)


def _spread(values: Any) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "count": len(ordered),
    }
