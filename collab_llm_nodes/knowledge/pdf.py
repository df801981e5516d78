"""PDFs become text in a process of its own, which can be ended.

A PDF is a program of a kind: a few hundred bytes can name a million pages, unpack to gigabytes or
refer to themselves. The reader is pure Python, so that none of this can corrupt memory.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from enum import IntEnum

from collab_llm_nodes.errors import InvalidInput, Unavailable, quoted
from collab_llm_nodes.knowledge.documents import DocumentLimits
from collab_llm_nodes.processes import module_environment

_FIELD = "path"
_WORKER = "collab_llm_nodes.knowledge.pdf_worker"
_HEADER = re.compile(rb"(?:\xef\xbb\xbf)?\s*%PDF-\d\.\d\s*?[\r\n]")
_HEADER_WITHIN = 1024  # bytes; readers look no farther
_BYTES_PER_CHARACTER = 4
_PATIENCE = 3.0
"""Time to read a PDF, in units of the CPU time allowed: other processes use the CPU as well."""
_START_S = 60.0
"""Further time, in which a busy machine starts the process."""
_LOOK_S = 0.1
"""Time between two looks whether the text is still wanted."""


class Status(IntEnum):
    """Exit statuses of the process; an exception that nobody foresaw gives 1 as well."""

    READ = 0
    UNREADABLE = 1
    ENCRYPTED = 3
    PAGES = 4
    CHARACTERS = 5
    MEMORY = 6
    LIBRARY = 7


_REFUSALS: dict[int, tuple[str, str]] = {
    Status.ENCRYPTED: ("is encrypted: it needs a password or a certificate", "save it without"),
    Status.PAGES: ("has too many pages", "split it, or raise pdf_pages"),
    Status.CHARACTERS: ("holds too much text", "split it, or raise characters"),
    Status.MEMORY: ("takes too much memory to read", "save it again with another program"),
    Status.LIBRARY: (
        "needs a library that is not installed",
        "for encryption by AES: pip install 'pypdf[crypto]'; or save it without encryption",
    ),
}
_UNREADABLE = ("is not a readable PDF", "save it again with another program")


def is_pdf(data: bytes) -> bool:
    """Return True if ``data`` begins with the header of a PDF."""
    return _HEADER.match(data) is not None


def may_be_pdf(data: bytes) -> bool:
    """Return True if readers would look for a PDF in ``data``, which is no text."""
    return b"%PDF-" in data[:_HEADER_WITHIN]


def read_pdf(
    name: str, data: bytes, limits: DocumentLimits, check: Callable[[], None] = lambda: None
) -> str:
    """Return the text of a PDF, its pages separated by page breaks.

    Takes half a second for the process and about 60 ms a page.

    Args:
        check: called meanwhile; what it raises ends the process.

    Raises:
        InvalidInput: not readable, encrypted, beyond ``limits``, or it takes too long.
        Unavailable: the process cannot start.
    """
    memory = limits.pdf_memory_bytes + 2 * len(data)
    memory += min(limits.characters, 64 * len(data)) * _BYTES_PER_CHARACTER
    command = [
        *(sys.executable, "-m", _WORKER),
        *("--pages", str(limits.pdf_pages)),
        *("--characters", str(limits.characters)),
        *("--memory", str(memory)),
        *("--cpu-s", str(limits.pdf_cpu_s)),
    ]
    try:
        with tempfile.TemporaryFile() as file:
            # No pipe: Popen.communicate(timeout=...) forgets the rest of its input (CPython 3.11).
            file.write(data)
            file.seek(0)
            # It dies with the thread that started it (``confine``): this one, which waits.
            reader = subprocess.Popen(
                command,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",  # python -m imports from there first
                env=module_environment(),
            )
    except OSError as error:
        raise Unavailable(f"cannot start the reader of PDFs: {error}", field=_FIELD) from error
    with reader:
        try:
            text = _text_of(
                reader, time.monotonic() + _START_S + _PATIENCE * limits.pdf_cpu_s, check
            )
        finally:
            reader.kill()  # no effect once it has ended
    if text is None or reader.returncode == -signal.SIGPROF:
        raise _too_long(name)
    if reader.returncode == Status.READ:
        return text.decode()
    why, remedy = _REFUSALS.get(reader.returncode, _UNREADABLE)
    raise InvalidInput(f"{quoted(name)} {why}", field=_FIELD, remedy=remedy)


def _text_of(
    reader: subprocess.Popen[bytes], due: float, check: Callable[[], None]
) -> bytes | None:
    """Return what ``reader`` writes; None if it takes longer than until ``due``."""
    while time.monotonic() < due:
        try:
            text, _ = reader.communicate(timeout=_LOOK_S)
            return text
        except subprocess.TimeoutExpired:
            check()
    return None


def _too_long(name: str) -> InvalidInput:
    return InvalidInput(
        f"{quoted(name)} takes too long to read",
        field=_FIELD,
        remedy="split it, or raise pdf_cpu_s",
    )
