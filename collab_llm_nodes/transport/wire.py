"""Checks that the codecs of all protocols make of what a peer sends."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from collab_llm_nodes.errors import InvalidInput, ProtocolError

UPDATE = "the two sides differ in version; update both"
"""The remedy for messages that the other side would not send if it had this version."""


def parse(kind: Any, data: bytes) -> Any:
    """Return ``data`` as a message of ``kind``, a generated class.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(
            f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}", field="message", remedy=UPDATE
        ) from error


def at_most(count: int, limit: int, field: str) -> None:
    """Refuse a count or a number above its limit.

    Raises:
        InvalidInput: for ``field``.
    """
    if count > limit:
        raise InvalidInput(f"{count} are too many", field=field, remedy=f"at most {limit}")
