"""The verifier: a gRPC server around the target model (paper 003, Algorithm 2).

One asyncio loop speaks to the clients; one compute thread owns the model, so sessions take turns
in order of arrival and nothing of a session is touched by two threads. Early exits leave while
the forward pass goes on. Whatever becomes of a client, its KV cache is freed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import check_ranges, from_yaml, setting
from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.edge_cloud.messages import (
    Close,
    Draft,
    EarlyExit,
    Open,
    Opened,
    Verdict,
    failure_of,
)
from collab_llm_nodes.edge_cloud.server import EarlyExitQueue, ExitConfig
from collab_llm_nodes.edge_cloud.target import TargetSession
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    ConfigError,
    InvalidInput,
    ProtocolError,
    Unavailable,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, PromptLimits, encode
from collab_llm_nodes.models.vocabulary import check_same
from collab_llm_nodes.verifier import codec
from collab_llm_nodes.verifier.background import background_loop, within
from collab_llm_nodes.verifier.client import read_file, read_token
from collab_llm_nodes.verifier.info import Limits, ServerInfo

log = logging.getLogger(__name__)

_OPEN_S = 10.0  # from a new stream to its Open message
_FREE_S = 1.0  # at the end, for the compute thread to free what is left


@dataclass(frozen=True)
class VerifierConfig:
    """Everything ``collab-llm verifier`` needs. File names are PEM files."""

    model: ModelConfig = field(default_factory=ModelConfig)
    address: str = setting("127.0.0.1:50551", "Listen here, host:port; port 0 takes a free one.")
    tls_cert: str = setting("", "Own certificate; empty: no encryption.")
    tls_key: str = setting("", "Key of tls_cert.")
    tls_client_ca: str = setting("", "Authority of the clients' certificates, to ask for them.")
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the token every client must give.")
    limits: Limits = field(default_factory=Limits)
    exits: ExitConfig = field(default_factory=ExitConfig)
    exit_candidates: int = setting(
        0,
        "Score later exits only over this many best tokens and the draft's; 0: all (worth it for"
        " large vocabularies).",
        low=0,
        high=4096,
    )
    drain_s: float = setting(
        10.0, "When told to stop, wait this long for open sessions [s].", low=0.0, high=3600.0
    )
    emulated_extra_compute_s: float = setting(
        0.0,
        "EMULATION: pad each forward pass by this time, spread over the layers, to stand for a"
        " larger model [s].",
        low=0.0,
        high=60.0,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key go together", field="tls_cert")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("needs tls_cert and tls_key", field="tls_client_ca")
        if self.token and self.token_file:
            raise ConfigError("give token or token_file, not both", field="token")


Encode = Callable[[Prompt], EncodedPrompt]


class _Slot:
    """One client's place in the verifier. ``session`` belongs to the compute thread."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.gone = threading.Event()  # the client left: stop computing for it
        self.session: TargetSession | None = None

    def check(self) -> None:
        if self.gone.is_set():
            raise Cancelled("the client is gone")

    def free(self) -> None:
        if self.session is not None:
            self.session.close()


class VerifierServer:
    """The service itself. All coroutines run in one loop; see ``serve`` and ``start_server``."""

    def __init__(self, config: VerifierConfig, engine: Engine, encode: Encode) -> None:
        self._config = config
        self._engine = engine
        self._encode = encode
        self._model = Path(engine.loaded.config.path).name
        self._token = read_token(config.token, config.token_file).encode()
        self._compute = ThreadPoolExecutor(1, "verifier-compute")
        self._slots: set[_Slot] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.port = 0

    @property
    def sessions(self) -> int:
        """Sessions whose KV cache is, or is about to be, in memory."""
        return len(self._slots)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use, or certificates cannot be read.
        """
        limits = self._config.limits
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.so_reuseport", 0),  # a second verifier on one port is an error
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 50),
                ("grpc.http2.max_ping_strikes", 0),
            ],
            # Streams beyond the sessions are told so by a typed failure; a flood of them is not.
            maximum_concurrent_rpcs=2 * limits.max_sessions + 16,
        )
        # Without serialisers the handlers get bytes, and nonsense gets a typed answer.
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(codec.SERVICE, handlers),)
        )
        address, credentials = self._config.address, _credentials(self._config)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}", field="address", remedy="is the port in use?"
            ) from error
        await self._server.start()
        if not (credentials and self._token) and not _is_local(address):
            log.warning("listening on %s without TLS and token: anyone may connect", address)
        if self._config.emulated_extra_compute_s:
            log.warning(
                "EMULATION: each forward pass takes %g s more",
                self._config.emulated_extra_compute_s,
            )
        log.info("verifier for %s listens on port %d", self._model, self.port)

    async def stop(self, grace_s: float) -> None:
        """Refuse new sessions at once, give open ones ``grace_s`` to finish, then end them."""
        await self._server.stop(grace_s)
        try:
            await within(self._empty.wait(), _FREE_S)
        except asyncio.TimeoutError:
            log.warning("the model is still busy with %d sessions", self.sessions)
        self._compute.shutdown(wait=False)

    # One call.

    async def _describe(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._authenticate(context)
        engine = self._engine
        return codec.encode_info(
            ServerInfo(
                self._model,
                engine.vocabulary,
                engine.vocab_size,
                engine.exit_layers,
                _version(),
                self._config.limits,
                self.sessions,
            )
        )

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        await self._authenticate(context)
        slot = _Slot()
        try:
            await self._converse(slot, context)
        except CollabError as error:
            await self._refuse(context, error)
        except Exception:
            log.exception("session %s failed", slot.id)
            failed = CollabError("the verifier failed", remedy=f"see its log: session {slot.id}")
            await self._refuse(context, failed)
        finally:
            slot.gone.set()
            if slot in self._slots:
                # After whatever still runs for it, whether or not anyone waits for this handler.
                freed = asyncio.get_running_loop().run_in_executor(self._compute, slot.free)
                freed.add_done_callback(lambda _: self._leave(slot))

    async def _converse(self, slot: _Slot, context: grpc.aio.ServicerContext) -> None:
        opened = await self._read(context, _OPEN_S)
        if opened is None:
            return
        if not isinstance(opened, Open):
            raise ProtocolError(
                "the first message must be Open", field="message", remedy="send Open first"
            )
        self._admit(opened)
        self._slots.add(slot)
        self._empty.clear()
        prompt_tokens = await self._in_compute_thread(self._open, slot, opened)
        await self._write(context, Opened(slot.id, prompt_tokens))
        while True:
            message = await self._read(context, self._config.limits.idle_s)
            if message is None or isinstance(message, Close):
                return
            if isinstance(message, Open):
                raise ProtocolError(
                    "the session is open already", field="message", remedy="use a new stream"
                )
            verdict = await self._verify(slot, message, context)
            if verdict is None:
                continue  # a stale draft
            await self._write(context, verdict)
            if verdict.finished:
                return

    async def _verify(
        self, slot: _Slot, draft: Draft, context: grpc.aio.ServicerContext
    ) -> Verdict | None:
        """Verify in the compute thread; meanwhile send its early exits, most confident first."""
        loop = asyncio.get_running_loop()
        exits = EarlyExitQueue(self._config.exits)
        wake = asyncio.Event()

        def arrived(exit_: EarlyExit) -> None:
            exits.push(exit_)
            wake.set()

        def emit(exit_: EarlyExit) -> None:
            loop.call_soon_threadsafe(arrived, exit_)

        def ended(job: asyncio.Future[Verdict | None]) -> None:
            wake.set()
            if not job.cancelled():
                job.exception()  # seen, even if the client is gone and nobody awaits the job

        job = self._in_compute_thread(self._verify_now, slot, draft, emit)
        job.add_done_callback(ended)
        while not job.done():
            await wake.wait()
            wake.clear()
            while not job.done() and (exit_ := exits.pop()) is not None:
                await self._write(context, exit_)
        return await job

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> None:
        if not self._token:
            return
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        expected = b"Bearer " + self._token
        if not hmac.compare_digest(str(given).encode(), expected):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")

    async def _read(
        self, context: grpc.aio.ServicerContext, deadline_s: float
    ) -> Open | Draft | Close | None:
        """The next message; None when the client has closed its side."""
        try:
            data = await within(context.read(), deadline_s)
        except asyncio.TimeoutError:
            raise Unavailable(
                f"nothing came for {deadline_s:g} s", field="session", remedy="use a new stream"
            ) from None
        return None if data is grpc.aio.EOF else codec.decode_client(data)

    async def _write(self, context: grpc.aio.ServicerContext, message: codec.ServerMessage) -> None:
        """Send; a client that does not read for ``idle_s`` loses its session."""
        await within(context.write(codec.encode(message)), self._config.limits.idle_s)

    async def _refuse(self, context: grpc.aio.ServicerContext, error: CollabError) -> None:
        """Tell the client why its session is over, if it is still there."""
        try:
            await self._write(context, failure_of(error))
        except (grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.TimeoutError) as lost:
            log.info("a client was gone before it could be told %r: %r", str(error), lost)

    def _admit(self, opened: Open) -> None:
        """Check all that can be checked without the model."""
        limits = self._config.limits
        check_same(opened.vocabulary, self._engine.vocabulary, draft="model", target=self._model)
        if not opened.text.strip():
            raise InvalidInput("the prompt is empty", field="text", remedy="say what is wanted")
        _at_most(len(opened.text), limits.max_prompt_chars, "text", "characters")
        _at_most(len(opened.images), limits.max_images, "images", "images")
        for i, image in enumerate(opened.images):
            _at_most(len(image), limits.max_image_bytes, f"images[{i}]", "bytes")
        _at_most(opened.max_tokens, limits.max_tokens, "max_tokens", "tokens")
        if opened.max_tokens < 1:
            raise InvalidInput("must be >= 1", field="max_tokens", remedy="ask for some tokens")
        if len(self._slots) >= limits.max_sessions:
            raise Unavailable(
                f"all {limits.max_sessions} sessions are taken",
                field="session",
                remedy="try again later, or raise max_sessions on the verifier",
            )

    def _leave(self, slot: _Slot) -> None:
        self._slots.discard(slot)
        if not self._slots:
            self._empty.set()

    # In the compute thread.

    def _in_compute_thread(self, job, *args):  # type: ignore[no-untyped-def]
        return asyncio.get_running_loop().run_in_executor(self._compute, job, *args)

    def _open(self, slot: _Slot, opened: Open) -> int:
        slot.check()
        prompt = self._encode(Prompt(opened.text, opened.images))
        room = self._engine.context - len(prompt.ids)
        if opened.max_tokens > room:
            raise InvalidInput(
                f"a prompt of {len(prompt.ids)} tokens leaves room for {room}",
                field="max_tokens",
                remedy="lower max_tokens or shorten the prompt",
            )
        slot.session = TargetSession(self._engine, prompt, opened, self._config.exits)
        slot.session.prefill()
        return slot.session.prompt_tokens

    def _verify_now(
        self, slot: _Slot, draft: Draft, emit: Callable[[EarlyExit], None]
    ) -> Verdict | None:
        assert slot.session is not None
        slot.check()
        extra = _Padding(self._config.emulated_extra_compute_s, self._engine.num_layers)

        def on_exit(exit_: EarlyExit) -> None:
            slot.check()
            extra.until(exit_.layer)
            emit(exit_)

        verdict = slot.session.verify(draft, on_exit)
        if verdict is None:
            return None
        return replace(verdict, compute_s=verdict.compute_s + extra.rest())


class _Padding:
    """EMULATION of a slower model: sleeps in the compute thread, in proportion to the depth."""

    def __init__(self, total_s: float, layers: int) -> None:
        self._total_s = total_s
        self._layers = layers
        self._slept_s = 0.0

    def until(self, layer: int) -> None:
        due = self._total_s * layer / self._layers - self._slept_s
        if due > 0:
            time.sleep(due)
            self._slept_s += due

    def rest(self) -> float:
        """Sleep what is left; returns how long that was."""
        before = self._slept_s
        self.until(self._layers)
        return self._slept_s - before


class ServerHandle:
    """A verifier in this process's background loop; made by :func:`start_server`."""

    def __init__(self, config: VerifierConfig, engine: Engine, encode: Encode) -> None:
        self._server = VerifierServer(config, engine, encode)
        self._run(self._server.start())

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return self._server.sessions

    def stop(self, grace_s: float = 0.0) -> None:
        """Stop; open sessions get ``grace_s`` to finish."""
        self._run(self._server.stop(grace_s), grace_s)

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, job: Coroutine[Any, Any, None], extra_s: float = 0.0) -> None:
        asyncio.run_coroutine_threadsafe(job, background_loop()).result(_OPEN_S + extra_s)


def start_server(
    config: VerifierConfig, engine: Engine | None = None, encode: Encode | None = None
) -> ServerHandle:
    """Run a verifier beside the caller's other work; returns when it listens.

    Args:
        engine: the target; loaded as ``config`` says when None.
        encode: prompts to token ids; by default as ``engine.loaded`` does it.
    """
    engine = engine or _load(config)
    return ServerHandle(config, engine, encode or _encoder(engine, config.limits))


def serve(config: VerifierConfig, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Load the model and serve until SIGTERM or SIGINT; then drain. Call it in the main thread.

    From then on both signals are ignored: the process is to end when this returns.

    Args:
        on_listening: told the port once clients can connect.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the address is in use, or a file cannot be read.
    """
    engine = _load(config)
    server = VerifierServer(config, engine, _encoder(engine, config.limits))
    asyncio.run(run_until_signal(server, config.drain_s, on_listening))


def load_config(
    file: str | Path | None = None, *, model: str | None = None, address: str | None = None
) -> VerifierConfig:
    """The configuration in ``file`` (YAML), with ``model`` and ``address`` in place of its own.

    Args:
        file: a path, or the name of a shipped file such as ``verifier_embedded.yaml``.

    Raises:
        ConfigError: no such file, unknown keys, values out of range, or no model at all.
    """
    if file is not None and not Path(file).exists() and Path(file).name == str(file):
        file = config_file(str(file))
    config = from_yaml(VerifierConfig, file) if file is not None else VerifierConfig()
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    if address is not None:
        config = replace(config, address=address)
    if not config.model.path:
        raise ConfigError(
            "no model", field="model.path", remedy="name the target's folder or hub id"
        )
    return config


async def run_until_signal(
    server: VerifierServer, drain_s: float, on_listening: Callable[[int], None]
) -> None:
    """Serve in this loop, which is the main thread's, until SIGTERM or SIGINT; then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not loop.add_signal_handler: the loop's end would bring KeyboardInterrupt back.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    await server.start()
    on_listening(server.port)
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a second one has nothing to add
    log.info("draining %d sessions for at most %g s", server.sessions, drain_s)
    await server.stop(drain_s)


def _load(config: VerifierConfig) -> Engine:
    return Engine(load(config.model), candidates=config.exit_candidates)


def _encoder(engine: Engine, limits: Limits) -> Encode:
    allowed = PromptLimits(max_characters=limits.max_prompt_chars, max_images=limits.max_images)
    return lambda prompt: encode(prompt, engine.loaded, allowed)


def _credentials(config: VerifierConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    key, cert = read_file(config.tls_key, "tls_key"), read_file(config.tls_cert, "tls_cert")
    if not config.tls_client_ca:
        return grpc.ssl_server_credentials([(key, cert)])
    ca = read_file(config.tls_client_ca, "tls_client_ca")
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def _at_most(value: int, limit: int, field_name: str, unit: str) -> None:
    if value > limit:
        raise InvalidInput(f"{value} {unit}, {limit} at most", field=field_name, remedy="send less")


def _is_local(address: str) -> bool:
    return address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]")


def _version() -> str:
    try:
        return metadata.version("collab_llm_nodes")
    except metadata.PackageNotFoundError:
        return "unknown"
