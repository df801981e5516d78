"""Camera sources that are no topics: OpenCV's, folders of pictures, and the Go2's videohub.

Every source keeps the newest frame only, is opened again with growing pauses when it breaks, and
reports its fault in words. A source that this machine cannot support, such as GStreamer with an
OpenCV built without it, is a ``ConfigError`` when the node is activated.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from builtin_interfaces.msg import Time as TimeMsg

from collab_llm_nodes.config import check_ranges, fixed, setting
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, Unavailable
from collab_llm_nodes.models.pictures import decode
from collab_llm_nodes.robot.go2.sport import Answer, Api, Requests
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.health import TopicLimits
from collab_llm_nodes.ros.images import (
    LEAST_VIEW,
    MAX_SIDE,
    MOST_VIEW,
    Form,
    Jpeg,
    encode_jpeg,
    read_compressed,
)
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.unitree import Services

TOPICS = {"image": "image", "compressed": "image/compressed"}
"""Sources that are topics."""

MULTICAST = "230.1.1.1:1720"
"""Address to which the Go2 sends its front camera."""

START_GRACE_S = 10.0
"""Absence of the first frame that is no error yet: drivers and simulators start slowly [s]."""
RETRY_S = (0.5, 10.0)
"""First and longest pause before a source is opened again: a camera that restarts is back soon, and
one that is unplugged must not fill the log [s]."""

_NEEDS_URL = {
    "v4l2": "a device: /dev/video0, or 0",
    "rtsp": "rtsp://host/path, or another URL that FFmpeg opens",
    "file": "a video file",
    "folder": "a folder of JPEG and PNG files",
    "gstreamer": "a pipeline that ends in appsink",
}


@dataclass(frozen=True)
class CameraConfig:
    """Parameters of ``camera_ingest``."""

    source: str = fixed(
        "image",
        "Source of the frames. Topics: image (raw), compressed (image/compressed). The Go2's"
        " camera: multicast (H.264, needs GStreamer) or videohub (JPEG by request, needs"
        " unitree_api). Others: v4l2, rtsp, file (a video), folder (JPEG and PNG files by name),"
        " gstreamer.",
        choices=(*TOPICS, "multicast", "videohub", *_NEEDS_URL),
    )
    url: str = fixed(
        "",
        "v4l2: device; rtsp: URL; file, folder: path; gstreamer: pipeline that ends in appsink;"
        " multicast: address:port. Any node can read parameters; a password in it is masked"
        " elsewhere.",
    )
    interface: str = fixed("", "multicast: network interface towards the robot, such as eth0.")
    loop: bool = fixed(False, "file, folder: begin again at the end.")
    max_rate: float = setting(
        10.0,
        "Most observations per second; 0 = all frames. folder: pictures per second, 0 = 30 [1/s].",
        low=0.0,
        high=1000.0,
    )
    quality: int = fixed(92, "JPEG quality where frames are encoded here.", low=1, high=100)
    max_width: int = fixed(
        0, "Wider frames are scaled down to this; 0 = never [px].", low=0, high=8192
    )
    field_of_view: float = fixed(
        0.0,
        "Horizontal field of view that the models know: other pictures are cropped to it, or their"
        " outermost pixels are repeated up to it; those that differ by less than 4 degrees at any"
        " place are left alone, and all with 0 [deg].",
        low=0.0,
        high=MOST_VIEW,
    )
    camera_fov: float = fixed(
        0.0,
        "Horizontal field of view of the camera; 0 = from the topic camera_info [deg].",
        low=0.0,
        high=MOST_VIEW,
    )
    silent_after: float = fixed(
        1.0, "No frame for this long is reported, machine's time [s].", low=0.05, high=600.0
    )
    open_timeout: float = setting(
        5.0,
        "rtsp: longest time to open or read [s]. Raise it for a camera that wakes slowly.",
        low=0.1,
        high=120.0,
    )
    frame_id: str = setting("camera_optical", "Frame of sources that are no topics.")
    health: TopicLimits = TopicLimits(min_rate=1.0, max_age=0.5)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.source in _NEEDS_URL and not self.url:
            raise ConfigError("empty", field="url", remedy=_NEEDS_URL[self.source])
        for name in ("field_of_view", "camera_fov"):
            if 0.0 < getattr(self, name) < LEAST_VIEW:
                raise ConfigError(
                    f"{getattr(self, name):g} is too narrow",
                    field=name,
                    remedy=f"{LEAST_VIEW:g} to {MOST_VIEW:g} degrees, or 0",
                )
        if self.source == "multicast" and not self.interface:
            raise ConfigError(
                "empty", field="interface", remedy="such as eth0; `ip link` names all"
            )
        if self.source == "gstreamer" and "appsink" not in self.url:
            raise ConfigError("has no appsink", field="url", remedy="end the pipeline in ! appsink")

    @property
    def path(self) -> Path:
        """Path of a file, a folder or a device."""
        return Path(os.path.expanduser(self.url))  # of a user unknown here it leaves the ~

    @property
    def place(self) -> str:
        """Return the source without its password."""
        if self.source == "videohub":
            return "/api/videohub"
        if self.source == "multicast":
            return f"{self.url or MULTICAST} on {self.interface}"
        return without_password(self.url)


@dataclass
class Frame:
    """A frame as received; ``jpeg`` encodes it in a form when it is to be published.

    Attributes:
        stamp: capture time, or the best guess at it.
    """

    stamp: TimeMsg
    frame_id: str
    jpeg: Callable[[Form], Jpeg]


_NAMED = r"\b((?:user|proxy)-pw|passphrase|password|passwd|pwd|token)=(?:\"[^\"]*\"|[^\s&]*)"
"""Secrets by the names that GStreamer's elements and cameras' URLs give them."""


def without_password(url: str) -> str:
    """Return ``url`` with user and password replaced by ``***``.

    Also those of URLs that cannot be opened because of a slash in the password.
    """
    masked = re.sub(r"(?<=://)(?:[^/\s]*|[^/\s:]*:(?!\d+/)\S*)@", "***@", url)
    return re.sub(_NAMED, r"\1=***", masked, flags=re.IGNORECASE)


# OpenCV.


class Grabber:
    """A thread that keeps the newest frame of a source, and the source open.

    Args:
        on_frame: called in the thread when ``take`` will have something new.
        on_skip: called in the thread with name and fault of a file that is left out, once for each.

    Attributes:
        reconnects: times the source was opened again.
        dropped: frames superseded before they were taken.
        error: fault of the source now, for people; "" while frames arrive.

    Raises:
        ConfigError: this OpenCV cannot open such sources at all.
    """

    def __init__(
        self,
        config: CameraConfig,
        clock: Callable[[], TimeMsg],
        on_frame: Callable[[], None],
        on_skip: Callable[[str], None],
    ) -> None:
        if config.source != "folder":
            check_backend(config.source)
        self.reconnects = self.dropped = 0
        self.error = ""
        self._config = config
        self._clock = clock
        self._on_frame = on_frame
        self._on_skip = on_skip
        self._skipped: set[str] = set()
        self._newest: tuple[TimeMsg, Callable[[Form], Jpeg]] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread without waiting.

        A read may hang up to ``open_timeout``; only the end of the process waits for it, since the
        caller's thread may have a robot to stop.
        """
        self._stopped.set()
        atexit.register(self._thread.join, self._config.open_timeout + 1.0)

    def take(self) -> Frame | None:
        """Return the newest frame, once."""
        with self._lock:
            newest, self._newest = self._newest, None
        if newest is None:
            return None
        stamp, jpeg = newest
        return Frame(stamp, self._config.frame_id, jpeg)

    def _run(self) -> None:
        c = self._config
        pause = RETRY_S[0]
        while not self._stopped.is_set():
            frames = 0
            try:
                capture = PictureFolder(c, self._skip) if c.source == "folder" else open_source(c)
                frames = self._read(capture)
                capture.release()
                self.error = (
                    "it broke off" if frames or c.source != "folder" else "no picture in it"
                )
            except CollabError as error:
                self.error = str(error)
            except Exception as error:  # noqa: BLE001 the thread must live to open it again
                self.error = f"{type(error).__name__}: {error}"
            if frames and c.source in ("file", "folder"):
                if c.loop:
                    continue
                self.error = f"the {c.source} has ended"
                return
            pause = RETRY_S[0] if frames else min(2 * pause, RETRY_S[1])
            if self._stopped.wait(pause):
                return
            self.reconnects += 1

    def _read(self, capture: Any) -> int:
        """Read until the source ends or ``stop``, films in real time; return the frames' number."""
        c, period = self._config, 0.0
        if c.source in ("file", "folder"):
            rate = capture.get(_cv2().CAP_PROP_FPS) if c.source == "file" else c.max_rate
            period = 1.0 / (rate or 30.0)
        frames = 0
        while not self._stopped.wait(period):
            good, read = capture.read()
            if not good or self._stopped.is_set():
                break
            stamp = self._clock()
            frames += 1
            self.error = ""
            with self._lock:
                waiting = self._newest is not None
                self._newest = (stamp, read if c.source == "folder" else partial(_encode, read))
            if waiting:
                self.dropped += 1  # the callback asked for earlier takes the new one
            else:
                self._on_frame()
        return frames

    def _skip(self, name: str, fault: str) -> None:
        if name not in self._skipped:
            self._skipped.add(name)
            self._on_skip(f"{name}: {fault}")


def _encode(bgr: np.ndarray, form: Form) -> Jpeg:
    return encode_jpeg(bgr[:, :, ::-1], form)


class PictureFolder:
    """The pictures of a folder in the order of their names, with methods of a ``VideoCapture``.

    Numbers in names count as numbers: 2.jpg precedes 10.jpg. For a file that is no picture
    ``on_skip`` is called with its name and fault. Hidden files and folders are ignored.

    Raises:
        Unavailable: there is no such folder.
    """

    def __init__(self, config: CameraConfig, on_skip: Callable[[str, str], None]) -> None:
        folder = config.path
        if not folder.is_dir():
            raise Unavailable(f"there is no folder {folder}", field="url")
        files = [each for each in folder.iterdir() if each.is_file() and each.name[0] != "."]
        self._files = iter(sorted(files, key=lambda file: _natural(file.name)))
        self._config = config
        self._on_skip = on_skip

    def read(self) -> tuple[bool, Callable[[Form], Jpeg] | None]:
        """Return True and the next picture; False and None at the end."""
        for file in self._files:
            try:
                if file.stat().st_size > _LARGEST:
                    raise InvalidInput(f"more than {_LARGEST >> 20} MiB")
                data = file.read_bytes()
                decode(data, MAX_SIDE**2, field="data")  # a file that is no picture is named
            except (InvalidInput, OSError) as error:  # the latter: it is gone, or unreadable
                self._on_skip(file.name, str(error))
            else:
                return True, partial(read_compressed, data)
        return False, None

    def release(self) -> None:
        """Do nothing: no file is open between two pictures."""


_LARGEST = 64 << 20  # bytes of a picture file


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _cv2() -> Any:
    import cv2  # only these sources need it

    return cv2


def check_backend(source: str) -> None:
    """Raise ConfigError if this OpenCV cannot open such a source at all."""
    try:
        cv2 = _cv2()
    except ImportError as error:
        raise ConfigError(
            "OpenCV is missing", field="source", remedy="pip install opencv-python-headless"
        ) from error
    backend = {
        "v4l2": "V4L2",
        "rtsp": "FFMPEG",
        "file": "FFMPEG",
        "multicast": "GSTREAMER",
        "gstreamer": "GSTREAMER",
    }[source]
    if cv2.videoio_registry.hasBackend(getattr(cv2, f"CAP_{backend}")):
        return
    remedy = "use another build of OpenCV"
    if backend == "GSTREAMER":  # the wheels of PyPI have none
        remedy = (
            "apt install python3-opencv gstreamer1.0-plugins-good gstreamer1.0-libav, and remove"
            " opencv-python-headless: docs/go2.md; or source: videohub"
        )
    raise ConfigError(
        f"OpenCV {cv2.__version__} at {Path(cv2.__file__).parent} is built without {backend}",
        field="source",
        remedy=remedy,
    )


def open_source(config: CameraConfig) -> Any:
    """Return an open ``cv2.VideoCapture``.

    Raises:
        Unavailable: it cannot be opened now; the message says why, if that is known.
    """
    cv2 = _cv2()
    if config.source == "v4l2":
        capture = cv2.VideoCapture(_device(config), cv2.CAP_V4L2)
    elif config.source in ("multicast", "gstreamer"):
        capture = cv2.VideoCapture(_pipeline(config), cv2.CAP_GSTREAMER)
    else:
        _check_reach(config)
        _connect_directly()
        limit = int(config.open_timeout * 1000)
        limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, limit, cv2.CAP_PROP_READ_TIMEOUT_MSEC, limit]
        source = str(config.path) if config.source == "file" else config.url
        capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, limits)
    if not capture.isOpened():
        raise Unavailable(f"cannot open {config.place!r}", remedy="is it a video, and not in use?")
    return capture


def _device(config: CameraConfig) -> str:
    path = Path(f"/dev/video{config.url}") if config.url.isdigit() else config.path
    if not path.exists():
        raise Unavailable(
            f"there is no {path}", field="url", remedy="`ls /dev/video*` after plugging it in"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        raise Unavailable(f"no permission for {path}", field="url", remedy="join the group video")
    return str(path)


def _pipeline(config: CameraConfig) -> str:
    """Return the vendor's pipeline for the Go2's multicast stream, or the user's own."""
    if config.source == "gstreamer":
        return config.url
    if config.interface not in (name for _, name in socket.if_nameindex()):
        raise Unavailable(
            f"there is no network interface {config.interface}",
            field="interface",
            remedy="`ip link` names all",
        )
    address, _, port = (config.url or MULTICAST).partition(":")
    return (
        f"udpsrc address={address} port={port} multicast-iface={config.interface}"
        " ! application/x-rtp, media=video, encoding-name=H264"
        " ! rtph264depay ! h264parse ! avdec_h264 ! videoconvert"
        " ! video/x-raw, format=BGR ! appsink drop=1 max-buffers=1"
    )


_FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


def _connect_directly() -> None:
    """Keep FFmpeg from the environment's proxy, which would see pictures and passwords."""
    options = os.environ.get(_FFMPEG_OPTIONS, "rtsp_flags;prefer_tcp")  # OpenCV's own
    if "http_proxy" not in options:  # set by the user: meant
        os.environ[_FFMPEG_OPTIONS] = f"{options}|http_proxy;none"


_PORTS = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443, "rtmp": 1935}


def _check_reach(config: CameraConfig) -> None:
    """Raise Unavailable for the usual reasons, which OpenCV does not report."""
    if config.source == "file":
        if not config.path.is_file():
            remedy = "source: folder" if config.path.is_dir() else ""
            raise Unavailable(f"there is no file {config.path}", field="url", remedy=remedy)
        return
    try:
        parts = urlsplit(config.url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # its message would hold a part of the password
        raise Unavailable(
            "cannot be read", field="url", remedy="is its port a number? Write / as %2F, @ as %40"
        ) from None
    if parts.hostname is None or port is None:
        return
    try:
        socket.create_connection((parts.hostname, port), config.open_timeout).close()
    except (OSError, UnicodeError) as error:  # the latter: no host can have such a name
        why = getattr(error, "strerror", "") or str(error)
        raise Unavailable(
            f"{parts.hostname}:{port}: {why}",
            field="url",
            remedy="is the camera on, and its server?",
        ) from error


# The Go2's videohub.

_ANSWER_S = 1.0  # as the vendor's client waits


class Videohub:
    """Requests one JPEG after the other from the robot, in the node's thread.

    The robot sends no capture time, so the stamp is that of the request: a picture may look older
    than it is, never younger.

    Args:
        on_frame: called with every picture.

    Attributes: as of :class:`Grabber`.

    Raises:
        ConfigError: the vendor's package is missing.
    """

    def __init__(self, node: ManagedNode[CameraConfig], on_frame: Callable[[Frame], None]) -> None:
        self.reconnects = self.dropped = 0
        self.error = ""
        self._node = node
        self._on_frame = on_frame
        self._requests = Requests(_ANSWER_S)
        self._services = Services(node, self._requests, (Api.GET_IMAGE,), self._on_answer)
        self._asked: TimeMsg | None = None  # time of the pending request
        self._due, self._pause = 0.0, RETRY_S[0]
        self._timer = node.create_timer(_ANSWER_S, self._tick, clock=STEADY)
        self._wake()

    def stop(self) -> None:
        self._node.destroy_timer(self._timer)
        self._services.destroy()

    def _tick(self) -> None:
        now = wall()
        for answer in self._requests.overdue(now):
            self._on_answer(answer, b"")
        if self._asked is None and now >= self._due:
            self._asked = self._node.get_clock().now().to_msg()
            self._due = now + 0.95 / (self._node.config.max_rate or 100.0)
            self._services.send([self._requests.make(Api.GET_IMAGE, None, now)])
        self._wake()

    def _wake(self) -> None:
        """Set the timer to the next due time, so that the executor wakes no more than needed."""
        wait = _ANSWER_S if self._asked else self._due - wall()
        self._timer.timer_period_ns = int(1e9 * max(wait, 1e-3))
        self._timer.reset()

    def _on_answer(self, answer: Answer, binary: bytes) -> None:
        stamp, self._asked = self._asked, None
        if answer.code or stamp is None:
            self.error = str(answer)
            self.reconnects += 1
            self._due = wall() + self._pause
            self._pause = min(2 * self._pause, RETRY_S[1])
            self._wake()
            return
        self.error, self._pause = "", RETRY_S[0]
        self._wake()
        frame_id = self._node.config.frame_id
        self._on_frame(Frame(stamp, frame_id, partial(read_compressed, binary)))
