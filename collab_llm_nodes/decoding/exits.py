"""Logits at early exits: adapter, final norm, LM head; over all tokens or over candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import DecoderParts


class ExitScorer:
    """Turns hidden states of a running forward pass into exit logits.

    Args:
        candidates: score only the fed tokens (so every drafted one) and the ``candidates`` best of
            the exit before; 0 scores the whole vocabulary. A full head at each exit of Qwen2-VL-7B
            would triple the weights read per pass.
    """

    def __init__(
        self, parts: DecoderParts, adapters: ExitAdapters, vocab_size: int, candidates: int
    ) -> None:
        self._parts = parts
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._candidates = min(candidates, vocab_size)

    def start(
        self, ids: Sequence[int], keep: int, on_exit: Callable[[int, Tensor], None]
    ) -> Callable[[int, Tensor], None]:
        """A function to be called in a pass: (layer, hidden [n, hidden_size]) -> None.

        ``on_exit`` gets (layer, logits [keep, vocab_size]).
        """
        running: Tensor | None = None  # ids worth scoring; None before the first exit

        def on_hidden(layer: int, hidden: Tensor) -> None:
            nonlocal running
            corrected = self._adapters(layer, hidden[-keep:])
            if running is None:
                logits = self._parts.logits(corrected)[:, : self._vocab_size]
            else:
                logits = self._score(corrected, running)
            if self._candidates:
                best = logits.topk(self._candidates, dim=-1).indices
                fed = torch.tensor(ids, device=best.device)
                running = torch.cat([best.flatten(), fed]).unique()
            on_exit(layer, logits)

        return on_hidden

    def _score(self, hidden: Tensor, ids: Tensor) -> Tensor:
        head = self._parts.head
        bias = None if head.bias is None else head.bias[ids]
        scores = functional.linear(self._parts.norm(hidden), head.weight[ids], bias)
        logits = scores.new_full((len(hidden), self._vocab_size), -torch.inf)
        logits[:, ids] = scores
        return logits
