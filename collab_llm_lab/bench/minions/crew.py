"""The models of the benchmark, and processes that answer questions about several logs at a time."""

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
from collab_llm_lab.bench.minions.oracle import Oracle
from collab_llm_lab.bench.minions.shown import shown_examples, teach_plain_chat
from collab_llm_lab.bench.minions.ways import Answered, Models, Way, answer_all
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
_LIMITS = InProcessConfig(
    BatchConfig(max_batch=64, prefill_tokens=1024, kept_tokens=1 << 16), max_jobs=1 << 16
)
"""All windows of a log stay in memory: its questions share them."""


@dataclass(frozen=True)
class Staff:
    """The two models that answer.

    Attributes:
        family: folder of the text family; its worker's tokenizer counts all tokens.
        worker: folder of the local model.
        trained: the remote is the family's target as planner; else it is the oracle.
        shown: seed of the examples that the worker is shown; None for one that was trained.
        window: tokens of a window in which the local model reads a long text.
        threads: CPU threads of each process.
        encoder: folder of the encoder of passages; None: their words are counted.
    """

    family: Path
    worker: Path
    trained: bool = False
    shown: int | None = None
    window: int = 640
    threads: int = 1
    encoder: Path | None = None


class Counter:
    """Counts tokens with the tokenizer of one model, which names all counts of a run."""

    def __init__(self, model: LoadedModel) -> None:
        self.text = token_count(model.tokenizer)

    def chat(self, turns: Sequence[Turn]) -> int:
        """Return the number of tokens of a prompt, or of one reply."""
        if len(turns) == 1 and turns[0].role == "assistant":
            return self.text(turns[0].content) + 1  # its end
        return self.text(prompt_text(turns))


def read(folder: Path) -> LoadedModel:
    """Load a model.

    Raises:
        ConfigError: there is none.
        ModelError: it cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder.parent} lacks {folder.name}",
            field="--models",
            remedy=f"name the folder that holds {WORKER} and {TARGET}",
        )
    return load(ModelConfig(path=str(folder)))


class Desk:
    """The models of one staff at a time, opened when they are needed."""

    def __init__(self) -> None:
        self._staff: Staff | None = None
        self._models: Models | None = None

    def models(self, staff: Staff) -> Models:
        """Return the models of ``staff``; those of another are closed first."""
        if self._models is None or staff != self._staff:
            self.close()
            torch.set_num_threads(staff.threads)
            self._staff, self._models = staff, _open(staff)
        return self._models

    def close(self) -> None:
        """Free the models."""
        if self._models is not None:
            self._models.remote.close()
            self._models.local.close()
            self._models = None


def _open(staff: Staff) -> Models:
    counter = Counter(read(staff.family / WORKER))
    engine = Engine(read(staff.worker))
    plain = staff.shown is not None and teach_plain_chat(engine)
    local: ChatModel = InProcessChat(engine, _LIMITS, staff.worker.name)
    if staff.shown is not None:
        local = shown_examples(local, staff.shown, plain=plain)
    if staff.trained:
        target = ModelConfig(path=str(staff.family / TARGET))
        remote: ChatModel = open_planner(target, PRICED_AS, _LIMITS)
    else:
        remote = Oracle(PRICED_AS, counter.chat)
    prices = from_yaml(PriceTable, config_file("prices.yaml"))
    encoder: Encoder = WordHashes()
    if staff.encoder is not None:
        encoder = TextEncoder(TextEncoderConfig(str(staff.encoder)))
    local = WindowedChat(local, counter.text, staff.window)
    return Models(remote, local, prices.of(PRICED_AS), encoder)


Task = tuple[Staff, Way, Case]
Answer = Callable[[Sequence[Task]], Iterator[list[Answered]]]
"""Takes tasks, and yields the answers to the questions of each, in their order."""


@contextmanager
def crew(desk: Desk, processes: int, kept: Path | None = None) -> Iterator[Answer]:
    """Yield what answers tasks: with the models of ``desk``, or in several processes side by side.

    A process that fails fails its task, whose answers are then not yielded but its error raised.

    Args:
        kept: folder of answers that are taken from there, or written to it as soon as a task is
            done; a run that was ended goes on there. It knows tasks by what they ask of whom, and
            not the code that answered them.
    """
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
    if processes == 1:
        yield lambda tasks: (_answered(kept, desk, task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        # One by one in turn: the tasks differ a lot in what they take.
        yield lambda tasks: iter(pool.map(partial(_of_a_process, kept), tasks))


def _answered(kept: Path | None, desk: Desk, task: Task) -> list[Answered]:
    staff, way, case = task
    if kept is None:
        return answer_all(way, [case], desk.models(staff))
    # Only a name: nothing is ever unpickled.
    file = kept / f"{hashlib.sha256(pickle.dumps(task)).hexdigest()[:32]}.json"
    if not file.is_file():
        answers = answer_all(way, [case], desk.models(staff))
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"answers": [_entry(each) for each in answers]}))
        os.replace(part, file)
    return _read_answers(file, case)


@dataclass(frozen=True)
class _Entry:
    """The part of an ``Answered`` that a file keeps: all but the question."""

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
def _own_desk() -> Desk:
    """Return the desk of this process."""
    return Desk()


def _of_a_process(kept: Path | None, task: Task) -> list[Answered]:
    return _answered(kept, _own_desk(), task)
