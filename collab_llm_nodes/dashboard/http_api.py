"""The HTTP API: access check, emergency stop, reset, camera, log-in.

It runs in the thread that owns the port (``connection_limiter.py``), and nothing in it takes long.
The emergency stop is published from here, not by the ROS thread, so a lagging page, a busy ROS
thread or a dead web socket does not delay it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from collab_llm_nodes.dashboard.access import Access, Refusal, Tries
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.dashboard.view import usable

STATIC = Path(__file__).parent / "static"
BAR = (STATIC / "bar.html").read_text(encoding="utf-8")
"""The bar with the emergency stop, the same on every page."""
_ONLY_THE_STOP = (STATIC / "stop.html").read_text(encoding="utf-8")
_LOG_IN = (STATIC / "log_in.html").read_bytes()
CONFIRM_S = 0.6
"""Seconds for which an emergency stop is repeated until confirmed; then the page asks again."""
_REPEAT_S = 0.05
_RESET_S = 3.0
_FILES = {
    f"/static/{name}": ((STATIC / name).read_bytes(), media_type)
    for name, media_type in {"bar.js": "text/javascript", "style.css": "text/css"}.items()
}
_FRESH = {"cache-control": "no-store"}
HEADERS = {
    "connection": "close",  # the next request must pass the limiter again
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
        refusal: the reason not to serve it; None for a client that may see and command the robot.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    network: str
    https: bool = False
    refusal: Refusal | None = None
    body: bytes = b""

    @property
    def stops(self) -> bool:
        """The request is the emergency stop."""
        return (self.method, self.path) == ("POST", "/emergency_stop")

    @property
    def logs_in(self) -> bool:
        """The request is the log-in form, the only one whose body is read."""
        asked = (self.method, self.path, self.refusal) == ("POST", "/log_in", Refusal.LOG_IN)
        return asked and "transfer-encoding" not in self.headers


def encode(reply: Response, method: str = "GET") -> bytes:
    """Return the bytes of the answer to a request by ``method``."""
    reply.headers.update(HEADERS)
    lines = [f"HTTP/1.1 {reply.status_code} {HTTPStatus(reply.status_code).phrase}".encode()]
    lines += [name + b": " + value for name, value in reply.raw_headers]
    head = b"\r\n".join([*lines, b"", b""])
    return head if method == "HEAD" else head + bytes(reply.body)


class HttpApi:
    """Checks access and answers the requests that must never wait."""

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

    def judge(self, request: Request) -> Request:
        """Set a request's ``refusal``."""
        socket = request.headers.get("upgrade", "").lower() == "websocket"
        refusal = self._access.refusal(request.method, request.headers, socket=socket)
        return replace(request, refusal=refusal)

    async def reply(self, request: Request) -> Response | None:
        """Return the answer; None if the pages have it (``page.py``)."""
        if request.refusal is not None:
            return self._refuse(request.refusal, request)
        self._tries.forgive(request.network)
        path = request.path
        if (request.method, path) in self._answers:
            return await self._answers[request.method, path](request)
        if path == "/stop":
            return HTMLResponse(only_the_stop())
        if path in _FILES:
            return Response(_FILES[path][0], media_type=_FILES[path][1])
        # Nothing else: NiceGUI keeps state for every request it has a page for.
        if path != "/" and not path.startswith(("/_nicegui", "/favicon.ico")):
            return PlainTextResponse("no such page", 404)
        if "transfer-encoding" in request.headers:  # chunks cost much more than they weigh
            return PlainTextResponse("no body in chunks", 411)
        return None

    def _refuse(self, refusal: Refusal, request: Request) -> Response:
        """The log-in page, what it sends, or the refusal in words."""
        if request.logs_in and self._access.same_origin(request.headers):
            return self._log_in(request)
        if refusal is Refusal.LOG_IN and request.path in ("/log_in", "/", "/stop"):
            return HTMLResponse(_LOG_IN, refusal.status)
        return PlainTextResponse(refusal.message, refusal.status)

    def _log_in(self, request: Request) -> Response:
        form = parse_qs(request.body.decode("utf-8", "replace"))
        wait = self._tries.take(request.network, time.monotonic())
        if wait > 0:
            seconds = str(math.ceil(wait))
            message = f"too many wrong tokens from your address: try again in {seconds} s"
            return PlainTextResponse(message, 429, {"retry-after": seconds})
        token = form.get("token", [""])[0].strip()
        cookie = self._access.log_in(token, secure=request.https)
        if cookie is None:
            return HTMLResponse(_LOG_IN, Refusal.LOG_IN.status)
        self._tries.forgive(request.network)
        return Response(None, 303, {"location": "/", "set-cookie": cookie})

    async def _stop(self, request: Request) -> Response:
        """Publish the stop until it is confirmed; a guard that is starting may miss the first."""
        due = time.monotonic() + CONFIRM_S
        while True:
            heard = self._robot.emergency_stop()
            await asyncio.sleep(_REPEAT_S)
            motion, age = self._robot.motion()
            confirmed = motion is not None and motion.stopped and age < CONFIRM_S
            if confirmed or time.monotonic() >= due:
                return JSONResponse({"confirmed": confirmed, "subscribers": heard})

    async def _reset(self, request: Request) -> Response:
        try:
            done, words = await asyncio.wait_for(asyncio.wrap_future(self._robot.reset()), _RESET_S)
        except asyncio.TimeoutError:
            done, words = False, "motion_guard does not answer"
        return JSONResponse({"success": done, "message": words})

    async def _motion(self, request: Request) -> Response:
        motion, age = self._robot.motion()
        if motion is None:
            return JSONResponse({"known": False})
        state = {**asdict(motion), "known": True, "age": round(age, 3), "text": motion.words}
        for name, value in state.items():
            if isinstance(value, float) and not usable(value):
                state[name] = None  # JSON has no NaN
        return JSONResponse(state, headers=_FRESH)

    async def _camera(self, request: Request) -> Response:
        """Return the newest picture; 204 if the page has it already. Slow pages skip some."""
        seen = parse_qs(request.query).get("after", ["0"])[0]
        if not seen.isdecimal():
            return PlainTextResponse("after: the number of a picture", 422)
        number, jpeg = self._robot.frame()
        headers = {**_FRESH, "x-frame": str(number)}
        if not jpeg or str(number) == seen:
            return Response(None, 204, headers)
        return Response(jpeg, 200, headers, "image/jpeg")


def only_the_stop(message: str = "") -> str:
    """Return a page with nothing but the bar, for a phone beside the robot, and ``message``."""
    return _ONLY_THE_STOP.replace("BAR", BAR).replace("MESSAGE", message)
