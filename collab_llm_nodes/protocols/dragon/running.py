"""DRAGON as a protocol: answers that device and cloud write together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, NotFound
from collab_llm_nodes.knowledge.quoting import Quotable
from collab_llm_nodes.knowledge.retrieval import Retrieved
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.device import AnswerSoFar, DeviceAnswer, Question
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.messages import Line
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN
from collab_llm_nodes.protocols.dragon.relevance import most_log_weight
from collab_llm_nodes.protocols.dragon.settings import DragonConfig
from collab_llm_nodes.protocols.dragon.side import SideInfo
from collab_llm_nodes.protocols.dragon.side_settings import QUOTE, SideConfig
from collab_llm_nodes.protocols.dragon.sides import load_side, measured


def check(request: Request) -> None:
    """Check a request without the model.

    Raises:
        InvalidInput: an empty question, or one that is too long.
    """
    config: DragonConfig = request.config
    if not request.prompt.strip() or len(request.prompt) > config.max_query_chars:
        raise InvalidInput(
            f"has {len(request.prompt)} characters",
            field="prompt",
            remedy=f"1 to {config.max_query_chars}, not only blanks",
        )
    request.length(config.max_tokens)


def start(config: DragonConfig, resources: Resources) -> Dragon:
    """Load the model, open the documents and connect to the cloud, which may come later.

    Raises:
        ConfigError: no model, or documents that do not fit the configuration.
        ModelError: the model cannot be loaded.
    """
    if not config.model.path:
        raise ConfigError("no model", field="model.path", remedy="name its folder or hub id")
    side, index = load_side(config.model, config.side)
    client = DragonClient(config.cloud) if config.use_cloud else None
    return Dragon(side, client, config, measured(side), index)


class Dragon:
    """The device's side with its model loaded.

    Args:
        client: None: the device answers alone.
        decode: the line of the side's passes, if it was measured.
        index: of the side's documents; None: it has no store.

    Attributes:
        on_found: called with each request and its documents before its first token, in the compute
            thread.
    """

    def __init__(
        self,
        side: ModelSide,
        client: DragonClient | None,
        config: DragonConfig,
        decode: Line | None = None,
        index: Index | None = None,
    ) -> None:
        self.side = side
        self.index = index
        self.on_found: Callable[[Request, Retrieved], None] = lambda request, found: None
        self.parallel = config.max_answers
        self._client = client
        self._decode = decode
        self._acceptance = UNKNOWN  # of the answers so far: where the next one begins best
        self._compute = ThreadPoolExecutor(1, "dragon-compute")

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Make one answer, with the cloud as long as it takes part."""
        config: DragonConfig = request.config
        limit = request.length(config.max_tokens)
        text = Detokeniser(self.side.decode)
        sampling = request.sampling
        side = _RequestSide(self.side, request, self.on_found)
        answer = DeviceAnswer(
            side,
            self._compute,
            self._client if config.use_cloud else None,
            config.rules(sampling),
            Question(request.prompt, limit, sampling.temperature, sampling.seed),
            self._decode,
            self._acceptance,
        )

        def progress(so_far: AnswerSoFar, *, final: bool = False) -> Progress:
            text.update(so_far.tokens, final=final)
            so_far.metrics.device_documents = side.found
            return Progress(
                text.text,
                so_far.tokens,
                tuple(int(source) for source in so_far.sources),
                text.ends,
                verified=so_far.metrics.unverified == 0,
                stage="alone" if so_far.metrics.unverified else "aggregate",
                share_done=min(1.0, len(so_far.tokens) / limit),
                metrics=so_far.metrics,
            )

        asked_at = request.asked_at or time.monotonic()
        try:
            so_far = answer.run(lambda answer: emit(progress(answer)), control, asked_at)
        except CollabError as error:
            if not answer.machine.answer:
                raise
            return Answer(**vars(progress(answer.so_far, final=True)), error=error)
        self._acceptance = answer.machine.profiler.acceptance
        whole = Answer(**vars(progress(so_far, final=True)))
        if config.side.answers == QUOTE and not whole.text:
            return replace(whole, error=_not_found(side, config.side, verified=whole.verified))
        return whole

    def health(self) -> Mapping[str, object]:
        """Return the state of the link and of the documents' caches."""
        caches = self.side.caches
        figures: dict[str, object] = {
            "document_kv_loaded": caches.loaded,
            "document_kv_computed": caches.computed,
            "document_kv_refused": caches.refused,
        }
        if self._client is not None:
            state, error = self._client.connection_state
            info = self._client.info
            figures["cloud"] = state if error is None else f"{state}: {error}"
            figures["cloud_model"] = info.model if info is not None else ""
            figures["without_cloud"] = str(self._client.left or "")
            figures["cloud_rtt_ms"] = f"{1e3 * self._client.rtt_s:.1f}"
        return figures

    def close(self) -> None:
        """Free the model and close the connection."""
        if self._client is not None:
            self._client.close()
        self._compute.shutdown()
        self.side.close()


def _not_found(side: _RequestSide, config: SideConfig, *, verified: bool) -> NotFound:
    """Return the reason for an answer that has no words: no side had a sentence to quote."""
    if not side.pieces:
        store = config.store or "of this side"
        cloud = ", and those of the cloud do not answer this" if verified else ""
        return NotFound(
            f"the store {store} holds no documents{cloud}",
            field="prompt",
            remedy=f"add some: collab-llm knowledge add {config.store or 'STORE'} FILES"
            " --by sentence --characters 240",
        )
    where = "" if verified else " on the robot"
    absent = "" if verified else ", and the cloud took no part"
    return NotFound(
        f"no sentence{where} answers this{absent}"
        f" (best evidence on the robot {side.best:.2f}, needed {config.evidence.least:.2f})",
        field="prompt",
        remedy="use the words of the documents, or add a document about it",
    )


class _RequestSide:
    """The side with the options of one request, which are part of its identity.

    Attributes:
        found: pieces of documents that were found for the question.
        best: the greatest probability that one of its sentences answers; with quotes only.
    """

    def __init__(
        self, side: ModelSide, request: Request, on_found: Callable[[Request, Retrieved], None]
    ) -> None:
        self._side, self._request, self._on_found = side, request, on_found
        self._config: SideConfig = request.config.side
        self.found, self.best = 0, 0.0

    @property
    def info(self) -> SideInfo:
        return replace(
            self._side.info,
            scorer=self._side.scorer(self._config),
            most_log_weight=most_log_weight(self._config),
        )

    @property
    def pieces(self) -> int:
        return self._side.pieces

    def decoder(self, query: str, max_tokens: int) -> DocumentsDecoder:
        decoder = self._side.decoder(query, max_tokens, self._config)
        self.found = len(decoder.found.hits)
        if isinstance(decoder.found, Quotable):
            self.best = decoder.found.best
        self._on_found(self._request, decoder.found)
        return decoder
