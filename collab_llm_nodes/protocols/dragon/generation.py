"""One side with its model: a sequence for each document, one engine pass per token for all.

document 1 | question | answer so far ──▶ p(x | d_1, x_<t) ─┐
document 2 | question | answer so far ──▶ p(x | d_2, x_<t) ─┼─▶ sum of w(d) p(x | d, x_<t)
document 3 | question | answer so far ──▶ p(x | d_3, x_<t) ─┘
── KV ────── one pass ─────────────────
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import Cancelled, InvalidInput, ProtocolError
from collab_llm_nodes.knowledge.chunking import LEAST_CHARACTERS, Chunk
from collab_llm_nodes.knowledge.cross_encoder import CrossEncoder
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.knowledge.evidence import load_calibration
from collab_llm_nodes.knowledge.quoting import Quotable, check_evidence, quotable
from collab_llm_nodes.knowledge.retrieval import Retrieved, retrieve, softmax
from collab_llm_nodes.knowledge.store import Hit, Store
from collab_llm_nodes.knowledge.text_encoder import TextEncoder
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.dragon.document_kv import DocumentCaches
from collab_llm_nodes.protocols.dragon.layout import Layout
from collab_llm_nodes.protocols.dragon.quotes import QuoteCap, Quotes, restricted, without
from collab_llm_nodes.protocols.dragon.relevance import (
    Relevance,
    Weights,
    most_log_weight,
    scorer_name,
)
from collab_llm_nodes.protocols.dragon.side import SideInfo
from collab_llm_nodes.protocols.dragon.side_settings import QUOTE, SideConfig

log = logging.getLogger(__name__)


class DocumentsDecoder:
    """A :class:`~collab_llm_nodes.protocols.dragon.side.SideDecoder` over an engine.

    Args:
        relevance: the documents' weights; the documents that it was made of are those of ``open``.
        quotes: the sentences of the documents, if the answer is to be one of them. A document that
            does not go on as the answer does loses its weight; a side without any other has no say,
            and alone it ends the answer.
        cap: limit on what the answer repeats of the documents.

    Attributes:
        found: the documents; without any, and without ``quotes``, the answer is plain generation.
    """

    def __init__(
        self,
        engine: Engine,
        caches: DocumentCaches,
        relevance: Relevance,
        quotes: Quotes | None = None,
        cap: QuoteCap | None = None,
    ) -> None:
        self._engine, self._caches, self._relevance = engine, caches, relevance
        self._quotes, self._cap = quotes, cap
        self._sessions: list[Session] = []
        self._starts: list[int] = []  # columns of each session before the prompt
        self._prompt: tuple[int, ...] = ()
        self._answer: list[int] = []
        self._fed = 0  # tokens of prompt and answer that all sessions hold
        self._rows: Tensor | None = None  # log p(x | d) [documents, V] after the last token fed
        self._evidence: list[Weights] = []  # after each of the answer's tokens that was judged
        self._given: tuple[NDArray[np.float32], float] | None = None
        self._lock = threading.Lock()
        self._running = self._cancelled = False
        self.found = Retrieved((), np.zeros(0), float("-inf"), "")

    def open(self, prompt_ids: Sequence[int], documents: Retrieved) -> None:
        """Load the KV of the documents; the first ``next`` reads the prompt after them.

        Raises:
            InvalidInput: no prompt, or a document is longer than the context.
        """
        if self._sessions:
            raise ProtocolError("the decoder is open", remedy="make another one")
        if not prompt_ids:
            raise InvalidInput("no prompt", field="prompt", remedy="ask something")
        self.found = documents
        self._sessions = self._caches.open(documents.hits) or [self._engine.open(EncodedPrompt(()))]
        self._starts = [session.length for session in self._sessions]
        self._prompt = tuple(prompt_ids)

    @property
    def room(self) -> int:
        """Tokens that the answer may have before the longest sequence fills the context."""
        return self._engine.context - max(self._starts) - len(self._prompt)

    def next(self) -> tuple[NDArray[np.float32], float]:
        """Return mixture and log weight, as ``SideDecoder.next``."""
        if self._given is None:
            self._read()
            self._given = self._mixture()
        return self._given

    def read_on(self, tokens: int) -> bool:
        """Read a part of prompt and answer, as ``SideDecoder.read_on``."""
        if len(self._prompt) + len(self._answer) - self._fed <= tokens:
            return False
        self._read(self._fed + tokens)
        return True

    def push(self, token: int) -> None:
        """Append ``token`` to the answer."""
        self._answer.append(token)
        self._given = None

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens of the answer."""
        if not 0 <= length <= len(self._answer):
            raise ProtocolError(
                f"cannot roll back from {len(self._answer)} to {length}", field="length"
            )
        if length == len(self._answer):
            return
        del self._answer[length:], self._evidence[length:]
        self._given = None
        if self._fed > len(self._prompt) + length:
            self._shorten(len(self._prompt) + length)

    def cancel(self) -> None:
        """End a ``next`` that runs now, between two layers."""
        with self._lock:
            self._cancelled = self._running

    def close(self) -> None:
        """Free the KV caches."""
        for session in self._sessions:
            session.close()
        self._sessions, self._rows, self._given = [], None, None

    # --- Internals
    # ----------------------------------------------------------------------------------

    def _read(self, end: int | None = None) -> None:
        """Feed prompt and answer up to the token ``end``; all sequences take it, or none does."""
        with self._lock:
            self._running, self._cancelled = True, False
        try:
            self._feed([*self._prompt, *self._answer][:end])
        finally:
            with self._lock:
                self._running = False

    def _feed(self, context: list[int]) -> None:
        """Feed what is new in ``context``, a beginning of prompt and answer."""
        rows = self._rows
        # A rollback loses the logits after the last token fed. They are needed for the next token
        # or for the evidence of the one pushed since, so that token is fed again.
        needed = self._fed == len(context) or self._relevance.needs_likelihoods
        if rows is None and needed and self._fed:
            self._shorten(self._fed - 1)
        new = context[self._fed :]
        if not new:
            return
        # This pass's own logits judge the answer tokens after the first one fed here.
        known = max(self._fed, len(self._prompt))
        last = len(context) - known + (1 if self._fed < known else 0)
        wanted = max(1, last) if self._relevance.needs_likelihoods else 1
        feeds = [Feed(session, new, last=wanted) for session in self._sessions]
        logits = []
        for result in self._engine.run(feeds, check=self._check):
            if isinstance(result, Exception):
                raise result
            logits.append(result)
        found = torch.log_softmax(torch.stack(logits).float(), dim=-1)
        self._fed = len(context)
        if self._relevance.needs_likelihoods:
            self._judge(found if rows is None else torch.cat([rows[:, None], found], dim=1))
        self._rows = found[:, -1]

    def _judge(self, rows: Tensor) -> None:
        """Note how likely each document made the answer's tokens that are not judged yet.

        Args:
            rows: log-probabilities [documents, n, V]; the last row follows the last token.
        """
        known, held = len(self._evidence), max(0, self._fed - len(self._prompt))
        count = held - known
        if count <= 0:
            return
        tokens = torch.tensor(self._answer[known:held], device=rows.device)
        judged = rows[:, -count - 1 : -1].gather(2, tokens.expand(len(rows), -1)[..., None])
        for likelihoods in judged[..., 0].T.double().cpu().numpy():
            self._evidence.append(self._relevance.judged(self._last_evidence(), likelihoods))

    def _last_evidence(self) -> Weights:
        return self._evidence[-1] if self._evidence else self._relevance.no_evidence

    def _shorten(self, fed: int) -> None:
        for session, start in zip(self._sessions, self._starts, strict=True):
            session.length = start + fed
        self._fed, self._rows = fed, None

    def _mixture(self) -> tuple[NDArray[np.float32], float]:
        rows = self._rows
        assert rows is not None
        goes_on = np.ones(len(self.found.hits), bool)
        if self._cap is not None:
            rows = without(rows, self._cap.forbidden(self._answer))
        if self._quotes is not None:
            tokens = self._quotes.next_tokens(self._answer)
            goes_on = np.array([bool(kept) for kept in tokens], bool)
            # Alone, this side ends the answer: it would invent the rest.
            rows = restricted(rows, tokens if goes_on.any() else [self._quotes.ends] * len(rows))
        if not goes_on.any():
            return _normalised(rows[0].exp()), float("-inf")
        logs = self._relevance.log_weights(self._answer, self._last_evidence())
        weights, log_mass = softmax(np.where(goes_on, logs, -np.inf), 1.0)
        shares = torch.from_numpy(weights).to(rows.device, rows.dtype)
        return _normalised(shares @ rows.exp()), self._relevance.side_weight(log_mass)

    def _check(self) -> None:
        if self._cancelled:
            raise Cancelled("the draft is not wanted any more")


def _normalised(p: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (p / p.sum()).cpu().numpy()
    return found


class ModelSide:
    """A :class:`~collab_llm_nodes.protocols.dragon.side.Side`: an engine, a store and a scorer.

    Any thread may ask it for decoders.

    Args:
        store: None: this side has no documents.
        encoder: None: the one that the configuration names.

    Raises:
        ConfigError: the store's vectors are those of another encoder.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store | None,
        config: SideConfig,
        encoder: Encoder | None = None,
    ) -> None:
        self._engine, self._store, self._config = engine, store, config
        self.encoder = encoder or encoder_of(config)
        self.reranker = CrossEncoder(config.reranker) if config.reranker.path else None
        self.calibration = load_calibration(config.evidence.calibration)
        if config.answers == QUOTE:
            check_evidence(
                config.evidence, self.calibration, not isinstance(self.encoder, WordHashes)
            )
        self.layout = Layout(engine.loaded, config.document_tokens)
        self.caches = DocumentCaches(engine, None if store is None else store.kv, self.layout)
        self._warned = False

    @cached_property
    def info(self) -> SideInfo:
        """Facts for the handshake."""
        return SideInfo(
            vocabulary=self._engine.vocabulary,
            model=fingerprint(self._engine.loaded.model),
            scorer=self.scorer(self._config),
            vocab_size=self._engine.vocab_size,
            eos=self._engine.eos,
            most_log_weight=most_log_weight(self._config),
        )

    def scorer(self, config: SideConfig) -> str:
        """Return the name of the scorer under ``config``; the weights of equal ones compare."""
        free = config.answers != QUOTE and self.reranker is not None
        model = self.reranker if free and self.reranker is not None else self.encoder
        return scorer_name(model.fingerprint, config, self.calibration)

    @property
    def pieces(self) -> int:
        """Pieces of documents in the store."""
        return 0 if self._store is None else self._store.pieces()

    def retrieve(self, query: str, config: SideConfig | None = None) -> Retrieved:
        """Return the documents for ``query``; to be quoted, a :class:`Quotable`.

        Raises:
            ConfigError: the store's vectors are those of another encoder, or it has none.
        """
        config = config or self._config
        if self._store is None:
            return Retrieved((), np.zeros(0), float("-inf"), self.info.scorer)
        if config.answers != QUOTE:
            return retrieve(self._store, query, config.retrieval, self.encoder, self.reranker)
        least = config.evidence.least
        return quotable(self._store, query, config.retrieval, self.calibration, least, self.encoder)

    def decoder(
        self, query: str, max_tokens: int, config: SideConfig | None = None
    ) -> DocumentsDecoder:
        """Retrieve documents for ``query`` and return an opened decoder for the answer.

        Without documents, that is the model's own answer to the question, or none if it must quote.

        Args:
            max_tokens: pushed tokens at most.
            config: the side's, with the request's options.

        Raises:
            ConfigError: the store has no vectors of this side's encoder.
            InvalidInput: no room for the answer, or a question that cannot be encoded.
            Unavailable: the store cannot be read.
        """
        config = config or self._config
        documents = self.retrieve(query, config)
        if documents.hits:
            if config.answers != QUOTE:  # a quote is chosen by evidence, from the whole piece
                self._warn_of_cuts(documents)
            prompt = self.layout.after(query)
        else:
            log.info("no document found")
            prompt = self.layout.alone(query)
        relevance = Relevance(documents, query, config, self.encoder, self._engine.decode)
        quotes = None
        if config.answers == QUOTE:
            sentences = documents.sentences if isinstance(documents, Quotable) else ()
            found = [[self.layout.sentence(sentence)] for sentence in sentences]
            quotes = Quotes(found, self._engine.eos)
        cap = None
        if config.quoted_tokens and quotes is None:
            texts = [hit.chunk.text for hit in documents.hits]
            cap = QuoteCap(self.layout.repeatable(texts), config.quoted_tokens)
        decoder = DocumentsDecoder(self._engine, self.caches, relevance, quotes, cap)
        decoder.open(prompt, documents)
        if decoder.room < max_tokens:
            room = decoder.room
            decoder.close()
            raise InvalidInput(
                f"room for {room} tokens after document and question",
                field="max_tokens",
                remedy="lower max_tokens, or shorten the question",
            )
        return decoder

    def _warn_of_cuts(self, documents: Retrieved) -> None:
        """Warn once about documents longer than this side reads, which ``Index`` did not cut."""
        cut = next((hit for hit in documents.hits if not self.layout.fits(hit.chunk.text)), None)
        if cut is not None and not self._warned:
            self._warned = True
            text = cut.chunk.text
            log.warning(
                "pieces of %r, and maybe of others, are longer than %d tokens: their ends are not"
                " read; add them again in smaller pieces (--by sentence --characters %d), or raise"
                " side.document_tokens",
                cut.name,
                self._config.document_tokens,
                max(LEAST_CHARACTERS, len(text) // (1 + len(self.layout.pieces(text)))),
            )

    def continuation(self, ids: Sequence[int]) -> DocumentsDecoder:
        """Return an opened decoder that continues ``ids``, without any documents."""
        nothing = Retrieved((), np.zeros(0), float("-inf"), self.info.scorer)
        relevance = Relevance(nothing, "", self._config, self.encoder, self._engine.decode)
        decoder = DocumentsDecoder(self._engine, self.caches, relevance)
        decoder.open(ids, nothing)
        return decoder

    def rehearsal(self, seed: int = 0) -> DocumentsDecoder:
        """Return an opened decoder with as many documents of random text as a question has.

        Each is as long as a document can be, and nothing of it is kept (section 5.2 of paper 001).
        """
        chance = np.random.default_rng(seed)
        texts = [
            self._engine.decode(chance.integers(self._engine.vocab_size, size=2 * most).tolist())
            for most in [self._config.document_tokens] * self._config.retrieval.chunks
        ]
        hits = tuple(
            Hit(number, "dummy", Chunk("", 0, len(text), text, 0, ""))
            for number, text in enumerate(texts)
        )
        documents = Retrieved(hits, *softmax([0.0] * len(hits), 1.0), self.info.scorer)
        relevance = Relevance(documents, "", self._config, self.encoder, self._engine.decode)
        caches = DocumentCaches(self._engine, None, self.layout)
        decoder = DocumentsDecoder(self._engine, caches, relevance)
        decoder.open(self.layout.between, documents)
        return decoder

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens."""
        return self._engine.decode(tokens)

    def close(self) -> None:
        """Close the store; the engine stays open."""
        if self._store is not None:
            self._store.close()


def encoder_of(config: SideConfig) -> Encoder:
    """Return the encoder that ``config`` names; without one, words are counted."""
    return TextEncoder(config.encoder) if config.encoder.path else WordHashes()
