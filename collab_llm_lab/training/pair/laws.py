"""The target's law of each token of its answers, cut to the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 64
"""Tokens kept of a law, as many as a draft's law is cut to on its way to a verifier."""


@dataclass(frozen=True)
class Law:
    """Laws of tokens, each over its likeliest tokens, the best first, and one rest.

    Attributes:
        ids: int32 [tokens, kept].
        logs: logarithms of their probabilities, [tokens, kept].
    """

    ids: Tensor
    logs: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Law:
        """Return the laws of float32 ``logits`` [tokens, V]."""
        found = logits.log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
        return cls(found.indices.int(), found.values)

    @classmethod
    def join(cls, laws: Sequence[Law]) -> Law:
        """Return all laws in turn."""
        return cls(torch.cat([law.ids for law in laws]), torch.cat([law.logs for law in laws]))

    def at(self, places: slice | Tensor) -> Law:
        """Return the laws at some places."""
        return Law(self.ids[places], self.logs[places])

    def to(self, device: torch.device) -> Law:
        """Return the laws on ``device``."""
        return Law(self.ids.to(device), self.logs.to(device))

    def distance(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy [tokens] of ``logits`` [tokens, V] to these laws, in nats.

        All tokens that were cut off count as one event. Up to a constant it is the divergence
        KL(law || softmax(logits)) of the laws so cut.
        """
        said = logits.log_softmax(-1).gather(-1, self.ids.long())
        share = self.logs.exp()
        rest = (1 - share.sum(-1)).clamp(min=0)
        rest_said = (1 - said.exp().sum(-1)).clamp(min=1e-6).log()
        return -(share * said).sum(-1) - rest * rest_said
