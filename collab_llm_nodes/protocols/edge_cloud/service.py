"""The verifier as a gRPC server (paper 003, Algorithm 2): network, signals, health, metrics.

What is said on a stream is ``conversation.py``'s business; here is what carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_server
from grpc_health.v1 import health, health_pb2

from collab_llm_nodes.collector import freeze_startup_objects
from collab_llm_nodes.ending import EndRequest, end_now, end_within
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError, Unauthenticated
from collab_llm_nodes.models.loading import load
from collab_llm_nodes.models.prompt import PromptLimits, encode
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.conversation import Encode, Verifier
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig, load_config
from collab_llm_nodes.protocols.edge_cloud.verifier_client import check_certificates, read_file
from collab_llm_nodes.transport.admission import Peer, part
from collab_llm_nodes.transport.background import background_loop

__all__ = [
    "ServerHandle",
    "VerifierConfig",
    "VerifierServer",
    "load_config",
    "run_until_signal",
    "serve",
    "start_server",
]

log = logging.getLogger(__name__)

_START_S = 10.0
_END_S = 0.8  # after the grace, for all that remains
_HANDSHAKE_S = 5.0  # for TLS and HTTP/2's first words; a lossy radio link takes a second or two
_IDLE_S = 10.0  # a connection without calls lasts this long at least
_OTHER_CALLS = 64  # beside sessions: health checks, Describe, streams that are being refused
_TELL_S = 1.0  # for clients to hear that the verifier has failed


class VerifierServer:
    """A :class:`Verifier` on a port. All coroutines run in one loop; see ``serve``."""

    def __init__(self, config: VerifierConfig, engine: Engine, encode: Encode) -> None:
        self._config = config
        self.verifier = Verifier(config, engine, encode)
        self.port = 0
        self.metrics_port = 0

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return self.verifier.sessions

    @property
    def failed(self) -> asyncio.Event:
        """As ``Verifier.failed``."""
        return self.verifier.failed

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: an address is in use, or certificates cannot be read.
        """
        limits = self._config.limits
        per_connection = part(limits.max_streams, self._config.shares.connection)
        self._server = _Server(
            (
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                # A proxy carries all robots on few connections: with windows that grow to megabytes
                # one robot's picture would hold up the others' drafts.
                ("grpc.http2.bdp_probe", int(not self._config.client_header)),
                ("grpc.so_reuseport", 0),  # a second verifier on one port is an error
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 50),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_allowed_incoming_connections", limits.max_connections),
                ("grpc.max_concurrent_streams", per_connection + _OTHER_CALLS),
                # Connections that say nothing make room for others: robots ask for signs of life.
                ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_S)),
                ("grpc.max_connection_idle_ms", int(1000 * max(_IDLE_S, limits.idle_s))),
            ),
            # Streams above max_streams are told so by a typed failure; a flood of them is not.
            limits.max_streams + _OTHER_CALLS,
        )
        # Without serialisers the handlers get bytes, and nonsense gets a typed answer.
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
        }
        # Health is asked without a token. Only Check: a Watch would hold a stream for nothing.
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        self._server.add_registered_method_handlers(codec.SERVICE, handlers)
        self._server.add_registered_method_handlers(health.SERVICE_NAME, {"Check": check})
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
        if self._config.metrics_address:
            self.metrics_port = self.verifier.telemetry.serve(self._config.metrics_address)
        self.verifier.start()
        await self._server.start()
        self._watch = asyncio.ensure_future(self._notice_end())
        known = self._config.token or self._config.token_file or self._config.tls_client_ca
        if not _is_local(address):
            if not known:
                log.warning(
                    "listening on %s: anyone may use it; set a token or tls_client_ca", address
                )
            if not credentials:
                log.warning("listening on %s without TLS: anyone on the way can read it", address)
        log.info("verifier for %s listens on port %d", self.verifier.model, self.port)

    async def stop(self, grace_s: float) -> bool:
        """Refuse new sessions at once, give open ones ``grace_s`` to finish, then end them.

        Returns False if a thread is still busy.
        """
        await self.verifier.drain(grace_s)  # health is answered meanwhile
        await self._server.stop(0.0)
        stopped = await self.verifier.stop()
        self.verifier.telemetry.stop()
        return stopped

    async def _notice_end(self) -> None:
        """Call the verifier failed if gRPC ends without being told to: nobody could reach it."""
        ended = await asyncio.gather(self._server.wait_for_termination(), return_exceptions=True)
        if self.verifier.serving:
            log.error("gRPC has ended: %r", ended[0])
            self.verifier.failed.set()

    # One call.

    async def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", codec.SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self.verifier.serving else states.NOT_SERVING)

    async def _describe(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await self._authenticate(context)
        return self.verifier.describe()

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        metadata = await self._authenticate(context)
        peer = Peer.behind(context.peer(), metadata, self._config.client_header)
        await self.verifier.converse(_GrpcStream(context), peer)

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> dict[str, str]:
        """Return the call's metadata if its token is right; else end the call."""
        metadata = {name: str(value) for name, value in context.invocation_metadata() or ()}
        try:
            self.verifier.check_token(metadata.get("authorization", ""))
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error.args[0]))
        return metadata


class _Server(grpc_server.Server):
    """As ``grpc.aio.server``, around :class:`_Calls`."""

    def __init__(self, options: tuple[tuple[str, int], ...], most_calls: int) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Calls(self._loop, None, (), (), options, most_calls)


class _Calls(cygrpc.AioServer):
    """gRPC's loop that takes calls, with methods that nobody serves kept out of it.

    The loop decodes the path of such a call, and a path that is no UTF-8 would end it and with it
    the server (grpcio 1.85.1), before any token is looked at. So these calls are answered here,
    with their path unread. Methods that are served must be registered: gRPC's core knows those.
    """

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        if method is None:
            return asyncio.ensure_future(self._refuse_unknown())
        return super()._make_request_call_future(method)

    async def _refuse_unknown(self) -> None:
        """Answer calls of unknown methods until the server stops."""
        loop = asyncio.get_running_loop()
        while True:
            call = await self._request_call()  # raises when the server stops
            context = cygrpc._ServicerContext(call, None, None, loop)
            with contextlib.suppress(grpc.aio.AbortError, *_LOST):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


_LOST = (grpc.aio.BaseError, asyncio.InvalidStateError)  # raised on a stream whose client is gone


class _GrpcStream:
    """As ``conversation.Stream``."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        try:
            data = await self._context.read()
        except _LOST as error:
            raise ConnectionError(repr(error)) from error
        return None if data is grpc.aio.EOF else data

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except _LOST as error:
            raise ConnectionError(repr(error)) from error


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
    def metrics_port(self) -> int:
        """The port of its metrics; 0: none."""
        return self._server.metrics_port

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

    def _run(self, job: Coroutine[Any, Any, object], extra_s: float = 0.0) -> None:
        asyncio.run_coroutine_threadsafe(job, background_loop()).result(_START_S + extra_s)


def start_server(
    config: VerifierConfig, engine: Engine | None = None, encode: Encode | None = None
) -> ServerHandle:
    """Run a verifier beside the caller's other work; returns when it listens.

    Args:
        engine: the target; loaded as ``config`` says when None.
        encode: prompts to token ids; by default as ``engine.loaded`` does it.
    """
    engine = engine or load_engine(config)
    return ServerHandle(config, engine, encode or prompt_encoder(engine, config.limits))


def serve(config: VerifierConfig, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Load the model and serve until SIGTERM or SIGINT; then drain. Call it in the main thread.

    From then on both signals are ignored: the process is to end when this returns.

    Args:
        on_listening: told the port once clients can connect.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: the address is in use, or a file cannot be read.
        CollabError: nothing can be computed any more; a supervisor is to start it again.
    """
    for name in ("address", "metrics_address"):
        _check_free(getattr(config, name), name)  # a model takes minutes to load
    set_threads(config.model)
    engine = load_engine(config)
    server = VerifierServer(config, engine, prompt_encoder(engine, config.limits))
    freeze_startup_objects()
    asyncio.run(run_until_signal(server, config.drain_s, on_listening))


async def run_until_signal(
    server: VerifierServer, drain_s: float, on_listening: Callable[[int], None]
) -> None:
    """Serve in this loop, which is the main thread's, until SIGTERM or SIGINT; then drain.

    Raises:
        CollabError: the verifier failed; those who were connected have been told.
    """
    # Not loop.add_signal_handler: the loop's end would bring KeyboardInterrupt back.
    end, stop = EndRequest(lambda: end_within(drain_s + _END_S, 0)), asyncio.Event()

    def notice() -> None:
        if end.noticed():
            stop.set()

    asyncio.get_running_loop().add_reader(end, notice)
    await server.start()
    on_listening(server.port)
    causes = [asyncio.ensure_future(event.wait()) for event in (stop, server.failed)]
    await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
    for cause in causes:
        cause.cancel()
    grace_s = min(drain_s, _TELL_S) if server.failed.is_set() else drain_s
    log.info("draining %d sessions for at most %g s", server.sessions, grace_s)
    status = 1 if server.failed.is_set() else 0
    if status:
        end_within(grace_s + _END_S, status)
    if not await server.stop(grace_s):
        end_now(status)  # the interpreter's exit would wait for the thread, or crash under it
    if server.failed.is_set():
        raise CollabError("the verifier failed", remedy="see its log, and start it again")


def load_engine(config: VerifierConfig) -> Engine:
    return Engine(load(config.model), candidates=config.exit_candidates)


def prompt_encoder(engine: Engine, limits: Limits) -> Encode:
    allowed = PromptLimits(
        max_characters=limits.max_prompt_chars,
        max_images=limits.max_images,
        max_pixels=limits.max_image_pixels,
        max_scans=limits.max_image_scans,
        max_turns=limits.max_turns,
    )
    return lambda prompt: encode(prompt, engine.loaded, allowed)


def _credentials(config: VerifierConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    key, cert = read_file(config.tls_key, "tls_key"), read_file(config.tls_cert, "tls_cert")
    ca = read_file(config.tls_client_ca, "tls_client_ca") if config.tls_client_ca else None
    check_certificates(config.tls_cert, config.tls_key, "tls_client_ca", config.tls_client_ca)
    if ca is None:
        return grpc.ssl_server_credentials([(key, cert)])
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def _check_free(address: str, field: str) -> None:
    """Tell at once that a port is taken. Whoever comes while the model loads finds out afterwards.

    Raises:
        ConfigError: somebody listens on ``address``.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # none, or a form that only gRPC reads
    with contextlib.suppress(socket.gaierror):
        places = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, place in places:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"cannot listen on {address}", field=field, remedy="is the port in use?"
                    ) from error


def _is_local(address: str) -> bool:
    return address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]")
