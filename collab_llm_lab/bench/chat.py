"""``collab-llm bench chat``: the jobs of MinionS on one engine, together and with shared chunks.

The same jobs in four modes: one by one; batched; one by one with the forked KV of each chunk; both.
Prompts are random tokens and all replies have one length, so that each mode does the same work; the
modes must agree on every token. Times are those of ``chat.batch.Batch``, from the encoded prompts
to the last token. They are predicted from the time of a prompt token and of each kind of pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from collab_llm_lab.bench.harness import medians, save_plot, subplots
from collab_llm_lab.training.text.models import WORKER, build
from collab_llm_nodes.chat.base import Usage
from collab_llm_nodes.chat.batch import Batch, BatchConfig, Job
from collab_llm_nodes.chat.prefixes import Ids
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.tokenizer import TEXT_SPECIAL

VOCABULARY = 3072
"""Tokens of the text family's vocabulary."""


@dataclass(frozen=True)
class JobsShape:
    """The jobs of one round: every task on every chunk, ``samples`` times. Lengths in tokens."""

    chunks: int = 8
    tasks: int = 4
    samples: int = 2
    instruction_tokens: int = 60
    chunk_tokens: int = 600
    task_tokens: int = 40
    reply_tokens: int = 48

    @property
    def jobs(self) -> int:
        return self.chunks * self.tasks * self.samples

    @property
    def prompt_tokens(self) -> int:
        return self.instruction_tokens + self.chunk_tokens + self.task_tokens


def run_chat(
    *,
    shape: JobsShape,
    model: str,
    max_batch: int,
    prefill_tokens: int,
    repeats: int,
    threads: int,
    seed: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure the four modes, and print them beside the prediction.

    Args:
        model: folder of a model; empty: random weights of the text worker's size.

    Returns:
        ``parallel`` with ``one_by_one_s``, ``batched_s``, ``forked_s``, ``both_s``, and
        ``share`` = both_s / one_by_one_s; ``predicted`` and, in processor time, ``processor``
        likewise; ``prefill_tokens`` by mode; ``shape``; ``mismatches``, the number of replies that
        differ from those one by one.
    """
    torch.set_num_threads(threads)
    engine = Engine(load(ModelConfig(model)) if model else random_worker(seed))
    engine.eos = frozenset()  # every reply has the same length
    measured = measure_parallel(
        engine,
        shape,
        max_batch=max_batch,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        seed=seed,
    )
    results = {
        **measured,
        "model": model or "random weights of the text worker",
        "dtype": "float32",
    }
    results["threads"] = threads
    _print(results, console)
    if plot is not None:
        _plot(results, plot)
    return results


def measure_parallel(
    engine: Engine,
    shape: JobsShape,
    *,
    max_batch: int = 32,
    prefill_tokens: int = 512,
    repeats: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the results of :func:`run_chat` without model and threads."""
    prompts = _prompts(engine.vocab_size, shape, seed)
    kept = shape.chunks * (shape.prompt_tokens + 128)
    modes = {
        "one_by_one": BatchConfig(1, prefill_tokens, 0),
        "batched": BatchConfig(max_batch, prefill_tokens, 0),
        "forked": BatchConfig(1, prefill_tokens, kept),
        "both": BatchConfig(max_batch, prefill_tokens, kept),
    }
    last: dict[str, list[Job]] = {}
    prefilled: dict[str, int] = {}
    processor: dict[str, list[float]] = {mode: [] for mode in modes}

    def run(mode: str) -> None:
        jobs = [
            Job(mode, ids, SamplingConfig(), shape.reply_tokens)
            for ids in prompts
            for _ in range(shape.samples)
        ]
        begun = time.process_time()
        prefilled[mode] = _finish(engine, modes[mode], jobs).prefill
        processor[mode].append(time.process_time() - begun)
        last[mode] = jobs

    times = medians({mode: lambda mode=mode: run(mode) for mode in modes}, repeats)  # type: ignore[misc]
    alone = [job.tokens for job in last["one_by_one"]]
    parallel = {f"{mode}_s": seconds for mode, seconds in times.items()}
    return {
        "parallel": {**parallel, "share": times["both"] / times["one_by_one"]},
        "processor": {f"{mode}_s": statistics.median(spent) for mode, spent in processor.items()},
        "predicted": _predicted(engine, shape, max_batch, prefill_tokens, prefilled),
        "prefill_tokens": prefilled,
        "shape": {**shape.__dict__, "jobs": shape.jobs},
        "max_batch": max_batch,
        "mismatches": sum(
            job.tokens != tokens
            for jobs in last.values()
            for job, tokens in zip(jobs, alone, strict=True)
        ),
    }


def random_worker(seed: int) -> LoadedModel:
    """Return a model with random weights, of the size and the vocabulary of the text worker."""
    words = [*TEXT_SPECIAL, *(str(i) for i in range(VOCABULARY - len(TEXT_SPECIAL)))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, words[0])),
        eos_token="<|im_end|>",
        additional_special_tokens=list(TEXT_SPECIAL),
    )
    model = build(WORKER, tokenizer, seed).eval()
    return LoadedModel(model, tokenizer, None, None, ModelConfig())


def _prompts(vocabulary: int, shape: JobsShape, seed: int) -> list[Ids]:
    """Return the prompts [chunks * tasks]: instruction, chunk, task."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> Ids:
        return rng.integers(len(TEXT_SPECIAL), vocabulary, count).astype(np.int32)

    instruction = words(shape.instruction_tokens)
    chunks = [words(shape.chunk_tokens) for _ in range(shape.chunks)]
    tasks = [words(shape.task_tokens) for _ in range(shape.tasks)]
    return [np.concatenate((instruction, chunk, task)) for chunk in chunks for task in tasks]


def _finish(engine: Engine, config: BatchConfig, jobs: Sequence[Job]) -> Usage:
    """Run ``jobs`` to their ends and return what they took."""
    batch = Batch(engine, config)
    batch.add(jobs)
    spent = Usage()
    while not batch.idle:
        for _, usage, reason in batch.step():
            if isinstance(reason, Exception):
                raise reason
            spent += usage
    batch.close()
    return spent


def _predicted(
    engine: Engine,
    shape: JobsShape,
    max_batch: int,
    prefill_tokens: int,
    prefilled: dict[str, int],
) -> dict[str, float]:
    """Return the time of each mode, from those of a prompt token and of each kind of pass [s]."""
    full = min(max_batch, shape.jobs)
    token_s = _prefill_s(engine, shape.prompt_tokens, prefill_tokens) / shape.prompt_tokens
    steps = shape.jobs * (shape.reply_tokens - 1)  # the first token comes with the prompt
    passes = {"one_by_one": (1, False), "batched": (full, False)}
    passes |= {"forked": (1, True), "both": (full, True)}
    return {
        f"{mode}_s": prefilled[mode] * token_s + steps / jobs * _pass_s(engine, shape, jobs, forked)
        for mode, (jobs, forked) in passes.items()
    }


def _prefill_s(engine: Engine, tokens: int, at_a_time: int) -> float:
    def read() -> None:
        _session(engine, tokens, at_a_time).close()

    return _median_s(read, 5)


def _pass_s(engine: Engine, shape: JobsShape, jobs: int, forked: bool) -> float:
    """Return the time of a pass over ``jobs`` jobs in the middle of their replies [s]."""
    shared = shape.instruction_tokens + shape.chunk_tokens
    own = shape.task_tokens + shape.reply_tokens // 2
    chunks: list[Session] = []
    sessions: list[Session] = []
    for job in range(jobs):
        if not forked:
            sessions.append(_session(engine, shared + own, 512))
            continue
        if job % (shape.tasks * shape.samples) == 0:
            chunks.append(_session(engine, shared, 512))
        sessions.append(chunks[-1].fork())
        sessions[-1].feed([len(TEXT_SPECIAL)] * own, last=0)

    def step() -> None:
        engine.run([Feed(session, [len(TEXT_SPECIAL)]) for session in sessions])

    seconds = _median_s(step, 9)
    for session in [*sessions, *chunks]:
        session.close()
    return seconds


def _session(engine: Engine, tokens: int, at_a_time: int) -> Session:
    session = engine.open(EncodedPrompt(()))
    for start in range(0, tokens, at_a_time):
        session.feed([len(TEXT_SPECIAL)] * min(at_a_time, tokens - start), last=0)
    return session


def _median_s(call: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _print(results: dict[str, Any], console: Console) -> None:
    shape, parallel, predicted = (results[name] for name in ("shape", "parallel", "predicted"))
    table = Table(
        title=f"{shape['jobs']} jobs: {shape['chunks']} chunks of {shape['chunk_tokens']} tokens, "
        f"{shape['tasks']} tasks, {shape['samples']} samples, {shape['reply_tokens']} tokens each"
    )
    for name in ("mode", "s", "predicted", "processor s", "over one by one", "prompt tokens"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, tokens in results["prefill_tokens"].items():
        seconds = parallel[f"{mode}_s"]
        share = seconds / parallel["one_by_one_s"]
        others = (predicted[f"{mode}_s"], results["processor"][f"{mode}_s"], share)
        row = [f"{figure:.2f}" for figure in (seconds, *others)]
        table.add_row(mode.replace("_", " "), *row, f"{tokens}")
    console.print(table)
    console.print(f"{results['mismatches']} replies differ from those one by one")


def _plot(results: dict[str, Any], file: Path) -> None:
    figure, axis = subplots(figsize=(6, 3.5))
    modes = list(results["prefill_tokens"])
    places = np.arange(len(modes))
    for shift, name in ((-0.2, "parallel"), (0.2, "predicted")):
        seconds = [results[name][f"{mode}_s"] for mode in modes]
        label = "measured" if name == "parallel" else name
        axis.bar(places + shift, seconds, 0.4, label=label)
    axis.set_xticks(places, [mode.replace("_", " ") for mode in modes])
    axis.set_ylabel("seconds")
    axis.set_title(f"{results['shape']['jobs']} jobs on {results['shape']['chunks']} chunks")
    axis.legend()
    save_plot(figure, file)
