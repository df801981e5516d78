"""Guides: limits on the text of an answer, as they are configured and sent."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.errors import InvalidInput

KINDS = ("json", "regex", "choice")
MAX_GUIDE_BYTES = 16 << 10
"""Longest source of a guide, in UTF-8."""
MOST_FORCED = 64
"""Tokens that are taken without the model at a time, since each takes work to find."""
FIELD = "answer.guide"
"""The field of all errors about a guide."""


@dataclass(frozen=True)
class Guide:
    """A limit on the text of an answer.

    Attributes:
        kind: one of ``KINDS``.
        source: a JSON schema; a regular expression in Rust's syntax for the whole text; or the
            texts to choose from, one a line.

    Raises:
        InvalidInput: an unknown kind, or a source that is empty or too long.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise refused(f"{self.kind[:20]!r} is no kind of guide", f"one of {', '.join(KINDS)}")
        if not self.source.strip():
            raise refused(f"{self.kind} needs a source", "set answer.guide_source")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise refused("the source is no Unicode text", "remove lone surrogates") from error
        if size > MAX_GUIDE_BYTES:
            raise refused(f"{size} bytes", f"at most {MAX_GUIDE_BYTES}")


def refused(what: str, remedy: str) -> InvalidInput:
    """Return the error about a guide."""
    return InvalidInput(what, field=FIELD, remedy=remedy)
