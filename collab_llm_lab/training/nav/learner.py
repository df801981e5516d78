"""A small Qwen2-VL model in training, with dense supervision of what it sees.

Cross-entropy on the answers alone yields a blind model, since the template gives most tokens away.
So each image token also learns to predict, through the language model's own embedding rows, the
words for the thing it shows (colour, shape, direction, distance), and its row and column. Without
help the language model also ignores for long which thing is asked for. So, half-way through the
layers, the token that ends the question's name learns to predict where that thing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.nav.forward import FastForward, Grid, Output
from collab_llm_lab.training.nav.models import export, prefix_ids, read
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.sim.expert import DIRECTIONS, DISTANCES


@dataclass(frozen=True)
class Supervision:
    """Losses beside that of the answers, and their weights; 0 leaves one out."""

    words: Sequence[str]
    """Dense words of the image tokens, each one token of the vocabulary."""
    dense_weight: float
    name_weight: float


class DenseHead(nn.Module):
    """Word logits of image tokens through the tied embedding rows; row and column beside them."""

    ids: Tensor

    def __init__(self, hidden: int, word_ids: list[int], grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.register_buffer("ids", torch.tensor(word_ids), persistent=False)
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.bias = nn.Parameter(torch.full((len(word_ids),), -3.0))
        self.place = nn.Linear(hidden, grid.rows + grid.columns)
        self.finding = nn.Linear(hidden, len(DIRECTIONS) + len(DISTANCES) + 2)

    def forward(self, vision: Tensor, rows: Tensor, dense: Tensor) -> Tensor:
        """Return the loss of image tokens [B, T, D] against multi-hot words [B, T, W]."""
        x = F.rms_norm(vision, (vision.shape[-1],))
        logits = F.linear(x, rows[self.ids]).float() * self.scale + self.bias
        words = F.binary_cross_entropy_with_logits(logits, dense)
        cells = torch.arange(self.grid.tokens, device=vision.device)
        places = self.place(x).float()
        row = F.cross_entropy(
            places[..., : self.grid.rows].flatten(0, 1),
            (cells // self.grid.columns).repeat(len(x)),
        )
        column = F.cross_entropy(
            places[..., self.grid.rows :].flatten(0, 1),
            (cells % self.grid.columns).repeat(len(x)),
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
        grid: of every picture.
        teacher: model whose law of each answer token is learnt, instead of the token itself.

    Attributes:
        fast: the model's forward pass.
    """

    def __init__(
        self,
        model: Qwen2VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe,
        grid: Grid,
        supervision: Supervision,
        teacher: Qwen2VLForConditionalGeneration | None = None,
    ) -> None:
        self.model, self.tokenizer, self.supervision = model, tokenizer, supervision
        words = [tokenizer(f" {w}", add_special_tokens=False).input_ids for w in supervision.words]
        assert all(len(ids) == 1 for ids in words), "every dense word is one token"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        mover: Any = model
        mover.to(device)
        text: Any = model.config.text_config
        self.head = DenseHead(text.hidden_size, [ids[0] for ids in words], grid).to(device)
        prefix = prefix_ids(tokenizer, grid)
        self.fast = FastForward(model, prefix, grid).to(device)
        self.teacher = (
            FastForward(teacher.requires_grad_(False), prefix, grid).to(device) if teacher else None
        )
        # half-way: later layers can still read it
        self._name_depth = text.num_hidden_layers // 2 + 1
        both = nn.ModuleDict({"model": model, "head": self.head})
        super().__init__(both, recipe, device)

    def save_model(self, folder: Path) -> None:
        """Write the model as a float32 checkpoint."""
        export(self.model, self.tokenizer, folder, torch.float32, self.fast.grid)

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
        result = {"loss": answer, "answer_loss": answer}
        weights = self.supervision
        if not weights.name_weight and not weights.dense_weight:
            return result
        named = self.fast.read(out.vision, names, names.shape[0] // count, self._name_depth)[-1]
        named = named.flatten(0, 1)
        named = named[torch.arange(len(named), device=named.device), name_at]
        result["dense_loss"] = self.head(out.vision, self.model.lm_head.weight, dense)
        result["name_loss"] = self.head.name(named, found)
        result["loss"] = (
            answer
            + weights.dense_weight * result["dense_loss"]
            + weights.name_weight * result["name_loss"]
        )
        return result


def _answer_logits(fast: FastForward, out: Output, at: Tensor) -> Tensor:
    """Return float32 [B K, A, V]: logits at the answer positions ``at`` [B K, A]."""
    hidden = out.layers[-1].flatten(0, 1)
    return fast.logits(
        torch.gather(hidden, 1, at[..., None].expand(-1, -1, hidden.shape[-1]))
    ).float()


def read_with(tokenizer: PreTrainedTokenizerBase, folder: str) -> Qwen2VLForConditionalGeneration:
    """Return the checkpoint in ``folder``.

    Raises:
        ConfigError: it was trained with another tokenizer.
    """
    model, own = read(folder)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{folder} has another tokenizer",
            field="initial, teacher",
            remedy="give a checkpoint of the same training",
        )
    return model
