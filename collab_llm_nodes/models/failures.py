"""Errors of libraries, which promise no list of them, as this package's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collab_llm_nodes.errors import CollabError

_LONGEST = 500
"""Characters of a library's text that an error repeats."""


@contextmanager
def translated(kind: type[CollabError], message: str, *, field: str, remedy: str) -> Iterator[None]:
    """Raise whatever is raised inside as ``kind``; an error of that kind passes as it is.

    Args:
        message: names what was tried; the library's own text follows.
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
        raise kind(f"{message}: {why[:_LONGEST]}", field=field, remedy=remedy) from error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
