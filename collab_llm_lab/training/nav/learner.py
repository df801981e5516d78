"""A small Qwen2-VL model in training, with dense supervision of what it sees.

Cross-entropy on the answers alone yields a blind model, since the template gives most tokens away.
So each image token also learns to predict, through the language model's own embedding rows, the
words for the thing it shows (colour, shape, direction, distance), and its row and column. Without
help the language model also ignores for long which thing is asked for. So, half-way through the
layers, the token that ends the question's name learns to predict where that thing is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.nav.batches import WORDS
from collab_llm_lab.training.nav.forward import GRID, FastForward, Output
from collab_llm_lab.training.nav.models import prefix_ids
from collab_llm_nodes.sim.view import DIRECTIONS, DISTANCES

_DENSE_WEIGHT, _NAME_WEIGHT = 4.0, 0.5
"""Weights of the losses beside that of the answers."""


class DenseHead(nn.Module):
    """Word logits of image tokens through the tied embedding rows; row and column beside them."""

    ids: Tensor

    def __init__(self, hidden: int, word_ids: list[int]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(word_ids), persistent=False)
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.bias = nn.Parameter(torch.full((len(word_ids),), -3.0))
        self.place = nn.Linear(hidden, GRID.rows + GRID.columns)
        self.finding = nn.Linear(hidden, len(DIRECTIONS) + len(DISTANCES) + 2)

    def forward(self, vision: Tensor, rows: Tensor, dense: Tensor) -> Tensor:
        """Return the loss of image tokens [B, T, D] against multi-hot words [B, T, W]."""
        x = F.rms_norm(vision, (vision.shape[-1],))
        logits = F.linear(x, rows[self.ids]).float() * self.scale + self.bias
        words = F.binary_cross_entropy_with_logits(logits, dense)
        cells = torch.arange(GRID.tokens, device=vision.device)
        places = self.place(x).float()
        row = F.cross_entropy(
            places[..., : GRID.rows].flatten(0, 1),
            (cells // GRID.columns).repeat(len(x)),
        )
        column = F.cross_entropy(
            places[..., GRID.rows :].flatten(0, 1),
            (cells % GRID.columns).repeat(len(x)),
        )
        return words + 0.02 * (row + column)

    def name(self, hidden: Tensor, found: Tensor) -> Tensor:
        """Return the loss of the name's token [N, D]: where the thing is, or that it is unseen."""
        guess = self.finding(F.rms_norm(hidden, (hidden.shape[-1],))).float()
        split = len(DIRECTIONS) + 1
        where = F.cross_entropy(guess[:, :split], found[:, 0])
        return where + F.cross_entropy(guess[:, split:], found[:, 1])


class PictureLearner(ModelLearner):
    """A model, the head that gives it dense supervision, and its teacher if it has one.

    Args:
        teacher: model whose law of each answer token is learnt, instead of the token itself.

    Attributes:
        fast: the model's forward pass.
    """

    def __init__(
        self,
        model: Qwen2VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe,
        device: torch.device,
        teacher: Qwen2VLForConditionalGeneration | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        words = [tokenizer(f" {w}", add_special_tokens=False).input_ids for w in WORDS]
        assert all(len(ids) == 1 for ids in words), "every dense word is one token"
        text: Any = model.config.text_config
        self.head = DenseHead(text.hidden_size, [ids[0] for ids in words]).to(device)
        prefix = prefix_ids(tokenizer)
        self.fast = FastForward(model, prefix).to(device)
        self.teacher = (
            FastForward(teacher.requires_grad_(False), prefix).to(device) if teacher else None
        )
        # half-way: later layers can still read it
        self._name_depth = text.num_hidden_layers // 2 + 1
        both = nn.ModuleDict({"model": model, "head": self.head})
        super().__init__(both, recipe, device)

    def losses(  # type: ignore[override]
        self,
        pictures: Tensor,
        texts: Tensor,
        at: Tensor,
        labels: Tensor,
        dense: Tensor,
        names: Tensor,
        name_at: Tensor,
        found: Tensor,
    ) -> dict[str, Tensor]:
        """Return the losses of a ``Batch``: of the answer in nats per token, dense, of the name."""
        count = pictures.shape[0]
        out = self.fast(pictures, texts, texts.shape[0] // count)
        logits = _answer_logits(self.fast, out, at)
        if self.teacher is None:
            answer = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        else:
            with torch.no_grad():
                said = self.teacher(pictures, texts, texts.shape[0] // count)
                law = _answer_logits(self.teacher, said, at).softmax(-1)
            real = (labels >= 0).float()
            answer = -((law * logits.log_softmax(-1)).sum(-1) * real).sum() / real.sum()
        named = self.fast.read(out.vision, names, names.shape[0] // count, self._name_depth)[-1]
        named = named.flatten(0, 1)
        named = named[torch.arange(len(named), device=named.device), name_at]
        dense_loss = self.head(out.vision, self.model.lm_head.weight, dense)
        name_loss = self.head.name(named, found)
        return {
            "loss": answer + _DENSE_WEIGHT * dense_loss + _NAME_WEIGHT * name_loss,
            "answer_loss": answer,
            "dense_loss": dense_loss,
            "name_loss": name_loss,
        }


def _answer_logits(fast: FastForward, out: Output, at: Tensor) -> Tensor:
    """Return float32 [B K, A, V]: logits at the answer positions ``at`` [B K, A]."""
    hidden = out.layers[-1].flatten(0, 1)
    return fast.logits(
        torch.gather(hidden, 1, at[..., None].expand(-1, -1, hidden.shape[-1]))
    ).float()
