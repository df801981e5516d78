"""Early-exit adapters of the frozen target (paper 003, section 3): towards the last layer's law."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.nav.batches import Batch
from collab_llm_lab.training.nav.forward import FastForward, gathered
from collab_llm_lab.training.nav.models import prefix_ids
from collab_llm_nodes.models.adapters import ExitAdapters


class ExitLearner(ModelLearner):
    """Adapters of all layers but the last; only these corrections are trained.

    The loss of an exit is the cross-entropy to the final exit's distribution; its agreement is the
    share of answer tokens with the final argmax.
    """

    def __init__(
        self,
        model: Qwen2VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.fast = FastForward(model.requires_grad_(False), prefix_ids(tokenizer)).to(device)
        text: Any = model.config.text_config
        self.adapters = ExitAdapters(text.hidden_size, range(1, text.num_hidden_layers)).to(device)
        super().__init__(self.adapters, recipe, device)

    def losses(self, *batch: Tensor) -> dict[str, Tensor]:
        question = Batch(*batch)
        with torch.no_grad():
            hidden = exit_hidden(self.fast, question)
            final = self.fast.logits(hidden[-1])
        real = question.labels >= 0
        law, best = final.softmax(-1)[real], final.argmax(-1)[real]
        result, loss = {}, torch.zeros((), device=self.device)
        for layer in self.adapters.layers:
            logits = self.fast.logits(self.adapters(layer, hidden[layer - 1]))[real]
            loss = loss + F.cross_entropy(logits, law)
            result[f"exit_{layer}"] = (logits.argmax(-1) == best).float().mean()
        agreement = torch.stack(list(result.values())).mean()
        return {"loss": loss, "agreement": agreement, **result}


def exit_hidden(fast: FastForward, batch: Batch) -> list[Tensor]:
    """Return the hidden states [N, A, D] at the answer positions, of each layer."""
    questions = batch.texts.shape[0] // batch.pictures.shape[0]
    layers = fast(batch.pictures, batch.texts, questions).layers
    return [gathered(hidden, batch.at) for hidden in layers]
