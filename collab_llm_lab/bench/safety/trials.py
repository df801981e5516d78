"""Six faults, each injected hundreds of times into a robot that is moving.

A scripted model has the robot turn on the spot, slowly, so that no step ends by itself while the
effect of a fault is waited for. A trial's latency is the time from the fault until the robot has
been sent zero for good, at the driver's end of ``cmd_vel``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from collab_llm_lab.bench.safety.rig import REAL_TIME, SCRIPTED, Rig, run_rig
from collab_llm_lab.bench.safety.watch import STOP_LIMIT_S, MotionWatch
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.processes import START_DEADLINE_S

if TYPE_CHECKING:
    from collab_llm_lab.bench.safety.client import SafetyClient

CONTROL_PERIOD_S = 0.05
"""Period of the navigator's commands, and of the simulator's steps."""
_SETTLE_S = 0.2  # zero for so long is a stop
_EARLY_S = (0.1, 0.35)  # after the beginning of a motion; a step takes 2.6 s
_DEADLINE_S = 60.0
_PARAMETERS = {
    **REAL_TIME,
    "navigator:rate": str(1.0 / CONTROL_PERIOD_S),
    "navigator:mission.executor.angular_speed": "0.3",
    "navigator:mission.settle": "0.0",
    "navigator:mission.check_thing": "false",  # the scripted model names none
}


@dataclass(frozen=True)
class Fault:
    """Something that breaks.

    Attributes:
        inject: break it; returns when.
        heal: mend it, and see to it that the robot moves on.
    """

    inject: Callable[[], float]
    heal: Callable[[], None]


def run_trials(trials: int, seed: int, console: Console) -> dict[str, Any]:
    """Inject each fault ``trials`` times.

    Returns:
        ``faults.<name>`` with ``median_s``, ``max_s``, ``trials``, ``latencies_s`` and ``ok`` (all
        within the limit); ``control_period_s``, ``limit_s``, ``unintended_motions`` and, for each,
        what it was.

    Raises:
        CollabError: a process ended by itself, or the robot did not move or did not stop.
    """
    from collab_llm_lab.bench.safety.client import SafetyClient  # rclpy: only where it is there

    watch = MotionWatch(CONTROL_PERIOD_S)
    chance = random.Random(seed)
    limit = STOP_LIMIT_S + CONTROL_PERIOD_S
    with (
        run_rig(SCRIPTED, _PARAMETERS) as rig,
        SafetyClient(watch, scripted=True) as client,
    ):
        client.instruct("turn on the spot", START_DEADLINE_S)
        found: dict[str, Any] = {}
        for name, fault in _faults(rig, client).items():
            with console.status("") as status:
                latencies: list[float] = []
                while len(latencies) < trials:
                    status.update(f"{name}: {len(latencies)} of {trials} trials ...")
                    latencies.append(_trial(fault, name, rig, client, chance))
            found[name] = {
                "median_s": statistics.median(latencies),
                "max_s": max(latencies),
                "trials": trials,
                "ok": max(latencies) <= limit,
                "latencies_s": latencies,
            }
            console.print(
                f"{name}: median {1e3 * found[name]['median_s']:.0f} ms,"
                f" max {1e3 * found[name]['max_s']:.0f} ms"
            )
    return {
        "faults": found,
        "control_period_s": CONTROL_PERIOD_S,
        "limit_s": limit,
        "unintended_motions": len(watch.violations),
        "unintended": [words for _, _, words in watch.violations],
    }


def _trial(fault: Fault, name: str, rig: Rig, client: SafetyClient, chance: random.Random) -> float:
    until = time.monotonic() + START_DEADLINE_S  # what was killed before may still be loading
    while not client.wait_for_motion(chance.uniform(*_EARLY_S), _DEADLINE_S, rig.check):
        assert client.ended is not None, "why it does not move"
        if time.monotonic() > until:
            raise CollabError(f"instructions end again and again: {client.ended.status.message}")
        client.instruct("turn on the spot", _DEADLINE_S)
    broken_at = fault.inject()
    stopped_at = client.stopped_at(broken_at, _SETTLE_S)
    client.mended(name)
    fault.heal()
    return stopped_at - broken_at


def _faults(rig: Rig, client: SafetyClient) -> dict[str, Fault]:
    """Return the faults by the names they have in the results."""

    def press() -> float:
        at = client.broken("estop")
        client.press_soon()
        return at

    def reset() -> None:
        client.wait(lambda: client.ended is not None, _DEADLINE_S, "the end of the instruction")
        client.wait(client.reset, _DEADLINE_S, "the reset")
        client.instruct("turn on the spot", _DEADLINE_S)

    def cut() -> float:
        at = client.broken("link_cut")
        rig.link.half_open()
        return at

    def silence(sensor: str) -> Callable[[], float]:
        def inject() -> float:
            client.silent.add(sensor)
            return client.broken(f"{sensor}_stall")

        return inject

    def kill(process: str) -> Callable[[], float]:
        def inject() -> float:
            at = client.broken(f"{process}_killed")
            rig.processes[process].kill()
            return at

        return inject

    def bring_back_navigator() -> None:
        client.forget_goal()
        rig.processes["navigator"].start()
        client.instruct("turn on the spot", _DEADLINE_S)

    return {
        "estop": Fault(press, reset),
        "link_cut": Fault(cut, rig.link.heal),
        "camera_stall": Fault(silence("camera"), lambda: client.silent.discard("camera")),
        "odometry_stall": Fault(silence("odometry"), lambda: client.silent.discard("odometry")),
        "verifier_killed": Fault(kill("verifier"), rig.processes["verifier"].start),
        "navigator_killed": Fault(kill("navigator"), bring_back_navigator),
    }
