"""MCP over HTTP, for clients with a token: one name and one token for each.

There are no sessions, so a client can leave nothing behind that others wait for. A client whose
connection ends loses its call, and with it the motion.
"""

from __future__ import annotations

import hmac
from collections import Counter

import uvicorn
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import MCPServer
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from collab_llm_nodes.dashboard.access import MIN_TOKEN
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.transport.credentials import read_file

MAX_BODY = 64 << 10
"""Bytes of a request: arguments are short texts."""
MAX_REQUESTS = 8
"""Requests of one client at a time."""
MAX_CLIENTS = 16
_STRANGERS = 32
"""Connections at a time, beside those of clients."""


class Tokens:
    """The clients of a file with a line ``NAME TOKEN`` for each.

    Attributes:
        names: of the clients.

    Raises:
        ConfigError: no such file, another form, or a token that can be guessed or is used twice.
    """

    def __init__(self, file: str) -> None:
        lines = read_file(file, "token_file").decode("utf-8", "replace").splitlines()
        pairs = [line.split() for line in lines if line.strip()]
        if not all(len(pair) == 2 for pair in pairs) or not 0 < len(pairs) <= MAX_CLIENTS:
            raise _unusable(f"has not 1 to {MAX_CLIENTS} lines of a name and a token")
        self.names = [name for name, _ in pairs]
        self._tokens = [token.encode() for _, token in pairs]
        if len(set(self.names)) < len(pairs) or len(set(self._tokens)) < len(pairs):
            raise _unusable("has a name or a token twice")
        if min(map(len, self._tokens)) < MIN_TOKEN:
            raise _unusable(
                f"has a token of less than {MIN_TOKEN} characters, which can be guessed"
            )

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the client that has ``token``, compared in constant time; None if none has."""
        given = token.encode()
        equal = [hmac.compare_digest(known, given) for known in self._tokens]
        if not any(equal):
            return None
        return AccessToken(token=token, client_id=self.names[equal.index(True)], scopes=[])


class _Shares:
    """Refuses requests of a client that has ``MAX_REQUESTS`` in progress."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope["user"].display_name
        if self._running[client] >= MAX_REQUESTS:
            await PlainTextResponse("too many requests at a time", 429)(scope, receive, send)
            return
        self._running[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client] -= 1


def http_server(server: MCPServer, tokens: Tokens, host: str) -> uvicorn.Server:
    """Return the web server of ``server``, at the path ``/mcp`` of a socket bound to ``host``."""
    tools = server.streamable_http_app(
        stateless_http=True, max_request_body_size=MAX_BODY, host=host
    )
    guarded = AuthenticationMiddleware(
        RequireAuthMiddleware(_Shares(tools), []), BearerAuthBackend(tokens)
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (guarded if scope["type"] == "http" else tools)(scope, receive, send)

    config = uvicorn.Config(
        app,
        log_level="error",  # anybody could write lines of requests
        access_log=False,
        ws="none",
        limit_concurrency=len(tokens.names) * MAX_REQUESTS + _STRANGERS,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(config)


def _unusable(why: str) -> ConfigError:
    return ConfigError(why, field="token_file", remedy="NAME TOKEN, from: openssl rand -hex 16")
