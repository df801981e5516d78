"""Requests that are always answered: emergency stop, reset, camera, log-in; and the gate before.

Runs in an event loop and a thread of its own, with nothing in it that takes long. The emergency
stop is published from here, past the ROS thread: a page that lags, a busy ROS thread or a dead web
socket do not delay it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect

from collab_llm_nodes.dashboard.access import Access, Refusal, Tries
from collab_llm_nodes.dashboard.bridge import App, Receive, Send
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.network import network_of

STATIC = Path(__file__).parent / "static"
BAR = (STATIC / "bar.html").read_text(encoding="utf-8")
"""The emergency stop, as it stands on every page."""
_ONLY_THE_STOP = (STATIC / "stop.html").read_text(encoding="utf-8")
_LOG_IN = (STATIC / "log_in.html").read_text(encoding="utf-8")
CONFIRM_S = 0.6
"""Time for which an emergency stop is repeated until motion_guard confirms it; then the page asks
again."""
_REPEAT_S = 0.05
_RESET_S = 3.0
_LOG_IN_BYTES = 4096
_FILES = {
    name: ((STATIC / name).read_bytes(), media_type)
    for name, media_type in {"bar.js": "text/javascript", "style.css": "text/css"}.items()
}
_CLOSE = {"connection": "close"}
_HEADERS = {
    b"x-frame-options": b"DENY",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # without any, a form's Origin would be "null"
    # The page's framework compiles templates in the browser, hence eval; nothing from elsewhere.
    b"content-security-policy": b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"frame-ancestors 'none'; form-action 'self'; base-uri 'none'",
}


def make_front(robot: Robot, access: Access, pages: App) -> App:
    """The application: gate, then what is answered here, then ``pages`` for everything else."""
    front = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @front.post("/emergency_stop")
    async def emergency_stop() -> Response:
        """Published at once, and again until confirmed: a guard that has just been started, or
        whose connection is only being made, may miss the first."""
        due = time.monotonic() + CONFIRM_S
        while True:
            heard = robot.emergency_stop()
            await asyncio.sleep(_REPEAT_S)
            motion, age = robot.motion()
            confirmed = motion is not None and motion.stopped and age < CONFIRM_S
            if confirmed or time.monotonic() >= due:
                return JSONResponse({"confirmed": confirmed, "subscribers": heard})

    @front.post("/reset_emergency_stop")
    async def reset() -> Response:
        try:
            done, words = await asyncio.wait_for(asyncio.wrap_future(robot.reset()), _RESET_S)
        except asyncio.TimeoutError:
            done, words = False, "motion_guard does not answer"
        return JSONResponse({"success": done, "message": words})

    @front.get("/motion")
    async def motion() -> Response:
        state, age = robot.motion()
        if state is None:
            return JSONResponse({"known": False})
        told = {
            "known": True,
            "age": round(age, 3),
            "allowed": state.allowed,
            "emergency_stop": state.emergency_stop,
            "reasons": list(state.reasons),
            "text": state.text,
            "linear": round(state.linear, 3),
            "angular": round(state.angular, 3),
            "speed_limit": round(state.speed_limit, 3),
        }
        return JSONResponse(told, headers={"cache-control": "no-store"})

    @front.get("/camera.jpg")
    async def camera(after: int = 0) -> Response:
        """The newest picture; 204 if the page has it already. Whoever is slow skips some."""
        number, jpeg = robot.frame()
        headers = {"cache-control": "no-store", "x-frame": str(number)}
        if not jpeg or number == after:
            return Response(status_code=204, headers=headers)
        return Response(jpeg, media_type="image/jpeg", headers=headers)

    @front.get("/stop")
    async def stop_page() -> Response:
        """Return the page with the stop alone, for a phone beside the robot."""
        return only_the_stop()

    @front.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in _FILES:
            return PlainTextResponse("no such file", 404)
        content, media_type = _FILES[name]
        return Response(content, media_type=media_type)

    async def behind(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Nothing else: NiceGUI keeps something of every request it has a page for."""
        if scope["path"] == "/" or scope["path"].startswith(("/_nicegui", "/favicon.ico")):
            await pages(scope, receive, send)
        else:
            await PlainTextResponse("no such page", 404)(scope, receive, send)

    front.mount("/", behind)
    return _gate(front, access)


def only_the_stop(message: str = "", status: int = 200) -> Response:
    """A page with nothing but the bar, and ``message``."""
    page = _ONLY_THE_STOP.replace("BAR", BAR).replace("MESSAGE", message)
    return HTMLResponse(page, status)


def _gate(app: App, access: Access) -> App:
    """Refuses what must not pass; adds the headers that confine the page."""
    tries = Tries()

    async def gate(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        socket = scope["type"] == "websocket"
        headers = _headers(scope)
        refusal = access.refusal(scope.get("method", "GET"), headers, socket=socket)

        async def confined(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS.items()]}
            await send(message)

        if refusal is None:
            scope["state"]["welcome"]()  # see door.py
            tries.forgive(_network(scope))
            await app(scope, receive, confined)
        elif socket:
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
        else:
            response = await _refuse(refusal, access, tries, Request(scope, receive), headers)
            await response(scope, receive, confined)

    return gate


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Return the headers by lower-case name.

    One that was given twice has both values, so that neither is believed.
    """
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _network(scope: MutableMapping[str, Any]) -> str:
    host, _ = scope.get("client") or ("", 0)
    return network_of(host)


async def _refuse(
    refusal: Refusal, access: Access, tries: Tries, request: Request, headers: dict[str, str]
) -> Response:
    """The log-in page, what it sends, or the refusal in words. Ends the connection."""
    asked = (request.method, request.url.path)
    if refusal is not Refusal.LOG_IN:
        return PlainTextResponse(refusal.message, refusal.status, _CLOSE)
    if asked == ("POST", "/log_in") and access.same_origin(headers):
        token = await _token_of(request)
        wait = tries.take(_network(request.scope), time.monotonic())
        if wait > 0:
            seconds = str(math.ceil(wait))
            message = f"too many wrong tokens from your address: try again in {seconds} s"
            return PlainTextResponse(message, 429, {"retry-after": seconds, **_CLOSE})
        cookie = access.log_in(token, secure=request.url.scheme == "https")
        if cookie is not None:
            tries.forgive(_network(request.scope))
            back = {"location": "/", "set-cookie": cookie}
            return Response(status_code=303, headers=back)
    if asked in (("POST", "/log_in"), ("GET", "/"), ("GET", "/stop")):
        return HTMLResponse(_LOG_IN, refusal.status, _CLOSE)
    return PlainTextResponse(refusal.message, refusal.status, _CLOSE)


async def _token_of(request: Request) -> str:
    """Return the token in the form, "" if there is none.

    A body without end ends with its connection.
    """
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LOG_IN_BYTES:
                return ""
    except ClientDisconnect:
        return ""
    return parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
