"""The target's answers to many prompts, each written as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collab_llm_lab.training.loop import Progress, Stop, ignore_progress
from collab_llm_lab.training.pair.data import DataWriter, Facts, Target, key_of, writing
from collab_llm_lab.training.pair.sources import QUESTIONS, Asked, prompts_of
from collab_llm_nodes.chat.base import Finish
from collab_llm_nodes.chat.batch import Batch, BatchConfig, Ended, Job
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode

LIMITS = PromptLimits(max_characters=1 << 20, max_images=64)
"""Prompts are the user's own; the model's context is the limit."""
_PREFILL = 2048
"""Prompt tokens read in one pass."""


@dataclass(frozen=True)
class CollectConfig:
    """Collection of a target's answers.

    Attributes:
        out: the data folder.
        questions: asked about each picture of a folder.
        guide, guide_source: as of ``Facts``.
    """

    target: ModelConfig
    sources: tuple[Path, ...]
    out: Path
    questions: tuple[str, ...] = QUESTIONS
    temperature: float = setting(0.0, "Of the answers; 0 is greedy.", low=0.0)
    max_tokens: int = setting(128, "Longest answer.", low=1, high=1 << 16)
    seed: int = 0
    batch: int = setting(16, "Prompts answered at a time; each has a KV cache.", low=1, high=4096)
    max_refused: int = setting(20, "Prompts that may be unusable before the run ends.", low=0)
    guide: str = "none"
    guide_source: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)


class Collected(NamedTuple):
    """Result of a call: answers in the folder, prompts refused in this call, and if it ended."""

    answers: int
    refused: int
    finished: bool


def collect(
    config: CollectConfig,
    report: Progress = ignore_progress,
    stop: Stop = lambda: False,
    on_refused: Callable[[str], None] = lambda line: None,
) -> Collected:
    """Answer the prompts that the folder does not hold yet, in batches.

    Args:
        stop: asked before every pass; True ends the call, to be gone on with.
        on_refused: called with a line about each prompt that cannot be used.

    Raises:
        ConfigError, InvalidInput: the folder or a source cannot be used (see ``writing`` and
            ``prompts_of``), or too many prompts cannot.
        ModelError: the target cannot be loaded, or a pass failed.

    An ``InvalidInput`` for ``answer.guide`` is about ``guide`` or ``guide_source``.
    """
    asked = [each for source in config.sources for each in prompts_of(source, config.questions)]
    engine = Engine(load(config.target))
    asked_for = (config.temperature, config.max_tokens, config.seed)
    facts = Facts(Target.of(engine.loaded), *asked_for, config.guide, config.guide_source)
    limit = facts.limit
    if limit is not None:
        engine.loaded.guides.open(limit)  # a bad one is refused now, not once for each prompt
    with writing(config.out, facts) as writer:
        run = _Collection(config, engine, limit, writer, on_refused)
        try:
            finished = run.answer(asked, report, stop)
        finally:
            run.close()
        if finished and not len(writer):
            raise InvalidInput(
                f"none of {len(asked)} prompts can be used",
                field="SOURCE",
                remedy="see the lines above; a model that reads text only takes no pictures",
            )
        return Collected(len(writer), run.refused, finished)


class _Collection:
    """One call: the batch, and the prompts whose answers it makes."""

    def __init__(
        self,
        config: CollectConfig,
        engine: Engine,
        guide: Guide | None,
        writer: DataWriter,
        on_refused: Callable[[str], None],
    ) -> None:
        self._config, self._engine, self._writer = config, engine, writer
        self._guide = guide
        self._on_refused = on_refused
        self._batch = Batch(engine, BatchConfig(config.batch, _PREFILL, kept_tokens=0))
        self._waiting: dict[Job, tuple[Prompt, str]] = {}
        self._read = 0
        self.refused = 0

    def answer(self, asked: Sequence[Asked], report: Progress, stop: Stop) -> bool:
        """Answer the prompts; return False if ``stop`` ended it."""
        jobs = self._jobs(asked)
        while not stop():
            for job in islice(jobs, self._config.batch - len(self._waiting)):
                self._batch.add([job])
            report("answers", self._read - len(self._waiting), len(asked), {})
            if self._batch.idle:
                return True
            for ended in self._batch.step():
                self._write(ended)
        return False

    def close(self) -> None:
        """Free the KV caches."""
        self._batch.close()

    def _jobs(self, asked: Sequence[Asked]) -> Iterator[Job]:
        """Yield a job for each prompt that can be used and is not answered yet."""
        for where, read in asked:
            self._read += 1
            try:
                prompt = read()
                if prompt in self._writer:
                    continue
                job = self._job(prompt)
            except InvalidInput as error:
                self._refuse(where, error)
                continue
            self._waiting[job] = prompt, where
            yield job

    def _job(self, prompt: Prompt) -> Job:
        encoded = encode(prompt, self._engine.loaded, LIMITS)
        seed = self._config.seed + int(key_of(prompt)[:8], 16)  # the same after a kill
        return Job(
            self._read,
            np.array(encoded.ids, np.int32),
            SamplingConfig(temperature=self._config.temperature, seed=seed),
            self._config.max_tokens,
            prompt=encoded if prompt.images else None,
            guide=self._engine.loaded.guides.open(self._guide) if self._guide else None,
        )

    def _refuse(self, where: str, error: InvalidInput) -> None:
        self.refused += 1
        self._on_refused(f"left out: {where}: {error}")
        if self.refused > self._config.max_refused:
            raise InvalidInput(
                f"{self.refused} prompts cannot be used, the last one, {where}: {error}",
                field="SOURCE",
                remedy="mend them, or raise --max-refused",
            )

    def _write(self, ended: Ended) -> None:
        prompt, where = self._waiting.pop(ended.job)
        if isinstance(ended.reason, CollabError):
            raise ended.reason
        answer, complete = tuple(ended.job.tokens), ended.reason is Finish.STOP
        self._writer.add(prompt, answer, ended=complete, source=where)
