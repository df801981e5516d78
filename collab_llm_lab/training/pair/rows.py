"""Prompts with their answers, as batches for the forward pass of transformers' own classes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from collab_llm_lab.training.pair.collecting import LIMITS
from collab_llm_lab.training.pair.data import Data, Sample
from collab_llm_nodes.engine.eager import on_device
from collab_llm_nodes.models.architectures import context_length
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt, encode

_SORTED = 8
"""Batches whose rows are sorted by length together, so that little is padding."""


@dataclass(frozen=True)
class Row:
    """A prompt as one model reads it, and the answer's token ids."""

    prompt: EncodedPrompt
    answer: tuple[int, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """Tokens that a model reads to say each token of the answer."""
        return (*self.prompt.ids, *self.answer[:-1])

    def cut(self, tokens: int) -> Row:
        """Return the row with the first ``tokens`` tokens of its answer."""
        return Row(self.prompt, self.answer[:tokens])


def encode_row(data: Data, sample: Sample, loaded: LoadedModel) -> Row:
    """Encode a sample for ``loaded``.

    The answer is cut where the model's context ends, and after a token that stands for pictures.

    Raises:
        InvalidInput: the prompt cannot be encoded, or a picture cannot be read.
    """
    prompt = encode(data.prompt(sample), loaded, LIMITS)
    room = context_length(loaded.model.config.get_text_config()) - len(prompt.ids) + 1
    answer = sample.answer[:room]
    placeholder = getattr(loaded.model.config, "image_token_id", None)
    if placeholder in answer:  # read, it would ask for the features of a picture
        answer = answer[: answer.index(placeholder) + 1]
    return Row(prompt, answer)


@dataclass(frozen=True)
class Batch:
    """Rows side by side; all answers begin in the same column.

    Attributes:
        inputs: arguments of the model's forward passes: one for all rows, or one for each.
        answers: int64 [rows, A], the longest answer's length; -1 where a row has none.
    """

    inputs: Sequence[Mapping[str, Any]]
    answers: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """Pad rows on both sides; those with pictures that a model reads itself stay alone."""
        longest = max(len(row.answer) for row in rows)
        answers = torch.full((len(rows), longest), -1)
        for i, row in enumerate(rows):
            answers[i, : len(row.answer)] = torch.tensor(row.answer)
        alone = any(row.prompt.processed is not None for row in rows)
        return cls([_inputs([row]) for row in rows] if alone else [_inputs(rows)], answers)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``."""
        return Batch([on_device(each, device) for each in self.inputs], self.answers.to(device))

    @property
    def said(self) -> Tensor:
        """Places of the answers' tokens, bool [rows, A]."""
        return self.answers >= 0

    def logits(self, model: Any, vocabulary: int) -> Tensor:
        """Return the logits of the answers' tokens, float32 [tokens, vocabulary].

        Args:
            vocabulary: tokens of the model; its further rows are padding.
        """
        found = []
        for inputs, said in zip(self.inputs, self.said.chunk(len(self.inputs)), strict=True):
            columns = int(said.sum(1).max())
            logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits
            found.append(logits[said[:, :columns]][:, :vocabulary].float())
        return torch.cat(found)


def _inputs(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the arguments of a forward pass over rows."""
    before = max(len(row.prompt.ids) for row in rows)
    columns = before + max(len(row.answer) for row in rows) - 1
    ids = torch.zeros(len(rows), columns, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        first = before - len(row.prompt.ids)
        place = slice(first, first + len(row.fed))
        ids[i, place] = torch.tensor(row.fed)
        real[i, place] = 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": real}
    processed = rows[0].prompt.processed
    if processed is not None:  # the model has a rule of its own for positions
        return {**_lengthened(processed, before, columns), **inputs}
    inputs["position_ids"] = _positions(rows, real)
    pictures = [row.prompt for row in rows if row.prompt.pixel_values is not None]
    if pictures:
        for name in ("pixel_values", "image_grid_thw"):
            inputs[name] = torch.cat([getattr(prompt, name) for prompt in pictures])
    return inputs


def _lengthened(processed: Mapping[str, Any], before: int, columns: int) -> dict[str, Any]:
    """Return what a processor made of a prompt, with zeros for the answer's tokens."""
    return {
        name: F.pad(value, (0, columns - before)) if _by_token(value, before) else value
        for name, value in processed.items()
    }


def _by_token(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (1, count)


def _positions(rows: Sequence[Row], real: Tensor) -> Tensor:
    """Return positions [rows, columns], or M-RoPE's [3, rows, columns]; those of padding are 0."""
    if rows[0].prompt.position_ids is None:
        return (real.cumsum(1) - 1).clamp(min=0)
    found = torch.zeros(3, *real.shape, dtype=torch.int64)
    for i, row in enumerate(rows):
        own = row.prompt.positions(0, len(row.fed))
        found[:, i, real[i].bool()] = torch.as_tensor(own)
    return found


def choose_batch(lengths: Sequence[int], size: int, step: int, seed: int) -> list[int]:
    """Return the numbers of the rows of batch ``step``: shuffled anew for each pass over the rows.

    Args:
        lengths: of all rows; rows of similar length stand in one batch.
    """
    size = min(size, len(lengths))
    per_epoch = len(lengths) // size
    epoch, place = divmod(step, per_epoch)
    rng = random.Random(f"{seed} {epoch}")
    order = rng.sample(range(len(lengths)), per_epoch * size)
    pool = _SORTED * size
    parts = []
    for first in range(0, len(order), pool):
        alike = sorted(order[first : first + pool], key=lambda number: lengths[number])
        parts += [alike[i : i + size] for i in range(0, len(alike), size)]
    rng.shuffle(parts)
    return parts[place]
