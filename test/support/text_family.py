"""A tiny random text family in a folder: a target, and models that agree with it more or less."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from collab_llm_lab.random_models import add_head_noise
from collab_llm_lab.training.text.models import TINY, TINY_DRAFT, build, export
from collab_llm_lab.training.text.samples import draw_sample
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import MedusaHeads, head_fingerprint
from collab_llm_nodes.models.tokenizer import train_text_tokenizer


def vocabulary(size: int = 400) -> PreTrainedTokenizerBase:
    """A tokenizer trained on samples of the domain."""
    rng = random.Random(0)
    texts = [turn.content for _ in range(60) for turn in draw_sample(rng).turns]
    return train_text_tokenizer(texts, size)


def write_family(folder: Path) -> Path:
    """Write the family: the target with its guesses, three copies of it or nearly so, another.

    The worker and one draft are the target itself; one draft is a noisy copy, one another model.
    """
    tokenizer = vocabulary()
    target, noisy = _target(tokenizer), _target(tokenizer)
    add_head_noise(noisy, 0.5, seed=1)
    models = {
        "text-target": target,
        "text-worker": target,
        "ssm-conversation": target,
        "ssm-instructions": noisy,
        "ssm-reports": build(TINY_DRAFT, tokenizer, 5),
    }
    for name, model in models.items():
        export(model, tokenizer, folder / name)
    ExitAdapters(TINY.hidden, (1, 2)).save(folder / "text-target")
    heads = MedusaHeads(TINY.hidden, fingerprint=head_fingerprint(decoder_parts(target)))
    heads.save(folder / "text-target")
    return folder


def _target(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    model = build(TINY, tokenizer, 0)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # With the embeddings for a head, random models say the same token for ever.
    add_head_noise(model, 3.0, seed=3)
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # what the file holds
    return model
