"""Pictures of strangers: what is refused, and what the others become."""

from __future__ import annotations

import ast
import contextlib
import io
import zlib
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
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
    loaded = tiny_model("qwen2_vl")  # which decodes a picture
    monkeypatch.setattr(Image, "open", None)  # nothing is decoded
    with pytest.raises(InvalidInput, match="pixels") as caught:
        encode(Prompt("go", (data,)), loaded)
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
        saved("P", format="PNG"),
        saved("1", format="PNG"),
    ],
)
def test_plain_pictures_are_what_pillow_reads(data: bytes) -> None:
    plain = Image.open(io.BytesIO(data))
    assert measure(data, NO_LIMIT) == plain.size
    assert np.array_equal(np.asarray(decode(data, NO_LIMIT)), np.asarray(plain.convert("RGB")))


def written(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def opencv_reads(data: bytes) -> np.ndarray:
    """The pixels that OpenCV shows: another program's reading of the same file, in RGB."""
    cv2 = pytest.importorskip("cv2")
    return np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))[:, :, ::-1]


def qwen_shows(image: Image.Image) -> np.ndarray:
    """What qwen-vl-utils shows to the model; importing it all would need torchvision."""
    source = distribution("qwen-vl-utils").locate_file("qwen_vl_utils/vision_process.py")
    module = ast.parse(Path(str(source)).read_text(encoding="utf-8"))
    module.body = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "to_rgb"]
    names: dict[str, Any] = {"Image": Image}
    exec(compile(module, str(source), "exec"), names)  # noqa: S102
    return np.asarray(names["to_rgb"](image))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_pictures_are_turned_as_people_see_them(form: str, orientation: int, order: str) -> None:
    tags = Image.Exif()
    tags.endian = order
    tags[0x010F], tags[0x0112] = "a maker", orientation
    data = written(Image.open(io.BytesIO(scene(0, 48, 32))), form, exif=tags.tobytes())
    upright = opencv_reads(data)
    seen = np.asarray(decode(data, NO_LIMIT))
    assert seen.shape == upright.shape
    assert measure(data, NO_LIMIT) == upright.shape[1::-1]
    assert np.abs(seen.astype(int) - upright).mean() < 2  # two readers of JPEG round differently


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"II*\0",
        b"MM\0*\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff" + bytes(60_000),
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0",  # no ninth way to turn it
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0\x06\0\0\0",  # a text
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_tag_that_says_nothing_turns_nothing(exif: bytes) -> None:
    image = Image.open(io.BytesIO(scene(0, 48, 32)))
    data = written(image, "JPEG", exif=b"Exif\0\0" + exif)
    assert np.array_equal(
        np.asarray(decode(data, NO_LIMIT)), np.asarray(decode(written(image, "JPEG"), NO_LIMIT))
    )
    assert decode(png((b"eXIf", exif)), NO_LIMIT).size == (8, 8)


def keyed(mode: str, transparency: object) -> bytes:
    """A picture of two colours, the first of them transparent."""
    image = Image.new(mode, (20, 20), 0)
    image.paste(1 if mode == "P" else "white", (5, 5, 15, 15))
    if mode == "P":
        image.putpalette([200, 30, 30, 0, 0, 0])
    return written(image, transparency=transparency)


@pytest.mark.parametrize(
    "data",
    [
        written(Image.linear_gradient("L").convert("RGBA")),
        written(Image.merge("LA", [Image.new("L", (256, 256)), Image.linear_gradient("L")])),
        written(Image.merge("RGBA", [Image.linear_gradient("L")] * 4)),
        keyed("P", 0),
        keyed("P", bytes([0, 255])),
        keyed("P", bytes([128, 255])),
        keyed("L", 0),
        keyed("RGB", (0, 0, 0)),
        saved("P", format="PNG", transparency=bytes(range(256))),
    ],
)
def test_transparent_pictures_are_shown_on_white(data: bytes) -> None:
    """A black drawing on a transparent ground would be black on black."""
    expected = qwen_shows(Image.open(io.BytesIO(data)).convert("RGBA"))
    assert np.array_equal(np.asarray(decode(data, NO_LIMIT)), expected)


def test_a_table_of_transparency_that_is_too_long_is_not_read() -> None:
    assert np.asarray(decode(png((b"tRNS", bytes(1 << 20))), NO_LIMIT)).min() == 255


@pytest.mark.parametrize("brightest", [4095, 4096, 65535])
def test_sixteen_bits_become_eight(brightest: int) -> None:
    """Cameras of 12 bits leave the upper four of sixteen empty."""
    ramp = np.linspace(0, brightest, 1000).astype(np.uint16).reshape(20, 50)
    seen = np.asarray(decode(written(Image.fromarray(ramp)), NO_LIMIT))
    in_full = ramp << 4 if brightest == 4095 else ramp
    assert np.array_equal(seen, opencv_reads(written(Image.fromarray(in_full))))


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
