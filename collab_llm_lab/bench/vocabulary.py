"""Checkpoints with the vocabulary of a large model: the same answers, and logits as wide as there.

The further tokens are read from no text, and their logits stay about zero, so they are never an
answer. What they cost is real: LM heads, distributions, predictions and their transport.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from collab_llm_lab.training.pair.shortened import write_checkpoint
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.loading import LoadedModel, TargetConfig, load, model_folder


def widen(name: str, size: int, folder: Path, exits: str | None = None) -> Path:
    """Write the model ``name`` with ``size`` tokens to ``folder``, with its exits if named.

    Args:
        exits: as of ``TargetConfig``.
    """
    loaded = load(TargetConfig(path=name, exits=exits))
    torch.manual_seed(0)
    loaded.model.resize_token_embeddings(size, mean_resizing=False)
    write_checkpoint(loaded.model, model_folder(loaded.config), folder)
    _widen_tokenizer(folder / "tokenizer.json", size)
    if loaded.adapters is not None:
        _save_exits(loaded, loaded.adapters, folder)
    return folder


def _widen_tokenizer(file: Path, size: int) -> None:
    """Add tokens without merges, which no text becomes."""
    facts = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = facts["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in facts["added_tokens"])}
    vocabulary |= {f"<unused {i}>": i for i in range(size) if i not in taken}
    file.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")


def _save_exits(loaded: LoadedModel, adapters: ExitAdapters, folder: Path) -> None:
    adapters.fingerprint = head_fingerprint(decoder_parts(loaded.model))
    adapters.save(folder)
