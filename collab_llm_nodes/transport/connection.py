"""Connections to a server, and the translation of gRPC's errors.

Each attempt is a gRPC channel of its own, which is closed if it fails: a channel that reconnects by
itself would add its own pauses of 0.1 s or more to the caller's.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from collab_llm_nodes.errors import (
    CollabError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import is_local
from collab_llm_nodes.transport.heartbeat import CHECK
from collab_llm_nodes.transport.settings import ClientConfig

_SECOND_S, _SECOND_RTTS = 0.25, 4.0  # RFC 8305 starts another attempt after 0.25 s


class Connector:
    """Makes connections; used in one event loop.

    Args:
        name: of the server, for messages.
    """

    def __init__(
        self, config: ClientConfig, credentials: grpc.ChannelCredentials | None, name: str
    ) -> None:
        self._config, self._credentials, self._name = config, credentials, name

    async def connect(self, deadline_s: float, rtt_s: float) -> grpc.aio.Channel:
        """Return a connected channel, for the caller to close.

        If that takes long, one of TCP's first packets may be lost, which TCP itself repeats only
        after a second. So a second attempt begins beside the first, and the faster one wins.

        Args:
            deadline_s: time allowed [s].
            rtt_s: round trip to the server, 0 if unknown [s]; connecting takes two, TLS four.

        Raises:
            CollabError: why there is no connection.
        """
        try:
            return await within(self._race(max(_SECOND_S, _SECOND_RTTS * rtt_s)), deadline_s)
        except asyncio.TimeoutError:
            raise self.no_connection(deadline_s) from None

    async def _race(self, patience_s: float) -> grpc.aio.Channel:
        attempts = {asyncio.ensure_future(self._attempt())}
        won = None
        try:
            ended, _ = await asyncio.wait(attempts, timeout=patience_s)
            if not ended:
                attempts.add(asyncio.ensure_future(self._attempt()))
            while True:
                ended, others = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                won = next((a for a in ended if a.exception() is None), None)
                if won is not None or not others:
                    return (won or ended.pop()).result()
                attempts = others
        finally:
            lost = [a for a in attempts if a is not won]
            for attempt in lost:
                attempt.cancel()
            for channel in await asyncio.gather(*lost, return_exceptions=True):
                if isinstance(channel, grpc.aio.Channel):
                    await channel.close()

    async def _attempt(self) -> grpc.aio.Channel:
        """Return a connected channel; raises Unavailable as soon as the attempt has failed."""
        channel = self._make_channel()
        try:
            while (state := channel.get_state(try_to_connect=True)) not in _SETTLED:
                await channel.wait_for_state_change(state)
            if state is grpc.ChannelConnectivity.READY:
                return channel
            raise await self._why(channel)
        except BaseException:  # a cancellation as well: no one else can close the channel
            await channel.close()
            raise

    async def _why(self, channel: grpc.aio.Channel) -> CollabError:
        """Return the reason by a call, which fails at once: gRPC gives it to calls only."""
        try:
            await channel.unary_unary(CHECK)(b"", timeout=_SECOND_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return self.error_of(error)
        return Unavailable("connected too late", field="address", remedy=self._remedy)

    def _make_channel(self) -> grpc.aio.Channel:
        c = self._config
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", c.max_message_bytes),
            ("grpc.max_send_message_length", c.max_message_bytes),
            # A dead connection (the robot left the network) is noticed within two probes.
            ("grpc.keepalive_time_ms", int(1000 * c.keepalive_s)),
            ("grpc.keepalive_timeout_ms", int(1000 * c.keepalive_s)),
            # Applies to any ping: gRPC's own, which measure the link, would delay the keepalive's.
            ("grpc.http2.ping_timeout_ms", int(1000 * c.keepalive_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # Channels to one address would share one TCP connection, and its pauses.
            ("grpc.use_local_subchannel_pool", 1),
            # TCP's time to connect.
            ("grpc.min_reconnect_backoff_ms", int(1000 * c.link.connect_deadline_s)),
        ]
        if c.proxy and not is_local(c.address):
            options.append(("grpc.http_proxy", c.proxy))
        else:  # not the environment's either, which would also apply to 127.0.0.1
            options.append(("grpc.enable_http_proxy", 0))
        if c.tls_server_name:
            options.append(("grpc.ssl_target_name_override", c.tls_server_name))
        if self._credentials is None:
            return grpc.aio.insecure_channel(c.address, options)
        return grpc.aio.secure_channel(c.address, self._credentials, options)

    @property
    def _remedy(self) -> str:
        return f"check that the {self._name} runs, its address and TLS"

    def no_connection(self, deadline_s: float) -> Unavailable:
        """Return the error for a server that neither answers nor refuses."""
        return Unavailable(
            f"no connection to {self._config.address} in {deadline_s:.3g} s",
            field="address",
            remedy=self._remedy,
        )

    def error_of(self, error: grpc.aio.AioRpcError) -> CollabError:
        """Return the typed error for a gRPC status; Unavailable if another attempt may help."""
        code, status, details = grpc.StatusCode, error.code(), error.details() or ""
        if status in (code.UNAUTHENTICATED, code.PERMISSION_DENIED):
            remedy = f"give the token that the {self._name} expects"
            return Unauthenticated(details, field="token", remedy=remedy)
        if status is code.RESOURCE_EXHAUSTED and "larger than max" in details:
            remedy = "send fewer or smaller images, or raise the limit"
            return InvalidInput(details, field="images", remedy=remedy)
        if status is code.INVALID_ARGUMENT:
            return InvalidInput(details, field="message", remedy="mend what was sent")
        if status is code.UNIMPLEMENTED:
            remedy = f"no {self._name} of this version listens there"
            return ProtocolError(details, field="address", remedy=remedy)
        if status is code.DEADLINE_EXCEEDED:
            remedy = "check the link and the load"
            return DeadlineExceeded(details, field=self._name, remedy=remedy)
        return Unavailable(
            details + self._why_not_connected(details), field="address", remedy=self._remedy
        )

    def _why_not_connected(self, details: str) -> str:
        """Return the likely cause where gRPC does not say that the other side refused us."""
        if details.startswith("failed to connect") and details.endswith("Socket closed"):
            return (
                f": the {self._name} closes connections at once; it may ask for TLS or for another"
                " client certificate, or have too many connections"
            )
        if "handshake failed" in details.lower():
            return f": check tls, tls_ca and tls_server_name, and that the {self._name} has TLS"
        return ""


_SETTLED = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
