"""Weights of the evidence, fitted to questions with known answers.

    P(sentence i answers) = exp(z_i) / (1 + sum of exp(z_j)),   z = intercept + weights . features

The 1 stands for "no sentence does": for a question whose answer is written nowhere it is the right
choice. So z = 0 is where quoting and refusing are equally likely to be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from collab_llm_lab.training.evidence.questions import Question
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import DocumentLimits
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.evidence import Calibration, Features
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.knowledge.quoting import candidates
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store

PLAN = ChunkPlan(by="sentence", characters=240)
_NAMES = tuple(field.name for field in fields(Features))
_STEPS = 400


@dataclass(frozen=True)
class Example:
    """The candidates of one question.

    Attributes:
        features: float64 [candidates, features].
        right: bool [candidates].
        known: the documents answer the question.
    """

    features: Tensor
    right: Tensor
    known: bool


def add_texts(store: Store, folders: Iterable[Path]) -> int:
    """Add the text files of the folders to a store, and return how many there are."""
    count = 0
    for folder in folders:
        for file in sorted(folder.resolve().rglob("*.txt")):
            document = read_document(file, Folders([folder.resolve()]), DocumentLimits(), str(file))
            store.add(document, chunks(document, PLAN))
            count += 1
    return count


def examples(
    store: Store,
    questions: Sequence[Question],
    config: RetrievalConfig,
    encoder: Encoder,
    *,
    similarity: bool,
) -> Iterator[Example]:
    """Yield the candidates of each question.

    Args:
        similarity: compare the encoder's vectors, too.
    """
    for question in questions:
        found = candidates(store, question.question, config, encoder, similarity=similarity)
        rows = [[getattr(each.features, name) for name in _NAMES] for each in found]
        yield Example(
            torch.tensor(rows, dtype=torch.float64).reshape(-1, len(_NAMES)),
            torch.tensor([question.is_right(each.sentence) for each in found], dtype=torch.bool),
            bool(question.answers),
        )


def fit(found: Sequence[Example], decay: float = 0.003) -> Calibration:
    """Return the weights of the greatest likelihood.

    Questions whose answer is not among the candidates are left out: no weights find it.

    Args:
        decay: L2 penalty on the weights of standardised features.
    """
    used = [each for each in found if each.right.any() or not each.known]
    rows = torch.cat([each.features for each in used])
    mean, spread = rows.mean(0), rows.std(0).clamp(min=1e-6)
    weights = torch.zeros(len(_NAMES), dtype=torch.float64, requires_grad=True)
    intercept = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weights, intercept], max_iter=_STEPS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        losses = [
            _loss(each, ((each.features - mean) / spread) @ weights + intercept) for each in used
        ]
        loss = torch.stack(losses).mean() + decay * (weights**2).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    scaled = weights.detach() / spread
    kept = {name: round(float(value), 3) for name, value in zip(_NAMES, scaled, strict=True)}
    return Calibration(round(float(intercept.detach() - mean @ scaled), 3), **kept)


def _loss(example: Example, log_odds: Tensor) -> Tensor:
    everything = torch.logsumexp(torch.cat([log_odds.new_zeros(1), log_odds]), 0)
    if not example.known:
        return everything
    return everything - torch.logsumexp(log_odds[example.right], 0)


def shares(found: Sequence[Example], calibration: Calibration, least: float) -> dict[str, float]:
    """Return ``right`` and ``false_refusals`` of the questions with an answer, ``refused_unseen``.

    One store answers, with its best sentence.
    """
    right, refused, unseen = list[bool](), list[bool](), list[bool]()
    for example in found:
        scores = [calibration.probability(Features(*row.tolist())) for row in example.features]
        best = max(range(len(scores)), key=scores.__getitem__, default=-1)
        quoted = best >= 0 and scores[best] >= least
        if example.known:
            right.append(quoted and bool(example.right[best]))
            refused.append(not quoted)
        else:
            unseen.append(not quoted)
    named = {"right": right, "false_refusals": refused, "refused_unseen": unseen}
    return {name: sum(each) / max(1, len(each)) for name, each in named.items()}
