"""Camera frames from wherever they come, as JPEG observations: the newest only, stamped at capture.

Sources: an image topic (raw or compressed), or whatever OpenCV opens: a V4L2 device, an RTSP or
HTTP URL, a GStreamer pipeline, a video file. A frame that cannot be used is counted and left out. A
source that falls silent is reported on ``/diagnostics``; one that breaks is opened again with
growing pauses.
"""

from __future__ import annotations

import atexit
import re
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time as TimeMsg
from rclpy.time import Time
from sensor_msgs.msg import CompressedImage, Image

from collab_llm.msg import Observation
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.nodes.health import Level, TopicLimits
from collab_llm_nodes.nodes.images import Jpeg, encode_jpeg, read_compressed, to_rgb
from collab_llm_nodes.nodes.ros import CAMERA, RESULT, STEADY, ManagedNode, guarded, run, wall


@dataclass(frozen=True)
class CameraConfig:
    """Parameters of the node."""

    source: str = setting(
        "image",
        "Where frames come from: topic image (raw), topic image/compressed, or opencv.",
        choices=("image", "compressed", "opencv"),
        read_only=True,
    )
    url: str = setting(
        "",
        "For opencv: device number, file, RTSP/HTTP URL, or GStreamer pipeline (contains '!')."
        " A parameter can be read by everybody in the graph; a password in it is masked elsewhere.",
        read_only=True,
    )
    max_rate: float = setting(
        10.0, "Observations per second at most; 0 = all frames [1/s].", low=0.0, high=1000.0
    )
    quality: int = setting(92, "JPEG quality where frames are encoded here.", low=1, high=100)
    max_width: int = setting(
        0, "Wider frames are scaled down to this; 0 = never [px].", low=0, high=8192
    )
    silent_after: float = setting(
        1.0, "No frame for this long is reported, machine's time [s].", low=0.05, high=600.0
    )
    retry_first: float = setting(0.5, "First pause before opening again [s].", low=0.01, high=60.0)
    retry_most: float = setting(10.0, "Longest such pause [s].", low=0.01, high=600.0)
    open_timeout: float = setting(
        5.0, "Opening or reading a network source may take this [s].", low=0.1, high=120.0
    )
    frame_id: str = setting("camera_optical", "Frame of opencv sources.")
    health: TopicLimits = TopicLimits(min_rate=1.0, max_age=0.5)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.source == "opencv" and not self.url:
            raise ConfigError("empty", field="url", remedy="say what OpenCV shall open")


@dataclass
class _Frame:
    """A frame as it came; ``jpeg`` turns it into one when it is to be published."""

    stamp: TimeMsg
    frame_id: str
    jpeg: Callable[[], Jpeg]


class CameraIngest(ManagedNode[CameraConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("camera_ingest", CameraConfig, **node_arguments)
        self._published_at = -np.inf  # capture time of the last observation [s]
        self._seen = wall()
        self._silent = False
        self._complaint = ""  # about the last frame
        self._counts = {"published": 0, "dropped": 0, "rejected": 0}
        self._grabber: Grabber | None = None
        self._heard: Any = None

    def configure(self) -> None:
        self._observations = self.create_publisher(Observation, "observation", RESULT)
        self._watch = self.create_timer(
            min(0.2, self.config.silent_after / 2), self._watch_silence, clock=STEADY
        )

    def activate(self) -> None:
        self._counts = dict.fromkeys(self._counts, 0)
        self._published_at = -np.inf
        self._seen, self._silent, self._complaint = wall(), False, ""
        if self.config.source == "image":
            self._heard = self.create_subscription(Image, "image", self._on_image, CAMERA)
        elif self.config.source == "compressed":
            self._heard = self.create_subscription(
                CompressedImage, "image/compressed", self._on_compressed, CAMERA
            )
        else:
            _check_backend(self.config.url)
            self._grabber = Grabber(
                self.config,
                clock=lambda: self.get_clock().now().to_msg(),
                on_frame=lambda: self.post(self._on_grabbed),
            )
            self._grabber.start()

    def deactivate(self) -> None:
        if self._heard is not None:
            self.destroy_subscription(self._heard)
            self._heard = None
        if self._grabber is not None:
            self._grabber.stop()
            self._grabber = None

    def cleanup(self) -> None:
        self.destroy_timer(self._watch)
        self.destroy_publisher(self._observations)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        grabber = self._grabber
        if self.active and self._silent:
            level = Level.ERROR
            message = f"no frame from {self._source()} for {wall() - self._seen:.1f} s"
            if grabber is not None and grabber.error:
                message = f"{message}: {grabber.error}"
        elif self.active and self._complaint:
            level, message = Level.WARN, f"frame rejected: {self._complaint}"
        values = {
            **self._counts,
            "dropped": self._dropped(),
            "reconnects": grabber.reconnects if grabber else 0,
            "source": self._source(),
        }
        return level, message, values

    def expected(self) -> dict[str, TopicLimits]:
        """What comes out, whatever the source."""
        return {"observation": self.config.health}

    # Frames in.

    @guarded
    def _on_image(self, msg: Image) -> None:
        def jpeg() -> Jpeg:
            rgb = to_rgb(
                msg.encoding, msg.width, msg.height, msg.step, msg.data, bool(msg.is_bigendian)
            )
            return encode_jpeg(rgb, self.config.quality, self.config.max_width)

        self._accept(_Frame(msg.header.stamp, msg.header.frame_id, jpeg))

    @guarded
    def _on_compressed(self, msg: CompressedImage) -> None:
        def jpeg() -> Jpeg:
            return read_compressed(bytes(msg.data), self.config.quality, self.config.max_width)

        self._accept(_Frame(msg.header.stamp, msg.header.frame_id, jpeg))

    @guarded
    def _on_grabbed(self) -> None:
        if self._grabber is None:
            return
        newest = self._grabber.take()
        if newest is None:
            return
        stamp, rgb = newest

        def jpeg() -> Jpeg:
            return encode_jpeg(rgb, self.config.quality, self.config.max_width)

        self._accept(_Frame(stamp, self.config.frame_id, jpeg))

    def _accept(self, frame: _Frame) -> None:
        """Publish ``frame``, unless it comes too soon after the last one or cannot be used."""
        self._seen = wall()
        if frame.stamp == TimeMsg():  # a driver that does not stamp: reception is the best guess
            frame.stamp = self.get_clock().now().to_msg()
        captured, rate = Time.from_msg(frame.stamp).nanoseconds * 1e-9, self.config.max_rate
        since = captured - self._published_at
        if rate and 0.0 <= since < 0.95 / rate:  # a little early counts: cameras jitter
            self._counts["dropped"] += 1
            return
        try:
            jpeg = frame.jpeg()
        except InvalidInput as error:
            self._counts["rejected"] += 1
            self._complain(str(error))
            self.get_logger().warning(f"frame rejected: {error}", throttle_duration_sec=2.0)
            return
        self._published_at = captured
        self._complain("")
        self._publish(frame, jpeg)

    def _complain(self, complaint: str) -> None:
        """About the last frame; "" when it was good. A change is reported at once."""
        changes = bool(complaint) != bool(self._complaint)
        self._complaint = complaint
        if changes:
            self.report_health()

    def _publish(self, frame: _Frame, jpeg: Jpeg) -> None:
        observation = Observation(
            width=jpeg.width,
            height=jpeg.height,
            sequence=self._counts["published"],
            dropped=self._dropped(),
            rejected=self._counts["rejected"],
            reconnects=self._grabber.reconnects if self._grabber else 0,
            source=self._source(),
        )
        observation.header.stamp, observation.header.frame_id = frame.stamp, frame.frame_id
        observation.image.header = observation.header
        observation.image.format = "jpeg"
        observation.image.data = array("B", jpeg.data)
        self._counts["published"] += 1
        self._observations.publish(observation)

    # Silence.

    @guarded
    def _watch_silence(self) -> None:
        silent = wall() - self._seen > self.config.silent_after
        if silent == self._silent:
            return
        self._silent = silent
        self.report_health()
        if silent:
            self.get_logger().error(self.diagnose()[1], throttle_duration_sec=1.0)
        else:
            told = f"frames from {self._source()} again"
            self.get_logger().info(told, throttle_duration_sec=1.0)

    def _dropped(self) -> int:
        """Frames left out: too soon after another, or superseded before they came here."""
        return self._counts["dropped"] + (self._grabber.dropped if self._grabber else 0)

    def _source(self) -> str:
        if self.config.source == "opencv":
            return without_password(self.config.url)
        topic = "image" if self.config.source == "image" else "image/compressed"
        return str(self.resolve_topic_name(topic))


class Grabber:
    """A thread that keeps the newest frame of an OpenCV source, and the source open.

    Attributes:
        reconnects: times the source was opened again.
        dropped: frames superseded before anybody took them.
        error: what is wrong with the source now, for people; "" when frames come.
    """

    def __init__(
        self, config: CameraConfig, clock: Callable[[], TimeMsg], on_frame: Callable[[], None]
    ) -> None:
        self.reconnects = self.dropped = 0
        self.error = ""
        self._config = config
        self._clock = clock
        self._on_frame = on_frame
        self._newest: tuple[TimeMsg, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end. A read that hangs (up to ``open_timeout``) is waited for only when
        the process ends: until then the caller's thread may have a robot to stop."""
        self._stopped.set()
        atexit.register(self._thread.join, self._config.open_timeout + 1.0)

    def take(self) -> tuple[TimeMsg, np.ndarray] | None:
        """Capture time and pixels (uint8 [height, width, 3] RGB) of the newest frame, once."""
        with self._lock:
            frame, self._newest = self._newest, None
        return frame

    def _run(self) -> None:
        pause = self._config.retry_first
        while not self._stopped.is_set():
            capture = _open(self._config)
            frames = self._read(capture) if capture.isOpened() else 0
            capture.release()
            if frames and Path(self._config.url).is_file():
                self.error = "the file has ended"
                return
            broken = f"cannot open {without_password(self._config.url)!r}"
            self.error = "the source broke off" if frames else broken
            pause = self._config.retry_first if frames else min(2 * pause, self._config.retry_most)
            if self._stopped.wait(pause):
                return
            self.reconnects += 1

    def _read(self, capture: Any) -> int:
        """Read until the source ends or ``stop``; the number of frames. Files play in real time."""
        is_file = Path(self._config.url).is_file()
        period = 1.0 / (capture.get(_cv2().CAP_PROP_FPS) or 30.0) if is_file else 0.0
        frames = 0
        while not self._stopped.wait(period):
            good, bgr = capture.read()
            if not good or self._stopped.is_set():
                break
            stamp = self._clock()
            frames += 1
            self.error = ""
            with self._lock:
                waiting = self._newest is not None
                self._newest = (stamp, bgr[:, :, ::-1])
            if waiting:
                self.dropped += 1  # the callback asked for earlier takes the new one
            else:
                self._on_frame()
        return frames


def without_password(url: str) -> str:
    """``url`` as everybody may see it: user and password, wherever they stand, become ``***``."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", url)


def _cv2() -> Any:
    import cv2  # only the opencv source needs it

    return cv2


def _check_backend(url: str) -> None:
    """Raises ConfigError when this OpenCV cannot open such a source at all."""
    try:
        information = _cv2().getBuildInformation()
    except ImportError as error:
        raise ConfigError(
            "OpenCV is missing", field="source", remedy="pip install opencv-python-headless"
        ) from error
    if "!" in url and "GStreamer:                   NO" in information:
        raise ConfigError(
            "this OpenCV is built without GStreamer",
            field="url",
            remedy="use python3-opencv of the distribution",
        )


def _open(config: CameraConfig) -> Any:
    cv2 = _cv2()
    if config.url.isdigit():
        return cv2.VideoCapture(int(config.url))
    if "!" in config.url:
        return cv2.VideoCapture(config.url, cv2.CAP_GSTREAMER)
    limit = int(config.open_timeout * 1000)
    limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, limit, cv2.CAP_PROP_READ_TIMEOUT_MSEC, limit]
    return cv2.VideoCapture(config.url, cv2.CAP_FFMPEG, limits)


def main() -> int:
    """Run the node."""
    return run(CameraIngest)


if __name__ == "__main__":
    raise SystemExit(main())
