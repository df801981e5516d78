"""Typed errors: each names the fault, the field it is about, and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_QUOTED = 64
"""Characters of a caller's value that an error repeats; escapes may double them."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the remedy for a ``name`` that is unknown: the nearest one, else ``otherwise``."""
    close = difflib.get_close_matches(name[:64], list(known), 1)
    return f"did you mean {close[0]}?" if close else otherwise


_HARMFUL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys, that end a line or reverse the direction of writing, and halves
of characters, which cannot be written at all."""


def printable(text: str, *, lines: bool = False) -> str:
    """Return untrusted text made harmless to terminals and logs.

    Harmful characters become escapes that can be read, such as ``\\x1b``.

    Args:
        lines: keep line breaks and tabs. Never where a line of its own could pass for ours.
    """

    def escape(found: re.Match[str]) -> str:
        character = found[0]
        return character if lines and character in "\n\t" else repr(character)[1:-1]

    return _HARMFUL.sub(escape, text)


def quoted(value: object) -> str:
    """Return a caller's value for an error's text: on one line, and no longer than a line."""
    if isinstance(value, str) and len(value) > _QUOTED:
        value = f"{value[:_QUOTED]}..."
    text = repr(value)
    return text if len(text) <= 2 * _QUOTED else f"{text[: 2 * _QUOTED]}..."


class CollabError(Exception):
    """Base of all errors of this package; its message may quote untrusted text, on one line.

    Attributes:
        code: stable machine-readable name, sent over the wire and in ROS ``status`` strings.
        field: the input the error is about (``""`` when it is about no single one).
        remedy: an action that the user can take.
        attempts: times that a request was sent to a server before it ended in this error; 0 if
            it never was.
    """

    code = "INTERNAL"
    attempts = 0

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(printable(message))
        self.field = printable(field)
        self.remedy = printable(remedy)

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        what_to_do = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{super().__str__()}{what_to_do}"


@contextmanager
def within(group: str) -> Iterator[None]:
    """Name the group of settings that the field of an error raised here belongs to.

    Two models of one node both have a ``path``; the user must learn which of them is meant.
    """
    try:
        yield
    except CollabError as error:
        if error.field:
            error.field = f"{group}.{error.field}"
        raise


class ConfigError(CollabError):
    """A configuration has an unknown key or a value out of its range."""

    code = "INVALID_CONFIG"


class InvalidInput(CollabError):
    """Content that cannot be used: empty or oversized text, corrupt image, ids out of range."""

    code = "INVALID_INPUT"


class ModelError(CollabError):
    """A model cannot be loaded or used: unknown architecture, missing file, too little memory."""

    code = "MODEL_ERROR"


class VocabularyMismatch(CollabError):
    """Draft and target do not share one vocabulary, so token ids cannot be exchanged."""

    code = "VOCABULARY_MISMATCH"


class ProtocolError(CollabError):
    """A peer sent a message that its session's state does not allow."""

    code = "PROTOCOL_ERROR"


class Unauthenticated(CollabError):
    """The verifier refused the credentials."""

    code = "UNAUTHENTICATED"


class Unavailable(CollabError):
    """The verifier cannot be reached, or has no room for another session."""

    code = "UNAVAILABLE"


class Replay(Unavailable):
    """The verifier let go of a session: open it again with the confirmed tokens.

    Between verifier and link only, which does so; users never see it (hence not in ``BY_CODE``).
    """

    code = "REPLAY"


class DeadlineExceeded(CollabError):
    """The answer did not come within the deadline."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(CollabError):
    """The caller gave the request up."""

    code = "CANCELLED"


class Busy(CollabError):
    """This node serves as many requests as it may; it does not queue more."""

    code = "BUSY"


class NotFound(CollabError):
    """No document holds an answer to the question, and none must be made up."""

    code = "NOT_FOUND"


class Inactive(CollabError):
    """The node is not in the lifecycle state active."""

    code = "INACTIVE"


# All above but ``Replay``, which stays between verifier and link.
BY_CODE: dict[str, type[CollabError]] = {
    CollabError.code: CollabError,
    **{kind.code: kind for kind in CollabError.__subclasses__()},
}


_LIBRARY_TEXT = 500
"""Characters of a library's text that an error repeats."""


@contextmanager
def translate_errors(
    kind: type[CollabError], message: str, *, field: str, remedy: str
) -> Iterator[None]:
    """Turn any error of a library inside into ``kind``; an error of that kind passes as it is.

    For libraries that promise no list of their errors.

    Args:
        message: names the operation that failed; the library's own text follows.
    """
    try:
        yield
    except kind:
        raise
    except BaseException as error:
        # A panic of tokenizers' Rust code is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = error.args[0] if isinstance(error, CollabError) else _described(error)
        raise kind(f"{message}: {why[:_LIBRARY_TEXT]}", field=field, remedy=remedy) from error


def as_collab_error(error: Exception) -> CollabError:
    """Return ``error`` itself, or a ModelError with its text."""
    if isinstance(error, CollabError):
        return error
    return ModelError(_described(error), remedy="see the log")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
