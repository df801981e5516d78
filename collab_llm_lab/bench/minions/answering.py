"""The models of the benchmark, and processes that answer questions about several logs at once."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from collab_llm_lab.bench.minions.material import Case
from collab_llm_lab.bench.minions.methods import Answered, Method, Models, answer_all
from collab_llm_lab.bench.minions.oracle import Oracle
from collab_llm_lab.bench.minions.shown import shown_examples, teach_plain_chat
from collab_llm_lab.bench.minions.string_search import StringSearch, line_that_begins
from collab_llm_lab.training.text.rendering import prompt_text
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.chat.base import ChatModel
from collab_llm_nodes.chat.batch import BatchConfig
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.chat.ledger import Call, CostLedger, PriceTable
from collab_llm_nodes.config import from_mapping, from_yaml
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.embedded.remote import open_planner
from collab_llm_nodes.protocols.minions.embedded.windows import WindowedChat, token_count
from collab_llm_nodes.protocols.minions.jobs import Dropped

WORKER, TARGET = "text-worker", "text-target"
PRICED_AS = "gpt-4o"
"""Prices of the paper's remote; the models here cost nothing."""
_LIMITS = InProcessConfig(BatchConfig(max_batch=64, prefill_tokens=1024, kept_tokens=1 << 16))
"""Limits with which all windows of a log stay in memory, since its questions share them."""


@dataclass(frozen=True)
class ModelSpec:
    """Specification of the two models that answer.

    Attributes:
        family: folder of the text family; its worker's tokenizer counts all tokens.
        worker: folder of the local model; None: string search in its place.
        trained: the remote is the family's target as planner instead of the oracle.
        shown: seed of few-shot examples for the worker; None for one that was trained.
        window: length of the windows in which the local model reads a long text [tokens].
        threads: CPU threads of each process.
        encoder: folder of the encoder of passages; None counts their words.
    """

    family: Path
    worker: Path | None
    trained: bool = False
    shown: int | None = None
    window: int = 640
    threads: int = 1
    encoder: Path | None = None


class Counter:
    """Token counter of a run, with the tokenizer of one model."""

    def __init__(self, model: LoadedModel) -> None:
        self.text = token_count(model.tokenizer)

    def chat(self, turns: Sequence[Turn]) -> int:
        """Return the number of tokens of a prompt, or of a reply."""
        if len(turns) == 1 and turns[0].role == "assistant":
            return self.text(turns[0].content) + 1  # and its end token
        return self.text(prompt_text(turns))


def read(folder: Path) -> LoadedModel:
    """Load a model.

    Raises:
        ConfigError: the folder has no model.
        ModelError: the model cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder.parent} lacks {folder.name}",
            field="--models",
            remedy=f"name the folder that holds {WORKER} and {TARGET}",
        )
    return load(ModelConfig(path=str(folder)))


class ModelCache:
    """Cache of the models of one specification, loaded on demand."""

    def __init__(self) -> None:
        self._staff: ModelSpec | None = None
        self._models: Models | None = None

    def models(self, spec: ModelSpec) -> Models:
        """Return the models of ``spec``, and close those of another one."""
        if self._models is None or spec != self._staff:
            self.close()
            torch.set_num_threads(spec.threads)
            self._staff, self._models = spec, _open(spec)
        return self._models

    def close(self) -> None:
        """Free the models."""
        if self._models is not None:
            self._models.remote.close()
            self._models.local.close()
            self._models = None


def _open(spec: ModelSpec) -> Models:
    counter = Counter(read(spec.family / WORKER))
    local = _open_worker(spec)
    if spec.trained:
        target = ModelConfig(path=str(spec.family / TARGET))
        remote: ChatModel = open_planner(target, PRICED_AS, _LIMITS)
    else:
        remote = Oracle(PRICED_AS, counter.chat)
    prices = from_yaml(PriceTable, config_file("prices.yaml"))
    encoder: Encoder = WordHashes()
    if spec.encoder is not None:
        encoder = TextEncoder(TextEncoderConfig(str(spec.encoder)))
    local = WindowedChat(local, counter.text, spec.window)
    return Models(remote, local, prices.of(PRICED_AS), encoder)


def _open_worker(spec: ModelSpec) -> ChatModel:
    if spec.worker is None:
        return StringSearch(line_that_begins)
    engine = Engine(read(spec.worker))
    plain = spec.shown is not None and teach_plain_chat(engine)
    local = InProcessChat(engine, _LIMITS, spec.worker.name)
    return local if spec.shown is None else shown_examples(local, spec.shown, plain=plain)


Task = tuple[ModelSpec, Method, Case]
Answer = Callable[[Sequence[Task]], Iterator[list[Answered]]]
"""Takes tasks and yields the answers to the questions of each, in order."""


@contextmanager
def answering(cache: ModelCache, processes: int, kept: Path | None = None) -> Iterator[Answer]:
    """Yield a function that answers tasks, with the models of ``cache`` or in several processes.

    Args:
        kept: folder to which the answers of each task are written, and from which they are read
            when a run is resumed. Tasks are identified by models, method and questions, but not by
            the code that answered them.
    """
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    if processes == 1:
        yield lambda tasks: (_answered(kept, cache, task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        # One task per process at a time, since they differ much in length.
        yield lambda tasks: iter(pool.map(partial(_answer_in_process, kept), tasks))


def _answered(kept: Path | None, cache: ModelCache, task: Task) -> list[Answered]:
    spec, method, case = task
    if kept is None:
        return answer_all(method, [case], cache.models(spec))
    # The pickle gives only a name; nothing is unpickled.
    file = kept / f"{hashlib.sha256(pickle.dumps(task)).hexdigest()[:32]}.json"
    if not file.is_file():
        answers = answer_all(method, [case], cache.models(spec))
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"answers": [_entry(each) for each in answers]}))
        os.replace(part, file)
    return _read_answers(file, case)


@dataclass(frozen=True)
class _Entry:
    """``Answered`` without its question, as stored in a file."""

    answer: str | None
    rounds: int
    calls: tuple[Call, ...]
    wire: tuple[str, ...]
    dropped: dict  # counts by ``Dropped``
    wall_s: float


@dataclass(frozen=True)
class _Entries:
    answers: tuple[_Entry, ...]


def _entry(of: Answered) -> dict[str, object]:
    calls = tuple(of.cost.calls)
    return asdict(_Entry(of.answer, of.rounds, calls, tuple(of.wire), of.dropped, of.wall_s))


def _read_answers(file: Path, case: Case) -> list[Answered]:
    try:
        entries = from_mapping(_Entries, dict(json.loads(file.read_bytes()))).answers
        return [
            Answered(
                asked,
                each.answer,
                each.rounds,
                CostLedger([*each.calls]),
                [*each.wire],
                {Dropped(reason): int(count) for reason, count in each.dropped.items()},
                each.wall_s,
            )
            for asked, each in zip(case.asked, entries, strict=True)
        ]
    except (OSError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(
            f"{file} holds no answers: {error}", field="--answers", remedy="remove it"
        ) from error


@functools.cache
def _own_cache() -> ModelCache:
    """Return the models of this process."""
    return ModelCache()


def _answer_in_process(kept: Path | None, task: Task) -> list[Answered]:
    return _answered(kept, _own_cache(), task)
