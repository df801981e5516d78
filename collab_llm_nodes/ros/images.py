"""Pictures in ROS messages, without cv_bridge: to RGB arrays and to JPEG."""

from __future__ import annotations

import io
import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image as Pil

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.pictures import decode, is_jpeg, is_turned, values_per_level

_BYTES_PER_PIXEL = {
    "rgb8": 3,
    "bgr8": 3,
    "8uc3": 3,
    "rgba8": 4,
    "bgra8": 4,
    "mono8": 1,
    "8uc1": 1,
    "mono16": 2,
    "16uc1": 2,
    "yuv422": 2,  # UYVY
    "uyvy": 2,
    "yuv422_yuy2": 2,
    "yuyv": 2,
    "nv12": 1,  # of the luma plane
    "nv21": 1,
}
MAX_SIDE = 8192
"""px; a message that claims more is not a picture."""
LEAST_VIEW, MOST_VIEW = 10.0, 170.0
"""Fields of view of cameras [deg]; beyond them no zoom makes sense."""
_FISHEYES = ("equidistant", "fisheye")
_MOST_ASIDE = 0.1
"""Distance of the optical axis from the middle of a picture, as a share of its width."""
_SAME_ZOOM = 1 / 8
"""With a smaller change pictures are left alone: directions are wrong by less than 4 degrees, and
another JPEG of small pictures costs the models as much."""
_LEVELS = np.arange(256)
_FULL_LUMA, _FULL_CHROMA = (
    np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    for levels in ((_LEVELS - 16) * 255 / 219, (_LEVELS - 128) * 255 / 224 + 128)
)
"""[256] Levels of video range (BT.601: luma 16 to 235, chroma 16 to 240) as those of a JPEG."""


@dataclass(frozen=True)
class Jpeg:
    """JPEG bytes and the size of the picture in px."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Form:
    """The form in which pictures are passed on.

    Attributes:
        quality: of the JPEGs that are encoded here, 1 to 100.
        max_width: wider pictures are scaled down to this; 0: none are [px].
        zoom: above 1 the middle fills the frame; below 1 the picture is that much smaller, and its
            outermost pixels are repeated up to the frame.
    """

    quality: int = 92
    max_width: int = 0
    zoom: float = 1.0

    def matches(self, picture: Pil.Image) -> bool:
        """Return True if the picture has this width and zoom already."""
        return self.zoom == 1.0 and not 0 < self.max_width < picture.width

    def apply(self, picture: Pil.Image) -> Pil.Image:
        """Return the picture with this width and zoom."""
        width, height = whole = picture.size
        if 0 < self.max_width < width:
            width, height = self.max_width, max(1, round(height * self.max_width / width))
        kept = [side / max(self.zoom, 1.0) for side in whole]
        left, top = ((side - part) / 2 for side, part in zip(whole, kept, strict=True))
        box = (left, top, left + kept[0], top + kept[1])
        inner = [max(1, round(side * min(self.zoom, 1.0))) for side in (width, height)]
        shown = picture.resize((inner[0], inner[1]), Pil.Resampling.BILINEAR, box=box)
        border = [(lack // 2, lack - lack // 2) for lack in (height - inner[1], width - inner[0])]
        return Pil.fromarray(np.pad(np.asarray(shown), (*border, (0, 0)), mode="edge"))


def to_rgb(
    encoding: str,
    width: int,
    height: int,
    step: int,
    data: bytes | memoryview | array[int],
    big_endian: bool = False,
) -> np.ndarray:
    """Return the pixels of a ``sensor_msgs/Image`` as uint8 [height, width, 3], RGB.

    Args:
        step: bytes per row, padding included; of NV12 and NV21, those of the luma plane, which the
            chroma plane follows with the same step.

    Raises:
        InvalidInput: unknown encoding, or sizes that do not fit together.
    """
    kind = encoding.lower()
    if kind not in _BYTES_PER_PIXEL:
        known = ", ".join(_BYTES_PER_PIXEL)
        raise InvalidInput(f"{encoding!r} is not supported", field="encoding", remedy=known)
    row, raw = width * _BYTES_PER_PIXEL[kind], np.frombuffer(data, np.uint8)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise InvalidInput(f"{width}x{height} px", field="width, height", remedy="1 to 8192 px")
    if step < row or raw.size < step * height:
        raise InvalidInput(
            f"{raw.size} bytes cannot hold {height} rows of {step} bytes with {width} px each",
            field="data",
            remedy="check step, width and height",
        )
    if kind in ("nv12", "nv21"):
        return _from_yuv420(raw, width, height, step, blue_first=kind == "nv12")
    rows = raw[: step * height].reshape(height, step)[:, :row]
    if kind in ("yuv422", "uyvy", "yuv422_yuy2", "yuyv"):
        return _from_yuv422(rows, luma_first=kind in ("yuv422_yuy2", "yuyv"))
    if kind in ("mono16", "16uc1"):
        values = np.ascontiguousarray(rows).view(">u2" if big_endian else "<u2")
        grey = (values // values_per_level(values.max())).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    pixels = rows.reshape(height, width, -1)
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    return pixels[:, :, :3] if kind.startswith("rgb") else pixels[:, :, 2::-1]


def _from_yuv422(rows: np.ndarray, *, luma_first: bool) -> np.ndarray:
    """Return RGB of YUV 4:2:2, where two pixels share one U and one V; the width must be even."""
    height, size = rows.shape
    if size % 4:
        raise InvalidInput("odd width", field="width", remedy="YUV 4:2:2 has an even width")
    quads = rows.reshape(height, size // 4, 4)
    luma, chroma = (quads[:, :, 0::2], quads[:, :, 1::2])
    if not luma_first:
        luma, chroma = chroma, luma
    ycc = np.empty((height, size // 2, 3), np.uint8)
    ycc[:, :, 0] = luma.reshape(height, -1)
    ycc[:, :, 1:] = np.repeat(chroma, 2, axis=1)
    return np.asarray(Pil.fromarray(ycc, "YCbCr").convert("RGB"))


def _from_yuv420(
    raw: np.ndarray, width: int, height: int, step: int, *, blue_first: bool
) -> np.ndarray:
    """Return RGB of a luma plane and one of chroma pairs, each shared by 2x2 px (video range).

    Raises:
        InvalidInput: odd sides, or rows of padding between the planes.
    """
    if width % 2 or height % 2:
        raise InvalidInput(
            f"{width}x{height} px", field="width, height", remedy="NV12 and NV21 have even sides"
        )
    count = height * 3 // 2
    if raw.size != count * step:
        raise InvalidInput(
            f"{raw.size} bytes are not {count} rows of {step} bytes",
            field="data",
            remedy="send the luma plane and the chroma plane without rows of padding",
        )
    rows = raw.reshape(count, step)[:, :width]
    chroma = rows[height:].reshape(height // 2, width // 2, 2)[:, :, :: 1 if blue_first else -1]
    ycc = np.empty((height, width, 3), np.uint8)
    ycc[:, :, 0] = _FULL_LUMA[rows[:height]]
    ycc[:, :, 1:] = _FULL_CHROMA[chroma].repeat(2, axis=0).repeat(2, axis=1)
    return np.asarray(Pil.fromarray(ycc, "YCbCr").convert("RGB"))


def view_of(info: Any) -> float:
    """Return the horizontal field of view [deg] by a ``sensor_msgs/CameraInfo``; 0.0: it says none.

    That of pictures as they come from the camera, by the focal length. A camera that is not
    calibrated has none, nor has a fisheye, or a part of a picture beside the optical axis.
    """
    width = info.roi.width or info.width
    focal_length, centre = float(info.k[0]), float(info.k[2]) - info.roi.x_offset
    if not (width > 0 and 0.0 < focal_length < math.inf) or info.distortion_model in _FISHEYES:
        return 0.0
    view = 2.0 * math.degrees(math.atan(width / 2 / focal_length))
    central = abs(centre / width - 0.5) < _MOST_ASIDE
    return view if central and LEAST_VIEW <= view <= MOST_VIEW else 0.0


def zoom_between(camera: float, wanted: float) -> float:
    """Return the zoom that brings one field of view to another [deg].

    1.0, no zoom, if that would change little, and if one of them is 0.0: unknown, or any.
    """
    if not (camera and wanted):
        return 1.0
    zoom = math.tan(math.radians(camera / 2)) / math.tan(math.radians(wanted / 2))
    return zoom if abs(zoom - 1.0) > _SAME_ZOOM else 1.0


def encode_jpeg(rgb: np.ndarray, form: Form) -> Jpeg:
    """Return the JPEG of uint8 [height, width, 3]."""
    return _save(Pil.fromarray(np.ascontiguousarray(rgb)), form)


def read_compressed(data: bytes, form: Form) -> Jpeg:
    """Check compressed bytes by decoding them; an upright JPEG of this form is kept as it is.

    Raises:
        InvalidInput: neither JPEG nor PNG, truncated, corrupt, or beyond the limits.
    """
    picture = decode(data, MAX_SIDE**2, field="data")
    if is_jpeg(data) and not is_turned(data) and form.matches(picture):
        return Jpeg(data, picture.width, picture.height)
    return _save(picture, form)


def _save(picture: Pil.Image, form: Form) -> Jpeg:
    if not form.matches(picture):
        picture = form.apply(picture)
    buffer = io.BytesIO()
    # Colour at full resolution.
    picture.save(buffer, "JPEG", quality=form.quality, subsampling=0)
    return Jpeg(buffer.getvalue(), picture.width, picture.height)
