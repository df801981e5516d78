"""Documents: a name and a text, checked before anything works on them."""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from functools import cached_property

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput, quoted

PAGE_BREAK = "\f"
"""Stands between two pages of a text, as in the output of pdftotext."""
_MAX_NAME = 512
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Document:
    """Text that an answer is about; a page break (form feed) separates its pages."""

    name: str
    content: str

    @cached_property
    def id(self) -> str:
        """First 32 hexadecimal digits of the content's SHA-256: equal texts have equal ids."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class DocumentLimits:
    """Bounds on one document, and on the process that reads a PDF."""

    file_bytes: int = setting(64 << 20, "Size of a file at most [bytes].", low=1, high=1 << 31)
    characters: int = setting(
        64 << 20, "Text of a document at most [characters].", low=1, high=1 << 29
    )
    pdf_pages: int = setting(5000, "Pages of a PDF at most.", low=1, high=1_000_000)
    pdf_cpu_s: float = setting(
        300.0, "A PDF may take this much CPU time to read [s].", low=0.1, high=3600.0
    )
    pdf_deadline_s: float = setting(
        900.0, "A PDF may take this long to read [s].", low=0.1, high=36000.0
    )
    pdf_memory_bytes: int = setting(
        512 << 20,
        "Memory for reading a PDF, beyond the file and the text [bytes].",
        low=16 << 20,
        high=1 << 34,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


def checked(name: str, content: str, limits: DocumentLimits, field: str = "documents") -> Document:
    """Return the document if it can be used.

    Raises:
        InvalidInput: no name, no text, too much text, or characters that are no text.
    """
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise InvalidInput(
            f"{quoted(name)} is no name of a document",
            field=field,
            remedy=f"1 to {_MAX_NAME} printable characters",
        )
    if len(content) > limits.characters:
        raise InvalidInput(
            f"{quoted(name)} has {len(content)} characters",
            field=field,
            remedy=f"at most {limits.characters}; split it",
        )
    if not content or content.isspace():
        raise InvalidInput(f"{quoted(name)} holds no text", field=field, remedy="leave it out")
    if "\0" in content:
        raise _binary(name, field)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{quoted(name)} holds half a character at {error.start}",
            field=field,
            remedy="send valid Unicode",
        ) from error
    return Document(name, content)


def decoded(name: str, data: bytes, field: str = "documents") -> str:
    """Return the text in ``data``: UTF-8, or UTF-16 with a byte order mark.

    Raises:
        InvalidInput: another encoding, or no text at all.
    """
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    if encoding != "utf-16" and b"\0" in data:
        raise _binary(name, field)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{quoted(name)} is not {encoding[:6].upper()} at byte {error.start}",
            field=field,
            remedy="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error


def _binary(name: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"{quoted(name)} is binary", field=field, remedy="give text, Markdown or a PDF"
    )
