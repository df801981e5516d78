"""Held-out documents, to measure the points of a learning curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.rendering import PAD, SHORT, Document
from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_lab.training.text.shards import draw_documents


class HeldOut:
    """Plain and extraction documents of every sub-domain, never shown in training."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, count: int, length: int, device: torch.device
    ) -> None:
        self._length, self._device = length, device
        self._plain = {
            sub_domain: self._rows(_documents(tokenizer, sub_domain, "plain", count))
            for sub_domain in SUB_DOMAINS
        }
        passages = [_documents(tokenizer, name, "extract", count) for name in SUB_DOMAINS]
        self._extract = self._rows([document for part in passages for document in part])

    def _rows(self, found: list[Document]) -> tuple[Tensor, Tensor]:
        ids, kinds = pad_documents(found, self._length)
        return ids.to(self._device), kinds.to(self._device)

    def figures(self, model: Any) -> dict[str, float]:
        """Return ``nats_<sub-domain>`` per answered token, and ``extract``.

        ``extract`` is the share of short answers whose every token is the model's first choice.
        """
        forward = TextForward(model, self._length)
        found = {}
        for sub_domain, (ids, kinds) in self._plain.items():
            nats, real = token_nats(forward, ids, kinds)
            found[f"nats_{sub_domain}"] = float(nats[real].mean())
        found["extract"] = _short_answers_right(forward, *self._extract)
        return found


def _documents(
    tokenizer: PreTrainedTokenizerBase, sub_domain: str, skill: str, count: int
) -> list[Document]:
    mix = {(sub_domain, skill): 1.0}
    return draw_documents(tokenizer, f"curve {skill}", mix, count, held_out=True)


def pad_documents(documents: list[Document], length: int) -> tuple[Tensor, Tensor]:
    """Return ids int64 and classes uint8 [documents, widest], cut at ``length``, padded with 0."""
    widest = min(length, max(len(ids) for ids, *_ in documents))
    ids = np.zeros((len(documents), widest), np.int64)
    kinds = np.zeros((len(documents), widest), np.uint8)
    for row, (tokens, classes, _) in enumerate(documents):
        ids[row, : len(tokens)] = tokens[:widest]
        kinds[row, : len(classes)] = classes[:widest]
    return torch.from_numpy(ids), torch.from_numpy(kinds)


@torch.no_grad()
def token_nats(
    forward: TextForward, ids: Tensor, kinds: Tensor, at_once: int = 16
) -> tuple[Tensor, Tensor]:
    """Return the nats of each token from the second on, and which are answered; [B, T - 1]."""
    nats = []
    for part in ids.split(at_once):
        logits = forward.logits(forward(part[:, :-1])[-1]).float()
        said = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        nats.append(said.view(len(part), -1))
    return torch.cat(nats), kinds[:, 1:] > PAD + 1


@torch.no_grad()
def _short_answers_right(
    forward: TextForward, ids: Tensor, kinds: Tensor, at_once: int = 16
) -> float:
    right = total = 0
    for tokens, classes in zip(ids.split(at_once), kinds.split(at_once), strict=True):
        best = forward.logits(forward(tokens[:, :-1])[-1]).argmax(-1)
        wrong = best != tokens[:, 1:]
        short = classes[:, 1:] == SHORT
        asked = short.any(1)
        total += int(asked.sum())
        right += int((asked & ~(wrong & short).any(1)).sum())
    return right / max(1, total)
