"""Camera frames of any source as JPEG observations: the newest only, stamped at capture.

Models learn directions from cameras with one field of view. ``field_of_view`` names it, and
pictures are brought to it from that of the camera: ``camera_fov``, or the topic ``camera_info``.

Sources: an image topic, raw or compressed, or one of ``cameras.py``: the Go2's own camera, V4L2,
RTSP, a file, a folder of pictures, a GStreamer pipeline. A frame that cannot be used is counted and
left out. A source without usable frames is reported on ``/diagnostics``; one that breaks is opened
again with growing pauses.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time as TimeMsg
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from collab_llm.msg import Observation
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.ros.cameras import (
    START_GRACE_S,
    TOPICS,
    CameraConfig,
    Frame,
    Grabber,
    Videohub,
)
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.health import Level, TopicLimits
from collab_llm_nodes.ros.images import (
    Form,
    Jpeg,
    encode_jpeg,
    read_compressed,
    to_rgb,
    view_of,
    zoom_between,
)
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import seconds_of
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import CAMERA, RESULT

CALIBRATION_S = 3.0
"""Longest wait of the first frames for ``camera_info``: drivers publish it with each frame [s]."""
_UNKNOWN_VIEW = (
    "the camera's field of view is unknown, so pictures are passed on as they come, and directions"
    " may be wrong: publish camera_info, or set camera_fov"
)


class CameraIngest(ManagedNode[CameraConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("camera_ingest", CameraConfig, **node_arguments)
        self._published_at = -np.inf  # capture time of the last observation [s]
        self._seen = wall()  # the last usable frame
        self._started = False  # there was one since the activation
        self._silent = False
        self._complaint = ""  # about the last frame
        self._counts = {"published": 0, "dropped": 0, "rejected": 0}
        self._camera: Grabber | Videohub | None = None
        self._images: Any = None  # subscriptions
        self._info: Any = None
        self._camera_fov = 0.0  # [deg], 0: not known yet
        self._first_at = math.inf  # the first frame since the activation

    def configure(self) -> None:
        self._observations = self.create_publisher(Observation, "observation", RESULT)
        self._watch = self.create_timer(
            min(0.5, self.config.silent_after / 2), self._watch_silence, clock=STEADY
        )

    def activate(self) -> None:
        self._counts = dict.fromkeys(self._counts, 0)
        self._published_at = -np.inf
        self._seen, self._silent, self._complaint = wall(), False, ""
        self._started = False
        self._camera_fov, self._first_at = self.config.camera_fov, math.inf
        if self.config.field_of_view and not self._camera_fov:
            self._info = self.create_subscription(CameraInfo, "camera_info", self._on_info, CAMERA)
        if self.config.source == "image":
            self._images = self.create_subscription(Image, "image", self._on_image, CAMERA)
        elif self.config.source == "compressed":
            self._images = self.create_subscription(
                CompressedImage, "image/compressed", self._on_compressed, CAMERA
            )
        elif self.config.source == "videohub":
            self._camera = Videohub(self, self._on_picture)
        else:
            self._camera = Grabber(
                self.config,
                clock=lambda: self.get_clock().now().to_msg(),
                on_frame=lambda: self.post(self._on_grabbed),
                on_skip=lambda fault: self.post(self._on_skipped, fault),
            )

    def deactivate(self) -> None:
        if self._images is not None:
            self.destroy_subscription(self._images)
            self._images = None
        if self._info is not None:
            self.destroy_subscription(self._info)
            self._info = None
        if self._camera is not None:
            self._camera.stop()
            self._camera = None

    def cleanup(self) -> None:
        self.destroy_timer(self._watch)
        self.destroy_publisher(self._observations)

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        level, message, _ = super().diagnose()
        camera = self._camera
        if self.active and self._silent:
            level = Level.ERROR
            usable = "usable frame" if self._complaint else "frame"
            message = f"no {usable} from {self._source()} for {wall() - self._seen:.1f} s"
            if why := (camera is not None and camera.error) or self._complaint:
                message = f"{message}: {why}"
        elif self.active and self._complaint:
            level, message = Level.WARN, f"frame rejected: {self._complaint}"
        elif self.active and not self._started:
            frame = f"the first frame from {self._source()}"
            awaited = frame if self._first_at == math.inf else "camera_info"
            level, message = Level.WARN, f"waiting for {awaited}"
        elif self.active and self._lacks_view():
            level, message = Level.WARN, _UNKNOWN_VIEW
        values = {
            **self._counts,
            "dropped": self._dropped(),
            "reconnects": camera.reconnects if camera else 0,
            "source": self._source(),
            "camera_fov": f"{self._camera_fov:.1f}",
            "zoom": f"{self._zoom():.2f}",
        }
        return level, message, values

    def expected(self) -> dict[str, TopicLimits]:
        """Return the limits of the output."""
        return {"observation": self.config.health}

    # Frames in.

    @guarded
    def _on_image(self, msg: Image) -> None:
        def jpeg(form: Form) -> Jpeg:
            rgb = to_rgb(
                msg.encoding, msg.width, msg.height, msg.step, msg.data, bool(msg.is_bigendian)
            )
            return encode_jpeg(rgb, form)

        self._accept(Frame(msg.header.stamp, msg.header.frame_id, jpeg))

    @guarded
    def _on_compressed(self, msg: CompressedImage) -> None:
        def jpeg(form: Form) -> Jpeg:
            return read_compressed(bytes(msg.data), form)

        self._accept(Frame(msg.header.stamp, msg.header.frame_id, jpeg))

    @guarded
    def _on_info(self, msg: CameraInfo) -> None:
        view = view_of(msg)
        if view and view != self._camera_fov:  # one without a meaning changes nothing
            self._camera_fov = view
            self.get_logger().info(
                f"the camera sees {view:.1f} degrees: pictures are zoomed by {self._zoom():.2f}",
                throttle_duration_sec=10.0,
            )

    @guarded
    def _on_grabbed(self) -> None:
        """Take a new frame of the grabber's thread."""
        frame = self._camera.take() if isinstance(self._camera, Grabber) else None
        if frame is not None:
            self._accept(frame)

    @guarded
    def _on_picture(self, frame: Frame) -> None:
        self._accept(frame)

    @guarded
    def _on_skipped(self, fault: str) -> None:
        self._counts["rejected"] += 1
        self.get_logger().warning(f"skipped {fault}")

    def _accept(self, frame: Frame) -> None:
        """Publish ``frame``, unless it is too soon after the last one or cannot be used."""
        if frame.stamp == TimeMsg():  # an unstamped frame counts as taken now
            frame.stamp = self.get_clock().now().to_msg()
        rate = self.config.max_rate
        self._first_at = min(self._first_at, wall())
        try:
            captured = seconds_of(frame.stamp)
            since = captured - self._published_at
            if rate and 0.0 <= since < 0.95 / rate:  # a little early counts: cameras jitter
                self._counts["dropped"] += 1
                if since:  # else it is the last one again
                    self._seen = wall()
                return
            if self._awaits_info():
                self._counts["dropped"] += 1
                self._seen = wall()
                return
            jpeg = frame.jpeg(Form(self.config.quality, self.config.max_width, self._zoom()))
        except InvalidInput as error:
            self._counts["rejected"] += 1
            self._complain(str(error))
            self.get_logger().warning(f"frame rejected: {error}", throttle_duration_sec=2.0)
            return
        self._published_at = captured
        self._seen, self._started = wall(), True
        self._complain("")
        if self._lacks_view():
            self.get_logger().warning(_UNKNOWN_VIEW, throttle_duration_sec=60.0)
        self._publish(frame, jpeg)

    def _zoom(self) -> float:
        return zoom_between(self._camera_fov, self.config.field_of_view)

    def _lacks_view(self) -> bool:
        return bool(self.config.field_of_view and not self._camera_fov)

    def _awaits_info(self) -> bool:
        """Return True if ``camera_info`` may still come: shortly after the first frame."""
        by_driver = self.config.source in TOPICS
        return by_driver and self._lacks_view() and wall() - self._first_at < CALIBRATION_S

    def _complain(self, complaint: str) -> None:
        """Set the fault of the last frame, "" if it was good; report a change at once."""
        changes = bool(complaint) != bool(self._complaint)
        self._complaint = complaint
        if changes:
            self.report_health()

    def _publish(self, frame: Frame, jpeg: Jpeg) -> None:
        observation = Observation(
            width=jpeg.width,
            height=jpeg.height,
            sequence=self._counts["published"],
            dropped=self._dropped(),
            rejected=self._counts["rejected"],
            reconnects=self._camera.reconnects if self._camera else 0,
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
        limit = self.config.silent_after
        if not self._started and not (self._camera is not None and self._camera.error):
            limit = max(limit, START_GRACE_S)
        silent = wall() - self._seen > limit
        if silent == self._silent:
            return
        self._silent = silent
        self.report_health()
        if silent:
            self.get_logger().error(self.diagnose()[1], throttle_duration_sec=1.0)
        else:
            self.get_logger().info(f"frames from {self._source()} again", throttle_duration_sec=1.0)

    def _dropped(self) -> int:
        """Return the number of frames left out: too soon after another, or superseded."""
        return self._counts["dropped"] + (self._camera.dropped if self._camera else 0)

    def _source(self) -> str:
        topic = TOPICS.get(self.config.source)
        return str(self.resolve_topic_name(topic)) if topic else self.config.place


def main() -> int:
    """Run the node."""
    return run(CameraIngest)


if __name__ == "__main__":
    raise SystemExit(main())
