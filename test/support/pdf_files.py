"""PDFs made byte by byte: plain ones, and some that cost the reader more than the sender."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

from pypdf import PdfReader, PdfWriter


def pdf(*pages: str) -> bytes:
    """A PDF with one line of text on each of its pages."""
    contents = [f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() for text in pages]
    return _document([_stream(b"", content) for content in contents])


def bomb(size: int) -> bytes:
    """A PDF with one page whose compressed contents unpack to ``size`` bytes."""
    packer = zlib.compressobj(9)
    blank = b" " * (1 << 20)
    packed = b"".join(packer.compress(blank) for _ in range(size >> 20)) + packer.flush()
    return _document([_stream(b"/Filter /FlateDecode ", packed)])


def many_pages(count: int) -> bytes:
    """A PDF that names one page ``count`` times."""
    return _document([_stream(b"", b"")] * count, shared=True)


def slow(operators: int) -> bytes:
    """A PDF with one page of so many operators that write nothing."""
    return _document([_stream(b"", b"BT /F1 12 Tf () Tj ET\n" * operators)])


def circle() -> bytes:
    """A PDF whose tree of pages contains itself."""
    return _file(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"]
    )


def nested(depth: int) -> bytes:
    """A PDF with arrays within arrays."""
    return _file([b"<< /Type /Catalog /Pages " + b"[" * depth + b"]" * depth + b" >>"])


def encrypted(text: str, password: str, algorithm: str = "RC4-128") -> bytes:
    """A PDF that only opens with ``password``; an empty one is needed by those who edit it."""
    writer, out = PdfWriter(PdfReader(io.BytesIO(pdf(text)))), io.BytesIO()
    writer.encrypt(password, "owner", algorithm=algorithm)
    writer.write(out)
    return out.getvalue()


def _document(contents: Sequence[bytes], shared: bool = False) -> bytes:
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    page = (
        b"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F1 3 0 R >> >> /Contents %d 0 R >>"
    )
    if shared:
        pages, kids = [contents[0], page % 4], [5] * len(contents)
    else:
        pages = [part for i, c in enumerate(contents) for part in (c, page % (4 + 2 * i))]
        kids = [5 + 2 * i for i in range(len(contents))]
    listed = b" ".join(b"%d 0 R" % kid for kid in kids)
    tree = b"<< /Type /Pages /Kids [" + listed + b"] /Count %d >>" % len(kids)
    return _file([b"<< /Type /Catalog /Pages 2 0 R >>", tree, font, *pages])


def _stream(facts: bytes, data: bytes) -> bytes:
    return b"<< %s/Length %d >>\nstream\n%s\nendstream" % (facts, len(data), data)


def _file(objects: Sequence[bytes]) -> bytes:
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)
