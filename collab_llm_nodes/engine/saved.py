"""Sessions on disk: safetensors, checked against the model before anything is used."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.prompt import EncodedPrompt

FORMAT = "collab_llm session 1"


@dataclass(frozen=True)
class Fit:
    """The facts on which a saved session and an engine must agree.

    Attributes:
        model: fingerprint of the model.
        dtype: of keys and values.
        shape: (layers, 2 * kv_heads, head_dim).
        context: most columns.
        vocab_size: token ids are below it.
    """

    model: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    context: int
    vocab_size: int


@dataclass(frozen=True)
class SavedSession:
    """The trunk of a session.

    Attributes:
        keys_values: [layers, 2 * kv_heads, columns, head_dim], the keys' heads first.
        prompt: without pixels.
        image_features: of the prompt's images, None where there are none or all have been fed.
    """

    keys_values: Tensor
    prompt: EncodedPrompt
    image_features: Tensor | None

    def write(self, file: str | Path, fit: Fit) -> None:
        """Write the session to ``file``, which is replaced as a whole or not at all.

        Raises:
            InvalidInput: the file cannot be written.
        """
        found = {
            "keys_values": self.keys_values,
            "prompt_ids": torch.tensor(self.prompt.ids, dtype=torch.int64),
            "position_ids": self.prompt.position_ids,
            "image_grid_thw": self.prompt.image_grid_thw,
            "image_features": self.image_features,
        }
        tensors = {k: t.detach().cpu().contiguous() for k, t in found.items() if t is not None}
        facts = {
            "format": FORMAT,
            "model": fit.model,
            "dtype": str(fit.dtype),
            "position": str(self.keys_values.shape[2]),
            "position_delta": str(self.prompt.position_delta),
        }
        target = Path(file)
        try:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as place:
                whole = Path(place) / "session"
                save_file(tensors, whole, facts)
                os.replace(whole, target)
        except (OSError, SafetensorError) as error:
            raise InvalidInput(
                f"cannot write {target}: {error}", field="file", remedy="give a writable folder"
            ) from error

    @classmethod
    def read(cls, file: str | Path, fit: Fit) -> SavedSession:
        """Read a session and check it; nothing in the file is executed.

        Raises:
            InvalidInput: no such file, a damaged one, or contents that contradict each other.
            ModelError: it was saved with another model or another type of numbers.
        """
        try:
            with safe_open(Path(file), "pt") as content:
                facts = content.metadata() or {}
                _check_facts(facts, fit)
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            columns, delta = int(facts["position"]), int(facts["position_delta"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InvalidInput(
                f"{file} is not a readable session: {error}", field="file", remedy="save it again"
            ) from error
        _check_tensors(tensors, columns, fit)
        prompt = EncodedPrompt(
            tuple(tensors["prompt_ids"].tolist()),
            None,
            tensors.get("image_grid_thw"),
            tensors.get("position_ids"),
            delta,
        )
        return cls(tensors["keys_values"], prompt, tensors.get("image_features"))


def _check_facts(facts: dict[str, str], fit: Fit) -> None:
    if facts.get("format") != FORMAT:
        raise InvalidInput(
            f"its format is {facts.get('format')!r}, not {FORMAT!r}",
            field="file",
            remedy="give a file that save() has written",
        )
    for name, wanted in (("model", fit.model), ("dtype", str(fit.dtype))):
        if facts.get(name) != wanted:
            raise ModelError(
                f"the session was saved with {name} {facts.get(name)}, this is {wanted}",
                field="file",
                remedy="restore it with the model that saved it, or feed the prompt again",
            )


def _check_tensors(tensors: dict[str, Tensor], columns: int, fit: Fit) -> None:
    layers, heads, width = fit.shape
    held, ids = tensors.get("keys_values"), tensors.get("prompt_ids")
    if held is None or held.shape != (layers, heads, columns, width) or held.dtype != fit.dtype:
        _refuse(f"keys and values are not those of {columns} columns")
    if not columns <= fit.context:
        _refuse(f"{columns} columns, the model reads {fit.context}")
    if ids is None or ids.ndim != 1 or ids.dtype != torch.int64:
        _refuse("the prompt's ids are missing")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < fit.vocab_size:
        _refuse("a prompt id is outside the vocabulary")
    positions = tensors.get("position_ids")
    if positions is not None and positions.shape != (3, len(ids)):
        _refuse("there is not one position for each prompt id")


def _refuse(message: str) -> NoReturn:
    raise InvalidInput(message, field="file", remedy="save the session again")
