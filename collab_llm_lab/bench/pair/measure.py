"""Figures of pairs: what early exits, a draft and Medusa heads guess of their target's answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor

from collab_llm_lab.bench.pair.plots import plot_pairs
from collab_llm_lab.training.pair.collecting import LIMITS
from collab_llm_lab.training.pair.data import Data, Sample, Target, read_data
from collab_llm_lab.training.pair.reports import REPORT
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.errors import InvalidInput, translate_errors
from collab_llm_nodes.models.adapters import NAME
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import ModelConfig, load, with_exits
from collab_llm_nodes.models.prompt import encode
from collab_llm_nodes.models.trained import holds_trained
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics

_EXIT_REPORT = ("chosen", "foreseen", "round_ms", "round_ms_without_exits")
"""Keys of the report of ``train exits`` that are taken, beside the figures of candidates."""
FORM = Guide(
    "json",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "answer": {"type": "string", "maxLength": 240},
                "sure": {"enum": ["yes", "no"]},
            },
            "required": ["answer", "sure"],
            "additionalProperties": False,
        }
    ),
)
"""The form of guided answers: free text in an object, as a robot's program would ask for."""


@dataclass(frozen=True)
class Pair:
    """A pair's folder, and how its target is loaded."""

    folder: Path
    target: ModelConfig
    data: Data
    answers: int
    """Held-out answers that are looked at, at most."""

    @property
    def held_out(self) -> list[Sample]:
        """Samples that nothing was trained on."""
        return self.data.parts()[1][: self.answers]


def run_pairs(
    folders: Sequence[Path],
    *,
    answers: int,
    load_as: Callable[[str], ModelConfig],
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure pairs; return ``pairs``, by the names of their folders.

    Args:
        load_as: returns how to load the target of this path.
        plot: is written, if given.

    Raises:
        InvalidInput: a folder holds no answers, or nothing that was trained on them.
        ModelError: the target of the answers is not where it was, or is another one.
    """
    pairs: dict[str, Any] = {}
    for folder in folders:
        data = read_data(folder / "data")
        pair = Pair(folder, load_as(data.facts.target.path), data, answers)
        found = {key: value for measure in _FIGURES for key, value in measure(pair).items()}
        if not found:
            raise InvalidInput(
                f"{folder} holds nothing that was trained",
                field="FOLDER",
                remedy="train exits, a draft or heads on its data",
            )
        pairs[folder.resolve().name] = found
        console.print(f"{folder}: {json.dumps(found)}", highlight=False, soft_wrap=True)
    plot_pairs(pairs, plot)
    return {"pairs": pairs, "ok": True}


def exit_figures(pair: Pair) -> dict[str, Any]:
    """Return the agreement of the exits that pay, and what the training's report says of all.

    The exits run as at a verifier: in the engine, during its passes, over held-out answers.
    """
    folder = pair.folder / "exits"
    report = _report(folder / REPORT, "exits", ("exits", *_EXIT_REPORT))
    if not report:
        return {}
    agreement: dict[str, float] = {}
    if holds_trained(folder, NAME, "exits"):
        loaded = load(with_exits(pair.target, str(folder)))
        pair.data.check_target(Target.of(loaded))
        with closing(Engine(loaded)) as engine:
            agreement = exit_agreement(engine, pair.data, pair.held_out)
    candidates = report.pop("exits")
    return {"exit_agreement": agreement, "exits": {**report, "candidates": candidates}}


def exit_agreement(engine: Engine, data: Data, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of the target's tokens that each exit says, by its layer."""
    hits = dict.fromkeys(engine.exit_layers, 0)
    tokens = 0
    for sample in samples:
        best, by_exit = _best_tokens(engine, data, sample)
        tokens += len(best)
        for layer, guessed in by_exit.items():
            hits[layer] += int((guessed == best).sum())
    return {str(layer): hit / max(1, tokens) for layer, hit in hits.items()}


def _best_tokens(engine: Engine, data: Data, sample: Sample) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return the best token at each place of the answer: the target's, and each exit's."""
    prompt = encode(data.prompt(sample), engine.loaded, LIMITS)
    guessed: dict[int, Tensor] = {}

    def on_exit(layer: int, logits: Tensor) -> None:
        guessed[layer] = logits.argmax(-1)

    with closing(engine.open(prompt)) as session:
        ids = (*prompt.ids, *sample.answer[:-1])
        (logits,) = engine.run([Feed(session, ids, on_exit, last=len(sample.answer))])
    if isinstance(logits, Exception):
        raise logits
    return logits.argmax(-1), guessed


def draft_figures(pair: Pair) -> dict[str, Any]:
    """Return tokens per pass of the target, and how much faster it is with the draft than alone.

    ``tau_before`` and ``tau_after`` are those of the training's report, both on the same prompts;
    the others are measured here, with both models on this device and without a link. A robot's
    figures: ``pair check --measure``. Answers keep to the guide of the collected ones, guided ones
    to ``FORM``; its forced tokens cost the target no pass, with a draft or without.
    """
    folder = pair.folder / "draft"
    report = _report(folder / REPORT, "draft", ("tau_before", "tau_after"))
    if not report:
        return {}
    target = Engine(load(pair.target))
    pair.data.check_target(Target.of(target.loaded))
    draft = Engine(load(replace(pair.target, path=str(folder / "model"), quantization="none")))
    free, guided = (_compare(pair, draft, target, guide) for guide in (pair.data.facts.limit, FORM))
    return {
        **report,
        "tau": free.tau,
        "speedup": free.speedup,
        "guided_tau": guided.tau,
        "guided_tau_alone": guided.tau_alone,
        "guided_speedup": guided.speedup,
        "different_answers": free.different + guided.different,
    }


class _Compared(NamedTuple):
    """Answers of the pair and of its target alone.

    Attributes:
        tau, tau_alone: tokens per pass of the target.
        different: number of answers that are not the same.
    """

    tau: float
    tau_alone: float
    speedup: float
    different: int


def _compare(pair: Pair, draft: Engine, target: Engine, guide: Guide | None) -> _Compared:
    """Answer the held-out prompts greedily, each with the draft and by the target alone."""
    both, alone = EdgeCloudMetrics(), EdgeCloudMetrics()
    runners = plain_runner(draft, target), plain_runner(draft, target, gamma=0)
    different = 0
    for sample in pair.held_out:
        prompt, most = pair.data.prompt(sample), pair.data.facts.max_tokens
        drafted, expected = (r.generate(prompt, max_tokens=most, guide=guide) for r in runners)
        both.add(drafted.metrics)
        alone.add(expected.metrics)
        different += drafted.tokens != expected.tokens
    speedup = (alone.total_s / alone.tokens) / (both.total_s / both.tokens)
    return _Compared(both.tau, alone.tau, speedup, different)


def head_figures(pair: Pair) -> dict[str, Any]:
    """Return what the training's report says of Medusa heads."""
    file = pair.folder / "heads" / REPORT
    report = _report(file, "heads", ("heads", "tokens_per_round"))
    return {"heads": report} if report else {}


def _report(file: Path, command: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return ``keys`` of a training's report; nothing if there was no such training."""
    if not file.is_file():
        return {}
    with translate_errors(
        InvalidInput,
        f"cannot read {file}",
        field="FOLDER",
        remedy=f"give the command collab-llm train {command} again",
    ):
        report = json.loads(file.read_text(encoding="utf-8"))
        return {key: report[key] for key in keys}


_FIGURES: tuple[Callable[[Pair], dict[str, Any]], ...] = (
    exit_figures,
    draft_figures,
    head_figures,
)
