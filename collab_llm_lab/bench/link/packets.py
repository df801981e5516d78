"""A link of IP packets between two network namespaces: loss, jitter, reordering as they really are.

    with PacketLink(LinkProfile(delay_s=0.02, loss=0.01)) as link:
        with link.at_far():                     # this thread, and what it starts meanwhile
            verifier = start(f"{link.FAR}:50551")
        with LinkProxy(f"{link.FAR}:50551", enter=link.enter_near) as proxy:
            VerifierClient(ClientLinkConfig(address=proxy.address))

Each namespace has one interface (a TUN device) and the loopback; what is written to one comes out
of the other, through this process. Kernel modules such as netem are not needed. The namespaces
have no names and vanish with the last process or file that holds them.

Needs Linux, /dev/net/tun and CAP_SYS_ADMIN and CAP_NET_ADMIN (root).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from collab_llm_lab.bench.link.lane import Lane, LinkProfile, LoopThread, Wire
from collab_llm_nodes.errors import Unavailable

_OWN = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_IFF_UP = 0x1
_DEVICE = "wan0"
_PACKET = 65536
_BURST = 64
"""Packets read at a time: what is due must not wait for all that comes in."""


class PacketLink:
    """See the module docstring. Controls are thread-safe and effective when they return."""

    NEAR, FAR = "10.77.0.1", "10.77.0.2"
    """Addresses of the two ends; the namespaces are private, so links do not collide."""

    def __init__(self, profile: LinkProfile | None = None) -> None:
        self._profile = profile or LinkProfile()
        self._silent = False
        self._thread = LoopThread("packet-link")
        self._held = contextlib.ExitStack()

    def __enter__(self) -> PacketLink:
        with contextlib.ExitStack() as held:
            self._near, near = _make_end(self.NEAR, held)
            self._far, far = _make_end(self.FAR, held)
            self._thread.start()
            held.callback(self._thread.stop)
            self._directions = self._thread.call(self._connect, near, far)
            self._held = held.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    @contextlib.contextmanager
    def at_near(self) -> Iterator[None]:
        """Put the calling thread into the near namespace; sockets and processes made there stay."""
        with _inside(self._near):
            yield

    @contextlib.contextmanager
    def at_far(self) -> Iterator[None]:
        """Put the calling thread into the far namespace, like ``at_near``."""
        with _inside(self._far):
            yield

    def enter_near(self) -> None:
        """Put the calling thread into the near namespace for good."""
        _enter(self._near)

    @property
    def carried(self) -> int:
        """Packets delivered, both directions."""
        return sum(direction.carried for direction in self._directions)

    @property
    def lost(self) -> int:
        """Packets lost on purpose or for want of capacity, both directions."""
        return sum(direction.lane.lost for direction in self._directions)

    @property
    def reordered(self) -> int:
        """Packets that overtook others, both directions."""
        return sum(direction.lane.reordered for direction in self._directions)

    def change(self, profile: LinkProfile) -> None:
        """Another profile from now on, for what enters the link."""
        self._profile = profile
        self._thread.call(self._change, profile, self._silent)

    def throttle(self, rate_bps: float) -> None:
        """Another capacity from now on; 0 = unlimited."""
        self.change(replace(self._profile, rate_bps=rate_bps))

    def half_open(self) -> None:
        """Lose everything from now on, packets in transit included, without a reset."""
        self._silent = True
        self._thread.call(self._change, self._profile, True)

    def heal(self) -> None:
        """Carry packets again."""
        self._silent = False
        self._thread.call(self._change, self._profile, False)

    # In the loop's thread.

    def _connect(self, near: int, far: int) -> tuple[_Direction, _Direction]:
        directions = (
            _Direction(self._profile, "up", near, far),
            _Direction(self._profile, "down", far, near),
        )
        for direction in directions:
            self._thread.loop.add_reader(direction.source, direction.on_packets)
        return directions

    def _change(self, profile: LinkProfile, silent: bool) -> None:
        for direction in self._directions:
            direction.lane.profile = replace(profile, loss=1.0) if silent else profile
            if silent:
                direction.wire.clear()


class _Direction:
    """One direction: packets from one device to the other."""

    def __init__(self, profile: LinkProfile, name: str, source: int, sink: int) -> None:
        self.lane = Lane(profile, name)
        self.wire: Wire[bytes] = Wire(self._deliver)
        self.source, self._sink = source, sink
        self.carried = 0

    def on_packets(self) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(self.source, _PACKET)
            except BlockingIOError:
                return
            due = self.lane.leaves(self.wire.now(), len(packet), packet=True)
            if due is not None:
                self.wire.push(packet, due)

    def _deliver(self, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # the receiver's queue is full, as happens
            os.write(self._sink, packet)
            self.carried += 1


def unavailable_reason() -> str:
    """Return why there can be no ``PacketLink`` here; empty if there can."""
    try:
        with contextlib.ExitStack() as held:
            _make_end(PacketLink.NEAR, held)
    except Unavailable as error:
        return str(error)
    return ""


def _make_end(address: str, held: contextlib.ExitStack) -> tuple[int, int]:
    """A namespace with ``address``; its descriptor, and that of its device's other side.

    Raises:
        Unavailable: this machine or this user cannot.
    """
    with ThreadPoolExecutor(1) as maker:  # the thread that enters a namespace never comes back
        try:
            return maker.submit(_make_end_here, address, held).result()
        except OSError as error:
            raise Unavailable(
                f"no packet link: {error}",
                field="PacketLink",
                remedy="run as root (CAP_SYS_ADMIN, CAP_NET_ADMIN) where /dev/net/tun exists",
            ) from error


def _make_end_here(address: str, held: contextlib.ExitStack) -> tuple[int, int]:
    _call("unshare", _CLONE_NEWNET)
    namespace = _keep(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC), held)
    device = _keep(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), held)
    flags = _IFF_TUN | _IFF_NO_PI
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), flags))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _set_address(control, _SIOCSIFADDR, address)
        _set_address(control, _SIOCSIFNETMASK, "255.255.255.0")
        for name in ("lo", _DEVICE):
            _bring_up(control, name)
    return namespace, device


def _keep(descriptor: int, held: contextlib.ExitStack) -> int:
    held.callback(os.close, descriptor)
    return descriptor


def _set_address(control: socket.socket, request: int, address: str) -> None:
    """struct ifreq with a sockaddr_in, netdevice(7)."""
    packed = struct.pack(
        "16sHH4s8x", _DEVICE.encode(), socket.AF_INET, 0, socket.inet_aton(address)
    )
    fcntl.ioctl(control, request, packed)


def _bring_up(control: socket.socket, name: str) -> None:
    asked = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
    (flags,) = struct.unpack_from("16xH", asked)
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | _IFF_UP))


@contextlib.contextmanager
def _inside(namespace: int) -> Iterator[None]:
    with Path(_OWN).open("rb") as own:
        _enter(namespace)
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(namespace: int) -> None:
    _call("setns", namespace, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """A function of libc that Python offers from 3.12 on only. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
