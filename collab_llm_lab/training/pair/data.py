"""A folder of a target's own answers: ``pair collect`` writes it, the trainings of a pair read it.

    data.json       the target, and how it was asked
    samples.jsonl   a prompt and its answer per line; lines are only ever appended
    pictures/       the prompts' pictures, each named by its SHA-256

A process may be killed at any point: a line counts once its line feed is written, after its
pictures. A tenth of the prompts, chosen by their hash, is held out from training.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from collab_llm_lab.training.run import locked
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import InvalidInput, translate_errors
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, model_folder
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.guides import AnswerConfig, guide_from

FACTS, SAMPLES, PICTURES = "data.json", "samples.jsonl", "pictures"
_HELD_OUT_OF = 10
"""One prompt of so many is held out."""


@dataclass(frozen=True)
class Target:
    """The model that answered.

    Attributes:
        path: as the user named it; for people.
        fingerprint: ``checkpoint_fingerprint`` of its files, the same in every precision.
        vocabulary: hash of its tokens.
        template: SHA-256 of its chat template.
    """

    path: str
    fingerprint: str
    vocabulary: str
    template: str

    @classmethod
    def of(cls, loaded: LoadedModel) -> Target:
        """Return the identity of a loaded model; reads its files once.

        Raises:
            ModelError: a file cannot be read.
        """
        template = json.dumps(loaded.tokenizer.chat_template)
        return cls(
            loaded.config.path,
            checkpoint_fingerprint(model_folder(loaded.config, offline=True)),
            loaded.vocabulary,
            hashlib.sha256(template.encode()).hexdigest(),
        )


@dataclass(frozen=True)
class Facts:
    """Facts that are the same for all answers of a folder.

    Attributes:
        temperature: of the answers; 0 is greedy.
        max_tokens: longest answer; longer ones are cut.
        seed: of the answers.
        guide, guide_source: limit on their text, as ``AnswerConfig`` names it.
    """

    target: Target
    temperature: float
    max_tokens: int
    seed: int
    guide: str = "none"
    guide_source: str = ""

    @property
    def limit(self) -> Guide | None:
        """The guide; None: any text.

        Raises:
            ConfigError, InvalidInput: there is no such guide, or its source cannot be used.
        """
        return guide_from(AnswerConfig(self.guide, self.guide_source), order=True)


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer.

    Attributes:
        text, turns, raw: as in ``Prompt``.
        images: names of files in ``pictures``.
        answer: token ids, the end token included; at least one.
        ended: the target ended the answer; else it was cut at ``Facts.max_tokens``.
        source: where the prompt is from; for people.
    """

    text: str
    turns: tuple[Turn, ...]
    raw: bool
    images: tuple[str, ...]
    answer: tuple[int, ...]
    ended: bool
    source: str

    @cached_property
    def key(self) -> str:
        """SHA-256 of the prompt, in hexadecimal."""
        turns = [[turn.role, turn.content] for turn in self.turns]
        prompt = json.dumps([self.text, turns, self.raw, self.images])
        return hashlib.sha256(prompt.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """True if nothing may be trained on this sample."""
        return int(self.key[:8], 16) % _HELD_OUT_OF == 0


@dataclass(frozen=True)
class Data:
    """A folder that was read."""

    folder: Path
    facts: Facts
    samples: tuple[Sample, ...]

    @property
    def identity(self) -> str:
        """The number of answers, and a hash of them and of their prompts."""
        content = json.dumps([[sample.key, sample.answer] for sample in self.samples])
        digest = hashlib.sha256(content.encode()).hexdigest()
        return f"{len(self.samples)} answers ({digest[:12]})"

    def parts(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples to train on, and the held-out ones; neither is empty.

        Raises:
            InvalidInput: one is; the folder holds too few answers.
        """
        train = [sample for sample in self.samples if not sample.held_out]
        held_out = [sample for sample in self.samples if sample.held_out]
        if not train or not held_out:
            raise InvalidInput(
                f"{self.folder} holds {len(train)} answers to learn and {len(held_out)} held out",
                field="--data",
                remedy="collect more answers",
            )
        return train, held_out

    def check_target(self, target: Target) -> None:
        """Refuse the answers of another target.

        Raises:
            InvalidInput: its weights, its tokens or its chat template differ.
        """
        _check_target(self.folder, self.facts.target, target, "--data")

    def check_weights(self, target: ModelConfig) -> None:
        """Refuse the answers of a target with other weights, by its files alone.

        Raises:
            InvalidInput: as :meth:`check_target`.
            ModelError: a file cannot be read.
        """
        known = self.facts.target
        weights = checkpoint_fingerprint(model_folder(target))
        found = replace(known, path=target.path, fingerprint=weights)
        _check_target(self.folder, known, found, "--data")

    def prompt(self, sample: Sample) -> Prompt:
        """Return the prompt of ``sample`` with its pictures.

        Raises:
            InvalidInput: a picture is missing or damaged.
        """
        images = tuple(self._picture(name) for name in sample.images)
        return Prompt(sample.text, images, turns=sample.turns, raw=sample.raw)

    def _picture(self, name: str) -> bytes:
        file = self.folder / PICTURES / Path(name).name
        with translate_errors(
            InvalidInput,
            f"cannot read {file}",
            field="--data",
            remedy="restore the file, or collect the answers again",
        ):
            content = file.read_bytes()
            if _picture_name(content) != name:
                raise ValueError("its content is not what its name says")
        return content


def read_data(folder: Path) -> Data:
    """Read a folder of answers; a last line without line feed is one that a kill cut off.

    Raises:
        InvalidInput: it is no such folder, holds no answer, or a line is damaged.
    """
    facts = _read_facts(folder)
    if facts is None:
        raise InvalidInput(
            f"{folder} holds no {FACTS}",
            field="--data",
            remedy="name a folder that collab-llm pair collect has written",
        )
    samples = tuple(_read_samples(folder / SAMPLES))
    if not samples:
        raise InvalidInput(
            f"{folder} holds no answers",
            field="--data",
            remedy="collect some: collab-llm pair collect",
        )
    return Data(folder, facts, samples)


class DataWriter:
    """Appends answers to a folder that it holds, see ``writing``."""

    def __init__(self, folder: Path, keys: set[str]) -> None:
        self._folder = folder
        self._keys = keys
        self._file = (folder / SAMPLES).open("a", encoding="utf-8")

    def __contains__(self, prompt: Prompt) -> bool:
        """Return True if the folder holds an answer to ``prompt``."""
        return key_of(prompt) in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, prompt: Prompt, answer: tuple[int, ...], *, ended: bool, source: str) -> None:
        """Append an answer; a prompt that is known is left out."""
        sample = _sample(prompt, answer, ended, source)
        if sample.key in self._keys:
            return
        for name, content in zip(sample.images, prompt.images, strict=True):
            _write_once(self._folder / PICTURES / name, content)
        self._file.write(json.dumps(asdict(sample)) + "\n")
        self._file.flush()
        self._keys.add(sample.key)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def writing(folder: Path, facts: Facts) -> Iterator[DataWriter]:
    """Hold ``folder`` and yield its writer; earlier answers stay.

    Raises:
        ConfigError: the folder cannot be written, or another process holds it.
        InvalidInput: it holds answers of another target, or to another temperature, seed or length;
            or it is damaged.
    """
    with locked(folder):
        known = _read_facts(folder)
        if known is None:
            text = json.dumps(asdict(facts), indent=1) + "\n"
            _write_once(folder / FACTS, text.encode())
        else:
            _check_target(folder, known.target, facts.target, "--out")
            _check_asked(folder, known, facts)
        (folder / PICTURES).mkdir(exist_ok=True)
        file = folder / SAMPLES
        keys = {sample.key for sample in _read_samples(file)}
        _drop_torn_line(file)
        writer = DataWriter(folder, keys)
        try:
            yield writer
        finally:
            writer.close()


def key_of(prompt: Prompt) -> str:
    """Return the ``Sample.key`` of ``prompt``."""
    return _sample(prompt).key


def _sample(
    prompt: Prompt, answer: tuple[int, ...] = (), ended: bool = False, source: str = ""
) -> Sample:
    names = tuple(_picture_name(content) for content in prompt.images)
    return Sample(prompt.text, prompt.turns, prompt.raw, names, answer, ended, source)


def _picture_name(content: bytes) -> str:
    suffix = ".png" if content.startswith(b"\x89PNG") else ".jpg"
    return hashlib.sha256(content).hexdigest() + suffix


def _write_once(file: Path, content: bytes) -> None:
    """Write a file that is there as a whole, or not at all."""
    if not file.exists():
        building = file.with_name(f"{file.name}.part")
        building.write_bytes(content)
        os.replace(building, file)


def _read_facts(folder: Path) -> Facts | None:
    """Return the facts of a folder; None if it has none yet."""
    file = folder / FACTS
    if not file.exists():
        return None
    with _damaged(f"cannot read {file}"):
        return from_mapping(Facts, json.loads(file.read_text(encoding="utf-8")))


def _read_samples(file: Path) -> Iterator[Sample]:
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            with _damaged(f"{file} is damaged in line {number}"):
                yield _read_sample(json.loads(line))


def _read_sample(content: Any) -> Sample:
    sample = from_mapping(Sample, content)
    if not sample.answer or min(sample.answer) < 0:
        raise ValueError(f"no answer: {sample.answer[:3]}")
    return sample


def _damaged(message: str) -> AbstractContextManager[None]:
    return translate_errors(
        InvalidInput,
        message,
        field="--data",
        remedy="delete the line or the folder, and collect again",
    )


def _drop_torn_line(file: Path) -> None:
    """Remove what a kill has left after the last line feed."""
    if file.exists():
        with file.open("r+b") as opened:
            end = 0
            for line in opened:
                end += len(line) if line.endswith(b"\n") else 0
            opened.truncate(end)


def _check_target(folder: Path, known: Target, found: Target, field: str) -> None:
    for name, what in (
        ("fingerprint", "other weights"),
        ("vocabulary", "another vocabulary"),
        ("template", "another chat template"),
    ):
        if getattr(known, name) != getattr(found, name):
            raise InvalidInput(
                f"{folder} holds answers of {known.path}; {found.path} has {what}",
                field=field,
                remedy="name the target that answered, or another folder",
            )


def _check_asked(folder: Path, known: Facts, facts: Facts) -> None:
    for name in ("temperature", "max_tokens", "seed", "guide", "guide_source"):
        was, now = getattr(known, name), getattr(facts, name)
        if was != now:
            raise InvalidInput(
                f"{folder} was begun with {was!r}, not {now!r}",
                field=f"--{name.replace('_', '-')}",
                remedy=f"give {was!r} to go on, or name another --out",
            )
