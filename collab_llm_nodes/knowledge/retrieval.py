"""Retrieval: the chunks that fit a question, and how much each of them weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from collab_llm_nodes.config import ANY, LOWER, check_ranges, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.store import Hit, Store

if TYPE_CHECKING:
    from collab_llm_nodes.knowledge.cross_encoder import CrossEncoder

MOST_CHUNKS = 10_000
"""Chunks that may be retrieved for one question."""


@dataclass(frozen=True)
class RetrievalConfig:
    """The way to find chunks."""

    method: str = setting(
        "bm25",
        "bm25: by words; dense: by vectors, which the store must hold; rescored: the `candidates`"
        " best by words, put in order by vectors that are computed then.",
        choices=("bm25", "dense", "rescored"),
        per_request=ANY,
    )
    chunks: int = setting(
        10, "Chunks that are retrieved.", low=1, high=MOST_CHUNKS, per_request=LOWER
    )
    candidates: int = setting(
        100,
        "Chunks that are rescored or re-ranked; DRAGON searches so many for sentences to quote.",
        low=1,
        high=10_000,
        per_request=LOWER,
    )
    temperature: float = setting(
        1.0,
        "Scores are divided by it before they become weights; lower: the best chunk counts more.",
        low=1e-4,
        high=1e4,
        per_request=ANY,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Retrieved:
    """The chunks for one question, the best one first.

    Attributes:
        weights: float64 [hits], the softmax of score / temperature (DRAGON, Equation 2).
        log_mass: log of the sum of exp(score / temperature): with those of two sides, h_l and h_r
            of DRAGON's Equation 4 are their exponentials. -inf without hits.
        scorer: two sides may set their masses against each other only if theirs are equal, and
            the temperature too. Of BM25 it names the store, since its statistics count.
    """

    hits: tuple[Hit, ...]
    weights: np.ndarray
    log_mass: float
    scorer: str


def retrieve(
    store: Store,
    question: str,
    config: RetrievalConfig,
    encoder: Encoder | None = None,
    reranker: CrossEncoder | None = None,
) -> Retrieved:
    """Return the chunks of ``store`` that fit ``question``.

    Args:
        reranker: puts the best ``candidates`` in order, and its scores take the place of theirs.

    Raises:
        ConfigError: the method needs an encoder and there is none, or the store's vectors are
            those of another one.
    """
    most = config.chunks if reranker is None else max(config.chunks, config.candidates)
    hits, scorer = _found(store, question, config, encoder, most)
    if reranker is not None:
        scores = reranker.score(question, [hit.chunk.text for hit in hits])
        hits, scorer = _ordered(hits, scores), reranker.fingerprint
    hits = hits[: config.chunks]
    weights, log_mass = softmax([hit.score for hit in hits], config.temperature)
    return Retrieved(hits, weights, log_mass, scorer)


def _found(
    store: Store, question: str, config: RetrievalConfig, encoder: Encoder | None, most: int
) -> tuple[tuple[Hit, ...], str]:
    """Return the ``most`` best chunks by the method alone, and the name of their scorer."""
    if config.method == "bm25":
        return store.search(question, most), f"bm25 {store.id} {store.version}"
    if encoder is None:
        raise ConfigError(
            f"{config.method!r} needs an encoder", field="method", remedy="name one, or use bm25"
        )
    (vector,) = encoder.encode([question])
    if config.method == "rescored":
        hits = rescored(store.search(question, config.candidates), vector, encoder)
    else:
        hits = store.nearest(vector, encoder.fingerprint, most)
    return hits, encoder.fingerprint


def rescored(hits: tuple[Hit, ...], vector: np.ndarray, encoder: Encoder) -> tuple[Hit, ...]:
    """Return ``hits`` in the order of their products with ``vector``, which is their score then.

    Args:
        vector: float32 [width], of the question or of question and answer so far.
    """
    if not hits:
        return ()
    scores = encoder.encode([hit.chunk.text for hit in hits]) @ vector
    return _ordered(hits, scores.tolist())


def _ordered(hits: Sequence[Hit], scores: Sequence[float]) -> tuple[Hit, ...]:
    best = sorted(zip(scores, hits, strict=True), key=lambda pair: (-pair[0], pair[1].id))
    return tuple(replace(hit, score=score) for score, hit in best)


def softmax(scores: Sequence[float] | np.ndarray, temperature: float) -> tuple[np.ndarray, float]:
    """Return exp(score / temperature), scaled to the sum 1, and the log of that sum.

    Computed relative to the largest score (DRAGON, Appendix A.1): no score overflows.
    """
    scaled = np.asarray(scores, np.float64) / temperature
    if not len(scaled):
        return scaled, float("-inf")
    top = scaled.max()
    raised = np.exp(scaled - top)
    total = raised.sum()
    return raised / total, float(top + np.log(total))
