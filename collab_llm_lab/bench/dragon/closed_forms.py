"""Predicted latency of DRAGON and of the baselines of paper 001, as one pipeline with five choices.

name        documents of   read by    what travels    sides agree
device      device         device     nothing
cloud       cloud          cloud      query, tokens
crcg        device         device     nothing                        one long context
drcg_text   both           device     text                           one long context
drcg_kv     both           device     KV caches                      one long context
drdg_tw     both           both       drafts          token-wise
drdg_sw     both           both       drafts, last    once, at the end
dragon      both           both       drafts          speculatively
"""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.decoding.aggregation import Pair
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.dragon.scheduler import per_token


@dataclass(frozen=True)
class Costs:
    """Measured costs of one answer. Pairs are of device and cloud.

    Attributes:
        decode_s: one pass over all documents of a side [s].
        context_decode_s: one pass of the device over one long context [s].
        retrieve_s: finding the documents [s].
        read_s: reading the query behind documents whose KV caches are there [s].
        prefill_s: reading one token of a document on the device [s].
        rtt_s: round trip of a small message [s].
        bytes_per_s: of the link, each way.
        documents, document_tokens: of each side, and tokens of each.
        text_bytes, kv_bytes, draft_bytes: of one token as text, as KV cache, as a draft.
        acceptance: share of drafts that are accepted.
        tokens: length of the answer.
    """

    decode_s: Pair
    context_decode_s: float
    retrieve_s: Pair
    read_s: Pair
    prefill_s: float
    rtt_s: float
    bytes_per_s: float
    documents: int
    document_tokens: int
    text_bytes: float
    kv_bytes: float
    draft_bytes: float
    acceptance: Pair
    tokens: int


@dataclass(frozen=True)
class Prediction:
    """Times of one answer [s].

    Attributes:
        first_s: to the first token on the device (TTFT).
        per_token_s: mean of the tokens behind it.
    """

    first_s: float
    per_token_s: float

    def mean_s(self, tokens: int) -> float:
        """Return the time of the whole answer over its tokens."""
        return (self.first_s + (tokens - 1) * self.per_token_s) / tokens


METHODS = (
    "device",
    "cloud",
    "crcg",
    "drcg_text",
    "drcg_kv",
    "drdg_tw",
    "drdg_sw",
    "dragon",
)


def predict(method: str, costs: Costs) -> Prediction:
    """Return what ``method`` should take. The query leaves before anything else is done.

    Raises:
        InvalidInput: it is none of ``METHODS``.
    """
    c = costs
    own = tuple(c.retrieve_s[side] + c.read_s[side] for side in (0, 1))
    passes = c.tokens - 1
    there_and_back = c.rtt_s + c.draft_bytes / c.bytes_per_s
    both = max(own[0], own[1] + there_and_back)
    if method == "device":
        return Prediction(own[0], c.decode_s[0])
    if method == "cloud":
        return Prediction(c.rtt_s + own[1], c.decode_s[1])
    if method == "crcg":
        return Prediction(own[0], c.context_decode_s)
    if method in ("drcg_text", "drcg_kv"):
        return Prediction(_fetched(method == "drcg_kv", c), c.context_decode_s)
    if method == "drdg_tw":
        return Prediction(both, max(c.decode_s[0], c.decode_s[1] + there_and_back))
    if method == "drdg_sw":
        sent = c.rtt_s + c.tokens * c.draft_bytes / c.bytes_per_s
        device, cloud = (own[side] + passes * c.decode_s[side] for side in (0, 1))
        end = max(device, cloud + sent)
        return Prediction(end, 0.0)  # nothing is known before the end
    if method == "dragon":
        return Prediction(both, per_token(*c.decode_s, there_and_back, c.acceptance[1]))
    raise InvalidInput(f"no method {method!r}", field="method", remedy=", ".join(METHODS))


def _fetched(as_kv: bool, c: Costs) -> float:
    """Return the time until the device has read both sides' documents in one context."""
    tokens = c.documents * c.document_tokens
    size = tokens * (c.kv_bytes if as_kv else c.text_bytes)
    fetched = max(c.retrieve_s[0], c.rtt_s + c.retrieve_s[1] + size / c.bytes_per_s)
    prefill = 0.0 if as_kv else 2 * tokens * c.prefill_s
    return fetched + prefill + c.read_s[0]
