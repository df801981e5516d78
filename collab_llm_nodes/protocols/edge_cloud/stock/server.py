"""A server that scores, as the sessions see it; ``vllm.py`` and ``sglang.py`` are two."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SamplingConfig,
    certain,
    distribution,
)
from collab_llm_nodes.errors import InvalidInput, NotFound, ProtocolError, VocabularyMismatch
from collab_llm_nodes.models.guide import refused
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, StockHttp, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.session import Score

Row = Mapping[int, float]
"""Log-probabilities of the likeliest tokens after one prefix, by token id."""


GUIDED_TOP = 20
"""Likeliest tokens that an allowed one is looked for among: vLLM's own ``--max-logprobs``."""
REVISION_TOKENS = 8
LAW = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The model's own law, whatever the server's defaults; ``top_k`` is off by a number of its own."""


@dataclass(frozen=True)
class Facts:
    """Statements of a server about itself.

    Attributes:
        context: tokens that its model reads, prompt and answer together.
        revision: its greedy answer to a probe, by which another model under the same name shows.
    """

    context: int
    revision: tuple[int, ...]


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt that the server has read.

    Attributes:
        ids: with one placeholder for each image.
        length: in tokens, as the server counts them.
        pictures: how the server is shown the images again, in its own form.
    """

    ids: tuple[int, ...]
    length: int
    pictures: object = None


class StockServer(Protocol):
    """Requests to one server; all raise ``CollabError``."""

    async def check(self) -> Facts:
        """Return what the server serves.

        Raises:
            VocabularyMismatch: another tokenizer or template than configured.
        """

    async def read(self, opened: Open, count: Count) -> ServedPrompt:
        """Have the prompt of ``opened`` read, so that later requests find it in the cache."""

    async def score(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        """Return the rows [gamma + 1] of ``score``, each of the ``top`` likeliest tokens.

        Args:
            top: 0: the row's only entry is the greedy token.
        """

    async def choose(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], allowed: Sequence[int], count: Count
    ) -> int:
        """Return the likeliest of the ``allowed`` tokens after ``prefix``."""

    def stream(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], most: int, count: Count
    ) -> AsyncGenerator[int, None]:
        """Yield the tokens of a greedy answer after ``prefix``: an end token or ``most``."""


def check_law(sampling: SamplingConfig, *, guided: bool) -> None:
    """Refuse a law that no list of likeliest tokens determines.

    Raises:
        InvalidInput: neither greedy nor limited by top_k, or sampled within a guide.
    """
    if guided and not sampling.greedy:
        raise refused(
            "a stock server gives the likeliest tokens only, which may all be outside of it",
            "none, or temperature 0",
        )
    if not sampling.greedy and not sampling.top_k:
        raise InvalidInput(
            "a stock server gives the likeliest tokens only, which do not determine this law",
            field="top_k",
            remedy="set top_k up to the server's --max-logprobs (20 by default), or temperature 0",
        )


def best_allowed(row: Row, allowed: NDArray[np.bool_]) -> int | None:
    """Return the likeliest token of ``row`` among those ``allowed`` [V]; None if it has none."""
    possible = [token for token in row if token < len(allowed) and allowed[token]]
    return max(possible, key=row.__getitem__) if possible else None


def laws_of(rows: Sequence[Row], sampling: SamplingConfig, size: int) -> list[Distribution]:
    """Return the distributions that ``rows`` of log-probabilities determine.

    Args:
        size: of the vocabulary.

    Raises:
        ProtocolError: a row lacks tokens, or holds some that are no tokens.
    """
    return [_law_of(row, sampling, size) for row in rows]


def _law_of(row: Row, sampling: SamplingConfig, size: int) -> Distribution:
    least = 1 if sampling.greedy else min(sampling.top_k, size)
    if len(row) < least or not all(0 <= token < size for token in row):
        raise ProtocolError(
            f"{len(row)} log-probabilities, or ids beyond the vocabulary, where {least} are needed",
            field="model",
            remedy="check that the server serves this model, and its --max-logprobs",
        )
    if sampling.greedy:
        return certain(max(row, key=row.__getitem__), size)
    logits = np.full(size, -np.inf)
    logits[list(row)] = list(row.values())
    return distribution(logits, sampling)


async def context_of(http: StockHttp, model: str) -> int:
    """Return the tokens that ``model`` reads, prompt and answer together, as the server lists it.

    Raises:
        NotFound: the server does not list it.
    """
    listed = (await http.get("/v1/models")).get("data")
    for card in listed if isinstance(listed, list) else ():
        if isinstance(card, dict) and card.get("id") == model:
            context = card.get("max_model_len")
            if isinstance(context, int) and context > 0:
                return context
    raise NotFound("the server does not list this model", field="model", remedy="see /v1/models")


async def check_tokens(
    http: StockHttp, model: str, text: Mapping[str, Any], ours: Sequence[int], what: str
) -> None:
    """Check that the server makes the ids ``ours`` of ``text``, a ``prompt`` or ``messages``.

    Raises:
        VocabularyMismatch: it does not; names ``what`` differs.
    """
    answer = await http.post("/tokenize", {"model": model, **text}, ignore_bytes)
    if answer.get("tokens") != list(ours):
        raise VocabularyMismatch(
            f"the server's {what} is another one than that of the model in tokenizer",
            field="tokenizer",
            remedy="give the folder or hub id, and the revision, that the server serves",
        )


def data_url(image: bytes) -> str:
    """Return the URL that holds ``image``, a picture's file."""
    return f"data:;base64,{base64.b64encode(image).decode()}"


def wrong_answer(what: str) -> ProtocolError:
    """Return the error for an answer that is not one to the request."""
    return ProtocolError(
        f"the server's answer does not fit the request: {what}",
        field="url",
        remedy="check kind, and the server's version and log",
    )
