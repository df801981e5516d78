"""Medusa heads (paper 004): the tokens after the next one, guessed from one hidden state."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.architectures import DecoderParts
from collab_llm_nodes.models.trained import (
    holds_trained,
    read_trained,
    trained_files,
    write_trained,
)

NAME = "medusa"
"""Name of the files that ``save`` writes."""
PUBLISHED = "medusa_lm_head"
"""Name of the file in which others publish heads (FasterDecoding/Medusa)."""
HEADS = 5
"""Heads of paper 004 (its section on decoding speed-ups)."""


class MedusaHeads(nn.Module):
    """A residual block ``SiLU(W x + b) + x`` per head, then the model's LM head or one of its own.

    Ours have no ``b`` and use the model's LM head; published ones have both. ``x`` is the input of
    the LM head: the last layer's output after the final norm. Head ``i`` guesses the token
    ``i + 2`` places after the one that was read, since the model itself says the next. ``W``
    begins at zero: an untrained head predicts the model's token.

    Args:
        hidden_size: width of the model.
        heads: tokens guessed beyond the next one.
        fingerprint: ``head_fingerprint`` of the model that they were trained with.
    """

    def __init__(self, hidden_size: int, heads: int = HEADS, fingerprint: str = "") -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.heads = heads
        self.fingerprint = fingerprint
        self.weight = nn.Parameter(torch.zeros(heads, hidden_size, hidden_size))
        self.bias: nn.Parameter | None = None
        self.own: nn.Parameter | None = None  # LM heads, [heads, V, hidden_size]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., heads, hidden_size] of ``hidden`` [..., hidden_size]."""
        mapped = torch.einsum("...d,hed->...he", hidden, self.weight.to(hidden.dtype))
        if self.bias is not None:
            mapped = mapped + self.bias.to(hidden.dtype)
        return F.silu(mapped) + hidden[..., None, :]

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [..., heads, V] for ``hidden`` after the final norm.

        Args:
            head: the model's LM head, for heads that have none of their own.
        """
        states = self(hidden)
        if self.own is None:
            return head(states)
        return torch.einsum("...hd,hvd->...hv", states, self.own.to(states.dtype))

    @torch.no_grad()
    def draft(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """Return each head's best token, int64 [..., heads]; arguments as of ``logits``."""
        return self.logits(hidden, head).argmax(-1)

    def save(self, folder: str | Path) -> None:
        """Write ``medusa.safetensors`` (float16) and its JSON to the subfolder of ``folder``."""
        facts = {
            "hidden_size": self.hidden_size,
            "heads": self.heads,
            "fingerprint": self.fingerprint,
        }
        write_trained(folder, NAME, self, facts, torch.float16)

    @classmethod
    def load(cls, folder: str | Path, parts: DecoderParts) -> MedusaHeads:
        """Read heads for the model that ``parts`` belongs to.

        Ours are float32. Published ones get the type of the LM head. They have no fingerprint:
        those of another model with the same sizes guess badly, and the answers stay right.

        Raises:
            ModelError: files absent or unreadable, or heads of another model.
        """
        if (published := _published(Path(folder))) is not None:
            return _read_published(published, parts)
        return read_trained(
            folder,
            NAME,
            lambda facts: cls(facts["hidden_size"], facts["heads"], facts["fingerprint"]),
            parts.hidden_size,
            kind="Medusa heads",
            field="heads",
            fingerprint=head_fingerprint(parts),
        )


def head_fingerprint(parts: DecoderParts) -> str:
    """Return the SHA-256 of the final norm and the LM head, which Medusa heads share with a model.

    It is taken of bfloat16 values, so a float16 checkpoint has one fingerprint in every precision.
    """
    found = hashlib.sha256()
    for value in (*parts.norm.state_dict().values(), parts.head.weight):
        rounded = value.detach().to("cpu", torch.bfloat16).contiguous()
        found.update(rounded.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def holds_heads(folder: Path) -> bool:
    """Return True if ``folder`` holds heads that can be read, ours or published ones.

    Raises:
        ModelError: ours are not in the subfolder.
    """
    return holds_trained(folder, NAME, "heads") or (folder / f"{PUBLISHED}.safetensors").is_file()


def count_heads(folder: Path) -> int:
    """Return the number of heads that ``folder`` holds; no weight is read.

    Raises:
        ModelError: their description cannot be read.
    """
    with translate_errors(
        ModelError,
        f"cannot read the Medusa heads in {folder}",
        field="heads",
        remedy="export the heads again, or do without them",
    ):
        if (published := _published(folder)) is not None:
            # Not config.json, which names 2 of the 5 heads of medusa-vicuna-7b-v1.3.
            return _count_published(_shapes(published))
        return int(json.loads(trained_files(folder, NAME)[1].read_text("utf-8"))["heads"])


def count_head_weights(folder: Path) -> int:
    """Return the number of weights of all heads in ``folder``; only the file's header is read.

    Raises:
        ModelError: it cannot be read.
    """
    file = _published(folder) or trained_files(folder, NAME)[0]
    with translate_errors(
        ModelError, f"cannot read {file}", field="heads", remedy="do without the heads"
    ):
        return sum(map(math.prod, _shapes(file).values()))


def _shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def _count_published(names: Iterable[str]) -> int:
    return 1 + max(int(name.split(".")[0]) for name in names)


def _published(folder: Path) -> Path | None:
    """Return the file of published heads in ``folder``; None where it holds ours, or none.

    Raises:
        ModelError: they are pickled.
    """
    file = folder / f"{PUBLISHED}.safetensors"
    if trained_files(folder, NAME)[1].is_file():
        return None
    if file.is_file():
        return file
    if (folder / f"{PUBLISHED}.pt").is_file():
        raise ModelError(
            f"{folder / PUBLISHED}.pt is pickled, which may run code when it is read",
            field="heads",
            remedy='convert it there: python -c "import torch; from safetensors.torch import'
            f" save_file as s; w = torch.load('{PUBLISHED}.pt', 'cpu', weights_only=True);"
            f" s({{k: v.clone() for k, v in w.items()}}, '{PUBLISHED}.safetensors')\"",
        )
    return None


def _read_published(file: Path, parts: DecoderParts) -> MedusaHeads:
    """Read heads in FasterDecoding's layout.

    Head ``i`` consists of ``i.0.linear.weight`` [hidden, hidden], ``i.0.linear.bias`` and, unless
    it uses the model's LM head, ``i.1.weight`` [V, hidden].

    Raises:
        ModelError: see ``MedusaHeads.load``.
    """
    with translate_errors(
        ModelError,
        f"cannot read the Medusa heads in {file}",
        field="heads",
        remedy="take heads with medusa_num_layers 1; or load without heads",
    ):
        stored = load_file(file)
        count = _count_published(stored)

        def stack(name: str) -> nn.Parameter:
            found = torch.stack([stored.pop(f"{i}.{name}") for i in range(count)])
            return nn.Parameter(found.to(parts.head.weight.dtype))

        heads = MedusaHeads(parts.hidden_size, 0)
        heads.heads = count
        heads.weight, heads.bias = stack("0.linear.weight"), stack("0.linear.bias")
        if stored:
            heads.own = stack("1.weight")
        if stored:
            raise ValueError(f"{', '.join(sorted(stored)[:3])} is not understood here")
    rows = parts.head.out_features if heads.own is None else heads.own.shape[1]
    width = heads.weight.shape[-1]
    if (rows, width) != (parts.head.out_features, parts.hidden_size):
        raise ModelError(
            f"heads of width {width} for {rows} tokens, model of width {parts.hidden_size} with"
            f" {parts.head.out_features}",
            field="heads",
            remedy="use the heads that were trained with this model",
        )
    return heads
