"""A server of chat completions that answers each prompt as a test's function does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_completions import completion


class ChatServer:
    """Use as a context manager.

    Args:
        says: takes all that the model is asked to read, and returns its reply; called in threads.

    Attributes:
        bodies: of the requests, byte by byte.
    """

    def __init__(self, says: Callable[[str], str]) -> None:
        self.says = says
        self.bodies: list[bytes] = []

    def __enter__(self) -> ChatServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append(body)
                prompt = "\n".join(turn["content"] for turn in json.loads(body)["messages"])
                words: Any = (len(prompt.split()), 0, 5)
                reply = json.dumps(completion(outer.says(prompt), usage=words)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def wire(self) -> str:
        """All that has crossed to this server, as text."""
        return b"\n".join(self.bodies).decode()
