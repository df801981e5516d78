"""One answer, token by token: round trip, Delta Z, the aggregator and acceptance (figure 9)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.dragon.sites import Sites
from collab_llm_lab.bench.harness import save_plot, subplots
from collab_llm_nodes.decoding.aggregation import Pair
from collab_llm_nodes.protocols.dragon.device import Rules
from collab_llm_nodes.protocols.dragon.machine import SideMachine
from collab_llm_nodes.protocols.dragon.scheduler import delta_z

RTT_S, TOKENS = 0.5, 15


def run_case(
    both: Sites, question: str, rules: Rules, decode_s: Pair, *, seed: int
) -> list[dict[str, Any]]:
    """Return a row for each token of an answer, as the device's machine saw it.

    Each has ``seconds`` since the question, ``rtt_ms`` as it was measured so far, ``delta_z_ms``
    (Eq. 8: the device's expected time per token less the cloud's; above 0 the cloud should
    aggregate), ``aggregator`` of the next token, and the drafts accepted so far,
    ``accepted_device`` and ``accepted_cloud``.
    """
    both.set(decode_s, RTT_S)
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()

    def watch(machine: SideMachine) -> None:
        fates = machine.figures.fates
        known = machine.profiler.estimates(len(machine.answer))
        gain = (
            delta_z(*known.decode_s, known.rtt_s, *known.acceptance) if known is not None else 0.0
        )
        for position in range(len(rows), len(machine.answer)):
            so_far = fates[: position + 1]
            rows.append(
                {
                    "seconds": time.monotonic() - begun,
                    "rtt_ms": 1e3 * machine.profiler.rtt_s,
                    "delta_z_ms": 1e3 * gain,
                    "aggregator": machine.aggregator.name.lower(),
                    "accepted_device": sum(fate[0] for fate in so_far),
                    "accepted_cloud": sum(fate[1] for fate in so_far),
                }
            )

    both.ask(question, rules, tokens=TOKENS, seed=seed, cloud=True, watch=watch)
    return rows


def plot_case(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the rows as figure 9 of the paper: one chart above the other, token by token."""
    figure, (link, gain, accepted) = subplots(3, 1, figsize=(7, 7), sharex=True)
    tokens = range(len(rows))
    link.plot(tokens, [row["rtt_ms"] for row in rows], marker="o")
    link.set_ylabel("round trip [ms]")
    gain.plot(tokens, [row["delta_z_ms"] for row in rows], marker="o")
    gain.axhline(0.0, color="grey", linewidth=0.8)
    gain.set_ylabel("Delta Z [ms]")
    for side, colour in (("device", "C0"), ("cloud", "C1")):
        counts = [row[f"accepted_{side}"] for row in rows]
        accepted.step(tokens, counts, colour, where="mid", label=f"drafts of the {side}")
        judged = [place for place in tokens if rows[place]["aggregator"] == side]
        accepted.plot(judged, [0] * len(judged), f"{colour}s", label=f"the {side} aggregates")
    accepted.set_ylabel("accepted so far")
    accepted.set_xlabel("token (link and passes EMULATED)")
    accepted.legend(fontsize=7)
    save_plot(figure, file)
