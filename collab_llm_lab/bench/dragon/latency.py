"""Time per token and to the first token by round trip (paper 001, figures 6 to 8).

Live: both sides with the real model, over gRPC and a link that delays, passes at a stated pace; the
baselines too (``baselines.py``). Predicted: the closed forms of ``closed_forms.py``,
with the measured costs.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collab_llm_lab.bench.dragon.baselines import (
    BASELINES,
    SEQUENCE,
    SEQUENCE_FULL,
    VOCABULARY,
    Written,
)
from collab_llm_lab.bench.dragon.case import run_case
from collab_llm_lab.bench.dragon.closed_forms import Costs, predict
from collab_llm_lab.bench.dragon.privacy import leaks
from collab_llm_lab.bench.dragon.replayed import point_name
from collab_llm_lab.bench.dragon.simulation import Delays, Trace, simulate_trace
from collab_llm_lab.bench.dragon.sites import Answered, Sites, sites
from collab_llm_lab.bench.harness import save_plot, subplots
from collab_llm_nodes.decoding.aggregation import AggregationConfig, Pair, Party
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.device import Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.machine import AheadConfig
from collab_llm_nodes.protocols.dragon.messages import Draft
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN
from collab_llm_nodes.protocols.dragon.scheduler import POLICIES, ScheduleConfig
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

DEVICE, DRAGON, TOKEN_WISE = "device", "dragon", "drdg_tw"
STATIC = ("dragon_device", "dragon_cloud")
MACHINES = (DRAGON, *STATIC, "dragon_follow", "dragon_delta_z", TOKEN_WISE)
"""Methods that DRAGON's machines carry out: all write the same answer."""
LIVE = (DEVICE, *MACHINES, *BASELINES)


@dataclass(frozen=True)
class LatencyPlan:
    """The settings of the measurement. Times are EMULATED: passes and link wait for them.

    Attributes:
        rtts_ms: round trips that the link adds; its jitter is a fifth of each.
        decode_ms: of a pass on device, on cloud, at least.
        questions, tokens: of each method at each round trip.
        prefill_ms: for the device to read one token of a document's text.
        mbit_s: of the link, each way.
        law: see ``AggregationConfig``.
    """

    rtts_ms: tuple[int, ...] = (0, 50, 100, 200, 300)
    decode_ms: Pair = (50.0, 50.0)
    questions: int = 4
    tokens: int = 20
    prefill_ms: float = 2.0
    mbit_s: float = 5.0
    law: str = "shared"
    top_p: float = 0.8
    seed: int = 0


def rules_of(method: str, plan: LatencyPlan) -> Rules:
    """Return the rules of a live method."""
    policy = {DRAGON: "auto", TOKEN_WISE: "device", DEVICE: "device"}.get(
        method, method.removeprefix("dragon_")
    )
    return Rules(
        AggregationConfig(law=plan.law, top_p=plan.top_p),
        ScheduleConfig(aggregate_on=policy),
        AheadConfig(1 if method == TOKEN_WISE else 0),
        patience=PatienceConfig(patience_s=120.0, silence_s=60.0),
    )


def run_latency(
    engine: Engine, config: SideConfig, plan: LatencyPlan, console: Console
) -> dict[str, Any]:
    """Measure and predict.

    Returns:
        ``settings``; ``latency.<rtt_ms>.<method>`` with ``ms_per_token`` (behind the first; of a
        sequence: all), ``ttft_ms``, ``ms_per_token_of_all``, ``predicted_ms`` per token,
        ``predicted_ttft_ms``, ``discarded_tokens``, ``handovers``, ``acceptance_device`` and
        ``acceptance_cloud`` (None: nothing was judged, or the cloud keeps its own to itself),
        ``bytes_up`` and ``bytes_down`` per token; ``mismatches``: answers of ``MACHINES`` that
        differ from one another; ``privacy.<policy>``: private runs of tokens that left the device
        in and outside the answer, with the aggregator pinned to the device and with policy auto;
        ``fates``: of both sides' drafts, token by token; ``case``, see ``run_case``.
    """
    latency: dict[str, dict[str, dict[str, float | None]]] = {}
    audited: dict[str, list[Answered]] = {DRAGON: [], STATIC[Party.DEVICE]: []}
    fates: list[tuple[bool, bool]] = []
    mismatches = 0
    with sites(engine, config, plan.seed) as (both, questions):
        for rtt_ms in plan.rtts_ms:
            both.set(
                (plan.decode_ms[0] / 1e3, plan.decode_ms[1] / 1e3),
                rtt_ms / 1e3,
                mbit_s=plan.mbit_s,
                prefill_s=plan.prefill_ms / 1e3,
            )
            with console.status(f"round trip {rtt_ms} ms ..."):
                answers, others = _answers(both, questions[: plan.questions], plan)
            written = [[a.told.tokens for a in answers[name]] for name in MACHINES]
            mismatches += sum(row != written[0] for row in written[1:])
            costs = _costs(both, engine, config, plan, rtt_ms / 1e3, answers)
            latency[str(rtt_ms)] = _rows(answers, costs) | _other_rows(others, costs)
            fates += [fate for answer in answers[DRAGON] for fate in answer.fates]
            for method, given in audited.items():
                given += answers[method]
        with console.status("figure 9 ..."):
            decode_s = (plan.decode_ms[0] / 1e3, plan.decode_ms[1] / 1e3)
            rules = rules_of("dragon_delta_z", plan)
            case = run_case(both, questions[0], rules, decode_s, seed=plan.seed)
        privacy = {method: _leaked(given, both, engine) for method, given in audited.items()}
    settings = {**asdict(plan), "decode_ms_device": plan.decode_ms[0]}
    settings |= {"decode_ms_cloud": plan.decode_ms[1], "emulated": True}
    return {
        "settings": settings,
        "latency": latency,
        "privacy": privacy,
        "mismatches": mismatches,
        "fates": fates,
        "case": case,
    }


def _leaked(answers: Sequence[Answered], both: Sites, engine: Engine) -> dict[str, float]:
    """Count private runs of tokens in all bytes that left the device, and these bytes per token."""

    def ids(text: str) -> list[int]:
        found: list[int] = engine.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    documents = [ids(text) for text in both.private]
    outside = inside = 0
    for answer in answers:
        messages = [codec.decode_device(data) for data in answer.sent]
        drafts = [(m.position, m.draft.token) for m in messages if isinstance(m, Draft)]
        # Frames may cut a message in two: so it is searched as a whole, too.
        left = (answer.wire, *answer.sent)
        found = leaks(
            left, documents, ids(answer.question), answer.told.tokens, engine.decode, drafts
        )
        outside += found.outside_answer
        inside += found.in_answer
    tokens = sum(len(answer.told.tokens) for answer in answers)
    return {
        "private_ngrams_outside_answer": outside,
        "private_ngrams_in_answer": inside,
        "bytes_up_per_token": sum(len(answer.wire) for answer in answers) / tokens,
    }


def _answers(
    both: Sites, questions: Sequence[str], plan: LatencyPlan
) -> tuple[dict[str, list[Answered]], dict[str, list[Written]]]:
    """Return the answers of the machines and of the baselines; the methods take turns."""
    found: dict[str, list[Answered]] = {method: [] for method in (DEVICE, *MACHINES)}
    others: dict[str, list[Written]] = {method: [] for method in BASELINES}
    for number, question in enumerate(questions):
        seed = plan.seed + number
        for method, given in found.items():
            rules = rules_of(method, plan)
            given.append(
                both.ask(question, rules, tokens=plan.tokens, seed=seed, cloud=method != DEVICE)
            )
        law = rules_of(DRAGON, plan).aggregation
        for method, written in others.items():
            written.append(both.baselines.ask(method, question, law, tokens=plan.tokens, seed=seed))
    return found, others


def _costs(
    both: Sites,
    engine: Engine,
    config: SideConfig,
    plan: LatencyPlan,
    rtt_s: float,
    answers: Mapping[str, Sequence[Answered]],
) -> Costs:
    """Return what was measured, for the closed forms."""
    model = engine.loaded.model.config
    heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    size = engine.loaded.model.dtype.itemsize
    pinned = [answer.told.metrics for answer in answers["dragon_device"]]
    tokens = sum(metrics.tokens for metrics in pinned)
    decode_s = (both.device.pass_s, both.cloud.pass_s)
    begun = [statistics.median(side.begun_s) for side in (both.device, both.cloud)]
    return Costs(
        decode_s=decode_s,
        context_decode_s=decode_s[0],
        retrieve_s=(0.0, 0.0),
        read_s=(begun[0], begun[1]),
        prefill_s=plan.prefill_ms / 1e3,
        rtt_s=rtt_s,
        bytes_per_s=plan.mbit_s * 1e6 / 8,
        documents=config.retrieval.chunks,
        document_tokens=both.document_tokens,
        text_bytes=4.0,
        kv_bytes=2.0 * model.num_hidden_layers * heads * width * size,
        draft_bytes=sum(metrics.bytes_down for metrics in pinned) / max(1, tokens),
        acceptance=_acceptance(answers["dragon_device"]),
        tokens=plan.tokens,
    )


def _acceptance(answers: Sequence[Answered]) -> Pair:
    fates = [fate for answer in answers for fate in answer.fates]
    count = max(1, len(fates))
    return sum(fate[0] for fate in fates) / count, sum(fate[1] for fate in fates) / count


def _rows(
    answers: Mapping[str, Sequence[Answered]], costs: Costs
) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for method, given in answers.items():
        measured = [answer.told.metrics for answer in given]
        tokens = sum(metrics.tokens for metrics in measured)
        behind = [
            (m.total_s - m.time_to_first_token_s) / (m.tokens - 1) for m in measured if m.tokens > 1
        ]
        acceptance: tuple[float | None, float | None] = (None, None)
        if method != DEVICE:
            acceptance = _acceptance(given)
        if method == STATIC[Party.CLOUD]:
            acceptance = acceptance[0], None
        rows[method] = {
            "ms_per_token": 1e3 * statistics.fmean(behind) if behind else 0.0,
            "ttft_ms": 1e3 * statistics.fmean(m.time_to_first_token_s for m in measured),
            "ms_per_token_of_all": 1e3 * sum(m.total_s for m in measured) / tokens,
            "discarded_tokens": sum(m.discarded for m in measured),
            "handovers": sum(m.handovers for m in measured),
            "acceptance_device": acceptance[0],
            "acceptance_cloud": acceptance[1],
            "bytes_up": sum(m.bytes_up for m in measured) / tokens,
            "bytes_down": sum(m.bytes_down for m in measured) / tokens,
            **_predicted(method, costs),
        }
    return rows


def _other_rows(
    answers: Mapping[str, Sequence[Written]], costs: Costs
) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for method, given in answers.items():
        tokens = sum(len(written.tokens) for written in given)
        per_token = [
            # A sequence comes as a whole: its time is that of all its tokens.
            written.total_s / len(written.tokens)
            if method in (SEQUENCE, SEQUENCE_FULL)
            else (written.total_s - written.first_s) / max(1, len(written.tokens) - 1)
            for written in given
        ]
        rows[method] = {
            "ms_per_token": 1e3 * statistics.fmean(per_token),
            "ttft_ms": 1e3 * statistics.fmean(written.first_s for written in given),
            "ms_per_token_of_all": 1e3 * sum(written.total_s for written in given) / tokens,
            "discarded_tokens": None,
            "handovers": None,
            "acceptance_device": None,
            "acceptance_cloud": None,
            "bytes_up": sum(written.bytes_up for written in given) / tokens,
            "bytes_down": sum(written.bytes_down for written in given) / tokens,
            **_predicted(method, costs),
        }
    return rows


def _predicted(method: str, costs: Costs) -> dict[str, float]:
    """Return the closed forms' times; policies of DRAGON have that of a static device."""
    name = method.removesuffix("_compact").removesuffix("_full")
    if name.startswith(DRAGON):
        name = DRAGON
    if method.endswith("_full"):  # a whole vector of fp16 numbers for each token
        costs = _with_vectors(costs)
    prediction = predict(name, costs)
    per_token = prediction.per_token_s
    if name == "drdg_sw":
        per_token = prediction.mean_s(costs.tokens)
    return {"predicted_ms": 1e3 * per_token, "predicted_ttft_ms": 1e3 * prediction.first_s}


def _with_vectors(costs: Costs) -> Costs:
    return replace(costs, draft_bytes=costs.draft_bytes + 2.0 * VOCABULARY)


# ------------------------------------------------------- the scheduler in virtual time


def run_scheduler(
    fates: Trace, points: Sequence[tuple[Pair, float]], *, answers: int = 50, tokens: int = 100
) -> dict[str, dict[str, float]]:
    """Replay recorded fates in virtual time, for each policy at each point (figure 8).

    Args:
        fates: of both sides' drafts, as recorded; each answer is a window of it.
        points: pass times of device and cloud, and the added round trip [s].

    Returns:
        ``<point>`` with ``<policy>_ms`` per token, ``virtual_ms`` (policy auto) and
        ``best_static_ms``.
    """
    found = {}
    windows = windows_of(fates, answers, tokens)
    for decode_s, rtt_s in points:
        delays = Delays.sinusoidal(decode_s, rtt_s)
        row = {}
        for policy in POLICIES:
            times, acceptance = list[float](), UNKNOWN
            for number, window in enumerate(windows):
                schedule = ScheduleConfig(aggregate_on=policy, seed=number)
                run = simulate_trace(window, delays, schedule, acceptance=acceptance)
                times.append(run.total_s)
                acceptance = run.acceptance  # the device remembers it
            row[f"{policy}_ms"] = 1e3 * statistics.fmean(times) / tokens
        row["virtual_ms"] = row["auto_ms"]
        row["best_static_ms"] = min(row["device_ms"], row["cloud_ms"])
        found[point_name(decode_s, rtt_s)] = row
    return found


def windows_of(fates: Trace, count: int, tokens: int) -> list[Trace]:
    """Return ``count`` windows of ``tokens`` fates, which begin anywhere."""
    chance = random.Random(0)
    firsts = [chance.randrange(len(fates)) for _ in range(count)]
    return [[fates[(first + i) % len(fates)] for i in range(tokens)] for first in firsts]


# ------------------------------------------------------- for people


def show_latency(results: Mapping[str, Any], console: Console) -> None:
    """Print milliseconds per token by method and round trip, measured and predicted."""
    latency = results["latency"]
    plan = results["settings"]
    table = Table(
        title=f"ms per token (predicted); passes of {plan['decode_ms_device']:g} and"
        f" {plan['decode_ms_cloud']:g} ms, EMULATED",
    )
    table.add_column("method", no_wrap=True)
    for rtt_ms in latency:
        table.add_column(f"{rtt_ms} ms", justify="right")
    for method in LIVE:
        figures = [row[method] for row in latency.values()]
        cells = [f"{row['ms_per_token']:.0f} ({row['predicted_ms']:.0f})" for row in figures]
        table.add_row(method, *cells)
    console.print(table)


def plot_latency(results: Mapping[str, Any], file: Path) -> None:
    """Draw time per token and to the first token over the round trip."""
    latency = results["latency"]
    rtts = [int(rtt) for rtt in latency]
    figure, (tokens, first) = subplots(1, 2, figsize=(11, 4.2))
    for number, method in enumerate(LIVE):
        rows = [row[method] for row in latency.values()]
        tokens.plot(rtts, [r["ms_per_token"] for r in rows], f"C{number}", label=method)
        first.plot(rtts, [r["ttft_ms"] for r in rows], f"C{number}", label=method)
    for axis, title in ((tokens, "ms per token"), (first, "ms to the first token")):
        axis.set_xlabel("added round trip [ms], EMULATED")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    tokens.legend(fontsize=7)
    save_plot(figure, file)
