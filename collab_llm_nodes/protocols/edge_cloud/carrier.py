"""The carrier that a host provides for the messages to the verifier.

It is a client in the same process (:class:`VerifierCarrier`), or ROS topics through the nodes
``cloud_verifier_bridge`` and ``predraft_cache`` (``nodes/draft_vlm.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from collab_llm_nodes.protocols.base import Request
from collab_llm_nodes.protocols.edge_cloud.loop import Event
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open
from collab_llm_nodes.protocols.edge_cloud.sessions import SessionClient


class Session(Protocol):
    """The verifier's side of one answer."""

    bytes_up: int
    bytes_down: int

    def send(self, draft: Draft) -> None:
        """Have ``draft`` verified; does not block."""

    def close(self) -> None:
        """End the session, complete or not; nothing more is received."""


class Carrier(Protocol):
    """Opens sessions at the verifier."""

    @property
    def queues_exits(self) -> bool:
        """True if another process ranks early exits, and posts a ``PreDraftRequest`` for each."""

    @property
    def verifier_drafts(self) -> bool:
        """True if the verifier is known to have a draft model of its own."""

    def open(
        self, request: Request, opened: Open, receive: Callable[[Event], None], due: float
    ) -> Session:
        """Open the session of ``request``.

        Args:
            receive: callback for its messages, from any thread; must not block.
            due: ``time.monotonic()`` by which the answer must be complete.

        Raises:
            CollabError: why there is no session.
        """


class VerifierCarrier:
    """Carries messages from this process to a verifier; the caller closes ``client``."""

    queues_exits = False

    def __init__(self, client: SessionClient[Any]) -> None:
        self._client = client

    @property
    def verifier_drafts(self) -> bool:
        """True if the verifier has said so since the connection was made."""
        return self._client.draft != ""

    def open(
        self, request: Request, opened: Open, receive: Callable[[Event], None], due: float
    ) -> Session:
        """Open a session; does not wait for the verifier."""
        return self._client.open(opened, receive)
