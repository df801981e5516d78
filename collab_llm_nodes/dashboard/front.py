"""Answers that are always given: emergency stop, reset, camera, log-in; and the gate before.

They are given in the thread of the port (``door.py``), with nothing in it that takes long. The
emergency stop is published from here, past the ROS thread: a page that lags, a busy ROS thread or a
dead web socket do not delay it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from collab_llm_nodes.dashboard.access import Access, Refusal, Tries
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.dashboard.view import usable

STATIC = Path(__file__).parent / "static"
BAR = (STATIC / "bar.html").read_text(encoding="utf-8")
"""The emergency stop, as it stands on every page."""
_ONLY_THE_STOP = (STATIC / "stop.html").read_text(encoding="utf-8")
_LOG_IN = (STATIC / "log_in.html").read_bytes()
CONFIRM_S = 0.6
"""Time for which an emergency stop is repeated until motion_guard confirms it; then the page asks
again."""
_REPEAT_S = 0.05
_RESET_S = 3.0
_HTML = "text/html; charset=utf-8"
_FILES = {
    f"/static/{name}": ((STATIC / name).read_bytes(), media_type)
    for name, media_type in {"bar.js": "text/javascript", "style.css": "text/css"}.items()
}
_FRESH = {"cache-control": "no-store"}
HEADERS = {
    "connection": "close",  # the next request is to come by the door again
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # without any, a form's Origin would be "null"
    # The page's framework compiles templates in the browser, hence eval; nothing from elsewhere.
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'none'",
}
"""Headers of every answer; they confine the page."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        headers: by lower-case name.
        network: where it comes from; see ``network_of``.
        https: the client speaks TLS, with a proxy.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    network: str
    https: bool = False
    body: bytes = b""

    @property
    def stops(self) -> bool:
        """It is the emergency stop."""
        return (self.method, self.path) == ("POST", "/emergency_stop")

    @property
    def logs_in(self) -> bool:
        """It is the form of the log-in page."""
        return (self.method, self.path) == ("POST", "/log_in")


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    status: int = 200
    body: bytes = b""
    media_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, method: str = "GET") -> bytes:
        """Return the bytes of the answer to a request by ``method``."""
        headers = {**HEADERS, **self.headers}
        if self.status != HTTPStatus.NO_CONTENT:
            headers |= {"content-type": self.media_type, "content-length": str(len(self.body))}
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return head if method == "HEAD" else head + self.body


class Front:
    """The gate, and the answers for those whom it lets pass."""

    def __init__(self, robot: Robot, access: Access) -> None:
        self._robot = robot
        self._access = access
        self._tries = Tries()
        self._answers = {
            ("POST", "/emergency_stop"): self._stop,
            ("POST", "/reset_emergency_stop"): self._reset,
            ("GET", "/motion"): self._motion,
            ("GET", "/camera.jpg"): self._camera,
        }

    def allows(self, request: Request) -> bool:
        """Return True if ``request`` comes from a client that may see and command the robot."""
        return self._refusal(request) is None

    def reads_body(self, request: Request) -> bool:
        """Return True if the answer depends on the body; it is read for nothing else."""
        logs_in = request.logs_in and "transfer-encoding" not in request.headers
        return logs_in and self._refusal(request) is Refusal.LOG_IN

    async def reply(self, request: Request) -> Reply | None:
        """Return the answer; None if the pages have it (``page.py``)."""
        refusal = self._refusal(request)
        if refusal is not None:
            return self._refuse(refusal, request)
        self._tries.forgive(request.network)
        path = request.path
        if (request.method, path) in self._answers:
            return await self._answers[request.method, path](request)
        if path == "/stop":
            return Reply(200, only_the_stop().encode(), _HTML)
        if path in _FILES:
            return Reply(200, *_FILES[path])
        # Nothing else: NiceGUI keeps something of every request it has a page for.
        if path != "/" and not path.startswith(("/_nicegui", "/favicon.ico")):
            return Reply(404, b"no such page")
        if "transfer-encoding" in request.headers:  # chunks cost much more than they weigh
            return Reply(411, b"no body in chunks")
        return None

    def _refusal(self, request: Request) -> Refusal | None:
        socket = request.headers.get("upgrade", "").lower() == "websocket"
        return self._access.refusal(request.method, request.headers, socket=socket)

    def _refuse(self, refusal: Refusal, request: Request) -> Reply:
        """The log-in page, what it sends, or the refusal in words."""
        same = self._access.same_origin(request.headers)
        if refusal is Refusal.LOG_IN and request.logs_in and same:
            return self._log_in(request)
        if refusal is Refusal.LOG_IN and request.path in ("/log_in", "/", "/stop"):
            return Reply(refusal.status, _LOG_IN, _HTML)
        return Reply(refusal.status, refusal.message.encode())

    def _log_in(self, request: Request) -> Reply:
        form = parse_qs(request.body.decode("utf-8", "replace"))
        wait = self._tries.take(request.network, time.monotonic())
        if wait > 0:
            seconds = str(math.ceil(wait))
            message = f"too many wrong tokens from your address: try again in {seconds} s"
            return Reply(429, message.encode(), headers={"retry-after": seconds})
        token = form.get("token", [""])[0].strip()
        cookie = self._access.log_in(token, secure=request.https)
        if cookie is None:
            return Reply(Refusal.LOG_IN.status, _LOG_IN, _HTML)
        self._tries.forgive(request.network)
        return Reply(303, headers={"location": "/", "set-cookie": cookie})

    async def _stop(self, request: Request) -> Reply:
        """Published at once, and again until confirmed: a guard that has just been started, or
        whose connection is only being made, may miss the first."""
        due = time.monotonic() + CONFIRM_S
        while True:
            heard = self._robot.emergency_stop()
            await asyncio.sleep(_REPEAT_S)
            motion, age = self._robot.motion()
            confirmed = motion is not None and motion.stopped and age < CONFIRM_S
            if confirmed or time.monotonic() >= due:
                return _json({"confirmed": confirmed, "subscribers": heard})

    async def _reset(self, request: Request) -> Reply:
        try:
            done, words = await asyncio.wait_for(asyncio.wrap_future(self._robot.reset()), _RESET_S)
        except asyncio.TimeoutError:
            done, words = False, "motion_guard does not answer"
        return _json({"success": done, "message": words})

    async def _motion(self, request: Request) -> Reply:
        motion, age = self._robot.motion()
        if motion is None:
            return _json({"known": False})
        return _json(
            {
                "known": True,
                "age": round(age, 3),
                "allowed": motion.allowed,
                "emergency_stop": motion.emergency_stop,
                "reasons": list(motion.reasons),
                "text": motion.words,
                "linear": _number(motion.linear),
                "angular": _number(motion.angular),
                "speed_limit": _number(motion.speed_limit),
            }
        )

    async def _camera(self, request: Request) -> Reply:
        """The newest picture; 204 if the page has it already. Whoever is slow skips some."""
        seen = parse_qs(request.query).get("after", ["0"])[0]
        if not seen.isdecimal():
            return Reply(422, b"after: the number of a picture")
        number, jpeg = self._robot.frame()
        headers = {**_FRESH, "x-frame": str(number)}
        if not jpeg or str(number) == seen:
            return Reply(204, headers=headers)
        return Reply(200, jpeg, "image/jpeg", headers)


def only_the_stop(message: str = "") -> str:
    """Return a page with nothing but the bar, for a phone beside the robot, and ``message``."""
    return _ONLY_THE_STOP.replace("BAR", BAR).replace("MESSAGE", message)


def _number(value: float) -> float | None:
    """Return a number as JSON has it; None if it is none."""
    return round(value, 3) if usable(value) else None


def _json(value: dict[str, Any]) -> Reply:
    return Reply(200, json.dumps(value, allow_nan=False).encode(), "application/json", _FRESH)
