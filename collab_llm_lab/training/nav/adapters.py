"""Early-exit adapters of the frozen target (paper 003, section 3): towards the last layer's law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.architecture import prefix_ids
from collab_llm_lab.training.nav.batches import Batch, Batches
from collab_llm_lab.training.nav.forward import FastForward
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts


@dataclass(frozen=True)
class AdapterConfig:
    """Training of the adapters beside the checkpoint in ``model``."""

    model: str = "models/nav-target"
    initial: str = ""
    """Folder of adapters to begin with, whose exits and width are kept; none: identities."""
    shards: tuple[str, ...] = ()
    """Picture shards; own trajectories of the target among them where there are any."""
    layers: tuple[int, ...] = ()
    """Exits, counted in layers done; all but the last one when empty."""
    width: int = 0
    """Width of the bottleneck; 0 is one linear map."""
    steps: int = 1_500
    batch: int = 24
    learning_rate: float = 2e-3
    reworded: float = 0.0
    """The same as in ``TrainConfig``."""
    bfloat16: bool = True
    seed: int = 1


def exit_hidden(fast: FastForward, batch: Batch) -> list[Tensor]:
    """Per layer the hidden states [N, A, D] at the answer positions."""
    questions = batch.texts.shape[0] // batch.pictures.shape[0]
    hidden = [h.flatten(0, 1) for h in fast(batch.pictures, batch.texts, questions).layers]
    at = batch.at[..., None].expand(-1, -1, hidden[0].shape[-1])
    return [torch.gather(h, 1, at) for h in hidden]


def train_adapters(
    config: AdapterConfig,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train and save the adapters beside the model; returns held-in agreement per exit layer.

    ``stop`` is asked before every step; True ends the call, which saves and returns nothing.

    The loss of an exit is the cross-entropy to the final exit's distribution; only the
    corrections are trained. Agreement is the share of answer tokens with the final argmax.
    """
    model = Qwen2VLForConditionalGeneration.from_pretrained(config.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    model.requires_grad_(False)
    fast = FastForward(model, prefix_ids(tokenizer))
    pictures = data.Pictures([Path(s) for s in config.shards])
    batches = Batches(tokenizer, config.seed, config.reworded)
    text: Any = model.config.text_config
    layers = config.layers or tuple(range(1, text.num_hidden_layers))
    torch.manual_seed(config.seed)
    adapters = ExitAdapters(text.hidden_size, layers, config.width)
    if config.initial:
        adapters = ExitAdapters.load(config.initial, decoder_parts(model))
        layers = adapters.layers
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=config.learning_rate, weight_decay=0.0)
    agreement = dict.fromkeys(layers, 0.0)
    for step in range(config.steps):
        if stop():
            return {}
        batch = batches.make([(pictures, config.batch)], step, 2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
            hidden = exit_hidden(fast, batch)
        final = fast.logits(hidden[-1].float())
        real = batch.labels >= 0
        rate = config.learning_rate * (1 - step / config.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, right = _losses(fast, adapters, layers, hidden, final, real)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        for layer, share in zip(layers, right, strict=True):
            agreement[layer] += (0.02 if step else 1.0) * (share - agreement[layer])
        if progress is not None:
            progress(step + 1, config.steps)
    adapters.save(config.model)
    return {f"exit_{layer}": share for layer, share in agreement.items()}


def _losses(
    fast: FastForward,
    adapters: ExitAdapters,
    layers: Sequence[int],
    hidden: Sequence[Tensor],
    final: Tensor,
    real: Tensor,
) -> tuple[Tensor, list[float]]:
    """Summed cross-entropy to the final law, and each exit's agreement with its argmax."""
    law, best = final.softmax(-1)[real], final.argmax(-1)[real]
    loss, right = torch.zeros(()), []
    for layer in layers:
        logits = fast.logits(adapters(layer, hidden[layer - 1].float()))[real]
        loss = loss + F.cross_entropy(logits, law)
        right.append(float((logits.argmax(-1) == best).float().mean()))
    return loss, right
