"""PDFs become text in a process of its own, which can be ended.

A PDF is a program of a kind: a few hundred bytes can name a million pages, unpack to gigabytes or
refer to themselves. The reader is pure Python, so that none of this can corrupt memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from enum import IntEnum

from collab_llm_nodes.errors import InvalidInput, Unavailable, quoted
from collab_llm_nodes.knowledge.documents import DocumentLimits
from collab_llm_nodes.processes import module_environment

_FIELD = "path"
_WORKER = "collab_llm_nodes.knowledge.pdf_worker"
_HEADER_WITHIN = 1024  # bytes; readers look no farther
_BYTES_PER_CHARACTER = 4


class Status(IntEnum):
    """Exit statuses of the process; an exception that nobody foresaw gives 1 as well."""

    READ = 0
    UNREADABLE = 1
    ENCRYPTED = 3
    PAGES = 4
    CHARACTERS = 5
    MEMORY = 6


_REFUSALS: dict[int, tuple[str, str]] = {
    Status.ENCRYPTED: ("is encrypted", "save it without a password"),
    Status.PAGES: ("has too many pages", "split it, or raise pdf_pages"),
    Status.CHARACTERS: ("holds too much text", "split it, or raise characters"),
    Status.MEMORY: ("takes too much memory to read", "save it again with another program"),
}
_UNREADABLE = ("is not a readable PDF", "save it again with another program")


def is_pdf(data: bytes) -> bool:
    """Return True if ``data`` begins like a PDF."""
    return b"%PDF-" in data[:_HEADER_WITHIN]


def read_pdf(name: str, data: bytes, limits: DocumentLimits) -> str:
    """Return the text of a PDF, its pages separated by page breaks.

    Takes half a second for the process and about 60 ms a page.

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
        # The process dies with the thread that started it (``confine``): this one, which waits.
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",  # python -m imports from there first
            env=module_environment(),
            timeout=limits.pdf_deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _too_long(name) from error
    except OSError as error:
        raise Unavailable(f"cannot start the reader of PDFs: {error}", field=_FIELD) from error
    if done.returncode == Status.READ:
        return done.stdout.decode()
    if done.returncode == -signal.SIGPROF:
        raise _too_long(name)
    why, remedy = _REFUSALS.get(done.returncode, _UNREADABLE)
    raise InvalidInput(f"{quoted(name)} {why}", field=_FIELD, remedy=remedy)


def _too_long(name: str) -> InvalidInput:
    return InvalidInput(
        f"{quoted(name)} takes too long to read",
        field=_FIELD,
        remedy="split it, or raise pdf_cpu_s and pdf_deadline_s",
    )
