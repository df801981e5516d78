"""A server with the API of vLLM for texts, whose model is a function of the last tokens."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig

MODEL, CONTEXT = "text-target", 2048
Answer = dict[str, Any]
Write = Callable[[BaseHTTPRequestHandler], None]
"""Writes a reply to the handler's connection, headers and all; the connection ends with it."""
Fault = Callable[[str, Answer, Answer], "Answer | Reply | Write | None"]
"""Called with path, request and honest answer; returns what is sent instead, or None."""


class Reply(Exception):
    """A raw reply: status, headers, body; with ``cut``, the connection closes after its half."""

    def __init__(
        self, status: int = 200, body: bytes = b"{}", *, cut: bool = False, **headers: str
    ) -> None:
        super().__init__()
        self.status, self.body, self.cut, self.headers = status, body, cut, headers

    def write(self, handler: BaseHTTPRequestHandler) -> None:
        """Send this reply."""
        handler.send_response(self.status)
        for name, value in self.headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(self.body)))
        handler.end_headers()
        handler.wfile.write(self.body[: len(self.body) // 2] if self.cut else self.body)


class FakeVllm:
    """Use as a context manager.

    Args:
        weights: another number is another model.
        fault: what the server does wrong, if anything.

    Attributes:
        requests: path and body of each request.
        headers: of each request.
    """

    def __init__(self, reference: Reference, weights: int = 0, fault: Fault | None = None) -> None:
        self.reference, self.weights, self.fault = reference, weights, fault
        self.requests: list[tuple[str, Answer]] = []
        self.headers: list[Message] = []
        self.port = 0  # a free one

    def __enter__(self) -> FakeVllm:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer._connections.append(self.connection)

            def do_GET(self) -> None:
                outer.respond(self, {})

            def do_POST(self) -> None:
                outer.respond(
                    self, json.loads(self.rfile.read(int(self.headers["content-length"])))
                )

            def log_message(self, *_: object) -> None:
                pass

        self._connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:  # which their threads would go on to serve
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def config(self, **settings: Any) -> TargetLinkConfig:
        """Return the settings of a client of this server."""
        url = f"http://127.0.0.1:{self.port}"
        known = {"kind": "vllm", "url": url, "model": MODEL, "tokenizer": MODEL}
        return TargetLinkConfig(**{**known, **settings})

    def logits(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the model's logits after ``ids``."""
        key = hash((self.weights, *ids[-4:])) % (1 << 63)
        logits = np.random.default_rng(key).normal(size=self.reference.vocab_size) * 3
        for token in self.reference.eos:
            logits[token] = 12.0 if key % 16 == 0 else -12.0
        return logits

    def greedy(
        self, ids: Sequence[int], most: int, allowed: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the model's own greedy answer after ``ids``; of ``allowed`` tokens, if given."""
        answer: list[int] = []
        while len(answer) < most and not (answer and answer[-1] in self.reference.eos):
            logits = self.logits([*ids, *answer])
            possible = range(len(logits)) if allowed is None else list(allowed)
            answer.append(possible[int(logits[possible].argmax())])
        return tuple(answer)

    def respond(self, handler: BaseHTTPRequestHandler, body: Answer) -> None:
        """Answer one request."""
        self.requests.append((handler.path, body))
        self.headers.append(handler.headers)
        honest = self._honest(handler.path, body)
        found = self.fault(handler.path, body, honest) if self.fault is not None else None
        if found is None and body.get("stream"):
            found = Reply(body=b"".join(events(honest)))
        if not isinstance(found, Reply) and not callable(found):
            found = Reply(body=json.dumps(honest if found is None else found).encode())
        if callable(found) or found.cut:
            handler.close_connection = True
        with contextlib.suppress(OSError):  # the client may leave before its end
            found.write(handler) if isinstance(found, Reply) else found(handler)

    def _honest(self, path: str, body: Answer) -> Answer:
        if path == "/health":
            return {}
        if path == "/v1/models":
            return {"data": [{"id": MODEL, "max_model_len": CONTEXT}]}
        if path == "/tokenize":
            return {"tokens": list(self._tokens(body)), "max_model_len": CONTEXT}
        if path == "/v1/chat/completions":
            tokens = self.greedy(self._tokens(body), body["max_tokens"])
            return {"choices": [{"token_ids": list(tokens), "message": {"content": "..."}}]}
        assert path == "/v1/completions", path
        choices = [self._choice(i, ids, body) for i, ids in enumerate(body["prompt"])]
        return {"choices": choices, "usage": {"prompt_tokens": sum(map(len, body["prompt"]))}}

    def _tokens(self, body: Answer) -> tuple[int, ...]:
        if "prompt" in body:
            return self.reference.encode(Prompt(body["prompt"], raw=True))
        *turns, last = (Turn(m["role"], m["content"]) for m in body["messages"])
        return self.reference.encode(Prompt(last.content, turns=tuple(turns)))

    def _choice(self, index: int, ids: list[int], body: Answer) -> Answer:
        tokens = self.greedy(ids, body["max_tokens"], body.get("allowed_token_ids"))
        choice: Answer = {
            "index": index,
            "token_ids": list(tokens),
            "prompt_token_ids": ids if body.get("return_token_ids") else None,
            "logprobs": {
                "tokens": [f"token_id:{t}" for t in tokens],
                "top_logprobs": [
                    {f"token_id:{t}": p for t, p in self._top(ids, body["logprobs"]).items()}
                ],
            },
        }
        if body.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [
                None,
                *(
                    self._entry(ids[:n], ids[n], body["prompt_logprobs"])
                    for n in range(1, len(ids))
                ),
            ]
        return choice

    def _entry(self, before: list[int], token: int, top: int) -> Answer:
        scores = self._scores(before)
        best = self._top(before, top)
        found = {token: scores[token]} | best
        ranks = {t: int((scores >= p).sum()) for t, p in found.items()}
        return {str(t): {"logprob": p, "rank": ranks[t]} for t, p in found.items()}

    def _top(self, ids: Sequence[int], top: int) -> dict[int, float]:
        scores = self._scores(ids)
        return {int(t): float(scores[t]) for t in np.argsort(-scores)[:top]}

    def _scores(self, ids: Sequence[int]) -> NDArray[np.float64]:
        logits = self.logits(ids)
        return logits - np.log(np.exp(logits).sum())


def events(honest: Answer) -> Iterator[bytes]:
    """Yield a streamed answer, one token at a time."""
    for token in honest["choices"][0]["token_ids"]:
        yield f"data: {json.dumps({'choices': [{'index': 0, 'token_ids': [token]}]})}\n\n".encode()
    yield b"data: [DONE]\n\n"
