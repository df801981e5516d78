"""A server of chat completions that misbehaves as told, over plain sockets or TLS."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Behaviour = Callable[[socket.socket], None]
"""Answers one request on its connection, which is closed afterwards."""


def completion(
    text: str | None = "yes",
    finish: str | None = "stop",
    usage: object = (9, 4, 2),
    **message: object,
) -> dict[str, Any]:
    """A chat completion; ``usage`` counts prompt, cached and reply tokens."""
    if isinstance(usage, tuple):
        usage = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[2],
            "prompt_tokens_details": {"cached_tokens": usage[1]},
        }
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": text, **message},
    }
    return {"object": "chat.completion", "choices": [choice], "usage": usage}


def response(content: object, status: int = 200, **headers: str) -> Behaviour:
    """Answer with ``content``: bytes, or something to be written as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]

    def answer(connection: socket.socket) -> None:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    return answer


def raw(data: bytes) -> Behaviour:
    """Send ``data`` and close."""
    return lambda connection: connection.sendall(data)


def endless(part: bytes, pause_s: float, gone: threading.Event) -> Behaviour:
    """Send ``part`` for ever, with pauses, until the client closes; then set ``gone``."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        with suppress(OSError):
            while not gone.wait(pause_s):
                connection.sendall(part)
        gone.set()

    return answer


def silent(gone: threading.Event) -> Behaviour:
    """Say nothing until the client closes; then set ``gone``."""

    def answer(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.recv(1)
        gone.set()

    return answer


@dataclass
class Seen:
    """One request as it came."""

    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeCompletions:
    """Answers requests by ``script``, one behaviour each; the last one stays.

    Attributes:
        seen: the requests so far.
        most: the largest number of requests at a time.
    """

    script: list[Behaviour]
    tls: tuple[str, str] | None = None
    seen: list[Seen] = field(default_factory=list)
    most: int = 0

    def __enter__(self) -> FakeCompletions:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._port = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._at_work = 0
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="fake-completions", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # else a pending accept() takes one more
        self._listening.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @property
    def url(self) -> str:
        return f"{'https://localhost' if self.tls else 'http://127.0.0.1'}:{self._port}/v1"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            if self.tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*self.tls)
                connection = context.wrap_socket(connection, server_side=True)
            seen = self._read(connection)
            with self._lock:
                self.seen.append(seen)
                self._at_work += 1
                self.most = max(self.most, self._at_work)
                behaviour = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            try:
                behaviour(connection)
            finally:
                with self._lock:
                    self._at_work -= 1
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    @staticmethod
    def _read(connection: socket.socket) -> Seen:
        with connection.makefile("rb") as stream:
            stream.readline()
            headers: dict[str, str] = {}
            while line := stream.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            body = json.loads(stream.read(int(headers["content-length"])))
        return Seen(headers, body)
