"""``collab-llm bench pipeline``: the embedded pair over real gRPC, predicted beside measured.

Modes: the cloud model alone (``ar``: one token per round), plain edge-cloud speculation (``sd``),
and early exits with the pre-draft cache (``fsd``). Two operating points: the verifier as fast as it
is, and one padded to the time of a large model (emulated, and labelled so).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collab_llm_nodes.bench.scenes import scene_prompts
from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.decoding.lossless import transformers_generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.demo.processes import free_port, verifier_process, wait_for_verifier
from collab_llm_nodes.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.edge_cloud.client import DraftJob
from collab_llm_nodes.edge_cloud.drafter import Drafter
from collab_llm_nodes.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.verifier.client import ClientLinkConfig, VerifierClient

MAX_TOKENS = 48
POINTS = {"as_is": 0.0, "emulated_large_target": 0.1}
"""Seconds that a verification takes at least."""
GAMMA = 4
MODES = {"ar": (0, 0), "sd": (GAMMA, 0), "fsd": (GAMMA, 6)}
"""gamma, max_predrafts."""


def run_pipeline(*, answers: int, seed: int, plot: Path | None, console: Console) -> dict[str, Any]:
    """Decode ``answers`` answers per mode and point.

    Returns:
        ``points.<point>.<mode>`` with ``ms_per_token``, ``predicted_ms_per_token``, ``tau``,
        ``hit_rate``, ``mean_exit_layer``, ``rounds``, ``bytes``; and
        ``transformers_ms_per_token``, the target alone in this process.
    """
    prompts = scene_prompts(answers, seed)
    draft = Engine(load(ModelConfig(path="nav-draft")))
    results: dict[str, Any] = {"points": {}, "answers": answers, "gamma": GAMMA}
    results["transformers_ms_per_token"] = _transformers(prompts)
    gamma_t_p = _draft_s(draft, prompts, GAMMA)
    results["gamma_t_p_ms"] = 1e3 * gamma_t_p
    for point, compute_s in POINTS.items():
        with _verifier(compute_s) as client:
            link_s = _link_s(client)
            measured = {}
            for mode, (gamma, predrafts) in MODES.items():
                with console.status(f"{point}: {mode} ..."):
                    runner = RemoteRunner(
                        draft,
                        client,
                        gamma=gamma,
                        predraft=PreDraftConfig(predrafts),
                        ahead=AheadConfig(predictions=0, push_window=0),
                    )
                    measured[mode] = _measure(runner, prompts)
            results["points"][point] = {
                mode: _row(mode, sums, gamma_t_p, link_s) for mode, sums in measured.items()
            }
    _print(results, console)
    if plot is not None:
        _plot(results, plot)
    return results


@dataclass
class Measured:
    """Sums over answers. Rates are of the rounds after the first, which also opens the session."""

    total: GenerationMetrics = field(default_factory=GenerationMetrics)
    later_s: float = 0.0
    later_tokens: int = 0

    def add(self, metrics: GenerationMetrics, first_tokens: int) -> None:
        """One answer, whose first round gave ``first_tokens`` tokens."""
        self.total.add(metrics)
        self.later_s += metrics.total_s - metrics.time_to_first_token_s
        self.later_tokens += metrics.tokens - first_tokens


def predicted(mode: str, total: GenerationMetrics, gamma_t_p: float, t_c: float) -> float:
    """Seconds per token after paper 003, Table 4, from measured T_p, T_q, T_c, tau and r.

    ``ar`` is this protocol's: one round trip per token (the paper streams: n T_q + 2 T_c).
    """
    t_q = total.verify_s / total.rounds
    drafting = {"ar": 0.0, "sd": gamma_t_p, "fsd": (1.0 - total.hit_rate) * gamma_t_p}[mode]
    return (2 * t_c + drafting + t_q) / total.tau


def _verifier(compute_s: float) -> contextlib.AbstractContextManager[VerifierClient]:
    @contextlib.contextmanager
    def serve() -> Any:
        address = f"127.0.0.1:{free_port()}"
        with (
            verifier_process(address, compute_s=compute_s) as process,
            VerifierClient(ClientLinkConfig(address=address)) as client,
        ):
            wait_for_verifier(client, process)
            yield client

    return serve()


def _link_s(client: VerifierClient) -> float:
    """One way, from the time an empty question takes there and back."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        client.describe(5.0)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 2


def _draft_s(draft: Engine, prompts: Sequence[Prompt], gamma: int) -> float:
    """Time to draft ``gamma`` tokens once the prompt is in the cache (gamma T_p)."""
    times = []
    for prompt in prompts:
        drafter = Drafter(draft, encode(prompt, draft.loaded), SamplingConfig())
        first = drafter.draft(DraftJob(0, (), gamma))
        assert first is not None
        started = time.perf_counter()
        drafter.draft(DraftJob(1, first.tokens, gamma))
        times.append(time.perf_counter() - started)
        drafter.close()
    return statistics.median(times)


def _measure(runner: RemoteRunner, prompts: Sequence[Prompt]) -> Measured:
    runner.generate(prompts[0], max_tokens=MAX_TOKENS)  # warm up
    measured = Measured()
    for prompt in prompts:
        rounds: list[tuple[int, ...]] = []
        answer = runner.generate(prompt, max_tokens=MAX_TOKENS, on_tokens=rounds.append)
        measured.add(answer.metrics, len(rounds[0]))
    return measured


def _row(mode: str, measured: Measured, gamma_t_p: float, t_c: float) -> dict[str, float]:
    total = measured.total
    return {
        "ms_per_token": 1e3 * measured.later_s / measured.later_tokens,
        "predicted_ms_per_token": 1e3 * predicted(mode, total, gamma_t_p, t_c),
        "tau": total.tau,
        "hit_rate": total.hit_rate,
        "mean_exit_layer": total.mean_exit_layer,
        "rounds": total.rounds,
        "bytes": total.bytes_up + total.bytes_down,
    }


def _transformers(prompts: Sequence[Prompt]) -> float:
    """Milliseconds per token of transformers' generate with the target in this process."""
    target = Engine(load(ModelConfig(path="nav-target")))
    tokens, started = 0, time.perf_counter()
    for prompt in prompts:
        encoded = encode(prompt, target.loaded)
        made, _ = transformers_generate(
            target.loaded, encoded, SamplingConfig(), MAX_TOKENS, target.eos
        )
        tokens += len(made)
    return 1e3 * (time.perf_counter() - started) / tokens


def _print(results: dict[str, Any], console: Console) -> None:
    table = Table(title="milliseconds per token, embedded pair over gRPC on this machine")
    for column in ("point", "mode", "measured", "predicted", "tau", "hits", "rounds", "bytes"):
        table.add_column(column, justify="left" if column in ("point", "mode") else "right")
    for point, modes in results["points"].items():
        for mode, row in modes.items():
            table.add_row(
                point,
                mode,
                f"{row['ms_per_token']:.1f}",
                f"{row['predicted_ms_per_token']:.1f}",
                f"{row['tau']:.2f}",
                f"{row['hit_rate']:.0%}",
                str(row["rounds"]),
                str(row["bytes"]),
            )
    console.print(table)


def _plot(results: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results["points"]), figsize=(9, 3.5))
    for axis, (point, modes) in zip(axes, results["points"].items(), strict=True):
        places = range(len(modes))
        axis.bar(
            [x - 0.2 for x in places],
            [m["ms_per_token"] for m in modes.values()],
            0.4,
            label="measured",
        )
        axis.bar(
            [x + 0.2 for x in places],
            [m["predicted_ms_per_token"] for m in modes.values()],
            0.4,
            label="predicted (paper 003, Table 4)",
        )
        axis.set_xticks(list(places), list(modes))
        axis.set_title(point.replace("_", " "))
        axis.set_ylabel("ms per token")
    axes[0].legend()
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
