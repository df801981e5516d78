"""Sessions on disk: safetensors, checked against the model before anything is used."""

from __future__ import annotations

import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt, check_encoded

FORMAT = "collab_llm session 2"


@dataclass(frozen=True)
class Fit:
    """The facts on which a saved session and an engine must agree.

    Attributes:
        model: fingerprint of the model.
        dtype: of keys and values.
        shape: (layers, 2 * kv_heads, head_dim).
        width: columns of a row of image features.
        context: most columns.
        vocab_size: token ids are below it.
        loaded: the model itself, against which prompts are checked.
    """

    model: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    width: int
    context: int
    vocab_size: int
    loaded: LoadedModel


@dataclass(frozen=True)
class SavedSession:
    """The trunk of a session.

    Attributes:
        keys_values: [layers, 2 * kv_heads, columns, head_dim], the keys' heads first.
        prompt: without pixels.
        image_features: [placeholder ids of the prompt, width]; None without images.
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
            "checksum": checksum_of(tensors),
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
            if facts["checksum"] != checksum_of(tensors):
                raise ValueError("its numbers are not those that were saved")
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
        check_encoded(prompt, fit.loaded, "file")
        features = tensors.get("image_features")
        _check_features(features, prompt, fit)
        return cls(tensors["keys_values"], prompt, features)


def checksum_of(tensors: dict[str, Tensor]) -> str:
    """Return a CRC-32 of all tensors: disks flip bits, and a wrong key still looks like a key."""
    found = 0
    for name in sorted(tensors):
        numbers = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
        found = zlib.crc32(numbers, zlib.crc32(name.encode(), found))
    return f"{found:08x}"


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
    if not _finite(held):
        _refuse("keys and values are not finite")
    if not columns <= fit.context:
        _refuse(f"{columns} columns, the model reads {fit.context}")
    if ids is None or ids.ndim != 1 or ids.dtype != torch.int64:
        _refuse("the prompt's ids are missing")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < fit.vocab_size:
        _refuse("a prompt id is outside the vocabulary")


def _check_features(features: Tensor | None, prompt: EncodedPrompt, fit: Fit) -> None:
    """Refuse features that are not those of the (checked) prompt's images."""
    if prompt.image_grid_thw is None:
        if features is not None:
            _refuse("image features without images")
        return
    count = prompt.ids.count(fit.loaded.model.config.image_token_id)
    if features is None or features.shape != (count, fit.width) or features.dtype != fit.dtype:
        _refuse(f"image_features is not {fit.dtype} [{count}, {fit.width}]")
    if not _finite(features):
        _refuse("image features are not finite")


def _finite(tensor: Tensor) -> bool:
    """Return False if a number is infinite or none at all; in one reading, without a mask."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


def _refuse(message: str) -> NoReturn:
    raise InvalidInput(message, field="file", remedy="save the session again")
