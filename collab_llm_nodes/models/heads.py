"""Medusa heads (paper 004): the tokens after the next one, guessed from one hidden state."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.architectures import DecoderParts
from collab_llm_nodes.models.trained import read_trained, write_trained

NAME = "medusa"
"""Name of the files."""
HEADS = 5
"""Heads of paper 004 (its section on decoding speed-ups)."""


class MedusaHeads(nn.Module):
    """A residual block ``SiLU(W x) + x`` per head, then the model's own LM head.

    ``x`` is the input of the LM head: the last layer's output after the final norm. Head ``i``
    guesses the token ``i + 2`` places after the one that was read, since the model itself says the
    next. ``W`` begins at zero: an untrained head predicts the model's token.

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

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., heads, hidden_size] of ``hidden`` [..., hidden_size]."""
        mapped = torch.einsum("...d,hed->...he", hidden, self.weight.to(hidden.dtype))
        return F.silu(mapped) + hidden[..., None, :]

    @torch.no_grad()
    def draft(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """Return each head's best token, int64 [..., heads], for ``hidden`` after the final norm.

        Args:
            head: the model's LM head.
        """
        best: Tensor = head(self(hidden)).argmax(-1)
        return best

    def save(self, folder: str | Path) -> None:
        """Write ``medusa.safetensors`` (float16) and ``medusa.json`` to ``folder``."""
        facts = {
            "hidden_size": self.hidden_size,
            "heads": self.heads,
            "fingerprint": self.fingerprint,
        }
        write_trained(folder, NAME, self, facts, torch.float16)

    @classmethod
    def load(cls, folder: str | Path, parts: DecoderParts) -> MedusaHeads:
        """Read trained heads, float32, for the model that ``parts`` belongs to.

        Raises:
            ModelError: files absent or unreadable, or heads of another model.
        """
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
        rounded = value.detach().float().to("cpu", torch.bfloat16).contiguous()
        found.update(rounded.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def count_heads(folder: Path) -> int:
    """Return the number of heads that ``folder`` holds.

    Raises:
        ModelError: their description cannot be read.
    """
    try:
        return int(json.loads((folder / f"{NAME}.json").read_text("utf-8"))["heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot read the Medusa heads in {folder}: {error}",
            field="heads",
            remedy="export the heads again, or do without them",
        ) from error
