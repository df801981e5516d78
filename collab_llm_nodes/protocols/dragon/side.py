"""One side of an answer, as the rest of the protocol sees it: distributions of the next token.

A side knows its own documents only. All that goes between the two sides (drafts, verification,
network) stands on these two interfaces; ``generation`` implements them with a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.decoding.aggregation import MOST_LOG_WEIGHT
from collab_llm_nodes.knowledge.retrieval import Retrieved


@dataclass(frozen=True)
class SideInfo:
    """Facts about a side that its peer must share, or know.

    Attributes:
        vocabulary: hash of the tokenizer's vocabulary (``models.vocabulary``); must be equal.
        model: fingerprint of the model (``models.fingerprint``); may differ, and is then reported.
        scorer: names the scorer of documents and its temperature; must be equal, because the two
            sides' weights are set against each other (Eq. 4).
        vocab_size: token ids are below this.
        eos: tokens that end an answer; must be equal.
        most_log_weight: bound of a side's log weight under this scorer.
    """

    vocabulary: str
    model: str
    scorer: str
    vocab_size: int
    eos: frozenset[int]
    most_log_weight: float = MOST_LOG_WEIGHT


class SideDecoder(Protocol):
    """One answer on one side. One thread uses it; only ``cancel`` may be called by any thread."""

    def open(self, prompt_ids: Sequence[int], documents: Retrieved) -> None:
        """Read the prompt after each of ``documents``; without any, the prompt alone."""

    def next(self) -> tuple[NDArray[np.float32], float]:
        """Return the distribution of the token that follows all pushed ones, and the side's weight.

        Calling it again without a push or a rollback returns the same.

        Returns:
            float32 [V], the mixture of the documents' distributions (p_t^s of the paper, sum 1),
            and log h_t^s = log of the sum over documents of exp(R(d, x_<t) / temperature) (Eq. 4,
            Appendix A.1); -inf if the side has no say: no documents, or none that goes on as the
            answer does. It has none in the rest of the answer then.

        Raises:
            Cancelled: ``cancel`` ended the pass. The pushed tokens stand, and ``next``, ``push``
                and ``rollback`` may be called as before.
        """

    def read_on(self, tokens: int) -> bool:
        """Read the next ``tokens`` of prompt and answer; False: no more than so many are left.

        Others can have a turn between two parts of a long prompt. ``next`` reads what is left.

        Raises:
            Cancelled: as ``next``.
        """

    def push(self, token: int) -> None:
        """Append ``token`` to the answer, without a pass: ``next`` runs it."""

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` pushed tokens only (0: the prompt alone)."""

    def cancel(self) -> None:
        """End a ``next`` that runs now, between two layers. Does nothing between two calls."""

    def close(self) -> None:
        """Free the KV caches; nothing else is called afterwards."""


class Side(Protocol):
    """A model with a store of documents, able to write several answers at a time."""

    @property
    def info(self) -> SideInfo:
        """Facts for the handshake."""

    @property
    def pieces(self) -> int:
        """Pieces of documents that can be found; without any, this side has no say."""

    def decoder(self, query: str, max_tokens: int) -> SideDecoder:
        """Retrieve the documents for ``query`` and return an opened decoder for the answer.

        Args:
            max_tokens: pushed tokens at most.

        Raises:
            CollabError: no room for the answer, or the store cannot be read.
        """
