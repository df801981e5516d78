"""``collab-llm bench chat``: the jobs of MinionS on one engine, together and with shared chunks.

The same jobs four ways: one by one; batched; one by one, with a chunk's KV computed once and then
forked; both. Prompts are random tokens and replies are cut at one length, so that each way does the
same work; the ways must agree on every token. Times are those of ``chat.batch.Batch``, between the
encoded prompts and the last token. The prediction is made of the time of a prompt token and of the
times of a pass with one job and with a full batch, forked or not.
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
    """The jobs of one round: every task on every chunk, so often. Lengths in tokens."""

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
    """Measure the four ways, and print them beside the prediction.

    Args:
        model: folder of a model; empty: random weights of the text worker's size.

    Returns:
        ``parallel`` with ``one_by_one_s``, ``batched_s``, ``forked_s``, ``both_s``, and
        ``share`` = both_s / one_by_one_s; ``predicted`` and ``processor``, likewise: the latter
        is processor time, which other work on the machine disturbs less; ``prefill_tokens`` by
        way; ``shape``; ``mismatches``, replies that differ from those one by one.
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
    """Return what :func:`run_chat` does, but for model and threads."""
    prompts = _prompts(engine.vocab_size, shape, seed)
    kept = shape.chunks * (shape.prompt_tokens + 128)
    ways = {
        "one_by_one": BatchConfig(1, prefill_tokens, 0),
        "batched": BatchConfig(max_batch, prefill_tokens, 0),
        "forked": BatchConfig(1, prefill_tokens, kept),
        "both": BatchConfig(max_batch, prefill_tokens, kept),
    }
    last: dict[str, list[Job]] = {}
    prefilled: dict[str, int] = {}
    processor: dict[str, list[float]] = {way: [] for way in ways}

    def run(way: str) -> None:
        jobs = [
            Job(way, ids, SamplingConfig(), shape.reply_tokens)
            for ids in prompts
            for _ in range(shape.samples)
        ]
        begun = time.process_time()
        prefilled[way] = _finish(engine, ways[way], jobs).prefill
        processor[way].append(time.process_time() - begun)
        last[way] = jobs

    times = medians({way: lambda way=way: run(way) for way in ways}, repeats)  # type: ignore[misc]
    alone = [job.tokens for job in last["one_by_one"]]
    parallel = {f"{way}_s": seconds for way, seconds in times.items()}
    return {
        "parallel": {**parallel, "share": times["both"] / times["one_by_one"]},
        "processor": {f"{way}_s": statistics.median(spent) for way, spent in processor.items()},
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
    """Return the seconds of each way, from the cost of a prompt token and of each kind of pass."""
    full = min(max_batch, shape.jobs)
    token_s = _prefill_s(engine, shape.prompt_tokens, prefill_tokens) / shape.prompt_tokens
    steps = shape.jobs * (shape.reply_tokens - 1)  # the first token comes with the prompt
    passes = {"one_by_one": (1, False), "batched": (full, False)}
    passes |= {"forked": (1, True), "both": (full, True)}
    return {
        f"{way}_s": prefilled[way] * token_s + steps / jobs * _pass_s(engine, shape, jobs, forked)
        for way, (jobs, forked) in passes.items()
    }


def _prefill_s(engine: Engine, tokens: int, at_a_time: int) -> float:
    def read() -> None:
        _session(engine, tokens, at_a_time).close()

    return _median_s(read, 5)


def _pass_s(engine: Engine, shape: JobsShape, jobs: int, forked: bool) -> float:
    """Return the time of a pass over so many jobs in the middle of their replies [s]."""
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
    for name in ("way", "s", "predicted", "processor s", "over one by one", "prompt tokens"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, tokens in results["prefill_tokens"].items():
        seconds = parallel[f"{way}_s"]
        share = seconds / parallel["one_by_one_s"]
        others = (predicted[f"{way}_s"], results["processor"][f"{way}_s"], share)
        row = [f"{figure:.2f}" for figure in (seconds, *others)]
        table.add_row(way.replace("_", " "), *row, f"{tokens}")
    console.print(table)
    console.print(f"{results['mismatches']} replies differ from those one by one")


def _plot(results: dict[str, Any], file: Path) -> None:
    figure, axis = subplots(figsize=(6, 3.5))
    ways = list(results["prefill_tokens"])
    places = np.arange(len(ways))
    for shift, name in ((-0.2, "parallel"), (0.2, "predicted")):
        seconds = [results[name][f"{way}_s"] for way in ways]
        label = "measured" if name == "parallel" else name
        axis.bar(places + shift, seconds, 0.4, label=label)
    axis.set_xticks(places, [way.replace("_", " ") for way in ways])
    axis.set_ylabel("seconds")
    axis.set_title(f"{results['shape']['jobs']} jobs on {results['shape']['chunks']} chunks")
    axis.legend()
    save_plot(figure, file)
