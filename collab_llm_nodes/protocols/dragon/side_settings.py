"""Settings of one side: its store, its scorer, and how its documents are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from collab_llm_nodes.config import ANY, LIMIT, MAX_TOKENS, check_ranges, ranked, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.chunking import ChunkPlan
from collab_llm_nodes.knowledge.cross_encoder import CrossEncoderConfig
from collab_llm_nodes.knowledge.documents import DocumentLimits
from collab_llm_nodes.knowledge.quoting import EvidenceConfig
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import StoreLimits
from collab_llm_nodes.knowledge.text_encoder import TextEncoderConfig

STATIC, RERANKED, POSTERIOR = "static", "encoder", "likelihood"
FREE, QUOTE = "free", "quote"


@dataclass(frozen=True)
class RelevanceConfig:
    """The rule by which the documents' weights follow the answer; equal on both sides."""

    update: str = setting(
        STATIC,
        "static: the weights of the retrieval stand; encoder: question and answer so far are scored"
        " anew; likelihood: a document gains by each token of the answer that it made likely.",
        choices=(STATIC, RERANKED, POSTERIOR),
        per_request=ANY,
    )
    every: int = setting(
        8,
        "Tokens between two scores, with `encoder`. Raise it where the encoder is slow.",
        low=1,
        high=65536,
        per_request=ANY,
    )
    memory: float = setting(
        0.9,
        "With `likelihood`, a token counts this much less with each later one; 1: all count alike.",
        low=0.0,
        high=1.0,
        per_request=ANY,
    )
    weight_step: float = setting(
        0.0,
        "The log of this side's weight is rounded to a multiple of it, before it is used or sent;"
        " 0: not at all. Exact weights tell which documents were retrieved.",
        low=0.0,
        high=10.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class SideConfig:
    """Documents of one side, how they are found, and how they are read."""

    store: str = setting("", "Folder of the side's documents; empty: none.", read_only=True)
    limits: StoreLimits = field(default_factory=StoreLimits)
    documents: DocumentLimits = field(default_factory=DocumentLimits)
    plan: ChunkPlan = field(default_factory=lambda: ChunkPlan(by="sentence", characters=240))
    document_tokens: int = setting(
        64,
        "A retrieved document has so many tokens at most; longer pieces are cut again.",
        low=8,
        high=65536,
        read_only=True,
    )
    encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    reranker: CrossEncoderConfig = field(default_factory=CrossEncoderConfig)
    retrieval: RetrievalConfig = field(
        default_factory=lambda: RetrievalConfig(method="dense", chunks=2, temperature=0.1)
    )
    relevance: RelevanceConfig = field(default_factory=RelevanceConfig)
    evidence: EvidenceConfig = field(default_factory=EvidenceConfig)
    answers: str = setting(
        FREE,
        "free: the model's own words; quote: the sentence of the documents that answers best, word"
        " for word, for models too small to copy reliably; NOT_FOUND without `evidence`. Equal on"
        " both sides.",
        choices=(FREE, QUOTE),
        per_request=ranked((QUOTE,), (FREE,)),
    )

    quoted_tokens: int = setting(
        0,
        "A free answer repeats at most so many tokens in a row of this side's retrieved documents;"
        " 0: no limit. Set it where the answer may leave the robot and its documents may not.",
        low=0,
        high=MAX_TOKENS,
        per_request=LIMIT,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.retrieval.method == "bm25":
            raise ConfigError(
                "'bm25' counts words of one store, so two sides cannot compare their scores",
                field="retrieval.method",
                remedy="dense or rescored",
            )
