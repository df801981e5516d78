"""One stream to a stage worker: from the coordinator, or from the previous worker.

A link is used once. It ends when either side closes it, or when the worker is silent for too long;
a worker that answers again later gets a new link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, fields

import grpc
import grpc.aio

from collab_llm_nodes.config import setting
from collab_llm_nodes.errors import (
    CollabError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Unavailable,
)
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter.messages import (
    Order,
    Pass,
    Ping,
    Report,
    Taken,
    WorkerInfo,
)
from collab_llm_nodes.protocols.jupiter.monitors import SilenceMonitor
from collab_llm_nodes.transport.client import call_metadata
from collab_llm_nodes.transport.connection import Connector
from collab_llm_nodes.transport.credentials import channel_credentials
from collab_llm_nodes.transport.settings import ClientConfig, ClientCredentials, RetryConfig
from collab_llm_nodes.transport.wire import Failure

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Period of pings."""
_SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
_TURNS = 5
_LONG_S = 1.0
"""No larger messages are timed after one that takes longer."""
_MESSAGE_S = 60.0
"""Deadline of a timed message: the largest one takes 40 s over 0.2 Mbit/s."""


@dataclass(frozen=True)
class LinkConfig(ClientCredentials):
    """Settings of a link to a worker, which is the server. File names are PEM files."""

    connect_s: float = setting(
        2.0, "Deadline of one attempt to connect [s].", low=0.1, high=60.0, read_only=True
    )
    silence_s: float = setting(
        0.7,
        "A worker that sends nothing for this long is lost [s].",
        low=0.3,
        high=600.0,
        read_only=True,
    )
    least_mbps: float = setting(
        20.0,
        "Speed of the slowest link [10^6 bit/s]: while hidden states are in transit, a worker may"
        " be silent for their time on such a link, and silence_s more.",
        low=0.001,
        high=1e6,
        read_only=True,
    )
    max_message_bytes: int = setting(
        64 << 20,
        "Largest message [byte]."
        " Raise it, and the workers' limit, for prompts or vocabularies beyond it.",
        low=4096,
        high=1 << 30,
        read_only=True,
    )

    def client(self, address: str) -> ClientConfig:
        """Return the settings of a connection to ``address``.

        Raises:
            ConfigError: the address is invalid.
        """
        credentials = {each.name: getattr(self, each.name) for each in fields(ClientCredentials)}
        return ClientConfig(
            address=address,
            max_message_bytes=self.max_message_bytes,
            link=RetryConfig(connect_deadline_s=self.connect_s),
            **credentials,
        )


class WorkerAtFault(Unavailable):
    """A worker that can be reached, but breaks the protocol or computes nothing."""

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(
            message, field=field, remedy=remedy or "see the worker's log, and start it again"
        )


class StageLink:
    """See the module docstring. Everything runs in the event loop in which it is made.

    Args:
        first: the first message, a Load or Link.
        on_report: called with each report; a CollabError that it raises ends the link.
        on_lost: called once with the reason, unless the link was closed here.
    """

    def __init__(
        self,
        config: LinkConfig,
        address: str,
        first: Order,
        on_report: Callable[[Report], None],
        on_lost: Callable[[CollabError], None],
    ) -> None:
        self._config = config
        self._client = config.client(address)
        self._on_report, self._on_lost = on_report, on_lost
        self._outbox: asyncio.Queue[Order] = asyncio.Queue()
        self._outbox.put_nowait(first)
        self._silence = SilenceMonitor(round(config.silence_s / TICK_S))
        self._bytes_of: dict[int, int] = {}  # of passes not yet computed, by number
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, order: Order) -> None:
        """Queue ``order``."""
        self._outbox.put_nowait(order)

    def close(self) -> None:
        """End the stream without further callbacks."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            connector = _connector(self._client)
            channel = await connector.connect(self._config.connect_s, 0.0)
            try:
                await self._talk(channel, connector)
            finally:
                await channel.close()
        except CollabError as error:
            self._on_lost(error)
        except Exception as error:  # the owner must learn of it in any case
            log.exception("the link to %s failed", self._client.address)
            self._on_lost(CollabError(f"the link failed: {error!r}", field="address"))

    async def _talk(self, channel: grpc.aio.Channel, connector: Connector) -> None:
        """Exchange messages until the stream ends, and raise the reason as a CollabError."""
        call = channel.stream_stream(codec.WORK)(metadata=call_metadata(self._client))
        jobs = [
            asyncio.ensure_future(job)
            for job in (self._read(call), self._write(call), self._watch(call))
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            errors = [job.exception() for job in done]
        finally:
            for job in jobs:
                job.cancel()
            call.cancel()
        for error in errors:
            if isinstance(error, grpc.aio.AioRpcError):
                meant = connector.error_of(error)
                if isinstance(
                    meant, (InvalidInput, ProtocolError)
                ):  # not an error of a correct worker
                    raise WorkerAtFault(meant.args[0], field=self._client.address)
                raise meant
            if error is not None:
                raise error
        raise Unavailable(
            "the worker ended the stream",
            field=self._client.address,
            remedy="see the worker's log",
        )

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            self._silence.reset()
            try:
                report = codec.decode_report(data)
            except CollabError as error:
                raise WorkerAtFault(
                    f"it sent an invalid report: {error.args[0]}", field=self._client.address
                ) from error
            if isinstance(report, Taken):
                self._bytes_of.pop(report.number, None)
            self._on_report(report)
            if isinstance(report, Failure):
                raise report.error()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # _read raises the reason
            while True:
                order = await self._outbox.get()
                data = codec.encode_order(order)
                if isinstance(order, Pass):
                    self._bytes_of[order.number] = len(data)
                await call.write(data)
        await asyncio.Event().wait()

    async def _watch(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send pings; raise when the worker is silent for too long."""
        bytes_per_tick = self._config.least_mbps * 1e6 / 8 * TICK_S
        while not self._silence.tick(sum(self._bytes_of.values()) / bytes_per_tick):
            if self._outbox.empty():  # otherwise the worker has something to answer anyway
                self._outbox.put_nowait(Ping())
            await asyncio.sleep(TICK_S)
        raise DeadlineExceeded(
            f"no message for {self._config.silence_s:g} s beyond the time of states in transit",
            field=self._client.address,
            remedy="check that the worker runs, and the link; lower least_mbps if the link is slow",
        )


async def describe(config: LinkConfig, address: str) -> WorkerInfo:
    """Return the description of a worker.

    Raises:
        CollabError: it cannot be reached, or its answer is invalid.
    """
    async with _describe_call(config, address) as ask:
        return codec.decode_info(await ask(codec.encode_question(), config.connect_s))


async def time_messages(config: LinkConfig, address: str) -> list[tuple[int, float]]:
    """Return sizes of messages to a worker [byte], and the shortest round trip of each [s].

    Raises:
        CollabError: it cannot be reached, or its answer is invalid.
    """
    found = []
    async with _describe_call(config, address) as ask:
        for size in _SIZES:
            question = codec.encode_question(size)
            times = []
            for _ in range(_TURNS):
                begun = time.perf_counter()
                await ask(question, _MESSAGE_S)
                times.append(time.perf_counter() - begun)
            found.append((size, min(times)))
            if min(times) > _LONG_S:
                break
    return found


@contextlib.asynccontextmanager
async def _describe_call(
    config: LinkConfig, address: str
) -> AsyncIterator[Callable[[bytes, float], Awaitable[bytes]]]:
    """Yield a function that calls Describe with a request and a deadline [s]."""
    client = config.client(address)
    connector = _connector(client)
    channel = await connector.connect(config.connect_s, 0.0)
    describe_of = channel.unary_unary(codec.DESCRIBE)

    async def ask(question: bytes, timeout: float) -> bytes:
        try:
            data: bytes = await describe_of(
                question, timeout=timeout, metadata=call_metadata(client)
            )
        except grpc.aio.AioRpcError as error:
            raise connector.error_of(error) from error
        return data

    try:
        yield ask
    finally:
        await channel.close()


def _connector(client: ClientConfig) -> Connector:
    credentials = None
    if client.tls:
        credentials = channel_credentials(client.tls_ca, client.tls_cert, client.tls_key)
    return Connector(client, credentials, "jupiter worker")
