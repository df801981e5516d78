"""A chat model behind any server that speaks OpenAI's chat completions: vLLM, SGLang, Ollama, ...

The server is not trusted: its answers are bounded in size and time and checked before they are
used, redirects are not followed (they would carry private text elsewhere), and nothing that it says
is logged. Requests run side by side in one asyncio loop, in a thread of this model's own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai

from collab_llm_nodes.chat.base import (
    ChatRequest,
    Control,
    Finish,
    Reply,
    Told,
    Usage,
    tell_nobody,
)
from collab_llm_nodes.chat.completions import read_completion, whole_characters
from collab_llm_nodes.chat.retries import RetryRules, asked_pause_s
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    quoted,
)
from collab_llm_nodes.models.turns import MAX_TURNS, check_texts
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import (
    check_certificates,
    check_paired,
    check_proxy,
    is_local,
    read_file,
    read_token,
)

_GRACE_S = 10.0
"""Time for requests to be given up when the deadline passes."""
_ITS_OWN = "x-stainless-raw-response"
"""The header that the library itself reads again."""
_RETRIED = frozenset({408, 409, 425, 429})
"""Refusals that may not last; those of the server's own making, from 500 on, are retried, too."""


@dataclass(frozen=True)
class RemoteConfig:
    """Address of a server, and the way to speak to it. File names are PEM files."""

    url: str = setting(
        "http://127.0.0.1:8000/v1", "Base URL of the server's API, /v1 included.", read_only=True
    )
    model: str = setting("", "Name of the model, as the server knows it.", read_only=True)
    token: str = field(default="", repr=False, metadata={"secret": True})
    token_file: str = setting("", "File that holds the API key.", read_only=True)
    token_variable: str = setting(
        "", "Name of the environment variable that holds the API key.", read_only=True
    )
    tls_ca: str = setting(
        "", "Certificate authority of the server; empty: the system's.", read_only=True
    )
    unencrypted: bool = setting(
        False, "Allow http:// to other machines: everybody between can read along.", read_only=True
    )
    proxy: str = setting(
        "",
        "HTTP proxy to the server, http://host:port; servers on this machine are reached without."
        " Empty: none, whatever the environment says.",
        read_only=True,
    )
    length_field: str = setting(
        "max_completion_tokens",
        "Field of a request that limits its reply; old servers know max_tokens only.",
        choices=("max_completion_tokens", "max_tokens"),
        read_only=True,
    )
    parallel: int = setting(8, "Requests under way at a time.", low=1, high=1024, read_only=True)
    max_jobs: int = setting(
        4096,
        "Requests taken in at a time; more are refused as BUSY.",
        low=1,
        high=1 << 20,
        read_only=True,
    )
    max_characters: int = setting(
        1 << 20, "Longest prompt, all turns together.", low=1, high=1 << 26, read_only=True
    )
    max_reply_bytes: int = setting(
        1 << 20, "Longest response of the server [byte].", low=1024, high=1 << 28, read_only=True
    )
    connect_s: float = setting(
        5.0, "Deadline of a connection [s].", low=0.01, high=600.0, read_only=True
    )
    attempt_s: float = setting(
        120.0, "Deadline of one attempt, its reply included [s].", low=0.01, high=3600.0
    )
    retries: RetryRules = field(default_factory=RetryRules)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_paired("", "", self.token, self.token_file)
        if self.token_variable and (self.token or self.token_file):
            raise ConfigError("give one of the ways to the API key", field="token_variable")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{quoted(self.url)} is no base URL",
                field="url",
                remedy="such as https://host:8000/v1",
            )
        if parts.username or parts.password:
            raise ConfigError("holds a password", field="url", remedy="use token_file")
        check_proxy(self.proxy)
        encrypted = parts.scheme == "https"
        if not (encrypted or self.unencrypted or self.local):
            raise ConfigError(
                "leaves this machine unencrypted",
                field="url",
                remedy="use https://, or set unencrypted: true where the network is trusted",
            )
        if self.tls_ca and not encrypted:
            raise ConfigError("a certificate authority needs https://", field="tls_ca")

    @property
    def local(self) -> bool:
        """True if the server is on this machine."""
        return is_local(f"{urlsplit(self.url).hostname}:0")


class RemoteChat:
    """A ``base.ChatModel`` on a server.

    Raises:
        ConfigError: no model is named, or a file cannot be read.
    """

    def __init__(self, config: RemoteConfig) -> None:
        if not config.model:
            raise ConfigError(
                "no model", field="model", remedy="name one; GET <url>/models lists them"
            )
        self._config = config
        self._token = _api_key(config)
        self._random = random.Random()
        self._jobs = 0
        self._lock = threading.Lock()  # of _jobs and _closing
        self._closing = False
        self._places = asyncio.Semaphore(config.parallel)
        self._client = self._new_client()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="chat-remote", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        return self._config.model

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``base.ChatModel``.

        The error of a request is InvalidInput, Unauthenticated, Unavailable (after all attempts,
        or if the pause before the next would end after the deadline), or ProtocolError.
        """
        control.check()
        with self._lock:
            if self._closing:
                raise _closed()
            if self._jobs + len(requests) > self._config.max_jobs:
                raise Busy(
                    f"{self._jobs} requests are being answered, {len(requests)} more are too many",
                    field="requests",
                    remedy=f"ask at most {self._config.max_jobs} at a time, or raise max_jobs",
                )
            self._jobs += len(requests)
            attempts = [_Attempts() for _ in requests]
            answers = asyncio.run_coroutine_threadsafe(
                self._ask_all(requests, attempts, control.due, told), self._loop
            )

        def cancel() -> None:
            answers.cancel()

        forget = control.on_cancel(cancel)
        left_s = control.due - time.monotonic() + _GRACE_S
        try:
            return answers.result(None if math.isinf(left_s) else max(0.0, left_s))
        except concurrent.futures.CancelledError:
            error = _closed() if self._closing else Cancelled("the caller gave the requests up")
            raise _after(attempts, error) from None
        except concurrent.futures.TimeoutError:
            cancel()
            late = DeadlineExceeded("requests could not be given up", field="deadline_s")
            raise _after(attempts, late) from None
        finally:
            forget()
            with self._lock:
                self._jobs -= len(requests)

    def close(self) -> None:
        """Give up the calls under way, which raise Unavailable, and close all connections."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result(_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        self._loop.close()

    def _new_client(self) -> openai.AsyncOpenAI:
        config = self._config
        verify = httpx2.create_ssl_context()
        if config.tls_ca:
            read_file(config.tls_ca, "tls_ca")
            check_certificates("", "", "tls_ca", config.tls_ca)
            verify = ssl.create_default_context(cafile=Path(config.tls_ca).expanduser())

        async def tell_less(request: httpx2.Request) -> None:
            # The library adds facts about this machine, and what the environment says of its user.
            for name in [*request.headers]:
                if name.startswith(("x-stainless-", "openai-")) and name != _ITS_OWN:
                    del request.headers[name]
            request.headers["user-agent"] = "collab_llm"

        async def bound(response: httpx2.Response) -> None:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ProtocolError(
                    "the server compresses its answer, which nobody asked for",
                    field="url",
                    remedy="switch compression off, there or in the proxy before it",
                )
            response.stream = _Bounded(response.stream, config.max_reply_bytes)

        http_client = openai.DefaultAsyncHttpxClient(
            verify=verify,
            trust_env=False,  # a proxy of the environment would read along, the key included
            proxy=None if config.local else config.proxy or None,
            follow_redirects=False,
            event_hooks={"request": [tell_less], "response": [bound]},
            limits=httpx2.Limits(max_connections=config.parallel),
        )
        return openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._token or "none",  # the library wants one
            max_retries=0,  # its own know neither our deadline nor our cancellation
            timeout=openai.Timeout(config.attempt_s, connect=config.connect_s),
            default_headers={"Accept-Encoding": "identity"},
            http_client=http_client,
        )

    # Everything below runs in the loop.

    async def _ask_all(
        self, requests: Sequence[ChatRequest], attempts: list[_Attempts], due: float, told: Told
    ) -> list[Reply | CollabError]:
        async def ask(place: int, request: ChatRequest) -> Reply | CollabError:
            result = await self._ask_one(request, attempts[place], due)
            told(place, result)
            return result

        return await asyncio.gather(*(ask(*each) for each in enumerate(requests)))

    async def _ask_one(
        self, request: ChatRequest, attempts: _Attempts, due: float
    ) -> Reply | CollabError:
        begun = time.monotonic()
        try:
            body = self._body(request)
            left_s = None if math.isinf(due) else due - begun
            text, finish, usage = await within(self._attempt_all(body, due, attempts), left_s)
        except CollabError as error:
            error.attempts = attempts.made
            return error
        except asyncio.TimeoutError:
            text, finish, usage = "", Finish.DEADLINE, None
        seconds = time.monotonic() - begun
        return Reply(text, finish, usage, attempts.made, seconds)

    async def _attempt_all(
        self, body: dict[str, Any], due: float, attempts: _Attempts
    ) -> tuple[str, Finish, Usage | None]:
        """Send ``body`` until it is answered.

        Raises:
            CollabError: it is not.
        """
        while True:
            async with self._places:
                attempts.made += 1
                failure = await self._attempt(body)
            if not isinstance(failure, _Failure):
                return failure
            pause_s = None
            if failure.may_pass:
                chance = self._random.random()
                pause_s = self._config.retries.pause_s(attempts.made, chance, failure.asked_s)
            if pause_s is None or time.monotonic() + pause_s >= due:
                raise failure.error
            await asyncio.sleep(pause_s)

    async def _attempt(self, body: dict[str, Any]) -> tuple[str, Finish, Usage | None] | _Failure:
        create = self._client.chat.completions.with_raw_response.create
        try:
            response = await within(create(**body), self._config.attempt_s)
            return read_completion(response.content)
        except ProtocolError as error:
            return _Failure(error, may_pass=True)
        except _TooLarge:
            limit = self._config.max_reply_bytes
            return _Failure(
                ProtocolError(
                    f"the server's answer has more than {limit} bytes",
                    field="url",
                    remedy="lower max_tokens, or raise max_reply_bytes",
                )
            )
        except openai.APIStatusError as error:
            return self._refused(error)
        except (asyncio.TimeoutError, openai.OpenAIError) as error:
            reason = type(error.__cause__ or error).__name__
            return _Failure(
                Unavailable(
                    f"{self._config.url} does not answer: {reason}",
                    field="url",
                    remedy="check that the server runs, and attempt_s",
                ),
                may_pass=True,
            )

    def _refused(self, error: openai.APIStatusError) -> _Failure:
        """Return what an HTTP status other than 200 means."""
        status = error.status_code
        told = quoted(_words_of(error.body).replace(self._token or "\0", "***"))
        if status in (401, 403):
            return _Failure(
                Unauthenticated(
                    f"the server refuses the API key: {status}",
                    field="token",
                    remedy="check token or token_file",
                )
            )
        asked_s = asked_pause_s(error.response.headers, time.time())
        exhausted = error.code == "insufficient_quota"  # a 429 that waiting does not mend
        if (status in _RETRIED or status >= 500) and not exhausted:
            asks = f", asks for a pause of {asked_s:g} s" if asked_s else ""
            return _Failure(
                Unavailable(
                    f"the server answers {status}{asks}: {told}",
                    field="url",
                    remedy="try again later, or with a later deadline",
                ),
                may_pass=True,
                asked_s=asked_s,
            )
        if status < 400 or exhausted:
            return _Failure(Unavailable(f"the server answers {status}: {told}", field="url"))
        return _Failure(
            InvalidInput(
                f"the server refuses the request: {status} {told}",
                field="turns",
                remedy="check model, length_field and the length of the prompt",
            )
        )

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        turns, sampling = request.turns, request.sampling
        check_texts(
            turns[-1].content,
            turns[:-1],
            raw=False,
            max_characters=self._config.max_characters,
            max_turns=MAX_TURNS,
        )
        if sampling.top_k:
            raise InvalidInput(
                "is unknown to the server's API", field="top_k", remedy="use top_p, or set it to 0"
            )
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [
                {"role": turn.role, "content": whole_characters(turn.content)} for turn in turns
            ],
            "temperature": sampling.temperature,
            self._config.length_field: request.max_tokens,
        }
        if not sampling.greedy:
            body["top_p"] = sampling.top_p
            body["seed"] = sampling.seed % 2**63
        return body

    async def _end(self) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


@dataclass
class _Attempts:
    """Number of attempts that were made for one request."""

    made: int = 0


def _after(attempts: Sequence[_Attempts], error: CollabError) -> CollabError:
    """Return ``error``, which has ended requests after so many attempts for one at most."""
    error.attempts = max((each.made for each in attempts), default=0)
    return error


@dataclass(frozen=True)
class _Failure:
    """The end of one attempt without a reply.

    Attributes:
        may_pass: another attempt may fare better.
        asked_s: pause that the server asks for [s].
    """

    error: CollabError
    may_pass: bool = False
    asked_s: float = 0.0


class _TooLarge(Exception):
    """A response has more bytes than were allowed."""


class _Bounded(httpx2.AsyncByteStream):
    """The bytes of a response, up to a limit."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._left = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise _TooLarge
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _api_key(config: RemoteConfig) -> str:
    """Return the API key, which may be empty; ConfigError if it is nowhere to be found."""
    variable = config.token_variable
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"the environment has no variable {quoted(variable)}",
            field="token_variable",
            remedy="export it where this process starts, or use token_file",
        )
    return read_token(config.token or os.environ.get(variable, ""), config.token_file)


def _words_of(body: object) -> str:
    """Return what a server says about an error, in any of the usual places."""
    if isinstance(body, dict):
        body = next((body[key] for key in ("message", "detail") if body.get(key)), body)
    return whole_characters(body if isinstance(body, str) else repr(body))


def _closed() -> Unavailable:
    return Unavailable("the model was closed", remedy="start it again")
