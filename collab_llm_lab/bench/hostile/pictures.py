"""Small pictures that take much to read."""

from __future__ import annotations

import struct
import zlib

_EOB_RUN = 32767
"""Blocks that one code word can skip, if its 14 further bits are ones (ITU T.81, G.1.2.2)."""


def progressive_jpeg(width: int, height: int, scans: int) -> bytes:
    """Return a grey picture with so many scans, each of which refines nothing.

    A decoder goes through all coefficients of all blocks once per scan: 500 scans over 25
    megapixels are some 12 billion steps for 22 kB.
    """
    blocks = -(-width // 8) * -(-height // 8)
    runs = -(-blocks // _EOB_RUN)
    bits = ("0" + "1" * 14) * runs
    bits += "1" * (-len(bits) % 8)
    coded = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    # All coefficients but the first (1 to 63), from one bit less to all bits (1, 0).
    scan = _segment(0xDA, bytes((1, 1, 0, 1, 63, 0x10))) + coded
    table = bytes((0x10, 1, *[0] * 15, 0xE0))  # one code word, "0": a run of 2**14 and more blocks
    return (
        b"\xff\xd8"
        + _segment(0xDB, bytes((0, *[1] * 64)))
        + _segment(0xC2, struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0))
        + _segment(0xC4, table)
        + scans * scan
        + b"\xff\xd9"
    )


def _segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def flat_png(width: int, height: int) -> bytes:
    """Return a black picture with four channels, a thousand times smaller than its pixels."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 4 * width)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND")
    )


def _chunk(kind: bytes, content: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )
