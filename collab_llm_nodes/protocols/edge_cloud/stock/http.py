"""JSON over HTTP to a stock server, which is not trusted.

Responses are bounded in size and time. Whatever goes wrong is a typed error: ``Unavailable`` where
the session link should try again, another one where that would not help.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from collab_llm_nodes.chat.completions import status_of, words_of
from collab_llm_nodes.chat.retries import asked_pause_s
from collab_llm_nodes.errors import (
    CollabError,
    InvalidInput,
    NotFound,
    ProtocolError,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import read_token
from collab_llm_nodes.transport.http import TooLarge, client_options, is_transient

log = logging.getLogger(__name__)

Count = Callable[[int, int], None]
"""Called with the bytes of a request's body, and of a part of the response's."""
_ABSENT = (404, 405, 501)
_PAUSE_MAX_S = 30.0
"""Longest pause that a server may ask of all sessions."""


def ignore_bytes(up: int, down: int) -> None:
    """Count nothing."""


class Pause:
    """The pause that a server has asked all requests for."""

    def __init__(self) -> None:
        self._until = 0.0  # time.monotonic()

    def extend(self, seconds: float) -> None:
        """Make the pause last ``seconds`` from now, or ``_PAUSE_MAX_S``."""
        self._until = max(self._until, time.monotonic() + min(_PAUSE_MAX_S, seconds))

    async def over(self) -> None:
        """Wait for the end of the pause."""
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))


class StockHttp:
    """A pool of connections to one server; used in one event loop.

    Args:
        pause: which outlasts these connections.

    Raises:
        ConfigError: a certificate or the token's file cannot be read.
    """

    def __init__(self, config: TargetLinkConfig, pause: Pause | None = None) -> None:
        token = read_token(config.token, config.token_file)
        options = client_options(
            config.url,
            tls_ca=config.tls_ca,
            proxy=config.proxy,
            connections=config.parallel,
            max_bytes=config.max_message_bytes,
        )
        headers = {"Accept-Encoding": "identity", "User-Agent": "collab_llm"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._token = token
        self._url = config.base_url
        self._answer_s = config.link.verdict_deadline_s
        timeout = httpx2.Timeout(self._answer_s, connect=config.link.connect_deadline_s)
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, **options)
        self._pause = pause or Pause()
        self.broken = asyncio.Event()
        """Set when the server cannot be reached, or has closed a connection in mid-answer."""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def alive(self, deadline_s: float) -> bool:
        """Return True if ``GET /health`` is answered at all within ``deadline_s``."""
        try:
            await within(self._client.get(self._url + "/health"), deadline_s)
        except (asyncio.TimeoutError, httpx2.HTTPError, CollabError, TooLarge):
            return False
        return True

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at ``path``; raises as :meth:`post`."""
        return await self._object("GET", path, None, ignore_bytes)

    async def post(self, path: str, body: Mapping[str, Any], count: Count) -> dict[str, Any]:
        """Return the JSON object that the server answers ``body`` with.

        Raises:
            Unavailable: not reached, late, broken off, overloaded, or an error of the server.
            Unauthenticated: the key was refused.
            InvalidInput: the request was refused.
            NotFound: there is no such path.
            ProtocolError: the answer is no JSON object, or too long.
        """
        return await self._object("POST", path, body, count)

    async def events(
        self, path: str, body: Mapping[str, Any], count: Count
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON objects of a streamed answer (server-sent events); raises as ``post``."""
        content = _encoded(body)
        count(len(content), 0)
        await self._pause.over()
        with _typed(self):
            async with self._client.stream(
                "POST", self._url + path, content=content, headers=_JSON
            ) as response:
                if response.status_code != 200:
                    raise self._refused(response, await response.aread())
                async for line in response.aiter_lines():
                    count(0, len(line) + 1)
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or not data:
                        continue
                    if data == "[DONE]":
                        return
                    yield self._checked(data.encode(), response)
        raise Unavailable("the server's answer ends too early", field="url", remedy=_LATER)

    async def _object(
        self, method: str, path: str, body: Mapping[str, Any] | None, count: Count
    ) -> dict[str, Any]:
        content = None if body is None else _encoded(body)
        await self._pause.over()
        with _typed(self):
            asked = self._client.request(method, self._url + path, content=content, headers=_JSON)
            response = await within(asked, self._answer_s)
            count(len(content or b""), len(response.content))
        if response.status_code != 200:
            raise self._refused(response, response.content)
        return self._checked(response.content, response)

    def _checked(self, content: bytes, response: httpx2.Response) -> dict[str, Any]:
        """Return the object in ``content``, unless it is an error report with status 200."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise ProtocolError(
                "the server's answer is no JSON", field="url", remedy="check url and kind"
            ) from None
        if not isinstance(found, dict):
            raise ProtocolError("the server's answer is no object", field="url", remedy="see kind")
        if found.get("error") or found.get("object") == "error":
            report = found.get("error") if isinstance(found.get("error"), dict) else found
            raise self._error(status_of(report) or 500, found, response.headers)
        return found

    def _refused(self, response: httpx2.Response, content: bytes) -> CollabError:
        try:
            report = json.loads(content)
        except (ValueError, RecursionError):
            report = content.decode(errors="replace")
        return self._error(response.status_code, report, response.headers)

    def _error(self, status: int, report: object, headers: Mapping[str, str]) -> CollabError:
        """Return the error that a report with ``status`` stands for."""
        words = f"the server answers {status}: {words_of(report, self._token)}"
        if is_transient(status):
            pause_s = asked_pause_s(headers, time.time())
            self._pause.extend(pause_s)
            asks = f" (asks for a pause of {pause_s:g} s)" if pause_s else ""
            return Unavailable(words + asks, field="url", remedy=_LATER)
        if status in (401, 403):
            return Unauthenticated(words, field="token_file", remedy="check the API key")
        if status in _ABSENT:
            return NotFound(words, field="url", remedy="check url, model and kind")
        if status < 400:
            return ProtocolError(words, field="url", remedy="give the address it redirects to")
        return InvalidInput(words, field="url", remedy="see the server's own log")


_LATER = "try again later; see the server's own log"
_JSON = {"Content-Type": "application/json"}


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


@contextmanager
def _typed(http: StockHttp) -> Iterator[None]:
    """Turn the errors of HTTP into typed ones."""
    try:
        yield
    except TooLarge:
        raise ProtocolError(
            "the server's answer is too long", field="max_message_bytes", remedy="raise it"
        ) from None
    except (asyncio.TimeoutError, httpx2.TimeoutException):
        raise Unavailable(
            "the server does not answer in time", field="url", remedy=_LATER
        ) from None
    except httpx2.HTTPError as error:
        http.broken.set()
        raise Unavailable(
            f"the server cannot be reached: {type(error).__name__}",
            field="url",
            remedy="check that it runs, and url",
        ) from None
