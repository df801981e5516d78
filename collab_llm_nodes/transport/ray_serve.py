"""A service as a Ray Serve application: replicas at one address.

Ray starts the replicas, restarts those that die and distributes sessions; HAProxy, which comes with
Serve, listens on the one address. This replaces ``server.py``; ``streams.py`` serves the streams as
before. A session is one stream, so it stays on one replica. If that dies, the stream breaks, and
the client opens the session at another.

A protocol derives its own :class:`Replica` and names its factory, "module:function". Ray is an
optional dependency. Serve's own processes import this module and the protocol's, so neither may
import torch before a replica is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, Unauthenticated, Unavailable
from collab_llm_nodes.processes import freeze_startup_objects
from collab_llm_nodes.transport.admission import Peer
from collab_llm_nodes.transport.logs import QUIET, set_up_logging
from collab_llm_nodes.transport.settings import ServerConfig

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

    from collab_llm_nodes.transport.streams import StreamService

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 << 20  # about Ray's minimum; it is not used
_NOTICE_S = 2.0  # for HAProxy to notice that a replica ends, before that refuses connections
_REACHABLE_S = 60.0  # from replicas that are ready to an address that answers
_END_S = 20.0  # for Ray's processes to end, beyond the time that sessions are given


@dataclass(frozen=True)
class RayConfig:
    """Replicas and their resources. Read with ``--ray`` only."""

    replicas: int = setting(2, "Copies of the model.", low=1, high=1024)
    cpus_per_replica: float = setting(
        1.0, "CPU cores that Ray sets aside for each.", low=0.0, high=1024.0
    )
    gpus_per_replica: float = setting(
        0.0, "GPUs that Ray sets aside for each, or a part of one.", low=0.0, high=64.0
    )
    http_port: int = setting(8000, "Ray Serve's own HTTP port: GET /-/healthz.", low=1, high=65535)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Application:
    """The application that Ray Serve is to run.

    Attributes:
        name: of the service, such as "verifier".
        replica: the protocol's own :class:`Replica`.
        methods: import path of the function that declares its methods to Serve; see
            :func:`add_methods`.
    """

    name: str
    replica: type[Replica]
    methods: str


def serve(
    application: Application,
    config: ServerConfig,
    wanted: RayConfig,
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Start the replicas and serve until SIGTERM or SIGINT; then drain. Call it in the main thread.

    On a machine of its own unless ``RAY_ADDRESS`` names a Ray cluster, which must have no other
    Serve application. As with ``server.run_until_signal`` the process is to end when this returns.

    Args:
        config: of each replica.
        on_listening: called with the port once clients can connect.

    Raises:
        ConfigError: Ray is not installed, or the configuration is impossible with it.
        Unavailable: the replicas do not start.
    """
    port = _check(config)
    ray, ray_serve = _import_ray(config)
    _start_ray(ray, config)
    try:
        _check_cluster(ray, wanted)
    except ConfigError:
        ray.shutdown()
        raise
    name = f"collab_llm_{application.name}"
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _interrupt)
        _deploy(ray_serve, application, config, wanted, port)
        on_listening(port)
        while True:
            time.sleep(1.0)  # short: a signal that another thread received is handled after it
    except KeyboardInterrupt:
        log.info("draining for at most %g s", config.drain_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second one changes nothing
        _end(ray, ray_serve, name, config.drain_s)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _check(config: ServerConfig) -> int:
    """Check that Serve's ingress supports ``config``; return the port to listen on."""
    if config.tls_cert:
        raise ConfigError(
            "Ray Serve's ingress does not encrypt",
            field="tls_cert",
            remedy="have a proxy end TLS before it (docs/cloud.md), or leave out --ray",
        )
    host, _, port = config.address.rpartition(":")
    if host != "0.0.0.0":
        raise ConfigError(
            f"Ray Serve listens on all interfaces, not on {host} alone",
            field="address",
            remedy="give 0.0.0.0:PORT, in a network that only the TLS proxy reaches",
        )
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"Ray Serve needs a port, not {port!r}", field="address", remedy="give 0.0.0.0:PORT"
        )
    return int(port)


def _import_ray(config: ServerConfig) -> tuple[ModuleType, ModuleType]:
    # Ray reads these at import, in this process and in those that it starts. Values that the user
    # has set stay.
    for name, value in _environment(config).items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve as ray_serve
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is not installed: {error}",
            field="ray",
            remedy="pip install 'collab_llm_nodes[ray]'",
        ) from error
    return ray, ray_serve


def _environment(config: ServerConfig) -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRPC_VERBOSITY": QUIET,
        # Without HAProxy each message passes through two more Python processes (3 ms a round), and
        # clients that probe their connection are disconnected for too many pings.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_MAXCONN": str(config.limits.max_connections),
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(config.limits.max_message_bytes),
        # One loop for gRPC and streams, as in server.py: between two, Serve has an unbounded queue.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_NOTICE_S),
        # Repeat all log lines of the replicas, unchanged.
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
    }


def _start_ray(ray: ModuleType, config: ServerConfig) -> None:
    address = os.environ.get("RAY_ADDRESS", "local")
    if address == "local":
        ray.init(
            "local",
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    else:
        environment = {name: os.environ[name] for name in _environment(config)}
        ray.init(address, runtime_env={"env_vars": environment})


def _check_cluster(ray: ModuleType, wanted: RayConfig) -> None:
    """Check that the cluster is free and large enough, before changing anything on it."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        pass  # there is none
    else:
        raise ConfigError(
            "Ray Serve already runs on this cluster, with an ingress of its own",
            field="ray",
            remedy="use a cluster of its own, or `serve shutdown` the other",
        )
    there = ray.cluster_resources()
    for what, each in (("CPU", wanted.cpus_per_replica), ("GPU", wanted.gpus_per_replica)):
        if each * wanted.replicas > there.get(what, 0.0):
            raise ConfigError(
                f"{wanted.replicas} replicas need {each * wanted.replicas:g} {what}s,"
                f" there are {there.get(what, 0.0):g}",
                field=f"ray.{what.lower()}s_per_replica",
                remedy="use fewer replicas, or give each less",
            )


def _deploy(
    ray_serve: ModuleType,
    application: Application,
    config: ServerConfig,
    wanted: RayConfig,
    port: int,
) -> None:
    quiet = {"enable_access_log": False, "log_level": "WARNING"}
    deployment = ray_serve.deployment(application.replica).options(
        name="target",
        num_replicas=wanted.replicas,
        ray_actor_options={
            "num_cpus": wanted.cpus_per_replica,
            "num_gpus": wanted.gpus_per_replica,
        },
        # As in server.py: streams above max_streams get a typed failure.
        max_ongoing_requests=config.limits.max_streams + 64,
        max_queued_requests=64,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=1.0,
        logging_config=quiet,
    )
    try:
        ray_serve.start(
            proxy_location="HeadOnly",
            http_options={"port": wanted.http_port},
            grpc_options={
                "port": port,
                "grpc_servicer_functions": [application.methods],
                "enable_reflection": False,
            },
            logging_config=quiet,
        )
        ray_serve.run(deployment.bind(config), name=f"collab_llm_{application.name}")
        direct = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", direct) as channel:
            check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check")
            check(b"", timeout=_REACHABLE_S, wait_for_ready=True)
    except (RuntimeError, grpc.RpcError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise Unavailable(
            f"Ray Serve does not start: {reason}",
            field="ray",
            remedy="see Ray's messages above, for ports that are taken docs/cloud.md",
        ) from error
    if not (config.token or config.token_file):
        log.warning("listening on port %d without a token: anyone may connect", port)
    log.info("%d replicas of the %s listen on port %d", wanted.replicas, application.name, port)


def _end(ray: ModuleType, ray_serve: ModuleType, name: str, drain_s: float) -> None:
    """Let sessions finish, then end all of Ray's processes."""

    def end() -> None:
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + drain_s + _NOTICE_S
        if ray_serve.status().applications:
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):  # Serve's own patience is a minute
                    ray_serve.delete(name)
                    break
        ray_serve.shutdown()
        ray.shutdown()

    ending = threading.Thread(target=end, name="ray-end", daemon=True)
    ending.start()
    ending.join(drain_s + _END_S)
    if ending.is_alive():
        # Ray's own processes received the signal as well, and the one that would answer has ended.
        # The others end with this one; the interpreter's exit would only wait in the same place.
        log.error("Ray does not answer: some sessions may have been cut off")
        logging.shutdown()
        os._exit(1)


class Refusal(Exception):
    """A call is refused; the status is in its context."""


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Return False for Serve's traceback of a refusal: strangers could fill the log with them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(getattr(error, "original_exception", error), Refusal)


class Replica:
    """One copy of the service in a process of its own. Serve calls its methods by gRPC's names.

    A protocol's subclass has each method of its service: ``Session = Replica.accept``, and for
    those without a stream one that returns ``await self.answer(name, request, context)``.

    Attributes:
        factory: "module:function" that makes the service from its configuration.
    """

    factory: str

    def __init__(self, config: ServerConfig) -> None:
        from ray import serve as ray_serve

        set_up_logging(config.log_format)
        logging.getLogger("ray.serve").addFilter(_is_no_refusal)
        module, _, function = self.factory.partition(":")
        service: StreamService[Any] = getattr(importlib.import_module(module), function)(config)
        if config.metrics_address:
            host, _, port = config.metrics_address.rpartition(":")
            rank = ray_serve.get_replica_context().rank.rank
            service.metrics.serve(f"{host}:{int(port) + rank}")
        freeze_startup_objects()
        service.start()
        self._service = service

    def check_health(self) -> None:
        """Check the replica; Serve calls this, and replaces a replica that raises.

        Raises:
            Unavailable: the service can compute nothing any more.
        """
        if self._service.failed.is_set():
            raise Unavailable(
                f"the {self._service.name} has failed", remedy="see the replica's log"
            )

    async def __del__(self) -> None:
        """Stop the service; Serve calls this after it has drained the replica's sessions itself.

        There is no earlier notification, and sessions must not be refused earlier: HAProxy sends
        them until it has noticed that this replica ends (``_NOTICE_S``).
        """
        if not hasattr(self, "_service"):
            return  # it did not even start
        await self._service.drain(0.0)
        await self._service.stop()

    async def accept(
        self, requests: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Encoded]:
        """Serve one client's stream."""
        metadata = self._authenticate(grpc_context)
        stream = _Stream(requests)
        # The connection is HAProxy's, which carries many clients: it identifies none.
        peer = Peer.behind("", metadata, self._service.server_config.client_header)
        talk = asyncio.ensure_future(self._service.accept(stream, peer))
        talk.add_done_callback(lambda _: stream.end())
        try:
            async for data in stream.written():
                yield Encoded(data)
        finally:
            talk.cancel()

    async def answer(
        self, method: str, request: bytes, grpc_context: RayServegRPCContext
    ) -> Encoded:
        """Return the response of a method without a stream."""
        self._authenticate(grpc_context)
        return Encoded(await self._service.unary()[method](request))

    async def Check(
        self, request: bytes, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """Return this replica's health, for HAProxy; no token is needed."""
        states = health_pb2.HealthCheckResponse
        try:
            asked = health_pb2.HealthCheckRequest.FromString(request).service
        except DecodeError:
            grpc_context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            grpc_context.set_details("no health check")
            raise Refusal from None
        if asked in ("", self._service.full_name):
            serving = self._service.serving
            return states(status=states.SERVING if serving else states.NOT_SERVING)
        grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
        grpc_context.set_details("no such service")
        raise Refusal

    def _authenticate(self, context: RayServegRPCContext) -> dict[str, str]:
        """Return the call's metadata if its token is right."""
        metadata = {name: str(value) for name, value in context.invocation_metadata()}
        try:
            self._service.check_token(metadata.get("authorization", ""))
        except Unauthenticated as error:
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(str(error.args[0]))
            raise Refusal from None
        return metadata


def add_methods(server: grpc.Server, service: str, stream: str, unary: Sequence[str]) -> None:
    """Declare a service's methods to Serve's ingress, which replaces the handlers by its own.

    Without serialisers replicas get bytes, as in server.py.
    """

    def replaced(request: object, context: object) -> None:
        raise NotImplementedError

    asked = grpc.unary_unary_rpc_method_handler(replaced)
    methods = {stream: grpc.stream_stream_rpc_method_handler(replaced)}
    services = {
        service: {**methods, **dict.fromkeys(unary, asked)},
        health.SERVICE_NAME: {"Check": asked},
    }
    for name, handlers in services.items():
        handler = grpc.method_handlers_generic_handler(name, handlers)
        server.add_generic_rpc_handlers((handler,))


class Encoded:
    """A serialised message, instead of the protobuf object that Serve expects."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class _Stream:
    """A ``streams.Stream`` whose written messages come out of ``written``."""

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self._requests = requests
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read(self) -> bytes | None:
        return await anext(self._requests, None)

    async def write(self, data: bytes) -> None:
        self._replies.put_nowait(data)
        await self._replies.join()

    async def written(self) -> AsyncIterator[bytes]:
        """Yield each written message; asking for the next confirms that it was sent."""
        while (data := await self._replies.get()) is not None:
            yield data
            self._replies.task_done()

    def end(self) -> None:
        """End ``written``."""
        self._replies.put_nowait(None)
