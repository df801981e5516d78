"""Pictures and cameras: encodings, every source, what is said when one is missing or breaks."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import os
import socket
import sys
import threading
import time
import types
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from fake_sport_server import FakeGo2
from motion_graph import graph, jpeg
from PIL import Image as Pil
from proxies import environment_proxy
from rclpy.parameter import Parameter
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from started_nodes import start

from collab_llm.msg import Observation
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, InvalidInput, Unavailable
from collab_llm_nodes.nodes import camera_ingest
from collab_llm_nodes.nodes.camera_ingest import CameraIngest
from collab_llm_nodes.ros import cameras
from collab_llm_nodes.ros.cameras import (
    TOPICS,
    CameraConfig,
    PictureFolder,
    open_source,
    without_password,
)
from collab_llm_nodes.ros.images import (
    Form,
    encode_jpeg,
    read_compressed,
    to_rgb,
    view_of,
    zoom_between,
)
from collab_llm_nodes.ros.qos import CAMERA, RESULT

pytestmark = pytest.mark.ros
__all__ = ["graph"]  # a fixture

needs_unitree = pytest.mark.skipif(
    importlib.util.find_spec("unitree_api") is None,
    reason="the test interfaces are not built: run the tests with `make test`",
)


@pytest.fixture
def retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are opened again after short pauses."""
    monkeypatch.setattr(cameras, "RETRY_S", (0.02, 0.1))


# Pictures.


@pytest.mark.parametrize(
    ("encoding", "pixel"),
    [
        ("rgb8", [10, 20, 30]),
        ("BGR8", [30, 20, 10]),
        ("rgba8", [10, 20, 30, 99]),
        ("bgra8", [30, 20, 10, 99]),
        ("8UC3", [30, 20, 10]),
    ],
)
def test_colours_come_out_as_rgb(encoding: str, pixel: list[int]) -> None:
    padding = [7, 7]
    data = bytes((pixel * 3 + padding) * 2)
    rgb = to_rgb(encoding, 3, 2, 3 * len(pixel) + 2, data)
    assert rgb.shape == (2, 3, 3)
    assert (rgb == (10, 20, 30)).all()


def test_grey_and_yuv() -> None:
    assert (to_rgb("mono8", 2, 1, 2, bytes([5, 5])) == 5).all()
    assert (to_rgb("mono16", 2, 1, 4, bytes([9, 80, 0, 80])) == 80).all()
    assert (to_rgb("mono16", 2, 1, 4, bytes([80, 0, 80, 9]), big_endian=True) == 80).all()
    for encoding, quad in (("yuv422_yuy2", [80, 128, 80, 128]), ("uyvy", [128, 80, 128, 80])):
        assert (to_rgb(encoding, 2, 1, 4, bytes(quad)) == 80).all()


def planes(rgb: np.ndarray, chroma_order: int, padding: int) -> bytes:
    """Return ``rgb`` [height, width, 3] as OpenCV encodes it, in NV12 (1) or NV21 (-1)."""
    height, width, _ = rgb.shape
    cv2 = pytest.importorskip("cv2")
    planar = cv2.cvtColor(rgb, cv2.COLOR_RGB2YUV_I420).reshape(-1)
    luma, chroma = planar[: height * width], planar[height * width :].reshape(2, -1)
    pairs = chroma[::chroma_order].T.reshape(height // 2, width)
    rows = np.vstack([luma.reshape(height, width), pairs])
    return np.pad(rows, ((0, 0), (0, padding)), constant_values=7).tobytes()


@pytest.mark.parametrize(("encoding", "order"), [("nv12", 1), ("NV21", -1)])
@pytest.mark.parametrize("padding", [0, 10])
def test_planes_of_hardware_decoders_come_out_as_opencv_reads_them(
    encoding: str, order: int, padding: int
) -> None:
    coarse = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    original = coarse.repeat(4, axis=0).repeat(4, axis=1)
    data = planes(original, order, padding)
    rgb = to_rgb(encoding, 48, 32, 48 + padding, data)
    bare = np.frombuffer(planes(original, order, 0), np.uint8).reshape(48, 48)
    cv2 = pytest.importorskip("cv2")
    code = cv2.COLOR_YUV2RGB_NV12 if order == 1 else cv2.COLOR_YUV2RGB_NV21
    assert np.abs(rgb.astype(int) - cv2.cvtColor(bare, code)).max() <= 3
    assert np.abs(rgb.astype(int) - original).max() <= 5, "flat colours survive the round trip"


@pytest.mark.parametrize(("brightest", "empty"), [(4095, 4), (65535, 0)])
@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_twelve_bits_is_not_black(brightest: int, empty: int, order: str) -> None:
    ramp = np.linspace(0, brightest, 60).astype(order).reshape(3, 20)
    padded = np.pad(ramp, ((0, 0), (0, 3)), constant_values=0xFFFF)  # not pixels
    rgb = to_rgb("mono16", 20, 3, 46, padded.tobytes(), big_endian=order == ">u2")
    assert np.array_equal(rgb, np.repeat((ramp >> (8 - empty))[:, :, None], 3, axis=2))
    buffer = io.BytesIO()
    Pil.fromarray(ramp.astype(np.uint16)).save(buffer, "PNG")
    compressed = read_compressed(buffer.getvalue(), Form(100))
    shown = np.asarray(Pil.open(io.BytesIO(compressed.data))).astype(int)
    assert np.abs(shown - rgb).max() <= 2, "as the same picture sent raw"


@pytest.mark.parametrize(
    ("encoding", "width", "step", "size"),
    [
        ("bayer_rggb8", 4, 4, 16),
        ("rgb8", 4, 12, 20),
        ("rgb8", 4, 4, 48),
        ("rgb8", 0, 0, 0),
        ("nv12", 3, 4, 24),  # odd
        ("nv12", 4, 3, 24),  # step below a row
        ("nv21", 4, 4, 16),  # without the chroma plane
        ("nv21", 4, 4, 32),  # rows of padding after a plane
        ("nv21", 4, 6, 35),  # no padding after the last row
    ],
)
def test_impossible_images_are_refused(encoding: str, width: int, step: int, size: int) -> None:
    with pytest.raises(InvalidInput):
        to_rgb(encoding, width, 4, step, bytes(size))


def test_jpegs_are_checked_scaled_and_else_left_alone() -> None:
    data = jpeg(64, 32)
    assert read_compressed(data, Form(90)).data == data
    scaled = read_compressed(data, Form(90, max_width=32))
    assert (scaled.width, scaled.height) == (32, 16)
    assert read_compressed(jpeg(format="PNG"), Form(90)).data.startswith(b"\xff\xd8")
    for broken in (data[:-40], b"", b"\xff\xd8" + bytes(50), jpeg(format="GIF")):
        with pytest.raises(InvalidInput, match="JPEG or PNG") as caught:
            read_compressed(broken, Form(90))
        assert "object at" not in str(caught.value)
    rgb = np.zeros((8, 16, 3), np.uint8)
    assert encode_jpeg(rgb, Form(90)).width == 16


@pytest.mark.parametrize("max_width", [0, 32])
def test_jpegs_that_are_turned_are_passed_on_upright(max_width: int) -> None:
    """People and model are shown the same side, by programs that read the tag and others."""
    picture = Pil.new("RGB", (64, 32), "red")
    picture.paste("blue", (32, 0, 64, 32))
    tags = Pil.Exif()
    tags[0x0112] = 6  # a quarter turn clockwise: red above, blue below
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=tags)
    passed = read_compressed(buffer.getvalue(), Form(95, max_width))
    assert (passed.width, passed.height) == (32, 64)
    shown = Pil.open(io.BytesIO(passed.data))
    assert shown.getexif().get(0x0112, 1) == 1
    assert np.array_equal(np.asarray(shown)[8, 16] > 128, [True, False, False])
    assert np.array_equal(np.asarray(shown)[56, 16] > 128, [False, False, True])


def seen_by(fov: float, bearing: float, size: tuple[int, int] = (400, 200)) -> Pil.Image:
    """Return what a camera sees of a white pole at ``bearing``; angles in degrees."""
    width, height = size
    x = width / 2 * (1 - math.tan(math.radians(bearing)) / math.tan(math.radians(fov / 2)))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, max(0, round(x - 3)) : round(x + 3)] = 255
    pixels[: height // 2, :, 2] = 200  # above the horizon
    return Pil.fromarray(pixels)


@pytest.mark.parametrize("camera", [50.0, 73.0, 90.0, 120.0])
@pytest.mark.parametrize("max_width", [0, 300])
def test_a_direction_has_one_place_in_the_pictures_of_all_cameras(
    camera: float, max_width: int
) -> None:
    for bearing in (-20.0, 0.0, 20.0):
        form = Form(100, max_width, zoom_between(camera, 90.0))
        shown = encode_jpeg(np.asarray(seen_by(camera, bearing)), form)
        assert (shown.width, shown.height) == ((300, 150) if max_width else (400, 200))
        pixels = np.asarray(Pil.open(io.BytesIO(shown.data))).astype(float)
        pole = pixels[shown.height // 2 + 5, :, 0] > 127
        x = np.flatnonzero(pole).mean() + 0.5
        found = math.degrees(math.atan(1.0 - 2.0 * x / shown.width))
        assert found == pytest.approx(bearing, abs=0.7)
        above = pixels[:, 0, 2] > 100
        assert abs(int(above.sum()) - shown.height // 2) <= 1, (
            "the horizon stays, in the border too"
        )


def test_a_camera_that_is_nearly_right_is_left_alone() -> None:
    """A direction at the edge is then wrong by less than 4 degrees."""
    for camera in (82.5, 90.0, 96.5):
        assert zoom_between(camera, 90.0) == 1.0
    for camera in (81.0, 98.0):
        assert zoom_between(camera, 90.0) != 1.0


def test_the_border_repeats_the_outermost_pixels() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 20, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    shown = Form(zoom=0.5).apply(Pil.fromarray(pixels))
    whole = np.asarray(shown)
    assert whole.shape == pixels.shape
    inner = whole[20:60, 40:120]
    assert np.array_equal(inner, np.asarray(Pil.fromarray(pixels).resize((80, 40), 2)))
    assert np.array_equal(whole[0, 40:120], inner[0])
    assert (whole[60:, 120:] == inner[-1, -1]).all()


@pytest.mark.parametrize("zoom", [1e-6, 0.013, 11.4, 1e6])
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (1, 50)])
def test_no_zoom_changes_the_size_of_a_picture(zoom: float, size: tuple[int, int]) -> None:
    assert Form(zoom=zoom).apply(Pil.new("RGB", size)).size == size


def calibration(fov: float, width: int = 16) -> CameraInfo:
    info = CameraInfo(width=width, height=width // 2, distortion_model="plumb_bob")
    info.k[0], info.k[2] = width / 2 / math.tan(math.radians(fov / 2)), width / 2
    return info


def test_the_field_of_view_follows_from_the_calibration() -> None:
    go2 = CameraInfo(width=1280, height=720)
    go2.k[0], go2.k[2] = 864.4, 639.2
    assert view_of(go2) == pytest.approx(73.0, abs=0.1)
    assert view_of(calibration(90.0)) == pytest.approx(90.0)
    part = calibration(120.0, 1280)
    part.roi.x_offset, part.roi.width = 320, 640
    assert view_of(part) == pytest.approx(2 * math.degrees(math.atan(math.tan(math.pi / 3) / 2)))
    part.roi.x_offset = 0  # the left half
    assert view_of(part) == 0.0


@pytest.mark.parametrize("focal_length", [0.0, -5.0, math.nan, math.inf, 1e9, 1e-9])
def test_a_calibration_without_a_meaning_tells_no_field_of_view(focal_length: float) -> None:
    info = calibration(90.0, 1280)
    info.k[0] = focal_length
    assert view_of(info) == 0.0


@pytest.mark.parametrize(
    "change", [{"width": 0}, {"distortion_model": "equidistant"}, {"k": [640.0, *[math.nan] * 8]}]
)
def test_no_width_a_fisheye_or_an_axis_nowhere_tells_no_field_of_view(
    change: dict[str, Any],
) -> None:
    info = calibration(90.0, 1280)
    for name, value in change.items():
        setattr(info, name, value)
    assert view_of(info) == 0.0


# camera_ingest.


class Camera:
    """A camera node with a publisher in front and a listener behind."""

    def __init__(self, graph: Any, **parameters: Any) -> None:
        self.graph = graph
        self.node = start(graph, CameraIngest, **parameters)
        self.user = graph.node("user")
        self.raw = self.user.create_publisher(Image, "image", CAMERA)
        self.compressed = self.user.create_publisher(CompressedImage, "image/compressed", CAMERA)
        self.observations: list[Observation] = graph.collect(
            self.user, Observation, "observation", RESULT
        )
        self.health = graph.collect(self.user, DiagnosticArray, "/diagnostics", RESULT)
        graph.wait_for(lambda: self.user.count_publishers("observation"))
        topics = ("image", "image/compressed")
        if parameters.get("source", "image") in TOPICS:
            graph.wait_for(lambda: any(self.user.count_subscribers(t) for t in topics))

    def send(self, stamp: float, data: bytes = b"", encoding: str = "") -> None:
        if encoding:
            image = Image(height=2, width=2, step=6, encoding=encoding)
            image.data = array("B", bytes(12))
            message, publisher = image, self.raw
        else:
            message = CompressedImage(format="jpeg", data=array("B", data or jpeg()))
            publisher = self.compressed
        message.header.stamp.sec, nanosec = int(stamp), stamp % 1
        message.header.stamp.nanosec = int(nanosec * 1e9)
        message.header.frame_id = "cam"
        publisher.publish(message)

    def send_until(self, condition: Callable[[], Any], stamp: float, *content: Any) -> None:
        """Send the same frame until ``condition``: best effort may lose the first ones."""

        def send() -> Any:
            self.send(stamp, *content)
            return condition()

        self.graph.wait_for(send)

    def status(self, level: bytes, words: str) -> Callable[[], Any]:
        """Return True if the newest report has ``level`` and ``words``."""

        def look() -> Any:
            own = [s for a in self.health for s in a.status if s.name == "camera_ingest: node"]
            return own and own[-1].level == level and words in own[-1].message

        return look


def test_camera_keeps_stamp_and_bytes(graph: Any) -> None:
    camera = Camera(graph, source="compressed")
    data = jpeg()
    camera.send_until(lambda: camera.observations, 12.5, data)
    seen = camera.observations[0]
    assert bytes(seen.image.data) == data
    assert (seen.header.stamp.sec, seen.header.stamp.nanosec) == (12, 500_000_000)
    assert seen.header == seen.image.header
    assert (seen.width, seen.height, seen.image.format) == (16, 8, "jpeg")
    assert seen.source == "/image/compressed"


def shown(seen: Observation) -> np.ndarray:
    return np.asarray(Pil.open(io.BytesIO(bytes(seen.image.data))))


@pytest.mark.parametrize("known", ["info", "roi", "parameter"])
def test_pictures_are_brought_to_the_field_of_view_of_the_models(graph: Any, known: str) -> None:
    fixed = {"camera_fov": 60.0} if known == "parameter" else {}
    camera = Camera(graph, source="compressed", field_of_view=90.0, max_rate=0.0, **fixed)
    info = calibration(60.0)
    if known == "roi":
        info = calibration(2 * math.degrees(math.atan(3 * math.tan(math.pi / 6))), 48)
        info.roi.x_offset = info.roi.width = 16
    publisher = camera.user.create_publisher(CameraInfo, "camera_info", CAMERA)
    white = io.BytesIO()
    Pil.fromarray(np.pad(np.full((6, 14, 3), 255, np.uint8), ((1, 1), (1, 1), (0, 0)))).save(
        white, "PNG"
    )
    stamps = itertools.count(1.0, 0.1)

    def send() -> bool:
        if known != "parameter":
            publisher.publish(info)
        camera.send(next(stamps), white.getvalue())
        return bool(camera.observations)

    graph.wait_for(send)
    seen = camera.observations[0]
    assert (seen.width, seen.height) == (16, 8)
    bright = shown(seen)[4, :, 0] > 127
    assert 6 <= bright.sum() <= 10, "14 of 16 columns before"
    assert camera.user.count_subscribers("camera_info") == (known != "parameter")


@pytest.mark.parametrize("useless", [False, True])
def test_a_camera_of_unknown_view_is_told_and_used(
    graph: Any, monkeypatch: pytest.MonkeyPatch, useless: bool
) -> None:
    monkeypatch.setattr(camera_ingest, "CALIBRATION_S", 0.3)
    camera = Camera(graph, source="compressed", field_of_view=90.0, max_rate=0.0)
    publisher = camera.user.create_publisher(CameraInfo, "camera_info", CAMERA)
    stamps = itertools.count(1.0, 0.1)

    def send() -> bool:
        if useless:
            publisher.publish(CameraInfo(width=16))  # not calibrated
        camera.send(next(stamps), jpeg())
        return bool(camera.observations)

    graph.wait_for(send)
    assert camera.observations[0].dropped > 0, "the first ones waited for camera_info"
    assert bytes(camera.observations[0].image.data) == jpeg()
    graph.wait_for(camera.status(DiagnosticStatus.WARN, "field of view is unknown"))

    def mended() -> bool:
        publisher.publish(calibration(60.0))
        camera.send(next(stamps), jpeg())
        return bool(bytes(camera.observations[-1].image.data) != jpeg())

    graph.wait_for(mended)
    for _ in range(3):
        publisher.publish(CameraInfo(width=16))  # changes nothing
    seen = len(camera.observations)
    camera.send_until(lambda: len(camera.observations) > seen, next(stamps), jpeg())
    assert bytes(camera.observations[-1].image.data) != jpeg()
    assert camera.node._camera_fov == pytest.approx(60.0)
    graph.do(camera.node.trigger_deactivate)
    graph.do(camera.node.trigger_activate)
    assert camera.node._camera_fov == 0.0


def test_pictures_that_no_driver_calibrates_do_not_wait(graph: Any, pictures: Path) -> None:
    parameters = {"source": "folder", "url": str(pictures), "max_rate": 4.0}
    camera = Camera(graph, **parameters, field_of_view=90.0, silent_after=9.0)
    graph.wait_for(camera.status(DiagnosticStatus.WARN, "field of view is unknown"))
    graph.wait_for(lambda: [each.width // 16 for each in camera.observations][-2:] == [10, 100])


@pytest.mark.parametrize("name", ["field_of_view", "camera_fov"])
def test_a_field_of_view_has_limits(name: str) -> None:
    for value in (5.0, 171.0, -1.0):
        with pytest.raises(ConfigError) as caught:
            from_mapping(CameraConfig, {name: value})
        assert caught.value.field == name


def test_camera_publishes_at_most_at_its_rate(graph: Any) -> None:
    camera = Camera(graph, max_rate=10.0)
    camera.send_until(lambda: camera.observations, 1.0, b"", "rgb8")
    for stamp in (1.02, 1.04, 1.06):  # by the time of capture, however late they come
        dropped = camera.node._counts["dropped"]
        camera.send(stamp, encoding="rgb8")
        graph.wait_for(lambda: camera.node._counts["dropped"] > dropped)  # noqa: B023
    camera.send_until(lambda: len(camera.observations) > 1, 1.5, b"", "rgb8")
    assert [o.header.stamp.nanosec for o in camera.observations[:2]] == [0, 500_000_000]
    assert camera.observations[1].dropped >= 3
    assert camera.observations[1].sequence == 1


def test_camera_counts_what_it_cannot_use_and_recovers(graph: Any) -> None:
    camera = Camera(graph, source="compressed")
    camera.send_until(lambda: camera.node._counts["rejected"], 1.0, jpeg()[:-60])
    assert not camera.observations
    graph.wait_for(camera.status(DiagnosticStatus.WARN, "not a readable JPEG or PNG"))
    camera.send_until(lambda: camera.observations, 2.0)
    assert camera.observations[0].rejected >= 1
    graph.wait_for(camera.status(DiagnosticStatus.OK, "active"))


def test_camera_refuses_unknown_encodings(graph: Any) -> None:
    camera = Camera(graph)
    camera.send_until(lambda: camera.node._counts["rejected"], 1.0, b"", "bayer_rggb8")
    graph.wait_for(camera.status(DiagnosticStatus.WARN, "bayer_rggb8"))
    assert not camera.observations


def test_camera_waits_for_the_first_frame_before_it_complains(graph: Any) -> None:
    camera = Camera(graph, source="compressed")

    def look_after(seconds: float) -> bool:
        camera.node._seen -= seconds
        camera.node._watch_silence()
        return camera.node._silent

    graph.wait_for(camera.status(DiagnosticStatus.WARN, "waiting for the first frame from"))
    assert not graph.do(look_after, 5.0)
    assert graph.do(look_after, 5.1)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "no frame from /image/compressed"))
    camera.send_until(lambda: camera.observations, 1.0)
    graph.wait_for(lambda: not camera.node._silent)
    assert graph.do(look_after, 1.1), "once there were frames, their absence is an error soon"


def test_camera_reports_a_topic_that_stops(graph: Any) -> None:
    camera = Camera(graph, source="compressed", silent_after=0.3)
    camera.send_until(lambda: camera.observations, 1.0)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "no frame from /image/compressed"))
    camera.send(2.0)
    graph.wait_for(camera.status(DiagnosticStatus.OK, "active"))


class LogLines:
    """The log as it is printed. (/rosout may lose a line on its way.)"""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._text = ""

    def have(self, words: str) -> bool:
        """Return True once a line with ``words`` was logged."""
        self._text += self._capfd.readouterr().err
        return words in self._text


def test_rejected_frames_do_not_end_a_silence(
    graph: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The robot is as blind as without any; the log says so until a frame can be used."""
    told = LogLines(capfd).have
    camera = Camera(graph, source="compressed", silent_after=0.3)
    camera.send_until(lambda: camera.observations, 1.0)
    graph.wait_for(lambda: told("no frame from /image/compressed"))
    rejected = camera.node._counts["rejected"]
    bad = (2.0, jpeg()[:-60])
    camera.send_until(lambda: camera.node._counts["rejected"] > rejected + 5, *bad)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "no usable frame from /image/compressed"))
    camera.send_until(camera.status(DiagnosticStatus.ERROR, "not a readable JPEG or PNG"), *bad)
    assert not told("frames from /image/compressed again")
    camera.send_until(lambda: told("frames from /image/compressed again"), 3.0)


# Sources that are no topics.


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """Eight frames, 20 a second."""
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 20.0, (32, 16))
    for i in range(8):
        writer.write(np.full((16, 32, 3), 20 * i, np.uint8))
    writer.release()
    return path


def test_a_file_plays_and_says_when_it_ends(graph: Any, film: Path) -> None:
    camera = Camera(graph, source="file", url=str(film), max_rate=0.0, silent_after=0.3)
    graph.wait_for(lambda: camera.observations)
    assert camera.observations[0].width == 32
    assert camera.observations[0].header.frame_id == "camera_optical"
    assert camera.observations[0].source == str(film)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "the file has ended"))
    assert camera.node._camera.reconnects == 0


def test_a_path_may_begin_in_the_home_folder(
    film: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(film.parent))
    played = open_source(CameraConfig(source="file", url="~/film.avi"))
    assert played.read()[0]
    played.release()
    shown = PictureFolder(CameraConfig(source="folder", url="~/pictures"), lambda *_: None)
    assert shown.read()[0]
    with pytest.raises(Unavailable, match=str(film.parent / "video9")):
        open_source(CameraConfig(source="v4l2", url="~/video9"))
    with pytest.raises(Unavailable, match=str(film.parent / "absent.mp4")):
        open_source(CameraConfig(source="file", url="~/absent.mp4"))


def test_a_file_begins_again_with_loop(graph: Any, film: Path) -> None:
    camera = Camera(graph, source="file", url=str(film), max_rate=0.0, loop=True)
    graph.wait_for(lambda: len(camera.observations) > 10)
    assert camera.node._camera.reconnects == 0


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Five pictures, as wide as their numbers say, among files that are none."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for number in (1, 2, 9, 10, 100):
        (folder / f"room{number}.jpg").write_bytes(jpeg(16 * number, 8))
    (folder / "room3.jpg").write_bytes(jpeg()[:-60])
    (folder / "room4.png").write_bytes(b"")
    (folder / "notes.txt").write_text("a cone")
    (folder / "room5.jpg").symlink_to(folder / "absent.jpg")
    os.mkfifo(folder / "room6.jpg")  # opening it would wait for a writer
    (folder / ".thumbnail.jpg").write_bytes(jpeg())
    return folder


def test_a_folder_of_pictures_is_a_camera(
    graph: Any, pictures: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each once, in the order of their numbers, byte for byte; the bad ones are named."""
    parameters = {"source": "folder", "url": str(pictures), "max_rate": 4.0, "silent_after": 0.5}
    told = LogLines(capfd).have
    camera = Camera(graph, **parameters)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "the folder has ended"))
    seen = camera.observations
    assert [each.width // 16 for each in seen][-4:] == [2, 9, 10, 100]
    assert bytes(seen[-1].image.data) == (pictures / "room100.jpg").read_bytes()
    stamps = [each.header.stamp.sec + 1e-9 * each.header.stamp.nanosec for each in seen]
    assert all(later - before >= 0.24 for before, later in itertools.pairwise(stamps))
    assert seen[-1].source == str(pictures)
    assert (camera.node._counts["rejected"], camera.node._camera.reconnects) == (3, 0)
    for name in ("notes.txt", "room3.jpg", "room4.png"):
        graph.wait_for(partial(told, f"skipped {name}: "))


def test_a_folder_begins_again_with_loop_and_what_was_added(graph: Any, pictures: Path) -> None:
    url = {"source": "folder", "url": str(pictures)}
    camera = Camera(graph, **url, max_rate=50.0, loop=True)
    graph.wait_for(lambda: len(camera.observations) > 10)
    (pictures / "room7.png").write_bytes(jpeg(16 * 7, 8, format="PNG"))
    graph.wait_for(lambda: 16 * 7 in [each.width for each in camera.observations])
    assert camera.node._counts["rejected"] == 3, "each bad file counts once"


@pytest.mark.parametrize("empty", [True, False])
def test_a_folder_without_a_picture_is_said(
    graph: Any, tmp_path: Path, empty: bool, retries_soon: None
) -> None:
    if not empty:
        (tmp_path / "notes.txt").write_text("a cone")
    parameters = {"source": "folder", "url": str(tmp_path), "silent_after": 0.2}
    camera = Camera(graph, **parameters)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "no picture in it"))
    (tmp_path / "late.jpg").write_bytes(jpeg())
    graph.wait_for(lambda: camera.observations)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"source": "folder", "url": "/nowhere/absent"}, "there is no folder /nowhere/absent"),
        ({"source": "file", "url": "/"}, "source: folder"),
        ({"source": "file", "url": "/nowhere/absent.avi"}, "there is no file /nowhere/absent.avi"),
        ({"source": "v4l2", "url": "/dev/video987"}, "there is no /dev/video987"),
        ({"source": "v4l2", "url": "987"}, "there is no /dev/video987"),
        ({"source": "rtsp", "url": "rtsp://127.0.0.1:9/live"}, "127.0.0.1:9: Connection refused"),
        ({"source": "rtsp", "url": "rtsp://me:sec/ret@cam/live"}, "rtsp://***@cam/live"),
        ({"source": "rtsp", "url": f"rtsp://{'x' * 70}/live"}, "label"),
    ],
)
def test_what_is_not_there_is_said_and_tried_again_with_growing_pauses(
    graph: Any, parameters: dict[str, Any], words: str, retries_soon: None
) -> None:
    pytest.importorskip("cv2")
    camera = Camera(graph, silent_after=0.2, **parameters)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, words))
    graph.wait_for(lambda: camera.node._camera.reconnects >= 3)
    camera.node.post(camera.node.stop)
    graph.wait_for(lambda: camera.node._camera is None)


def test_a_device_that_is_no_camera_is_said() -> None:
    pytest.importorskip("cv2")
    with pytest.raises(Unavailable, match="cannot open '/dev/null'"):
        open_source(CameraConfig(source="v4l2", url="/dev/null"))


def test_an_address_where_nobody_speaks_rtsp_is_said() -> None:
    """Something listens, but it is no camera."""
    pytest.importorskip("cv2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = CameraConfig(source="rtsp", url=f"rtsp://127.0.0.1:{port}/x", open_timeout=0.3)
        with pytest.raises(Unavailable, match="cannot open"):
            open_source(config)


def test_a_camera_is_reached_without_the_environments_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FFmpeg would tell it the password, and it would see the pictures."""
    pytest.importorskip("cv2")
    monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", "rtsp_flags;prefer_tcp")
    with (
        environment_proxy(monkeypatch) as proxy,
        environment_proxy(monkeypatch) as camera,  # answers like one that is broken
    ):
        monkeypatch.setenv("http_proxy", f"http://{proxy.host_and_port}")
        url = f"http://user:word@{camera.host_and_port}/film"
        with pytest.raises(Unavailable, match="cannot open"):
            open_source(CameraConfig(source="rtsp", url=url))
    assert proxy.seen == []
    assert any(asked.startswith(b"GET /film") for asked in camera.seen)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"source": "rtsp"}, "url: empty"),
        ({"source": "file"}, "url: empty"),
        ({"source": "folder"}, "url: empty"),
        ({"source": "v4l2"}, "url: empty"),
        ({"source": "multicast"}, "interface: empty"),
        ({"source": "gstreamer", "url": "videotestsrc"}, "url: has no appsink"),
        ({"source": "webcam"}, "source: 'webcam' is unknown"),
    ],
)
def test_a_source_that_is_not_complete_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CameraConfig(**parameters)


def fake_opencv(monkeypatch: pytest.MonkeyPatch, backends: set[str]) -> list[tuple[Any, ...]]:
    """An OpenCV that has ``backends`` and opens nothing; returns what it is asked to open."""
    asked: list[tuple[Any, ...]] = []

    def capture(*arguments: Any) -> Any:
        asked.append(arguments)
        return types.SimpleNamespace(isOpened=lambda: False)

    names = {f"CAP_{b}": b for b in ("V4L2", "FFMPEG", "GSTREAMER")}
    fake = types.SimpleNamespace(
        **names,
        __version__="4.6.0",
        __file__="/usr/lib/python3/dist-packages/cv2.so",
        CAP_PROP_OPEN_TIMEOUT_MSEC=1,
        CAP_PROP_READ_TIMEOUT_MSEC=2,
        VideoCapture=capture,
        videoio_registry=types.SimpleNamespace(hasBackend=backends.__contains__),
    )
    monkeypatch.setattr(cameras, "_cv2", lambda: fake)
    return asked


@pytest.mark.parametrize(
    ("parameters", "backend"),
    [
        ({"source": "multicast", "interface": "lo"}, "GSTREAMER"),
        ({"source": "gstreamer", "url": "videotestsrc ! appsink"}, "GSTREAMER"),
        ({"source": "v4l2", "url": "0"}, "V4L2"),
        ({"source": "rtsp", "url": "rtsp://cam/x"}, "FFMPEG"),
    ],
)
def test_a_missing_backend_is_said_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any], backend: str
) -> None:
    fake_opencv(monkeypatch, {"V4L2", "FFMPEG", "GSTREAMER"} - {backend})
    with pytest.raises(ConfigError, match=f"is built without {backend}") as caught:
        cameras.check_backend(CameraConfig(**parameters).source)
    if backend == "GSTREAMER":
        assert "apt install python3-opencv" in caught.value.remedy


def test_opencv_itself_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ImportError("No module named cv2")

    monkeypatch.setattr(cameras, "_cv2", absent)
    with pytest.raises(ConfigError, match="pip install opencv-python-headless"):
        cameras.check_backend("rtsp")


def test_the_node_does_not_become_active_without_the_backend(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_opencv(monkeypatch, {"FFMPEG"})
    parameters = {"source": "multicast", "interface": "lo"}
    overrides = [Parameter(name, value=value) for name, value in parameters.items()]
    node = CameraIngest(context=graph.context, parameter_overrides=overrides)
    with pytest.raises(ConfigError):
        node.start()
    assert not node.active
    node.destroy_node()


def test_the_go2s_multicast_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_opencv(monkeypatch, {"GSTREAMER"})
    for url, address, port in (("", "230.1.1.1", "1720"), ("239.0.0.9:5000", "239.0.0.9", "5000")):
        config = CameraConfig(source="multicast", url=url, interface="lo")
        with pytest.raises(Unavailable, match=f"cannot open '{address}:{port} on lo'"):
            open_source(config)
        pipeline, backend = asked[-1]
        assert backend == "GSTREAMER"
        assert f"udpsrc address={address} port={port} multicast-iface=lo ! " in pipeline
        assert "rtph264depay ! h264parse ! avdec_h264 ! videoconvert" in pipeline
        assert "format=BGR ! appsink drop=1" in pipeline
    with pytest.raises(Unavailable, match="there is no network interface nowhere0"):
        open_source(CameraConfig(source="multicast", interface="nowhere0"))


def test_other_sources_are_opened_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_opencv(monkeypatch, {"V4L2", "FFMPEG", "GSTREAMER"})
    for source, url, expected in (
        ("v4l2", "/dev/null", ("/dev/null", "V4L2")),
        ("gstreamer", "a ! appsink", ("a ! appsink", "GSTREAMER")),
        ("file", __file__, (__file__, "FFMPEG", [1, 5000, 2, 5000])),
    ):
        with pytest.raises(Unavailable, match="cannot open"):
            open_source(CameraConfig(source=source, url=url))
        assert asked[-1] == expected


class StuckCapture:
    """An OpenCV source whose read hangs until the test lets it go."""

    def __init__(self) -> None:
        self.reading, self.free = threading.Event(), threading.Event()

    def read(self) -> tuple[bool, Any]:
        self.reading.set()
        return self.free.wait(30.0), np.zeros((2, 2, 3), np.uint8)

    def release(self) -> None:
        pass


def test_a_camera_that_hangs_does_not_hold_up_the_node(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2")
    capture = StuckCapture()
    monkeypatch.setattr(cameras, "open_source", lambda config: capture)
    camera = Camera(graph, source="rtsp", url="rtsp://10.0.0.1/live", open_timeout=30.0)
    assert capture.reading.wait(10.0)
    thread = camera.node._camera._thread
    camera.node.post(camera.node.trigger_deactivate)
    graph.wait_for(lambda: not camera.node.active)
    assert thread.is_alive()
    capture.free.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert not camera.observations  # nor is what came after the end published


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rtsp://me:se@cret@cam:554/live?a=b", "rtsp://***@cam:554/live?a=b"),
        (
            "rtspsrc location=rtsp://me:secret@cam/live ! decodebin ! appsink",
            "rtspsrc location=rtsp://***@cam/live ! decodebin ! appsink",
        ),
        ("rtsp://cam/a@b", "rtsp://cam/a@b"),
        ("rtsp://cam:554/a@b", "rtsp://cam:554/a@b"),
        ("rtsp://me:sec/ret@cam/live", "rtsp://***@cam/live"),
        (
            'rtspsrc location=rtsp://cam/live user-id=me user-pw="sec ret" ! appsink',
            "rtspsrc location=rtsp://cam/live user-id=me user-pw=*** ! appsink",
        ),
        ("http://cam/video?token=secret&size=1", "http://cam/video?token=***&size=1"),
        ("/dev/video0", "/dev/video0"),
        ("2", "2"),
    ],
)
def test_passwords_of_cameras_are_masked(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_camera_does_not_publish_its_password(graph: Any) -> None:
    pytest.importorskip("cv2")
    url = "rtsp://me:secret@127.0.0.1:9/live"  # nothing listens there
    camera = Camera(graph, source="rtsp", url=url, silent_after=0.2, open_timeout=0.5)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "from rtsp://***@127.0.0.1:9/live"))
    own = [s for array in camera.health for s in array.status if "camera_ingest" in s.name]
    assert all("secret" not in str(status) for status in own)
    assert "secret" not in camera.node._source()


# The Go2's videohub.


@needs_unitree
def test_videohub_gives_the_robots_jpegs_with_an_honest_stamp(graph: Any) -> None:
    robot = FakeGo2(graph.node("go2"))
    camera = Camera(graph, source="videohub", max_rate=20.0)
    before = camera.user.get_clock().now().nanoseconds * 1e-9
    graph.wait_for(lambda: len(camera.observations) >= 3)
    now = camera.user.get_clock().now().nanoseconds * 1e-9
    seen = camera.observations[-1]
    assert bytes(seen.image.data) == robot.server.request("videohub", 1001, 0, "", 0.0)[2]
    stamp = seen.header.stamp.sec + seen.header.stamp.nanosec * 1e-9
    assert before - 1.0 <= stamp <= now
    assert (seen.width, seen.height) == (64, 36)
    assert (seen.header.frame_id, seen.source) == ("camera_optical", "/api/videohub")
    assert max(robot.server.ids.values()) == 1  # every number once


@needs_unitree
def test_videohub_asks_one_after_the_other_at_its_rate(graph: Any, retries_soon: None) -> None:
    robot = FakeGo2(graph.node("go2"), mute={("videohub", 1001)})
    camera = Camera(graph, source="videohub", max_rate=50.0, silent_after=0.3)
    graph.wait_for(lambda: robot.requests("videohub", 1001))
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "GET_IMAGE: 3104, no answer in time"))
    assert len(robot.requests("videohub", 1001)) <= 3  # none is asked for while one is waited for
    robot.server.mute.clear()
    graph.wait_for(lambda: camera.observations)
    graph.wait_for(camera.status(DiagnosticStatus.OK, "active"))
    assert camera.observations[-1].reconnects >= 1


@needs_unitree
def test_videohub_wakes_only_when_something_is_due(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []
    tick = cameras.Videohub._tick

    def counted(self: cameras.Videohub) -> None:
        ticks.append(time.monotonic())
        tick(self)

    monkeypatch.setattr(cameras.Videohub, "_tick", counted)
    FakeGo2(graph.node("go2"))
    camera = Camera(graph, source="videohub", max_rate=5.0)
    graph.wait_for(lambda: len(camera.observations) >= 5)
    assert len(ticks) <= 2 * len(camera.observations) + 2


@needs_unitree
def test_videohub_tells_the_robots_errors_and_corrupt_pictures(
    graph: Any, retries_soon: None
) -> None:
    robot = FakeGo2(graph.node("go2"), codes={("videohub", 1001): 3203})
    camera = Camera(graph, source="videohub", silent_after=0.2)
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "the robot does not have this function"))
    robot.server.picture = b"\xff\xd8 half a picture"
    robot.server.codes.clear()
    graph.wait_for(camera.status(DiagnosticStatus.ERROR, "not a readable JPEG"))


def test_videohub_without_the_vendors_package_says_what_to_install(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "unitree_api.msg", None)
    node = start(graph, CameraIngest)
    with pytest.raises(ConfigError, match="unitree_ros2"):
        cameras.Videohub(node, lambda frame: None)
