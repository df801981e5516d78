"""Transport of hidden states to the next worker by torch.distributed's gloo.

Each pair of neighbours has a group of its own, so that the loss of a worker does not affect other
pairs. Headers of passes and all other messages stay on the gRPC stream. gloo neither encrypts nor
authenticates.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from collab_llm_nodes.errors import Unavailable

_MEET_S = 10.0  # for both sides to connect
_STATES_S = 2.0  # for states whose header has arrived
_IN_FLIGHT = 64  # passes being sent at a time

SENDER, RECEIVER = 0, 1


class MeetingPlace:
    """A port at which the receiver connects to the sender.

    Attributes:
        port: where it listens.
    """

    def __init__(self) -> None:
        self.store = _store("0.0.0.0", 0, listens=True)
        self.port: int = self.store.port


class GlooPath:
    """One direction between two workers, for one thread.

    Raises:
        Unavailable: the other side does not connect, or no longer answers.
    """

    def __init__(self, store: TCPStore, rank: int) -> None:
        try:
            self._group: Any = ProcessGroupGloo(store, rank, 2, timedelta(seconds=_MEET_S))
        except RuntimeError as error:
            raise _lost(error) from error
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()

    @classmethod
    def to_next(cls, place: MeetingPlace) -> GlooPath:
        """Return the path to the worker that connects to ``place``."""
        return cls(place.store, SENDER)

    @classmethod
    def from_previous(cls, host: str, port: int) -> GlooPath:
        """Return the path from the worker that listens there."""
        try:
            return cls(_store(host, port, listens=False), RECEIVER)
        except RuntimeError as error:
            raise _lost(error) from error

    def send(self, data: bytes, number: int) -> None:
        """Send the states of a pass without waiting for their arrival."""
        if not data:
            return
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        if len(self._in_flight) >= _IN_FLIGHT:
            raise Unavailable("the next worker takes no states", field="states")
        self._in_flight.append((self._group.send([tensor], RECEIVER, _tag(number)), tensor))

    def receive(self, size: int, number: int) -> bytes:
        """Return the ``size`` bytes of a pass whose header has arrived."""
        if not size:
            return b""
        tensor = torch.empty(size, dtype=torch.uint8)
        try:
            self._group.recv([tensor], SENDER, _tag(number)).wait(timedelta(seconds=_STATES_S))
        except RuntimeError as error:
            raise _lost(error) from error
        data: bytes = tensor.numpy().tobytes()
        return data


def _store(host: str, port: int, *, listens: bool) -> TCPStore:
    patience = timedelta(seconds=_MEET_S)
    return TCPStore(host, port, 2, listens, patience, wait_for_workers=False)


def _tag(number: int) -> int:
    return number % (1 << 31)


def _lost(error: RuntimeError) -> Unavailable:
    first_line = str(error).splitlines()[0]
    return Unavailable(
        f"gloo: {first_line}",
        field="path",
        remedy="check the network, and GLOO_SOCKET_IFNAME on machines with several",
    )
