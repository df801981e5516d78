"""Decoding of compressed pictures that may be hostile. Needs Pillow only: no torch, no numpy.

A few hundred bytes can claim a billion pixels, or have each of them decoded five hundred times. So
the size is read from the header, and the scans are counted, before anything is decoded.

Pixels are those that viewers display: turned by the EXIF orientation, on white where the picture is
transparent, and with 8 of 16 bits.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from PIL import Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError

from collab_llm_nodes.errors import InvalidInput

# Image.open() would import these, and all other formats, when the first picture comes.
_PLUGINS = (JpegImagePlugin, PngImagePlugin)

MAX_SCANS = 20
"""Progressive JPEGs have ten scans; libjpeg writes eighteen for pictures in CMYK."""
_MAX_SEGMENTS = 4096
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
# A JPEG marker with a segment after it: not 00 (data), FF (fill), 01 and D0 to D7 (stand alone).
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15
_APP1, _EXIF = 0xE1, b"Exif\0\0"
_ORIENTATION = 0x0112
_MAX_TAGS = 256  # looked through for it; cameras write some thirty, in the order of their numbers
_MAX_TRANSPARENCY = 256  # bytes of tRNS: one for each colour of a palette
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Operations that turn a picture upright, by its EXIF orientation; 1 is upright."""


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
        """Return the picture as an image of Pillow."""
        return Image.frombytes("RGB", (self.width, self.height), self.rgb)


@dataclass(frozen=True)
class _Header:
    """Size as stored, and the EXIF orientation, 1 to 8."""

    size: tuple[int, int]
    orientation: int


def measure(data: bytes, max_pixels: int, field: str = "image") -> tuple[int, int]:
    """Return width and height of the upright picture, from its header.

    Takes microseconds, or milliseconds for a file that is made to cost time.

    Raises:
        InvalidInput: neither JPEG nor PNG, or more than ``max_pixels`` pixels.
    """
    header = _read_header(data, max_pixels, field)
    width, height = header.size
    return (height, width) if header.orientation >= 5 else (width, height)


def decode(
    data: bytes, max_pixels: int, max_scans: int = MAX_SCANS, field: str = "image"
) -> Image.Image:
    """Return the upright RGB image in ``data``, a JPEG or PNG file.

    Raises:
        InvalidInput: not readable, too many pixels, or a JPEG with too many scans.
    """
    header = _read_header(data, max_pixels, field)
    try:
        if data.startswith(_PNG):
            data = _bare_png(data)
        elif (scans := _count_scans(data)) > max_scans:
            raise InvalidInput(
                f"a JPEG of {scans} scans", field=field, remedy=f"send at most {max_scans} scans"
            )
        else:  # Pillow would read all tags, for the resolution, and warn of each that is wrong
            data = data.replace(_EXIF, bytes(len(_EXIF)))
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.size != header.size:  # Pillow has found another than _jpeg_header
                raise ValueError("two sizes")
            plain = _plain(image)
        turn = _TURNS.get(header.orientation)
        return plain if turn is None else plain.transpose(turn)
    except (OSError, ValueError, SyntaxError) as error:
        # Pillow's own words for an unknown format name a Python object.
        why = "" if isinstance(error, UnidentifiedImageError) else str(error)
        raise _unreadable(why, field) from error
    except Image.DecompressionBombError as error:
        raise InvalidInput(str(error), field=field, remedy="send fewer pixels") from error


def is_jpeg(data: bytes) -> bool:
    """Return True if ``data`` begins like a JPEG file."""
    return data.startswith(_JPEG)


def is_turned(data: bytes) -> bool:
    """Return True if the EXIF orientation of a JPEG or PNG that can be decoded is not upright."""
    return _header_of(data).orientation != 1


def values_per_level(brightest: int) -> int:
    """Return the number of 16-bit values that become one of 256 levels of grey.

    Cameras of 12 bits leave the upper four empty: shown as 16 bits, their pictures were black.
    """
    return 16 if brightest < 1 << 12 else 256


def _plain(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB: in 8 bits, and on white, as qwen-vl-utils shows it to the model."""
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip
        _, brightest = cast("tuple[int, int]", image.getextrema())
        share = 1 / values_per_level(brightest)
        image = image.point(lambda value: value * share).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image if image.mode == "RGBA" else image.convert("RGBA")
    shown = Image.new("RGB", image.size, "white")
    shown.paste(colours, mask=colours.getchannel("A"))
    return shown


def _read_header(data: bytes, max_pixels: int, field: str) -> _Header:
    try:
        header = _header_of(data)
    except ValueError as error:
        raise _unreadable(str(error), field) from error
    width, height = header.size
    if not width * height:
        raise _unreadable("no pixels", field)
    if width * height > max_pixels:
        raise InvalidInput(
            f"{width}x{height} pixels", field=field, remedy=f"send at most {max_pixels} pixels"
        )
    return header


def _header_of(data: bytes) -> _Header:
    return _png_header(data) if data.startswith(_PNG) else _jpeg_header(data)


def _unreadable(why: str, field: str) -> InvalidInput:
    return InvalidInput(
        f"is not a readable JPEG or PNG{why and ': '}{why}",
        field=field,
        remedy="send the complete compressed image",
    )


def _png_header(data: bytes) -> _Header:
    if len(data) < 26 or data[12:16] != b"IHDR":
        raise ValueError("no header")
    size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    exif = next((data[at + 8 : end - 4] for name, at, end in _chunks(data) if name == b"eXIf"), b"")
    return _Header(size, _orientation(exif))


def _jpeg_header(data: bytes) -> _Header:
    if not is_jpeg(data):
        raise ValueError
    size, exif = None, b""
    for code, start, length in _segments(data):
        if code == _SOS:
            break
        if code in _FRAMES and length >= 5 and size is None:
            height, width = (int.from_bytes(data[start + i : start + i + 2], "big") for i in (1, 3))
            size = width, height
        if code == _APP1 and not exif and data.startswith(_EXIF, start):
            exif = data[start + len(_EXIF) : start + length]
    if size is None:
        raise ValueError("no header")
    return _Header(size, _orientation(exif))


def _orientation(exif: bytes) -> int:
    """Return the orientation, 1 to 8; 1 where ``exif`` has none."""
    little_endian = exif.startswith(b"II*\0")
    if not (little_endian or exif.startswith(b"MM\0*")):
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(exif[at : at + size], "little" if little_endian else "big")

    tags = number(4, 4)
    for at in range(tags + 2, tags + 2 + 12 * min(number(tags, 2), _MAX_TAGS), 12):
        if number(at, 2) == _ORIENTATION:
            size = {3: 2, 4: 4}.get(number(at + 2, 2), 0)  # SHORT or LONG
            value = number(at + 8, size)
            return value if 1 <= value <= 8 else 1
    return 1


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
    """Return the PNG without chunks that leave its pixels alone: texts, profiles, animation.

    Compressed texts and profiles can be bombs; a second header would take the place of the first.
    """
    kept, once = [_PNG], {b"IHDR"}
    depth, colour_type = data[24], data[25]
    if depth == 8 or colour_type == 3:  # a palette; Pillow compares other depths wrongly
        once.add(b"tRNS")
    for name, start, end in _chunks(data):
        if name in once and (name == b"IHDR" or end - start <= 12 + _MAX_TRANSPARENCY):
            once.remove(name)
        elif name not in (b"PLTE", b"IDAT", b"IEND"):
            continue
        kept.append(data[start:end])
    return b"".join(kept)


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and end of a PNG's chunks. Linear in their number.

    Raises:
        ValueError: there are too many.
    """
    start = len(_PNG)
    for _ in range(_MAX_SEGMENTS):
        length, name = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        end = min(start + 12 + length, len(data))
        yield name, start, end
        if name == b"IEND" or end == len(data):
            return
        start = end
    raise ValueError("too many chunks")
