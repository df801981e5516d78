"""Pictures made byte by byte to cost the reader more than the sender."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image


def progressive_jpeg(side: int, scans: int) -> bytes:
    """A grey progressive JPEG of ``side`` x ``side`` px, a multiple of 8, of zeros only.

    Each scan of a few bytes has libjpeg walk over all coefficients again.
    """
    blocks = (side // 8) ** 2
    out = [b"\xff\xd8", _segment(0xDB, b"\0" + b"\1" * 64)]
    out.append(_segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + bytes([1, 0x11, 0])))
    out.append(_huffman(0x00, 0))  # of the first coefficients: "0" is no difference
    out += [_scan(0, 0, 0, 1), bytes((blocks + 7) // 8)]
    out.append(_huffman(0x10, 0xE0))  # of the others: "0" and 14 bits are a run of empty blocks
    runs, left = "", blocks
    while left > 0:
        run = max(1 << 14, min(left, (1 << 15) - 1))
        runs += f"0{run - (1 << 14):014b}"
        left -= run
    runs += "1" * (-len(runs) % 8)
    empty = int(runs, 2).to_bytes(len(runs) // 8, "big").replace(b"\xff", b"\xff\0")
    for number in range(scans - 1):
        high, low = (0, 13) if not number else (max(1, 14 - number), max(0, 13 - number))
        out += [_scan(1, 63, high, low), empty]
    return b"".join(out) + b"\xff\xd9"


def claiming_jpeg(side: int) -> bytes:
    """A JPEG of some hundred bytes that claims ``side`` x ``side`` px."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 30, 30)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", side, side)
    return bytes(data)


def png(*chunks: tuple[bytes, bytes], side: int = 8) -> bytes:
    """A white PNG of ``side`` x ``side`` px with ``chunks`` between its header and its pixels."""
    rows = zlib.compress((b"\0" + b"\xff" * 3 * side) * side)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (
            (b"IHDR", png_header(side)),
            *chunks,
            (b"IDAT", rows),
            (b"IEND", b""),
        )
    )


def png_header(side: int) -> bytes:
    return struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)


def _segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _huffman(table: int, symbol: int) -> bytes:
    """A table in which "0" stands for ``symbol``."""
    return _segment(0xC4, bytes([table, 1]) + bytes(15) + bytes([symbol]))


def _scan(first: int, last: int, high: int, low: int) -> bytes:
    return _segment(0xDA, bytes([1, 1, 0, first, last, high << 4 | low]))
