"""Pictures of a prompt over stages: encoded here once, and fed with their placeholders.

pictures ──▶ vision encoder ──features──▶ embedding, layers ══states══▶ layers, LM head
             (the coordinator)            (first worker)                (last worker)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collab_llm_nodes.engine.pictures import encode_pictures, features_within
from collab_llm_nodes.models.architectures import deepstack_levels
from collab_llm_nodes.models.loading import DTYPES, LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.jupiter.messages import Step
from collab_llm_nodes.protocols.jupiter.states import pack


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt, and the features of its pictures.

    Attributes:
        prompt: without the pictures themselves.
        features: [placeholders in the prompt, width], on the CPU.
        placeholder: id of the tokens that stand for pictures; None for a text model.
    """

    prompt: EncodedPrompt
    features: Tensor
    placeholder: int | None

    def place(self, step: Step) -> Step:
        """Return ``step`` with the positions of its tokens and the number of its features."""
        if not step.ids:
            return step
        positions = self.prompt.positions(step.start, len(step.ids))
        return replace(
            step,
            positions=tuple(positions.flatten().tolist())
            if isinstance(positions, Tensor)
            else (positions,),
            features=len(self.features_of(step)),
        )

    def features_of(self, step: Step) -> Tensor:
        """Return the features [k, width] that the first stage needs with ``step``."""
        within = features_within(self.prompt, self.placeholder, step.start, len(step.ids))
        return self.features[within]


@torch.inference_mode()
def show(
    loaded: LoadedModel, prompt: EncodedPrompt, placeholder: int | None, form: str
) -> ShownPrompt:
    """Encode the pictures of ``prompt``.

    Args:
        loaded: the model's vision encoder, of ``models.partial.load_vision``.
        form: of hidden states on the wire.

    Raises:
        ModelError: the features are not finite, or ``form`` cannot hold them.
    """
    config = loaded.model.config
    width = (1 + deepstack_levels(config)) * config.get_text_config().hidden_size
    features = torch.empty(0, width, dtype=DTYPES[loaded.config.dtype])
    if prompt.pixel_values is not None:
        features = encode_pictures(loaded, prompt, features.to(loaded.config.device)).cpu()
        pack(features, form)  # otherwise it would fail a pass of all lanes
    # Pixels take ten times the features' memory.
    return ShownPrompt(replace(prompt, pixel_values=None), features, placeholder)
