"""The measurements: methods of decoding take turns on the same prompts."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch

from collab_llm_lab.bench.collective import Sizes
from collab_llm_lab.bench.collective.emulation import paced
from collab_llm_lab.bench.collective.material import (
    DRAFTS,
    MIXED,
    STREAMS,
    Family,
    TargetAnswers,
)
from collab_llm_lab.bench.collective.methods import (
    IN_FLIGHT,
    Collective,
    Method,
    Run,
    S,
    Transformers,
    Tree,
)
from collab_llm_lab.bench.collective.watch import PARTS, Span
from collab_llm_lab.training.text.evaluate import accepted_in_rounds
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_nodes.decoding.weights import VOTED as VOTED_WEIGHTS
from collab_llm_nodes.decoding.weights import WeightsConfig
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.collective.length import FIXED, PRINTED, LengthConfig
from collab_llm_nodes.protocols.collective.messages import Ids

VOTED, ADAPTIVE, PRINTED_RULE = "vote", "adaptive", "printed"
GENERALIST = "generalist"
PIPELINE = "pipeline"
LADDER = ("default", "majority", "selector", PIPELINE)
"""Steps of the paper's ladder."""
ASSISTED = "assisted"
GENERATE, ON_ALL_CORES = "generate", "generate_all_cores"
PEERS = (GENERATE, ON_ALL_CORES, ASSISTED)
"""Ways of transformers. Their answers are compared too, but are no mismatches of ours."""
SHOWN_S = 0.5
"""Part of a run that the time line shows (paper 002, Figure 3)."""

PART_TOKENS = 128
"""Tokens for each place of a batch in one turn of an endless method: seconds at most.

The machine is now faster, now slower, so turns are to be many and short; but not much shorter than
the windows of eight verifications that the adaptive rule compares.
"""
RIVALS_TURNS = 8
"""Turns of the best fixed length and the rules that count, for each turn of all lengths."""
_TWINS = ("one", "other")
"""Names of the two instances of a rival; the printed rule has only the first."""

_TOLD = 10
"""Lines of progress of one measurement, beside the first."""

_CORES = len(os.sched_getaffinity(0))

POINTS = 200
"""Points of a curve over time."""

Point = TypeVar("Point")
Prompts = Mapping[str, Sequence[Ids]]
Make = Callable[[], Method]
Runs = dict[str, list[Run]]


@dataclass
class Bench:
    """Everything that the measurements share.

    Attributes:
        prompts: of each stream; a run takes the first ones.
        mismatches: answers of ours that differ from the target's, near ties left out.
        near_ties: answers of ours that differ only where two tokens are as likely but for rounding.
        peer_differences: answers of batched or assisted generate that differ, near ties included.
        best_draft, worst_draft: index of the draft with the highest, lowest acceptance, by stream.
    """

    family: Family
    prompts: Prompts
    right: TargetAnswers
    sizes: Sizes
    report: Callable[[str], None]
    mismatches: int = 0
    near_ties: int = 0
    peer_differences: int = 0
    best_draft: dict[str, int] = field(default_factory=dict)
    worst_draft: dict[str, int] = field(default_factory=dict)

    def in_turn(
        self,
        title: str,
        stream: str,
        batch: int,
        methods: Mapping[str, Make],
        repeats: int,
        *,
        half: bool = True,
        endless: bool = False,
    ) -> Runs:
        """Return the runs of methods that answer the same prompts in turn.

        The first turn warms up: it is not measured, and takes no more prompts than are in flight.
        Assisted generation answers one prompt after the other, so its speed is not the batch's: it
        takes as many as at a batch of 1. Every other turn goes backwards: which method came before
        should not matter.

        Args:
            half: half of the prompts.
            endless: the methods are endless. A turn is over when they say so, the first as well.
        """
        prompts = self.prompts[stream][: self.sizes.count(batch, half=half)]
        runs: Runs = {name: [] for name in methods}
        with ExitStack() as stack:
            made = {name: stack.enter_context(closing(make())) for name, make in methods.items()}
            for turn in range(repeats + 1):
                for name, method in reversed(made.items()) if turn % 2 else made.items():
                    places = 1 if name == ASSISTED else batch
                    whole = turn or endless
                    most = self.sizes.count(places, half=half) if whole else IN_FLIGHT * places
                    run = method.run(prompts[:most])
                    self._compare(name, run)
                    if turn:
                        runs[name].append(run)
                if turn * _TOLD // repeats > (turn - 1) * _TOLD // repeats:
                    self.report(f"{title}, {stream}, batch {batch}: {turn} of {repeats} turns")
        return runs

    def collective(self, batch: int, drafts: Sequence[int] | None = None, **options: Any) -> Make:
        """Return what makes collective speculation with all drafts, or those named."""
        used = range(len(self.family.drafts)) if drafts is None else drafts
        return lambda: Collective(self.family, list(used), batch, self.sizes.max_tokens, **options)

    def generalist(self, batch: int) -> Make:
        """Return what makes speculation with the generalist as the only draft model."""
        alone = self.family.with_generalist()
        return lambda: Collective(alone, [0], batch, self.sizes.max_tokens)

    def _compare(self, name: str, run: Run) -> None:
        for prompt, answer in zip(run.prompts, run.answers, strict=True):
            if answer == self.right.of(prompt):
                continue
            if name in PEERS:
                self.peer_differences += 1
            elif self.right.is_near_tie(prompt, answer):
                self.near_ties += 1
            else:
                self.mismatches += 1


def fixed(s: int) -> LengthConfig:
    """Return the setting that keeps the speculation length ``s``."""
    return LengthConfig(FIXED, initial=s)


# ---------------------------------------------------------------- drafts


def choose_drafts(bench: Bench) -> None:
    """Set the best and the worst draft of each stream, by acceptance at the default length."""
    for stream in STREAMS:
        single = [_acceptance(rounds, S) for rounds in _matches(bench, stream)]
        bench.best_draft[stream] = single.index(max(single))
        bench.worst_draft[stream] = single.index(min(single))


def answer_tokens(bench: Bench) -> dict[str, float]:
    """Return the mean length of the target's answers to the first prompts of each stream."""
    first = slice(bench.sizes.count(1))
    return {
        stream: statistics.fmean(len(bench.right.of(prompt)) for prompt in prompts[first])
        for stream, prompts in bench.prompts.items()
    }


def by_length(bench: Bench) -> dict[str, Any]:
    """Return each draft's acceptance by stream and speculation length (paper 002, Figure 1)."""
    lengths = [s for s in bench.sizes.lengths if s]
    return {
        sub_domain: {
            name: {str(s): _acceptance(rounds, s) for s in lengths}
            for name, rounds in zip(DRAFTS, _matches(bench, sub_domain), strict=True)
        }
        for sub_domain in SUB_DOMAINS
    }


@torch.inference_mode()
def _matches(bench: Bench, stream: str) -> list[list[list[bool]]]:
    """Return for each draft whether it predicts each token of each of the target's answers.

    One pass over an answer gives the draft's token at every place of it.
    """
    found = []
    for engine in bench.family.drafts:
        matches = []
        for prompt in bench.prompts[stream][: bench.sizes.count(1)]:
            answer = bench.right.of(prompt)
            session = engine.open(EncodedPrompt(prompt))
            logits = session.feed((*prompt, *answer[:-1]), last=len(answer))
            session.close()
            said = logits.argmax(dim=-1).tolist()
            matches.append([a == b for a, b in zip(said, answer, strict=True)])
        found.append(matches)
    return found


def _acceptance(matches: Sequence[Sequence[bool]], s: int) -> float:
    return _share(accepted_in_rounds(row, s) for row in matches)


def _share(counts: Any) -> float:
    accepted, drafted = (sum(column) for column in zip(*counts, strict=True))
    return accepted / max(1, drafted)


def drafts(bench: Bench, batch: int) -> dict[str, Any]:
    """Return acceptance and throughput of each draft alone and of the vote (Figure 11)."""
    found: dict[str, Any] = {}
    methods = {name: bench.collective(batch, [i]) for i, name in enumerate(DRAFTS)}
    methods[GENERALIST] = bench.generalist(batch)
    methods[VOTED] = bench.collective(batch)
    for stream in STREAMS:
        runs = bench.in_turn("drafts", stream, batch, methods, bench.sizes.repeats)
        found[stream] = {name: _accepted_and_speed(own) for name, own in runs.items()}
    return found


def variants(bench: Bench, batch: int) -> dict[str, Any]:
    """Return acceptance and throughput of other methods to vote, and to overlap the models' work.

    Each differs in one thing from ``whole_drafts``: the vote on whole drafts, weights per request,
    all in sequence. Two more differ from ``processes``: b_SSM is half, and twice, b_LLM.
    """
    methods = {
        "whole_drafts": bench.collective(batch),
        "all_draft": bench.collective(batch, ask_all_every=1),
        "every_token": bench.collective(batch, vote_every_token=True),
        "voted_weights": bench.collective(batch, weights=WeightsConfig(VOTED_WEIGHTS)),
        "threads": bench.collective(batch, pipelined=True, in_threads=True),
        "processes": bench.collective(batch, pipelined=True),
        "half_draft_batch": bench.collective(batch, pipelined=True, draft_batch=-(-batch // 2)),
        "double_draft_batch": bench.collective(batch, pipelined=True, draft_batch=2 * batch),
    }
    runs = bench.in_turn("variants", MIXED, batch, methods, bench.sizes.repeats)
    return {name: _accepted_and_speed(own) for name, own in runs.items()}


def _accepted_and_speed(runs: Sequence[Run]) -> dict[str, float]:
    return {
        "acceptance": statistics.median(run.acceptance for run in runs),
        "tokens_per_s": tokens_per_s(runs),
    }


# ---------------------------------------------------------------- the ladder


def ladder(bench: Bench, stream: str, batch: int, repeats: int) -> Runs:
    """Run each step of the paper's ladder, and the methods beside it (Figures 8 to 10 and 13)."""
    family, best = bench.family, bench.best_draft[stream]
    tokens = bench.sizes.max_tokens
    methods = {
        **_steps(bench, family, best, batch),
        "default_worst": bench.collective(batch, [bench.worst_draft[stream]]),
        GENERALIST: bench.generalist(batch),
        GENERATE: lambda: Transformers(family, batch, tokens),
        ON_ALL_CORES: lambda: Transformers(family, batch, tokens, threads=_CORES),
        ASSISTED: lambda: Transformers(family, batch, tokens, family.peer_drafts[best]),
    }
    return bench.in_turn("ladder", stream, batch, methods, repeats, half=stream != MIXED)


def emulated(bench: Bench, batch: int) -> Runs:
    """Climb the ladder with models whose passes take the time of large ones: EMULATION.

    All draft models draft at the same time, each in a thread: passes that wait do not hold the
    interpreter.
    """
    family, best = paced(bench.family), bench.best_draft[MIXED]
    return bench.in_turn(
        "emulated", MIXED, batch, _steps(bench, family, best, batch, in_threads=True), 1
    )


def _steps(
    bench: Bench, family: Family, best: int, batch: int, *, in_threads: bool = False
) -> dict[str, Make]:
    """Return the steps of the ladder, the target alone, and trees."""
    tokens = bench.sizes.max_tokens

    def ours(drafts: Sequence[int], **options: Any) -> Make:
        return lambda: Collective(family, drafts, batch, tokens, in_threads=in_threads, **options)

    every = range(len(family.drafts))
    return {
        "default": ours([best]),
        "majority": ours(every),
        "selector": ours(every, length=LengthConfig()),
        PIPELINE: ours(every, length=LengthConfig(), pipelined=True),
        "autoregressive": ours([], length=fixed(0)),
        "tree": lambda: Tree(family, batch, tokens),
    }


def figures(runs: Runs) -> dict[str, dict[str, float]]:
    """Return throughput and normalised latency of each method."""
    return {
        name: {
            "tokens_per_s": tokens_per_s(own),
            "normalised_latency_ms": statistics.median(run.normalised_latency_ms for run in own),
        }
        for name, own in runs.items()
    }


def overhead(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return what vote, monitor and weights take, per verification and of the time (Figure 14)."""
    verifications = sum(run.verifications for run in runs)
    seconds = sum(run.seconds for run in runs)
    spent = {part: sum(run.overhead_s[part] for run in runs) for part in PARTS}
    return {
        part: {"us_per_verification": 1e6 * own / verifications, "share": own / seconds}
        for part, own in spent.items()
    }


def tokens_per_s(runs: Sequence[Run]) -> float:
    """Return the median throughput."""
    return statistics.median(run.tokens_per_s for run in runs)


# ---------------------------------------------------------------- length


def lengths(bench: Bench, batch: int) -> dict[str, Any]:
    """Compare fixed speculation lengths with both adaptive rules (Figures 2 and 12).

    The best fixed length is chosen by half of the turns and scored on others: else chance would
    favour the length that it chose. Those others have that length and the rules alone, and are
    ``RIVALS_TURNS`` times as many. All of them count together: a rule tries other lengths in few
    of them, which a median would leave out. Half as many turns before them are for the rules to
    learn in: ``learning`` has their throughput. The best fixed length and our rule run as two
    instances each, whose difference shows how sure the figures are: ``twins`` has both.

    These turns have half of a run's tokens. The methods take turns after each part of them, of
    ``PART_TOKENS``; requests go on from part to part.
    """

    tokens = bench.sizes.count(batch, half=True) * bench.sizes.max_tokens
    part = min(tokens, PART_TOKENS * batch)
    parts = -(-tokens // part)

    def make(length: LengthConfig, seed: int = 0) -> Make:
        return bench.collective(batch, length=length, endless=part, seed=seed)

    methods = {str(s): make(fixed(s)) for s in bench.sizes.lengths}
    scoring = parts * (bench.sizes.repeats // 2)
    choosing = 2 * (parts * bench.sizes.repeats - scoring)
    by_s = bench.in_turn("lengths", MIXED, batch, methods, choosing, half=False, endless=True)
    best = max(by_s, key=lambda s: _speed(by_s[s]))
    rivals = {
        best: fixed(int(best)),
        ADAPTIVE: LengthConfig(),
        PRINTED_RULE: LengthConfig(PRINTED),
    }
    both = {
        f"{name} {twin}": make(length, seed)
        for seed, twin in enumerate(_TWINS)
        for name, length in rivals.items()
        if seed == 0 or name != PRINTED_RULE
    }
    turns = RIVALS_TURNS * scoring
    learns = turns // 2
    runs = bench.in_turn(
        "adaptive lengths", MIXED, batch, both, learns + turns, half=False, endless=True
    )
    twins = {name: [own for key, own in runs.items() if key.split()[0] == name] for name in rivals}
    learning = {name: _speed(*(own[:learns] for own in each)) for name, each in twins.items()}
    counted = {name: [own[learns:] for own in each] for name, each in twins.items()}
    scored = {name: _speed(*each) for name, each in counted.items()}
    return {
        "best_fixed_s": int(best),
        "best_fixed_tokens_per_s": scored[best],
        "adaptive_tokens_per_s": scored[ADAPTIVE],
        "printed_tokens_per_s": scored[PRINTED_RULE],
        "regret": 1.0 - scored[ADAPTIVE] / scored[best],
        "printed_regret": 1.0 - scored[PRINTED_RULE] / scored[best],
        "learning": learning,
        "twins": {name: [*map(_speed, each)] for name, each in counted.items()},
        "by_length": {
            s: {
                "tokens_per_s": _speed(own),
                "llm_ms_per_token": 1e3 * sum(r.llm_s for r in own) / sum(r.tokens for r in own),
            }
            for s, own in by_s.items()
        },
    }


def _speed(*instances: Sequence[Run]) -> float:
    """Return the throughput of all runs of these instances together [tokens/s]."""
    runs = [*chain(*instances)]
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


# ---------------------------------------------------------------- the pipeline


def time_lines(bench: Bench, batch: int) -> dict[str, Any]:
    """Return when drafting and verification were under way, in sequence and pipelined (Figure 3).

    Times are in ms from the middle of a run.
    """
    found = {}
    prompts = bench.prompts[MIXED][: bench.sizes.count(batch, half=True)]
    for name, pipelined in (("in_sequence", False), ("pipelined", True)):
        method = Collective(
            bench.family, range(len(DRAFTS)), batch, bench.sizes.max_tokens, pipelined=pipelined
        )
        with closing(method):
            method.run(prompts)
            machine = method.machine
            begin = machine.verifying[len(machine.verifying) // 2][0]
            found[name] = {
                "drafting": _part(machine.drafting, begin),
                "verifying": _part(machine.verifying, begin),
            }
    return found


def _part(spans: Sequence[Span], begin: float) -> list[tuple[float, float]]:
    return [
        (1e3 * (a - begin), 1e3 * (b - begin)) for a, b in spans if begin <= a < begin + SHOWN_S
    ]


def pool(bench: Bench, batch: int) -> dict[str, Any]:
    """Return how pool and KV caches grow with and without control (Figure 7).

    All requests come at once and may be active; without control, drafting never pauses. The target
    waits for drafts, as in the paper: else it takes in all requests by itself.
    """
    prompts = bench.prompts[MIXED][: bench.sizes.count(batch)]
    found = {}
    for name, high in (("controlled", 0), ("uncontrolled", len(prompts) + 1)):
        method = Collective(
            bench.family,
            range(len(DRAFTS)),
            batch,
            bench.sizes.max_tokens,
            length=LengthConfig(),
            pipelined=True,
            in_flight=len(prompts),
            pool_high=high,
            fill_waits=False,
        )
        with closing(method):
            method.run(prompts)
            noted, held = _some(method.machine.pool), _some(method.target.held)
            drafts_held = _some(method.drafts_held)
            begin = noted[0][0]
            found[name] = {
                "drafts_waiting": [(t - begin, n) for t, n, _ in noted],
                "requests_active": [(t - begin, n) for t, _, n in noted],
                "kv_bytes": [(t - begin, n) for t, n in held],
                "drafts_kv_bytes": [(t - begin, n) for t, n in drafts_held],
                "peak_drafts_waiting": method.machine.pool_peak,
                "peak_requests_active": max(n for *_, n in method.machine.pool),
                "peak_kv_bytes": max(n for _, n in method.target.held),
                "peak_drafts_kv_bytes": max(n for _, n in method.drafts_held),
            }
    return found


def _some(points: Sequence[Point]) -> Sequence[Point]:
    """Return about ``POINTS`` of ``points``, evenly taken."""
    return points[:: -(-len(points) // POINTS)]
