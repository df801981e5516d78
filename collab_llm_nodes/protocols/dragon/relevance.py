"""The weights of documents while the answer grows (dynamic weights, paper 001, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.evidence import Calibration
from collab_llm_nodes.knowledge.retrieval import MOST_CHUNKS, Retrieved
from collab_llm_nodes.protocols.dragon.side_settings import (
    POSTERIOR,
    QUOTE,
    RERANKED,
    SideConfig,
)

Weights = NDArray[np.float64]


class Relevance:
    """R(d, x_<t) / temperature of each document: a pure function of the answer's tokens so far.

    ``likelihood`` is Bayes' rule: with ``memory`` 1, exp of the result is p(d) p(x_<t | d), whose
    share is the p(d | x_<t) of Equation 1. A memory below 1 lets the answer turn to another
    document.

    Args:
        encoder: scores texts; needed with ``encoder`` only.
        decode: text of an answer's tokens.
    """

    def __init__(
        self,
        documents: Retrieved,
        question: str,
        config: SideConfig,
        encoder: Encoder,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._rule = config.relevance
        self._temperature = config.retrieval.temperature
        self._texts = [hit.chunk.text for hit in documents.hits]
        self._question, self._encoder, self._decode = question, encoder, decode
        self._first = np.array([hit.score for hit in documents.hits]) / self._temperature
        self._vectors: NDArray[np.float32] | None = None
        self._scored: tuple[tuple[int, ...], Weights] = ((), self._first)

    @property
    def needs_likelihoods(self) -> bool:
        """Return True if the weights depend on how likely each document made the tokens."""
        return self._rule.update == POSTERIOR

    @property
    def no_evidence(self) -> Weights:
        """The evidence before the first token."""
        return np.zeros(len(self._texts))

    def judged(self, evidence: Weights, likelihoods: Weights) -> Weights:
        """Return the evidence for each document after one more token.

        Args:
            evidence: [documents] before it.
            likelihoods: [documents] log p(x_t | d, x_<t).
        """
        found: Weights = self._rule.memory * evidence + likelihoods
        return found

    def log_weights(self, tokens: Sequence[int], evidence: Weights) -> Weights:
        """Return float64 [documents], not normalised: their log-sum-exp is log h_t^s (Eq. 4).

        Args:
            tokens: of the answer so far.
            evidence: after the last of them; counts with ``likelihood`` only.
        """
        if self._rule.update == RERANKED:
            return self._rescored(tokens)
        return self._first + evidence if self.needs_likelihoods else self._first

    def side_weight(self, log_mass: float) -> float:
        """Return the log weight of this side as it is used and sent: log h_t^s, or nearly so.

        Args:
            log_mass: log-sum-exp of the documents' log weights.
        """
        step = self._rule.weight_step
        return round(log_mass / step) * step if step else log_mass

    def _rescored(self, tokens: Sequence[int]) -> Weights:
        count = len(tokens) - len(tokens) % self._rule.every
        if not count or not self._texts:
            return self._first
        scored = tuple(tokens[:count])
        if self._scored[0] != scored:
            if self._vectors is None:
                self._vectors = self._encoder.encode(self._texts)
            text = f"{self._question} {self._decode(scored)}"
            scores = self._vectors @ self._encoder.encode([text])[0]
            self._scored = (scored, scores.astype(np.float64) / self._temperature)
        return self._scored[1]


def most_log_weight(config: SideConfig) -> float:
    """Return the bound of a side's log weight for any documents.

    A score is the product of two unit vectors, as far as rounding allows, and evidence is no
    larger than 0. The sum of Eq. 4 has as many terms as documents can be retrieved.
    """
    retrieval = config.retrieval
    return 1.01 / retrieval.temperature + math.log(MOST_CHUNKS) + config.relevance.weight_step


def scorer_name(model: str, config: SideConfig, calibration: Calibration) -> str:
    """Return the name of the scorer; weights of equal names are comparable.

    Args:
        model: fingerprint of the encoder or cross-encoder.
    """
    rule = config.relevance
    facts = {
        RERANKED: f" every {rule.every}",
        POSTERIOR: f" memory {rule.memory}",
    }.get(rule.update, "")
    quotes = f", quotes by {calibration}" if config.answers == QUOTE else ""
    return f"{model}, temperature {config.retrieval.temperature}, {rule.update}{facts}{quotes}"
