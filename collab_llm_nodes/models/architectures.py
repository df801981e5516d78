"""The architectures this package runs, and where their parts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from collab_llm_nodes.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """What differs between architectures.

    Attributes:
        vision: it takes images, and its positions are three-dimensional (M-RoPE).
        norm: name of the final norm in the text decoder.
    """

    vision: bool
    norm: str = "norm"


ARCHITECTURES = {
    "qwen2_vl": Architecture(vision=True),
    "qwen2_5_vl": Architecture(vision=True),
    "llama": Architecture(vision=False),
    "qwen2": Architecture(vision=False),
    "opt": Architecture(vision=False, norm="final_layer_norm"),
}


def architecture_of(model_type: str) -> Architecture:
    """Look ``config.model_type`` up.

    Raises:
        ModelError: it is none of ``ARCHITECTURES``.
    """
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        raise ModelError(
            f"unknown architecture {model_type!r}",
            field="path",
            remedy=f"supported: {', '.join(ARCHITECTURES)}",
        ) from None


@dataclass(frozen=True)
class DecoderParts:
    """The text decoder of a model, taken apart for early exits.

    Attributes:
        layers: the decoder layers; layer ``i`` (from 1) is done after ``layers[i - 1]``.
        hidden_size: width between the layers.
        norm: final norm (and OPT's output projection), [..., hidden_size] -> what the head takes.
        head: LM head.
    """

    layers: nn.ModuleList
    hidden_size: int
    norm: nn.Module
    head: nn.Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] behind any layer -> [..., rows of the head]."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def decoder_parts(model: Any) -> DecoderParts:
    """Take a supported ``PreTrainedModel`` apart; nothing is copied."""
    architecture = architecture_of(model.config.model_type)
    decoder = model.get_decoder()
    steps = [getattr(decoder, architecture.norm), getattr(decoder, "project_out", None)]
    present = [step for step in steps if step is not None]  # small OPTs lack the one or the other
    return DecoderParts(
        layers=decoder.layers,
        hidden_size=model.config.get_text_config().hidden_size,
        norm=present[0] if len(present) == 1 else nn.Sequential(*present),
        head=model.get_output_embeddings(),
    )
