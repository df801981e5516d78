"""The target's own answers to prompts of one sub-domain, as rows to distil a draft on."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from collab_llm_lab.training.loop import Stop
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_lab.training.text.checker import check
from collab_llm_lab.training.text.models import answers
from collab_llm_lab.training.text.plans import Answers
from collab_llm_lab.training.text.rendering import (
    ANSWERED,
    ASKED,
    NOWHERE,
    Renderer,
    pack,
    prompt_text,
    raw_text,
)
from collab_llm_lab.training.text.samples import Sample, draw_sample
from collab_llm_lab.training.text.shards import write_rows
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ModelError

MIX = (("plain", 0.76), ("document", 0.06), ("extract", 0.06), ("outline", 0.06), ("point", 0.06))
"""Skills of the prompts."""
RAW_PROMPTS = 0.5
"""Share of the plain prompts that are the beginning of raw text, not a chat."""
TEMPERATURE = 0.7
"""Sampling temperature of every second unit; the others are greedy."""
_AT_ONCE = 128
"""Prompts made by one task of the pool."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A prompt as token ids; ``sample`` is None for raw text, which cannot be checked."""

    ids: tuple[int, ...]
    sample: Sample | None


def questions(
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    sub_domain: str,
    count: int,
    most_tokens: int,
    *,
    raw_share: float,
    held_out: bool = False,
    skills: Sequence[tuple[str, float]] = MIX,
) -> list[Question]:
    """Return ``count`` prompts of one sub-domain.

    Args:
        most_tokens: longer prompts are left out.
        raw_share: share of the plain prompts that are the beginning of raw text, not a chat.
        held_out: use the part of the grammar that is not trained on.
        skills: the skills of the prompts, with their shares.
    """
    renderer = Renderer(tokenizer)
    mix = {(sub_domain, skill): share for skill, share in skills}
    found: list[Question] = []
    while len(found) < count:
        samples = [draw_sample(rng, held_out=held_out, mix=mix) for _ in range(_AT_ONCE)]
        texts, checked = [], []
        for sample in samples:
            raw = sample.skill == "plain" and rng.random() < raw_share
            texts.append(beginning(sample, rng) if raw else prompt_text(sample.turns[:-1]))
            checked.append(None if raw else sample)
        encoded = zip(renderer.encode(texts), checked, strict=True)
        found += [Question(tuple(ids), s) for ids, s in encoded if len(ids) <= most_tokens]
    return found[:count]


def beginning(sample: Sample, rng: random.Random) -> str:
    """Return the first 15 to 50 % of a sample's raw text, cut after a word."""
    words = raw_text(sample).split(" ")
    return " ".join(words[: max(4, int(len(words) * rng.uniform(0.15, 0.5)))])


@cache
def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    os.environ["RAYON_NUM_THREADS"] = "1"
    read: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    return read


def _ask(folder: str, seed: str, sub_domain: str, count: int, most: int) -> list[Question]:
    rng = random.Random(seed)
    return questions(_tokenizer(folder), rng, sub_domain, count, most, raw_share=RAW_PROMPTS)


def _judge(asked: list[Question], answers: list[str]) -> list[bool]:
    """Return which answers the grammar's checker accepts."""
    return [
        question.sample is None or not check(question.sample, answer)
        for question, answer in zip(asked, answers, strict=True)
    ]


class Teacher:
    """Answers units of prompts and writes the right answers as rows.

    Args:
        engine: the target.
        tokenizer: folder of its tokenizer.
        length: tokens of a row.
        processes: number of processes that make prompts and check answers.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Path,
        plan: Answers,
        length: int,
        seed: int,
        processes: int,
    ) -> None:
        self._engine, self._plan, self._length, self._seed = engine, plan, length, seed
        self._folder = str(tokenizer)
        self._renderer = Renderer(_tokenizer(self._folder))
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context)

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(
        self,
        folder: Path,
        sub_domain: str,
        report: Callable[[int, int, dict[str, float]], None],
        stop: Stop,
    ) -> bool:
        """Write the missing units to ``folder``; return False if ``stop`` ended the call.

        Raises:
            ModelError: hardly any answer was right, so there is nothing to learn from.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"unit-{unit:03d}.npy" for unit in range(self._plan.units)]
        asked = {
            unit: self._asked(sub_domain, unit)
            for unit, file in enumerate(files)
            if not file.exists()
        }
        for unit, parts in asked.items():
            if stop():
                return False
            prompts = [question for part in parts for question in part.result()]
            share = self._answer(prompts, unit, files[unit])
            report(unit + 1, self._plan.units, {"right": share})
        return True

    def _asked(self, sub_domain: str, unit: int) -> list[Future[list[Question]]]:
        left, parts = self._plan.prompts, []
        while left:
            seed = f"ask {self._seed} {sub_domain} {unit} {left}"
            count = min(left, _AT_ONCE)
            most = self._plan.prompt_tokens
            parts.append(self._submit(_ask, self._folder, seed, sub_domain, count, most))
            left -= count
        return parts

    def _submit(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        with processes_ignoring_sigint():  # the pool starts its processes when it has work for them
            return self._pool.submit(work, *args, **named)

    def _answer(self, asked: list[Question], unit: int, file: Path) -> float:
        """Answer one unit and write the rows of its right answers; return their share."""
        temperature = TEMPERATURE if unit % 2 else 0.0
        law = SamplingConfig(temperature=temperature, seed=self._seed + unit * len(asked))
        said = answers(self._engine, [question.ids for question in asked], self._plan.most, law)
        tokenizer = _tokenizer(self._folder)
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        judged = []
        for first in range(0, len(asked), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            judged.append(self._submit(_judge, asked[part], texts[part]))
        verdicts = [verdict for part in judged for verdict in part.result()]
        documents = []
        for question, answer, good in zip(asked, said, verdicts, strict=True):
            if good and answer:
                ids = np.array([*question.ids, *answer], np.uint16)
                kinds = np.full(len(ids), ANSWERED, np.uint8)
                if question.sample is not None:  # raw text is learnt from its beginning on
                    kinds[: len(question.ids)] = ASKED
                documents.append((ids, kinds, np.full(len(ids), NOWHERE, np.int16)))
        if not documents:
            raise ModelError(
                f"not one of {len(asked)} answers of the target was right",
                field="target",
                remedy="train the target longer",
            )
        total = sum(len(ids) for ids, *_ in documents)
        rows = pack(documents, self._length, -(-total // self._length), self._renderer.text_end)
        write_rows(file, *rows)
        return len(documents) / len(asked)
