"""Figures of pairs: what early exits, a draft and Medusa heads guess of their target's answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from collab_llm_lab.training.pair.collecting import LIMITS
from collab_llm_lab.training.pair.data import Data, Sample, Target, read_data
from collab_llm_lab.training.pair.reports import REPORT
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import Feed
from collab_llm_nodes.errors import InvalidInput, translate_errors
from collab_llm_nodes.models.adapters import NAME
from collab_llm_nodes.models.loading import ModelConfig, load, with_exits
from collab_llm_nodes.models.prompt import encode
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

_REPORTED = ("chosen", "foreseen", "round_ms", "round_ms_without_exits")
"""What is taken from the report of ``train exits``."""


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
    console: Console,
) -> dict[str, Any]:
    """Measure pairs; return ``pairs``, by the names of their folders.

    Args:
        load_as: returns how to load the target of this path.

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
    return {"pairs": pairs, "ok": True}


def exit_figures(pair: Pair) -> dict[str, Any]:
    """Return the agreement of the exits that pay, and what the training's report says of them.

    The exits run as at a verifier: in the engine, during its passes, over held-out answers.
    """
    folder = pair.folder / "exits"
    found = _report(folder / REPORT, "exits", _REPORTED)
    if not found:
        return {}
    agreement: dict[str, float] = {}
    if (folder / f"{NAME}.json").is_file():
        loaded = load(with_exits(pair.target, str(folder)))
        pair.data.check_target(Target.of(loaded))
        with closing(Engine(loaded)) as engine:
            agreement = exit_agreement(engine, pair.data, pair.held_out)
    return {"exit_agreement": agreement, "exits": found}


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
    """Return tokens per pass of the target before and after the training of the draft.

    And how many times as fast as the target alone the two decode, both on this device and without
    a link. A robot's figures: ``pair check --measure``.
    """
    folder = pair.folder / "draft"
    report = _report(folder / REPORT, "draft", ("tau_before",))
    if not report:
        return {}
    target = Engine(load(pair.target))
    pair.data.check_target(Target.of(target.loaded))
    draft = Engine(load(replace(pair.target, path=str(folder / "model"), quantization="none")))
    alone, expected = _decode(pair, plain_runner(draft, target, gamma=0))
    both, answers = _decode(pair, plain_runner(draft, target))
    return {
        **report,
        "tau_after": both.tau,
        "speedup": (alone.total_s / alone.tokens) / (both.total_s / both.tokens),
        "different_answers": sum(a != b for a, b in zip(expected, answers, strict=True)),
    }


def _decode(pair: Pair, runner: InProcessRunner) -> tuple[EdgeCloudMetrics, list[tuple[int, ...]]]:
    """Answer the held-out prompts greedily; return the sum of the costs, and the answers."""
    total, answers = EdgeCloudMetrics(), []
    for sample in pair.held_out:
        made = runner.generate(pair.data.prompt(sample), max_tokens=pair.data.facts.max_tokens)
        total.add(made.metrics)
        answers.append(made.tokens)
    return total, answers


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
