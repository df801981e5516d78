"""A gRPC server around a service: network, TLS, health, metrics, signals, shutdown.

``streams.py`` serves the streams that this module carries.

    with ServerHandle(service): ...                       # beside the caller's other work
    serve_until_signal(config, make_service, on_port)     # in a process of its own
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_server
from grpc_health.v1 import health, health_pb2

from collab_llm_nodes.ending import EndRequest, end_now, end_within, ended_at_once
from collab_llm_nodes.errors import (
    Busy,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.processes import freeze_startup_objects
from collab_llm_nodes.transport.admission import Peer, share_of
from collab_llm_nodes.transport.background import background_loop
from collab_llm_nodes.transport.credentials import is_local, server_credentials
from collab_llm_nodes.transport.settings import ServerConfig
from collab_llm_nodes.transport.streams import StreamService, Unary

log = logging.getLogger(__name__)

S = TypeVar("S", bound=StreamService[Any])

_START_S = 60.0
_END_S = 0.8  # after the grace, for all that remains
_HANDSHAKE_S = 5.0  # for TLS and HTTP/2's first words; a lossy radio link takes a second or two
_IDLE_S = 10.0  # a connection without calls lasts this long at least
_OTHER_CALLS = 64  # beside sessions: methods without a stream, streams that are being refused
_FAILURE_S = 1.0  # for clients to receive the error when the server has failed


_STATUS = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Busy: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Server(Generic[S]):
    """A :class:`StreamService` on a port. All coroutines run in one loop."""

    def __init__(self, service: S) -> None:
        self._config: ServerConfig = service.server_config
        self.service = service
        self.port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: an address is in use, or certificates cannot be read.
        """
        limits = self._config.limits
        per_connection = share_of(limits.max_streams, self._config.shares.connection)
        self._server = _Server(
            (
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                # A proxy carries all robots on few connections: with windows that grow to megabytes
                # one robot's picture would hold up the others' drafts.
                ("grpc.http2.bdp_probe", int(not self._config.client_header)),
                ("grpc.so_reuseport", 0),  # a second server on one port is an error
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
            # Streams above max_streams get a typed failure; a flood of them does not.
            limits.max_streams + _OTHER_CALLS,
        )
        # Without serialisers the handlers get bytes, and can answer malformed ones by type.
        # Requests are streams of one message: gRPC would read a unary call's before the token is
        # checked.
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(self._answering(answer))
            for name, answer in self.service.unary().items()
        }
        if self.service.stream:
            session = grpc.stream_stream_rpc_method_handler(self._session)
            handlers[self.service.stream] = session
        # Health needs no token. Only Check: a Watch would hold a stream for nothing.
        check = grpc.unary_unary_rpc_method_handler(
            self._check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )
        self._server.add_registered_method_handlers(self.service.full_name, handlers)
        self._server.add_registered_method_handlers(health.SERVICE_NAME, {"Check": check})
        c, address = self._config, self._config.address
        credentials = server_credentials(c.tls_cert, c.tls_key, c.tls_client_ca)
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
            self.metrics_port = self.service.metrics.serve(self._config.metrics_address)
        self.service.start()
        await self.service.warm()
        await self._server.start()
        self._watch = asyncio.ensure_future(self._notice_end())
        known = self._config.token or self._config.token_file or self._config.tls_client_ca
        if not is_local(address):
            if not known:
                log.warning(
                    "listening on %s: anyone may use it; set a token or tls_client_ca", address
                )
            if not credentials:
                log.warning("listening on %s without TLS: anyone on the way can read it", address)
        log.info("%s listens on port %d", self.service.title, self.port)

    async def stop(self, grace_s: float) -> bool:
        """Refuse new sessions at once, give open ones ``grace_s`` to finish, then end them.

        Returns False if a thread is still busy.
        """
        await self.service.drain(grace_s)  # health is answered meanwhile
        await self._server.stop(0.0)
        stopped = await self.service.stop()
        self.service.metrics.stop()
        return stopped

    async def _notice_end(self) -> None:
        """Mark the service as failed if gRPC ends by itself: no client could reach it."""
        ended = await asyncio.gather(self._server.wait_for_termination(), return_exceptions=True)
        if self.service.serving:
            log.error("gRPC has ended: %r", ended[0])
            self.service.failed.set()

    # One call.

    async def _check(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        try:
            asked = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError:  # gRPC itself would log a traceback for each of a stranger's calls
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no health check")
            raise  # abort has raised already
        if asked not in ("", self.service.full_name):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self.service.serving else states.NOT_SERVING)

    def _answering(
        self, answer: Unary
    ) -> Callable[[object, grpc.aio.ServicerContext], Awaitable[bytes]]:
        async def handle(_: object, context: grpc.aio.ServicerContext) -> bytes:
            await self._authenticate(context)
            try:
                request = await _GrpcStream(context).read()
            except ConnectionError:
                raise asyncio.CancelledError from None  # so gRPC ends a call that is gone
            try:
                return await answer(request or b"")
            except CollabError as error:
                status = _STATUS.get(type(error), grpc.StatusCode.FAILED_PRECONDITION)
                await context.abort(status, str(error))
                raise  # abort has raised already

        return handle

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        metadata = await self._authenticate(context)
        peer = Peer.behind(context.peer(), metadata, self._config.client_header)
        stream = _GrpcStream(context)
        await self.service.accept(stream, peer)
        if stream.broken:
            # After a failed first write gRPC would send its headers again, and log that it cannot
            # (grpcio 1.85.1). A cancelled call ends silently.
            raise asyncio.CancelledError

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> dict[str, str]:
        """Return the call's metadata if its token is right; else end the call."""
        metadata = {name: str(value) for name, value in context.invocation_metadata() or ()}
        try:
            self.service.check_token(metadata.get("authorization", ""))
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error.args[0]))
        return metadata


class _Server(grpc_server.Server):
    """The server that ``grpc.aio.server`` makes, around :class:`_Calls`."""

    def __init__(self, options: tuple[tuple[str, int], ...], most_calls: int) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Calls(self._loop, None, (), (), options, most_calls)


class _Calls(cygrpc.AioServer):
    """gRPC's loop that accepts calls, without those of unknown methods.

    The loop would decode the path of such a call before any token is checked, and a path that is no
    UTF-8 would end the loop and the server (grpcio 1.85.1). So these calls are answered here with
    their path unread. The service's methods must be registered, so that gRPC's core knows them.
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


_LOST = (grpc.aio.BaseError, asyncio.InvalidStateError)  # raised once the client is gone


class _GrpcStream:
    """One call, as a ``streams.Stream``.

    Attributes:
        broken: a message could not be sent.
    """

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self.broken = False

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
            self.broken = True
            raise ConnectionError(repr(error)) from error


class ServerHandle(Generic[S]):
    """A server in this process's background loop; it listens once this is constructed."""

    def __init__(self, service: S) -> None:
        self._server = Server(service)
        self._run(self._server.start())

    @property
    def service(self) -> S:
        """The service that is served."""
        return self._server.service

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
        """Number of open sessions."""
        return self.service.sessions

    def stop(self, grace_s: float = 0.0) -> None:
        """Stop; open sessions get ``grace_s`` to finish."""
        self._run(self._server.stop(grace_s), grace_s)

    def __enter__(self) -> ServerHandle[S]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, job: Coroutine[Any, Any, object], extra_s: float = 0.0) -> None:
        asyncio.run_coroutine_threadsafe(job, background_loop()).result(_START_S + extra_s)


def serve_until_signal(
    config: ServerConfig,
    make_service: Callable[[], StreamService[Any]],
    on_listening: Callable[[int], None],
) -> None:
    """Make a service, and serve until SIGTERM or SIGINT; then drain. Call it in the main thread.

    While the service is made both signals end the process at once. When this returns they are
    ignored, and the process should end.

    Args:
        make_service: may load a model.
        on_listening: called with the port once clients can connect.

    Raises:
        ConfigError: the address is in use, or a file cannot be read.
        CollabError: the service failed; a supervisor should restart the process.
    """
    for name in ("address", "metrics_address"):
        check_port_free(getattr(config, name), name)  # a model takes minutes to load
    with ended_at_once():
        server = Server(make_service())
    freeze_startup_objects()
    asyncio.run(run_until_signal(server, config.drain_s, on_listening))


async def run_until_signal(
    server: Server[Any], drain_s: float, on_listening: Callable[[int], None]
) -> None:
    """Serve in this loop, which is the main thread's, until SIGTERM or SIGINT; then drain.

    Raises:
        CollabError: the service failed; connected clients have received the error.
    """
    # Not loop.add_signal_handler: the loop's end would bring KeyboardInterrupt back.
    end, stop = EndRequest(lambda: end_within(drain_s + _END_S, 0)), asyncio.Event()

    def notice() -> None:
        if end.noticed():
            stop.set()

    asyncio.get_running_loop().add_reader(end, notice)
    await server.start()
    on_listening(server.port)
    failed = server.service.failed
    causes = [asyncio.ensure_future(event.wait()) for event in (stop, failed)]
    await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
    for cause in causes:
        cause.cancel()
    grace_s = min(drain_s, _FAILURE_S) if failed.is_set() else drain_s
    log.info("draining %d sessions for at most %g s", server.service.sessions, grace_s)
    status = 1 if failed.is_set() else 0
    if status:
        end_within(grace_s + _END_S, status)
    if not await server.stop(grace_s):
        end_now(status)  # the interpreter's exit would wait for the thread, or crash under it
    if failed.is_set():
        raise CollabError(
            f"the {server.service.name} failed", remedy="see its log, and start it again"
        )


def check_port_free(address: str, field: str) -> None:
    """Check that no process listens on ``address``, before a long start-up.

    Raises:
        ConfigError: the port is in use.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # no port, or a form that only gRPC reads
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
