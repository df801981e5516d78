"""Training rows that processes make from seeds, while the training already uses the first."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from collab_llm_lab.training.loop import Stop
from collab_llm_lab.training.stopping import processes_ignoring_sigint
from collab_llm_lab.training.text.rendering import WEIGHTS, Document, Renderer, pack
from collab_llm_lab.training.text.samples import DEFAULT_MIX, SUB_DOMAINS, Sample, draw_sample
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput

LENGTH = 1024
"""Tokens of a row."""
RAW_SHARE = 0.25
"""Plain samples that are written as raw text, without turns."""
SKILL_EVERY = 4
"""Every fourth shard is of ``SKILL_MIX``: reading a passage is hardest for models this small."""
SKILL_MIX = {
    (sub_domain, skill): share
    for sub_domain in SUB_DOMAINS
    for skill, share in (
        ("extract", 0.50),
        ("recall", 0.10),
        ("document", 0.12),
        ("copy", 0.12),
        ("plain", 0.08),
        ("outline", 0.04),
        ("point", 0.04),
    )
}
SHORT_MIX = {
    (sub_domain, skill): share / 3
    for sub_domain in SUB_DOMAINS
    for skill, share in (
        ("copy", 0.24),
        ("recall", 0.34),
        ("extract", 0.24),
        ("document", 0.06),
        ("plain", 0.12),
    )
}
"""Mix of rows that are shorter than ``LENGTH``; documents that do not fit into one are left out."""
_AT_ONCE = 64
"""Samples encoded by one call."""


@dataclass(frozen=True)
class Corpus:
    """Shards 0 to ``shards - 1`` in ``folder``; shard ``k`` follows from ``(seed, k)`` alone."""

    folder: str
    shards: int
    rows: int = 256
    """Rows of a shard."""
    seed: int = 0
    length: int = LENGTH
    short: bool = False
    """Made of ``SHORT_MIX``."""

    def file(self, shard: int) -> Path:
        return Path(self.folder) / f"shard-{shard:05d}.npy"

    def ready(self) -> list[int]:
        """Return the shards that are made, in order."""
        return [k for k in range(self.shards) if self.file(k).exists()]


def is_skill_shard(shard: int) -> bool:
    """Return True for a shard of ``SKILL_MIX``."""
    return shard % SKILL_EVERY == SKILL_EVERY - 1


def documents(
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    mix: Mapping[tuple[str, str], float],
    held_out: bool = False,
) -> Iterator[Document]:
    """Yield endless samples; a share of the plain ones is raw text."""
    renderer = Renderer(tokenizer)
    while True:
        chats: list[Sample] = []
        raw: list[Sample] = []
        for _ in range(_AT_ONCE):
            sample = draw_sample(rng, held_out=held_out, mix=mix)
            plain = sample.skill == "plain" and rng.random() < RAW_SHARE
            (raw if plain else chats).append(sample)
        found = [*renderer.chats(chats), *renderer.raw(raw)]
        rng.shuffle(found)
        yield from found


def make_shard(tokenizer: PreTrainedTokenizerBase, corpus: Corpus, shard: int) -> None:
    """Write one shard by ``write_rows``."""
    mix = SKILL_MIX if is_skill_shard(shard) else DEFAULT_MIX
    name = f"text {corpus.seed} False {shard}"  # False: not held out
    if corpus.short:
        mix, name = SHORT_MIX, f"{name} {corpus.length}"
    rng = random.Random(name)
    renderer = Renderer(tokenizer)
    source = documents(tokenizer, rng, mix)
    rows = pack(source, corpus.length, corpus.rows, renderer.text_end)
    write_rows(corpus.file(shard), *rows)


def write_rows(file: Path, ids: np.ndarray, kinds: np.ndarray, sources: np.ndarray) -> None:
    """Write the result of ``pack`` to one file, int16 [3, rows, length]; atomically."""
    building = file.with_suffix(f".{os.getpid()}.part")
    with building.open("wb") as stream:
        np.save(stream, np.stack([plane.astype(np.int16) for plane in (ids, kinds, sources)]))
    os.replace(building, file)


def _make_shards(tokenizer: str, corpus: Corpus, first: int, every: int) -> None:
    """Make every ``every``-th shard that is missing; the target of a process."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    read = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for shard in range(first, corpus.shards, every):
        if not corpus.file(shard).exists():
            make_shard(read, corpus, shard)


class Makers:
    """Processes that make a corpus; the context ends them.

    Args:
        tokenizer: its folder.
        processes: number of them; 0 makes nothing.
    """

    def __init__(self, tokenizer: Path, corpus: Corpus, processes: int) -> None:
        Path(corpus.folder).mkdir(parents=True, exist_ok=True)
        self.corpus = corpus
        missing = corpus.shards - len(corpus.ready())
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_make_shards,
                args=(str(tokenizer), corpus, number, processes),
                daemon=True,
            )
            for number in range(processes if missing else 0)
        ]

    def __enter__(self) -> Makers:
        with processes_ignoring_sigint():
            for process in self._processes:
                process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for left in Path(self.corpus.folder).glob("*.part"):
            left.unlink()

    def check(self) -> None:
        """Raise ``CollabError`` if a process has ended with an error, which it printed."""
        for process in self._processes:
            if process.exitcode:
                raise CollabError(
                    f"a process that makes training data ended with {process.exitcode}",
                    field="data",
                    remedy="its error is printed above",
                )

    def wait(self, shards: int, report: Callable[[int, int], None], stop: Stop) -> bool:
        """Wait until the first ``shards`` are there; return False if ``stop`` ended the wait.

        Raises:
            CollabError: a process failed, or all ended without making them.
        """
        while True:
            if stop():  # first: the signal behind it may have ended the processes, too
                return False
            self.check()
            working = [process for process in self._processes if process.is_alive()]
            made = sum(self.corpus.file(k).exists() for k in range(shards))
            report(made, shards)
            if made == shards:
                return True
            if not working:
                raise CollabError(
                    f"{made} of {shards} shards, and no process makes more",
                    field="shards",
                    remedy="see their errors above, then run the same command again",
                )
            working[0].join(0.5)


IDS, SOURCES = range(2)
"""Planes of a batch of ``Rows``."""


class Rows:
    """Rows of shards, held on a device; batches follow from seed, step and the rows held."""

    def __init__(self, length: int, seed: int, device: torch.device) -> None:
        self.length = length
        self.seed = seed
        self._device = device
        self._files: set[Path] = set()
        # Ids, classes, sources; torch has few operations for uint16, ids are far below 32,768.
        self._rows = torch.empty(3, 0, length, dtype=torch.int16, device=device)
        self._weights = torch.from_numpy(WEIGHTS).to(device)

    def __len__(self) -> int:
        return self._rows.shape[1]

    def add(self, files: Iterable[Path]) -> None:
        """Read the ``files`` that are not held yet.

        Raises:
            ConfigError: rows of another length.
            InvalidInput: a file is damaged.
        """
        new = sorted(set(files) - self._files)
        if not new:
            return
        held = [self._rows]
        for file in new:
            try:
                rows = np.load(file)
            except (OSError, ValueError, EOFError) as error:
                raise InvalidInput(
                    f"cannot read the training rows in {file}",
                    field="--out",
                    remedy="delete it: it is made again, or the stage goes on without it",
                ) from error
            if rows.shape[-1] != self.length:
                raise ConfigError(
                    f"rows of {rows.shape[-1]} tokens in {file}, not {self.length}",
                    field="length",
                    remedy="use another folder for another plan",
                )
            held.append(torch.from_numpy(rows).to(self._device))
        self._rows = torch.cat(held, dim=1)
        self._files.update(new)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return a batch that is drawn for ``step``.

        Returns:
            int64 [size, 2, length], ids and sources, and loss weights float32 [size, length].
        """
        rng = np.random.default_rng((self.seed, step))
        drawn = torch.from_numpy(rng.integers(0, len(self), size)).to(self._device)
        ids, kinds, sources = self._rows[:, drawn].long()
        return torch.stack([ids, sources], dim=1), self._weights[kinds]


def draw_documents(
    tokenizer: PreTrainedTokenizerBase,
    seed: str,
    mix: Mapping[tuple[str, str], float],
    count: int,
    held_out: bool,
) -> list[Document]:
    """Return ``count`` documents drawn from ``seed``."""
    return list(islice(documents(tokenizer, random.Random(seed), mix, held_out), count))
