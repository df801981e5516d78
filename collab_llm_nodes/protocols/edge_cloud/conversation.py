"""The verifier's side of the conversation with each robot, whatever carries the bytes.

``transport/streams.py`` admits, times and ends streams; here is what is said on them. Reading goes
on while a draft is verified, since more may be pushed ahead; early exits leave while the forward
pass goes on. The model and the sessions belong to the compute thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from collab_llm_nodes.assets import version
from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.engine.interface import ServingEngine
from collab_llm_nodes.errors import CollabError, InvalidInput, ProtocolError, Unavailable
from collab_llm_nodes.models.pictures import Picture
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, pixel_limit
from collab_llm_nodes.models.turns import check_texts
from collab_llm_nodes.models.vocabulary import check_same
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import ServerInfo
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    EarlyExit,
    Open,
    Opened,
    Verdict,
    failure_of,
)
from collab_llm_nodes.protocols.edge_cloud.server import EarlyExitQueue, ExitConfig
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.target import TargetJudge, TargetSession
from collab_llm_nodes.protocols.edge_cloud.telemetry import Telemetry
from collab_llm_nodes.serving.compute import Compute
from collab_llm_nodes.serving.pictures import PictureLimits, PictureReader
from collab_llm_nodes.serving.turns import Turns
from collab_llm_nodes.transport.streams import ClientSession, Outbox, StreamService, Unary

log = logging.getLogger(__name__)

_FREE_S = 0.5  # at the end, for the compute thread to free what is left

Encode = Callable[[Prompt], EncodedPrompt]
Reply = Opened | EarlyExit | Verdict
Client = ClientSession[Reply]


class Verifier(StreamService[Reply]):
    """The service without a network.

    Args:
        engine: the target model.
        encode: prompts to token ids.
    """

    name = "verifier"
    full_name = codec.SERVICE

    def __init__(self, config: VerifierConfig, engine: ServingEngine, encode: Encode) -> None:
        self.telemetry = Telemetry(self.name)
        super().__init__(config, self.telemetry)
        self.config = config
        self.model = Path(engine.loaded.config.path).name
        self.title = f"verifier for {self.model}"
        self._engine = engine
        self._encode_prompt = encode
        pixels = pixel_limit(config.limits.max_image_pixels, engine.loaded)
        self._limits = limits = replace(config.limits, max_image_pixels=pixels)
        bounds = PictureLimits(
            limits.max_message_bytes, limits.max_image_bytes, pixels, limits.max_image_scans
        )
        self._pictures = (
            PictureReader(config.pictures, bounds, engine.loaded, self.name)
            if engine.loaded.image_processor is not None
            else None
        )

    def start(self) -> None:
        super().start()
        c = self.config
        loop = asyncio.get_running_loop()

        def fail() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all clients with it
                loop.call_soon_threadsafe(self.failed.set)

        # Reading a prompt takes as long as some passes: not in the compute thread, not in the loop.
        self._reader = ThreadPoolExecutor(1, "verifier-reader")
        self._reading = Turns(1)
        if self._pictures is not None:
            self._pictures.start()
        self._compute = Compute(
            self._engine,
            batch=c.batch,
            max_sessions=c.limits.max_sessions,
            pixels=self._limits.max_image_pixels if self._pictures is not None else 0,
            judge=TargetJudge(c.exits, self.telemetry.count_verdicts),
            name=self.name,
            emulated_compute_s=c.emulated_compute_s,
            figures=self.telemetry.compute,
            on_failure=fail,
        )
        if c.emulated_compute_s:
            log.warning("EMULATION: a forward pass takes at least %g s", c.emulated_compute_s)

    async def stop(self) -> bool:
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._pictures is not None:
            await self._pictures.stop()
        loop = asyncio.get_running_loop()
        ended = await asyncio.gather(
            loop.run_in_executor(None, self._compute.stop, _FREE_S), self._reading.idle(_FREE_S)
        )
        if not all(ended):
            log.warning("the model is still busy")
        return all(ended)

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
            )
        )

    def encode(self, message: Reply | CollabError) -> bytes:
        said = failure_of(message) if isinstance(message, CollabError) else message
        return codec.encode(said)

    def make_outbox(self) -> Outbox[Reply]:
        return _ExitsLast(self.config.exits)

    def is_last(self, message: Reply) -> bool:
        return isinstance(message, Verdict) and message.finished

    def is_answer(self, message: Reply) -> bool:
        return isinstance(message, Verdict)

    def on_silence(self, client: Client, error: Unavailable) -> None:
        self._compute.end_if_idle(client, error)  # which knows who is late

    def on_left(self, client: Client) -> None:
        self._compute.leave(client)

    def summary(self, sent: Counter[str]) -> dict[str, int]:
        return {"verdicts": sent["Verdict"], "early_exits": sent["EarlyExit"]}

    async def hold(self, client: Client) -> None:
        """Hear Open, then drafts."""
        asked = await self._hear_open(client)
        if asked is not None:
            await self._open(client, *asked)
            del asked
            await self._take_drafts(client)

    async def _hear_open(self, client: Client) -> tuple[Open, Prompt] | None:
        """Read Open and decode its pictures; their files are not kept, and may be large."""
        async with self.turn(client):
            data = await self.read(client)
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
        """Turn the prompt into ids and the pictures into features, in the reader's thread."""
        prompt = self._encode_prompt(asked)
        target = TargetSession(self._engine, prompt, opened, self.config.exits)
        if not client.gone.is_set():
            target.encode_images()
        return target

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

    def _check_open(self, opened: Open) -> None:
        """Check all that can be checked without the model."""
        limits = self.config.limits
        check_same(opened.vocabulary, self._engine.vocabulary, draft="model", target=self.model)
        check_texts(
            opened.text,
            opened.turns,
            raw=opened.raw,
            max_characters=limits.max_prompt_chars,
            max_turns=limits.max_turns,
        )
        _at_most(len(opened.images), limits.max_images, "images", "images")
        for i, image in enumerate(opened.images):
            _at_most(len(image), limits.max_image_bytes, f"images[{i}]", "bytes")
        check_max_tokens(opened.max_tokens, limits.max_tokens)


class _ExitsLast(Outbox[Reply]):
    """Early exits wait for all else, the best first, and are dropped when their verdict is out."""

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


def _at_most(value: int, limit: int, field_name: str, unit: str) -> None:
    if value > limit:
        raise InvalidInput(f"{value} {unit}, {limit} at most", field=field_name, remedy="send less")
