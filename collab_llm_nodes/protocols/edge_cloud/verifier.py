"""The verifier as a service: the messages of each session's stream.

``transport/streams.py`` admits, times and ends streams. Reading continues while a draft is
verified, since more may be pushed ahead; early exits are sent during the forward pass. The model
and the sessions belong to the compute thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import Counter as PrometheusCounter

from collab_llm_nodes.assets import version
from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.engine.interface import ServingEngine
from collab_llm_nodes.errors import CollabError, ProtocolError, Unavailable
from collab_llm_nodes.models.pictures import Picture
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, pixel_limit
from collab_llm_nodes.models.turns import check_texts
from collab_llm_nodes.models.vocabulary import shared_size
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.co_located import DraftingThread, OwnDrafts
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Open,
    Opened,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.server import EarlyExitQueue, ExitConfig
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.serving.compute import Compute
from collab_llm_nodes.serving.metrics import ComputeMetrics
from collab_llm_nodes.serving.pictures import PictureLimits, PictureReader
from collab_llm_nodes.serving.turns import Turns
from collab_llm_nodes.transport.metrics import ServerMetrics
from collab_llm_nodes.transport.streams import ClientSession, Outbox, StreamService, Unary
from collab_llm_nodes.transport.wire import at_most

log = logging.getLogger(__name__)

_FREE_S = 0.5  # on shutdown, for the compute thread to free its memory
_MANY = 4096  # tokens, whose KV caches tell the models' shares
_WATCH_S = 0.25  # between two looks at drafts that sessions wait for

Encode = Callable[[Prompt], EncodedPrompt]
Reply = Opened | EarlyExit | Verdict
Client = ClientSession[Reply]


class Verifier(StreamService[Reply]):
    """The service without a network.

    Args:
        engine: the target model.
        encode: turns prompts into token ids.
        draft: the draft model beside the target, and the encoding of its prompts; None: there is
            none.
    """

    name = "verifier"
    full_name = codec.SERVICE
    metrics: VerifierMetrics

    def __init__(
        self,
        config: VerifierConfig,
        engine: ServingEngine,
        encode: Encode,
        draft: tuple[ServingEngine, Encode] | None = None,
    ) -> None:
        super().__init__(config, VerifierMetrics(self.name))
        self.config = config
        self.model = Path(engine.loaded.config.path).name
        self.title = f"verifier for {self.model}"
        self._engine = engine
        self._encode_prompt = encode
        self._draft = draft
        self._drafting: DraftingThread | None = None
        pixels = pixel_limit(config.limits.max_image_pixels, engine.loaded)
        self._limits = limits = replace(config.limits, max_image_pixels=pixels)
        bounds = PictureLimits(
            limits.max_message_bytes, limits.max_image_bytes, pixels, limits.max_image_scans
        )
        self._pictures = (
            PictureReader(config.pictures, bounds, engine.loaded, self.name)
            if engine.loaded.sees
            else None
        )

    def start(self) -> None:
        super().start()
        c = self.config
        loop = asyncio.get_running_loop()

        def fail() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so have all clients
                loop.call_soon_threadsafe(self.failed.set)

        # Encoding a prompt takes as long as some passes: keep it out of the compute thread and
        # loop.
        self._reader = ThreadPoolExecutor(1, "verifier-reader")
        self._reading = Turns(1)
        if self._pictures is not None:
            self._pictures.start()
        self._compute = Compute(
            self._engine,
            batch=c.batch,
            max_sessions=c.limits.max_sessions,
            pixels=self._limits.max_image_pixels if self._pictures is not None else 0,
            judge=TargetJudge(c.exits, self.metrics.count_verdicts),
            name=self.name,
            emulated_compute_s=c.emulated_compute_s,
            metrics=self.metrics.compute,
            cache_share=self._cache_share(),
            on_failure=fail,
        )
        if self._draft is not None:
            batch = c.batch.max_batch
            self._drafting = DraftingThread(self._draft[0], batch, c.emulated_draft_s)
            self._watch = loop.create_task(_watch(self._drafting))
        if c.emulated_compute_s:
            log.warning("EMULATION: a forward pass takes at least %g s", c.emulated_compute_s)

    async def warm(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._compute.warm.wait)
        if self._drafting is not None:
            await loop.run_in_executor(None, self._drafting.warm.wait)

    def _cache_share(self) -> float:
        """Return the target's share of the memory for KV caches, which its draft model may need."""
        if self._draft is None or self._draft[0].device != self._engine.device:
            return 1.0
        here, there = (e.cache_bytes(_MANY) for e in (self._engine, self._draft[0]))
        return here / max(1, here + there)

    async def stop(self) -> bool:
        if self._drafting is not None:
            self._watch.cancel()
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._pictures is not None:
            await self._pictures.stop()
        loop = asyncio.get_running_loop()
        ended = await asyncio.gather(
            loop.run_in_executor(None, self._stop_threads), self._reading.idle(_FREE_S)
        )
        if not all(ended):
            log.warning("the model is still busy")
        return all(ended)

    def _stop_threads(self) -> bool:
        """Stop compute and drafting; return False if one is still busy."""
        stopped = self._compute.stop(_FREE_S)
        return (self._drafting is None or self._drafting.stop(_FREE_S)) and stopped

    def unary(self) -> Mapping[str, Unary]:
        return {"Describe": self._describe}

    async def _describe(self, request: bytes) -> bytes:
        engine = self._engine
        return codec.encode_info(
            ServerInfo(
                self.model,
                engine.vocabulary,
                engine.vocab_size,
                engine.exit_layers,
                version(),
                self._limits,
                self.sessions,
                Path(self._draft[0].loaded.config.path).name if self._draft is not None else "",
            )
        )

    def encode(self, message: Reply | CollabError) -> bytes:
        return codec.encode_server(message)

    def make_outbox(self) -> Outbox[Reply]:
        return _ExitsLast(self.config.exits)

    def is_last(self, message: Reply) -> bool:
        return isinstance(message, Verdict) and message.finished

    def is_answer(self, message: Reply) -> bool:
        return isinstance(message, Verdict)

    def on_silence(self, client: Client, error: Unavailable) -> None:
        self._compute.end_if_idle(client, error)  # the compute thread may be the late side

    def on_disconnected(self, client: Client) -> None:
        self._compute.leave(client)

    def summary(self, sent: Counter[str]) -> dict[str, int]:
        return {"verdicts": sent["Verdict"], "early_exits": sent["EarlyExit"]}

    async def serve_stream(self, client: Client) -> None:
        """Receive Open, then drafts."""
        asked = await self._receive_open(client)
        if asked is not None:
            await self._open(client, *asked)
            del asked
            await self._take_drafts(client)

    async def _receive_open(self, client: Client) -> tuple[Open, Prompt] | None:
        """Return Open and its prompt with decoded pictures; the encoded ones are dropped."""
        data = await self.read_first(client)
        opened = None if data is None else codec.decode_client(data)
        if isinstance(opened, Draft):
            raise ProtocolError(
                "the first message must be Open", field="message", remedy="send Open first"
            )
        if not isinstance(opened, Open):
            return None
        self._check_open(opened)
        client.open()
        client.urgent = opened.for_motion
        decoded: tuple[Picture, ...] = ()
        if self._pictures is not None:
            decoded = await self._pictures.read_all(
                opened.images, client.peer, urgent=client.urgent
            )
        shown = (b"",) * len(opened.images)
        prompt = Prompt(opened.text, shown, decoded, opened.turns, opened.raw)
        return replace(opened, images=()), prompt

    async def _open(self, client: Client, opened: Open, prompt: Prompt) -> None:
        loop = asyncio.get_running_loop()
        target = await self._reading.run(
            client.peer,
            1.0 + len(prompt.images),
            lambda: loop.run_in_executor(self._reader, self._read_prompt, client, prompt, opened),
            urgent=client.urgent,
        )
        self._compute.open(client, target)

    def _read_prompt(self, client: Client, asked: Prompt, opened: Open) -> TargetSession:
        """Encode the prompt and its pictures, in the reader thread."""
        prompt = self._encode_prompt(asked)
        target = TargetSession(
            self._engine,
            prompt,
            opened,
            self.config.exits,
            shared=self._shared_size(opened),
            drafts=self._own_drafts(client, asked, opened),
        )
        if not client.gone.is_set():
            target.encode_images()
        return target

    def _own_drafts(self, client: Client, asked: Prompt, opened: Open) -> OwnDrafts | None:
        """Return the own draft model's session, if one is wanted and can be had."""
        if self._draft is None or self._drafting is None or not opened.co_located:
            return None
        _, encode = self._draft
        try:
            return self._drafting.open(encode(asked), opened, partial(self._compute.submit, client))
        except CollabError as error:  # such as a prompt that is too long for this model alone
            log.warning("session %s: the target decodes alone: %s", client.id[:8], error)
            return None

    async def _take_drafts(self, client: Client) -> None:
        while (data := await self.read(client)) is not None:
            message = codec.decode_client(data)
            if isinstance(message, Open):
                raise ProtocolError(
                    "the session is open already", field="message", remedy="use a new stream"
                )
            if not isinstance(message, Draft):
                break  # Close
            self._compute.submit(client, message)

    def _shared_size(self, opened: Open) -> int:
        sizes = self._engine.loaded.shared_sizes
        return shared_size(opened.vocabulary, sizes, draft="model", target=self.model)

    def _check_open(self, opened: Open) -> None:
        """Check everything that needs no model."""
        limits = self.config.limits
        self._shared_size(opened)
        check_texts(
            opened.text,
            opened.turns,
            raw=opened.raw,
            max_characters=limits.max_prompt_chars,
            max_turns=limits.max_turns,
        )
        at_most(len(opened.images), limits.max_images, "images")
        for i, image in enumerate(opened.images):
            at_most(len(image), limits.max_image_bytes, f"images[{i}]", "bytes")
        check_max_tokens(opened.max_tokens, limits.max_tokens)


async def _watch(drafting: DraftingThread) -> None:
    while True:
        await asyncio.sleep(_WATCH_S)
        drafting.end_overdue(time.monotonic())


class VerifierMetrics(ServerMetrics):
    """Prometheus metrics of one verifier; the counters are safe in all threads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        r, prefix = self.registry, f"collab_llm_{name}"
        self.compute = ComputeMetrics(name, "draft", r)
        self.tokens = PrometheusCounter(f"{prefix}_tokens", "Tokens in verdicts.", registry=r)
        self.accepted = PrometheusCounter(
            f"{prefix}_accepted", "Draft tokens accepted.", registry=r
        )

    def count_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Count the verdicts of one pass."""
        self.tokens.inc(sum(len(verdict.tokens) for verdict in verdicts))
        self.accepted.inc(sum(verdict.accepted for verdict in verdicts))


class _ExitsLast(Outbox[Reply]):
    """Sends early exits after all else, the best first, and drops them once the verdict is out."""

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self._exits = EarlyExitQueue(config)

    def push(self, message: Reply | CollabError) -> None:
        if isinstance(message, EarlyExit):
            self._exits.push(message)
            return
        if isinstance(message, Verdict):
            self._exits.reset()
        super().push(message)

    def pop_optional(self) -> EarlyExit | None:
        return self._exits.pop()
