"""The process that reads one PDF from stdin and writes its text to stdout (``pdf.py`` starts it).

Whatever the PDF does to the reader happens to this process only: its memory and CPU time are
limited, and its parent may kill it. A status other than 0 says what was wrong (``Status``).
"""

from __future__ import annotations

import argparse
import io
import logging
import signal
import sys

from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

from collab_llm_nodes.knowledge.documents import PAGE_BREAK
from collab_llm_nodes.knowledge.pdf import Status
from collab_llm_nodes.processes import confine


def main() -> int:
    """Read one PDF and return a ``Status``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--characters", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True, help="beyond what it starts with")
    parser.add_argument("--cpu-s", type=float, required=True)
    limits = parser.parse_args()
    logging.disable()
    confine(limits.memory)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        return _read(sys.stdin.buffer.read(), limits.pages, limits.characters)
    except FileNotDecryptedError:
        return Status.ENCRYPTED
    except DependencyError:
        return Status.LIBRARY
    except MemoryError:
        return Status.MEMORY
    except (PyPdfError, RecursionError):
        return Status.UNREADABLE


def _read(data: bytes, most_pages: int, most_characters: int) -> Status:
    try:
        reader = PdfReader(io.BytesIO(data))
    except NotImplementedError:  # such as encryption for a certificate
        return Status.ENCRYPTED if b"/Encrypt" in data else Status.UNREADABLE
    if reader.is_encrypted and not reader.decrypt(""):
        return Status.ENCRYPTED
    pages = []
    for number, page in enumerate(reader.pages):
        if number == most_pages:
            return Status.PAGES
        text = page.extract_text().replace(PAGE_BREAK, "\n").replace("\0", "")
        most_characters -= len(text) + 1
        if most_characters < 0:
            return Status.CHARACTERS
        pages.append(text.encode("utf-8", "replace"))
    sys.stdout.buffer.write(PAGE_BREAK.encode().join(pages))
    sys.stdout.buffer.flush()
    return Status.READ


if __name__ == "__main__":
    sys.exit(main())
