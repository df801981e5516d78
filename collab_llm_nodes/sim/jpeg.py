"""Camera pictures as the JPEGs that a robot sends."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def to_jpeg(picture: np.ndarray, quality: int = 92) -> bytes:
    """Return the JPEG of a uint8 RGB picture, in full colour resolution for small things."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def from_jpeg(data: bytes) -> np.ndarray:
    """Return a JPEG as uint8 RGB [height, width, 3]."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))
