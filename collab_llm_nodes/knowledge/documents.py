"""Documents: a name and a text, checked before anything works on them."""

from __future__ import annotations

import codecs
import hashlib
import logging
import re
from dataclasses import dataclass
from functools import cached_property

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput, quoted

log = logging.getLogger(__name__)

PAGE_BREAK = "\f"
"""Stands between two pages of a text, as in the output of pdftotext."""
_MAX_NAME = 512
_DAMAGE = "\N{REPLACEMENT CHARACTER}"
_NUL_BLOCK = re.compile("\0{64,}")
"""The byte that a power cut leaves in a file that was being written."""
_BAD = re.compile(f"[\0{_DAMAGE}]+")
_CHARACTERS_PER_BAD = 1000
"""Fewer of them for each place that is no text: another encoding, or no text at all."""
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

    file_bytes: int = setting(
        64 << 20,
        "Size of a file at most [bytes]. Raise it for files that are refused, if memory allows.",
        low=1,
        high=1 << 31,
    )
    characters: int = setting(
        64 << 20, "Text of a document at most [characters]. Raise it likewise.", low=1, high=1 << 29
    )
    pdf_pages: int = setting(
        5000, "Pages of a PDF at most. Raise it likewise.", low=1, high=1_000_000
    )
    pdf_cpu_s: float = setting(
        300.0,
        "A PDF may take this much CPU time to read, and three times as long on a busy machine [s]."
        " Raise it on a slow one.",
        low=0.1,
        high=3600.0,
    )
    pdf_memory_bytes: int = setting(
        512 << 20,
        "Memory for reading a PDF, beyond the file and the text [bytes]."
        " Raise it for PDFs that are refused for it.",
        low=16 << 20,
        high=1 << 34,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


def checked(name: str, content: str, limits: DocumentLimits, field: str = "documents") -> Document:
    """Return the document if it can be used.

    Args:
        field: name of the content in errors.

    Raises:
        InvalidInput: no name, no text, too much text, or characters that are no text.
    """
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise InvalidInput(
            f"{quoted(name)} is no name of a document",
            field="name",
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

    A log may hold a block of NUL bytes, from a power cut, and a few bytes that are no text. Each
    such place becomes a replacement character.

    Raises:
        InvalidInput: another encoding, or no text at all.
    """
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    error: UnicodeDecodeError | None = None
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as first:
        text, error = data.decode(encoding, "replace"), first
    if error is None and "\0" not in text:
        return text
    text, blocks = _NUL_BLOCK.subn(_DAMAGE, text)
    text, places = _BAD.subn(_DAMAGE, text)
    if (places - blocks) * _CHARACTERS_PER_BAD > len(text) or not text.strip(_DAMAGE):
        if error is None or (b"\0" in data and encoding != "utf-16"):
            raise _binary(name, field)
        raise InvalidInput(
            f"{quoted(name)} is not {encoding[:6].upper()} at byte {error.start}",
            field=field,
            remedy="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
    log.warning("%s is damaged; places that hold no text: %d", quoted(name), places)
    return text


def _binary(name: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"{quoted(name)} is binary", field=field, remedy="give text, Markdown or a PDF"
    )
