"""Pictures of strangers: what is refused, and what the others become."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hostile_pictures import claiming_jpeg, png, png_header, progressive_jpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_models import scene, tiny_model

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.pictures import MAX_SCANS, decode, measure
from collab_llm_nodes.models.prompt import Prompt, PromptLimits, encode, pixel_limit
from collab_llm_nodes.protocols.edge_cloud.info import Limits

T = TypeVar("T")
FULL_HD = 1920 * 1080
NO_LIMIT = 1 << 40


# --- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("data", [claiming_jpeg(5000), progressive_jpeg(4992, 500)])
def test_pixels_are_counted_in_the_header(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", None)  # nothing is decoded
    with pytest.raises(InvalidInput, match="pixels") as caught:
        encode(Prompt("go", (data,)), tiny_model("qwen2_vl"))
    assert caught.value.field == "images[0]"
    assert caught.value.remedy == f"send at most {FULL_HD} pixels"


def test_scans_are_counted_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(progressive_jpeg(64, MAX_SCANS), NO_LIMIT).size == (64, 64)
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(InvalidInput, match=f"{MAX_SCANS + 1} scans"):
        decode(progressive_jpeg(64, MAX_SCANS + 1), NO_LIMIT)
    with pytest.raises(InvalidInput, match="500 scans"):
        decode(progressive_jpeg(1440, 500), FULL_HD)


def test_a_full_hd_frame_and_what_the_model_can_use_are_allowed() -> None:
    loaded = tiny_model("qwen2_vl")
    assert loaded.image_processor is not None
    size = loaded.image_processor.size
    assert pixel_limit(0, loaded) == FULL_HD > size["longest_edge"]
    assert pixel_limit(100, loaded) == 100
    assert pixel_limit(0, tiny_model("llama")) == 0
    assert PromptLimits().max_scans == Limits().max_image_scans
    assert encode(Prompt("go", (scene(0, 1920, 1080),)), loaded).ids


def test_what_does_not_change_a_pngs_pixels_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = b"a\0\0" + zlib.compress(bytes(100 << 20), 9)
    data = png(
        (b"zTXt", bomb),
        (b"iCCP", bomb),
        (b"IHDR", png_header(5000)),  # Pillow would believe the second
        (b"acTL", bytes(8)),
    )
    inflate: Callable[..., Any] = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", None)
    image = decode(data, 64)
    monkeypatch.setattr(zlib, "decompressobj", inflate)
    assert np.array_equal(np.asarray(image), np.full((8, 8, 3), 255))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff" + b"\xff" * 1_000_000,
        b"\xff\xd8" + b"\xff\xe0\0\2" * 1_000_000,
        b"\xff\xd8" + b"\xff\xd0" * 1_000_000,
        progressive_jpeg(64, 4)[:-2] + b"\xff\xe0\0\2" * 1_000_000,
        png(*[(b"tEXt", b"")] * 300_000),
        png(*[(b"IDAT", b"")] * 5000),
        claiming_jpeg(0),
        png(side=0),
        b"\xff\xd8\xff\xf0\0\4" + claiming_jpeg(100)[2:],  # Pillow looks into FFF0, libjpeg not
    ],
)
def test_a_file_of_nothing_but_segments_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a readable"):
        decode(data, NO_LIMIT)


@given(st.data())
def test_no_bytes_cause_anything_but_a_typed_error(choice: st.DataObject) -> None:
    valid = choice.draw(
        st.sampled_from([scene(0), claiming_jpeg(16), progressive_jpeg(64, 4), png()])
    )
    data = bytearray(valid)
    for _ in range(choice.draw(st.integers(1, 8))):
        data[choice.draw(st.integers(0, len(data) - 1))] = choice.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidInput):
        assert decode(bytes(data), 1 << 16).mode == "RGB"


def saved(*modes: str, **options: Any) -> bytes:
    """A noisy picture, converted to each of ``modes``."""
    rgb = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(rgb)
    for mode in modes:
        image = image.convert(mode)
    image.save(file, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        saved("RGB", format="JPEG"),
        saved("RGB", format="JPEG", progressive=True),
        saved("RGB", format="JPEG", restart_marker_blocks=1, comment=b"\xff\xda" * 50),
        saved("L", format="JPEG", progressive=True),
        saved("CMYK", format="JPEG", progressive=True),
        saved("RGB", format="PNG", icc_profile=b"profile"),
        saved("RGBA", format="PNG"),
        saved("LA", format="PNG"),
        saved("L", format="PNG", transparency=7),
        saved("P", format="PNG", transparency=bytes(range(256))),
        saved("RGB", format="PNG", transparency=(1, 2, 3)),
        saved("1", format="PNG"),
        saved("L", "I;16", format="PNG"),
    ],
)
def test_pixels_are_those_of_pillow(data: bytes) -> None:
    plain = Image.open(io.BytesIO(data))
    assert measure(data, NO_LIMIT) == plain.size
    assert np.array_equal(np.asarray(decode(data, NO_LIMIT)), np.asarray(plain.convert("RGB")))


def test_scaling_is_the_image_processors() -> None:
    loaded = tiny_model("qwen2_vl")
    shown = (scene(0), scene(1, 300, 40), scene(2, 20, 20), scene(3, 56, 84), scene(4, 1280, 720))
    processor = loaded.image_processor
    assert processor is not None
    images: list[Image.Image] = [Image.open(io.BytesIO(data)) for data in shown]
    plain = processor(images=images, return_tensors="pt")
    encoded = encode(Prompt("go", shown), loaded)
    assert encoded.pixel_values is not None
    assert encoded.image_grid_thw is not None
    assert torch.equal(encoded.pixel_values, plain["pixel_values"])
    assert torch.equal(encoded.image_grid_thw, plain["image_grid_thw"])
