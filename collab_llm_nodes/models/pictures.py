"""Decoding of compressed pictures that may be hostile. Needs Pillow only: no torch, no numpy.

A few hundred bytes can claim a billion pixels, or have each of them decoded five hundred times. So
the size is read from the header, and the scans are counted, before anything is decoded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError

from collab_llm_nodes.errors import InvalidInput

# Image.open() would import these, and all other formats, when the first picture comes.
_PLUGINS = (JpegImagePlugin, PngImagePlugin)

MAX_SCANS = 20
"""Progressive JPEGs have ten scans; libjpeg writes eighteen for pictures in CMYK."""
_MAX_SEGMENTS = 4096
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# A JPEG marker with a segment behind it: not 00 (data), FF (fill), 01 and D0 to D7 (stand alone).
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15


@dataclass(frozen=True)
class Picture:
    """Decoded pixels: ``rgb`` holds 3 * width * height bytes, row by row."""

    width: int
    height: int
    rgb: bytes

    @classmethod
    def of(cls, image: Image.Image) -> Picture:
        """Copy the pixels of an RGB image."""
        return cls(image.width, image.height, image.tobytes())

    def image(self) -> Image.Image:
        """Return it as Pillow's."""
        return Image.frombytes("RGB", (self.width, self.height), self.rgb)


def measure(data: bytes, max_pixels: int, field: str = "image") -> tuple[int, int]:
    """Return width and height as the header tells them. Takes microseconds.

    Raises:
        InvalidInput: neither JPEG nor PNG, or more than ``max_pixels`` pixels.
    """
    try:
        width, height = _png_size(data) if data.startswith(_PNG) else _jpeg_size(data)
    except ValueError as error:
        raise _unreadable(str(error), field) from error
    if not width * height:
        raise _unreadable("no pixels", field)
    if width * height > max_pixels:
        raise InvalidInput(
            f"{width}x{height} pixels", field=field, remedy=f"send at most {max_pixels} pixels"
        )
    return width, height


def decode(
    data: bytes, max_pixels: int, max_scans: int = MAX_SCANS, field: str = "image"
) -> Image.Image:
    """Return the RGB image in ``data``, a JPEG or PNG file.

    Raises:
        InvalidInput: not readable, too many pixels, or a JPEG with too many scans.
    """
    size = measure(data, max_pixels, field)
    try:
        if data.startswith(_PNG):
            data = _bare_png(data)
        elif (scans := _count_scans(data)) > max_scans:
            raise InvalidInput(
                f"a JPEG of {scans} scans", field=field, remedy=f"send at most {max_scans} scans"
            )
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.size != size:  # Pillow has found another header than _jpeg_size
                raise ValueError("two sizes")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        # Pillow's own words for an unknown format name a Python object.
        why = "" if isinstance(error, UnidentifiedImageError) else str(error)
        raise _unreadable(why, field) from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(str(error), field=field, remedy="send fewer pixels") from error


def is_jpeg(data: bytes) -> bool:
    """Return True if ``data`` begins like a JPEG file."""
    return data.startswith(_JPEG)


def _unreadable(why: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"is not a readable JPEG or PNG{why and ': '}{why}",
        field=field,
        remedy="send the complete compressed image",
    )


def _png_size(data: bytes) -> tuple[int, int]:
    if len(data) < 24 or data[12:16] != b"IHDR":
        raise ValueError("no header")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    if not is_jpeg(data):
        raise ValueError
    for code, start, length in _segments(data):
        if code == _SOS:
            break
        if code in _FRAMES and length >= 5:
            height, width = (int.from_bytes(data[start + i : start + i + 2], "big") for i in (1, 3))
            return width, height
    raise ValueError("no header")


def _count_scans(data: bytes) -> int:
    codes = [code for code, _, _ in _segments(data)]
    if sum(code in _FRAMES for code in codes) != 1:
        raise ValueError("two frames")
    return codes.count(_SOS)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield code, start and length of a JPEG's segments; compressed data between them is skipped.

    Linear in the data. It reads on where libjpeg does, so no scan is hidden from it.

    Raises:
        ValueError: a segment is cut off, or there are too many.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or data[found.start() + 1] == _EOI:
            return
        start = found.end()
        length = int.from_bytes(data[start : start + 2], "big")
        at = start + length
        if length < 2 or at > len(data):
            raise ValueError("cut off")
        yield data[start - 1], start + 2, length - 2
    raise ValueError("too many segments")


def _bare_png(data: bytes) -> bytes:
    """Return the PNG without what does not change its pixels: texts, profiles, animation.

    Compressed texts and profiles can be bombs; a second header would take the place of the first.
    """
    kept, at = [_PNG], len(_PNG)
    for number in range(_MAX_SEGMENTS):
        length, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        chunk = data[at : at + 12 + length]
        if name in (b"PLTE", b"IDAT", b"IEND") or (name == b"IHDR" and number == 0):
            kept.append(chunk)
        at += len(chunk)
        if name == b"IEND" or at >= len(data):
            return b"".join(kept)
    raise ValueError("too many chunks")
