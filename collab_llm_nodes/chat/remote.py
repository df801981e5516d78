"""Client of any server of OpenAI's chat completions: vLLM, SGLang, Ollama, ...

The server is not trusted: its responses are bounded in size and time and checked before they are
used, redirects are not followed (they would carry private text elsewhere), and no text of it is
logged. Requests run concurrently in one asyncio loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

from collab_llm_nodes.chat.base import (
    MAX_JOBS,
    ChatRequest,
    Control,
    Finish,
    OnResult,
    Reply,
    Usage,
    check_jobs,
    ignore_result,
)
from collab_llm_nodes.chat.completions import (
    BrokenOff,
    Reported,
    kind_of,
    read_completion,
    status_of,
    whole_characters,
    words_of,
)
from collab_llm_nodes.chat.retries import RetryRules, asked_pause_s
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import (
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
from collab_llm_nodes.models.turns import MAX_TURNS, check_texts, fold_system
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import check_paired, check_proxy, read_token
from collab_llm_nodes.transport.http import (
    TooLarge,
    check_url,
    client_options,
    is_local_url,
    is_transient,
)

log = logging.getLogger(__name__)

_MAX_REPLY_BYTES = 1 << 20
"""Longest response: the text of 65,536 tokens, the most a reply may have, with its JSON."""
_CONNECT_S = 5.0
"""Deadline of a connection; a slower one is retried."""
_GRACE_S = 10.0
"""Grace period in which requests are cancelled after the deadline."""
_SEEDS = 1 << 31
"""Servers read signed 32-bit seeds; several refuse longer ones."""
_ITS_OWN = "x-stainless-raw-response"
"""Header that the library itself reads."""
_TRANSIENT_KIND = re.compile(
    r"overload|rate.?limit|unavailable|time.?out|timed.out|server.?error|internal|exhausted|busy"
)
"""Kinds of transient errors in reports without a status."""
_NO_CREDIT = re.compile(r"insufficient.(?:quota|balance|credit)|billing|payment")
SYSTEM = "system"
FORM = "response_format"
LENGTH = "length"
OPTIONAL = ("temperature", "top_p", "seed", SYSTEM, FORM, LENGTH)
"""Parts of a request that some servers refuse."""
_MAX_CHARACTERS = 1 << 21
"""Longest prompt; the server knows the context of its model and refuses less."""
_MOST_PER_TOKEN, _FEW_TOKENS = 10, 200
"""Characters of a token of a whole prompt at most; English has some four. Short prompts may be of
blanks."""
_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
_NOT_TAKEN = re.compile(
    r"(?:un|not |n't |does not )(?:support|permit|allow|accept|enabled|recogni[sz]|known|expected)"
    r"|extra.?(?:input|field|forbidden|param)|forbidden|deprecated|no such|only the default"
    r"|additional propert|invalid (?:field|parameter|argument)|unknown",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"context.?(?:length|size|window)|(?:prompt|input|messages?)\b.{0,40}too (?:long|large)",
    re.IGNORECASE,
)
_NO_SCHEMA = re.compile(r"response.?format|json.?schema|structured.output|grammar", re.IGNORECASE)
_NO_SYSTEM_TURN = re.compile(
    r"system['\"` ]{0,2}(?:role|turn|message|prompt|instruction)s?\b.{0,60}(?:not |n't |un)"
    r"(?:support|allow|enabled|accept|permit)"
    r"|(?:support|unknown|invalid|unexpected|expected)[^.]{0,40}\bsystem\b"
    r"|developer instruction is not enabled|roles must alternate"
    r"|only [`'\"]?user[`'\"]?(?:,| and| or) [`'\"]?(?:assistant|model)"
    r"|should be [`'\"]?user[`'\"]? or",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RemoteConfig:
    """Address of a server and the rules of its requests. Files are PEM files."""

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
        False,
        "Allow http:// to other machines, which exposes texts and key on the network.",
        read_only=True,
    )
    proxy: str = setting(
        "",
        "HTTP proxy to the server, http://host:port; not used for servers on this machine."
        " Empty: none, whatever the environment says.",
        read_only=True,
    )
    length_field: str = setting(
        "max_completion_tokens",
        "Field of a request that limits its reply; old servers know only max_tokens.",
        choices=_LENGTH_FIELDS,
        read_only=True,
    )
    omit: tuple[str, ...] = setting(
        (),
        "Parts left out of requests, which some servers refuse: temperature, top_p, seed;"
        " response_format, the JSON schema of the reply; length, its limit; system puts the system"
        " turn before the first question. A part that the server refuses by name is left out from"
        " then on, listed or not.",
        read_only=True,
    )
    extra_body: str = setting(
        "",
        "Further fields of each request, as a JSON object, for what only this server has:"
        ' \'{"chat_template_kwargs": {"enable_thinking": false}}\'.',
        read_only=True,
    )
    parallel: int = setting(
        8,
        "Concurrent requests. Raise it to the server's own batch size; lower it below a rate"
        " limit.",
        low=1,
        high=1024,
        read_only=True,
    )
    attempt_s: float = setting(
        120.0,
        "Deadline of one attempt, its reply included [s]. Raise it for a model that takes longer"
        " to answer.",
        low=0.01,
        high=3600.0,
    )
    retries: RetryRules = field(default_factory=RetryRules)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.omit:
            if name not in OPTIONAL:
                raise ConfigError(
                    f"{quoted(name)} cannot be left out",
                    field="omit",
                    remedy=f"any of {', '.join(OPTIONAL)}",
                )
        check_paired("", "", self.token, self.token_file)
        _further_fields(self.extra_body)
        if self.token_variable and (self.token or self.token_file):
            raise ConfigError(
                "the API key is given twice",
                field="token_variable",
                remedy="give one of token, token_file and token_variable",
            )
        check_url(
            self.url,
            unencrypted=self.unencrypted,
            tls_ca=self.tls_ca,
            example="https://host:8000/v1",
        )
        check_proxy(self.proxy)

    @property
    def local(self) -> bool:
        """True if the server is on this machine."""
        return is_local_url(self.url)


class RemoteChat:
    """``base.ChatModel`` on a server.

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
        self._extra = _further_fields(config.extra_body)
        self._left_out = set(config.omit)  # this and the next two: of the loop's thread
        self._length_field = config.length_field
        self._warned_of_context = False
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
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``base.ChatModel``.

        The error of a request is InvalidInput, Unauthenticated, ProtocolError or, after all
        attempts or if the next pause would end after the deadline, Unavailable.
        """
        control.check()
        with self._lock:
            if self._closing:
                raise _closed()
            check_jobs(self._jobs, len(requests), MAX_JOBS)
            self._jobs += len(requests)
            attempts = [_Attempts() for _ in requests]
            answers = asyncio.run_coroutine_threadsafe(
                self._ask_all(requests, attempts, control.due, on_result), self._loop
            )

        def cancel() -> None:
            answers.cancel()

        unregister = control.on_cancel(cancel)
        left_s = control.due - time.monotonic() + _GRACE_S
        try:
            return answers.result(None if math.isinf(left_s) else max(0.0, left_s))
        except concurrent.futures.CancelledError:
            error = _closed() if self._closing else Cancelled("the caller cancelled the requests")
            raise _after(attempts, error) from None
        except concurrent.futures.TimeoutError:
            cancel()
            late = DeadlineExceeded(
                "the requests could not be cancelled in time", field="deadline_s"
            )
            raise _after(attempts, late) from None
        finally:
            unregister()
            with self._lock:
                self._jobs -= len(requests)

    def close(self) -> None:
        """End running calls with Unavailable and close all connections."""
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
        options = client_options(
            config.url,
            tls_ca=config.tls_ca,
            proxy=config.proxy,
            connections=config.parallel,
            max_bytes=_MAX_REPLY_BYTES,
        )

        async def strip_headers(request: httpx2.Request) -> None:
            # The library adds facts about this machine and about its user.
            for name in [*request.headers]:
                if name.startswith(("x-stainless-", "openai-")) and name != _ITS_OWN:
                    del request.headers[name]
            request.headers["user-agent"] = "collab_llm"

        options["event_hooks"]["request"].append(strip_headers)
        http_client = openai.DefaultAsyncHttpxClient(**options)
        return openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._token or "none",  # required by the library
            max_retries=0,  # its own ignore our deadline and cancellation
            timeout=openai.Timeout(config.attempt_s, connect=_CONNECT_S),
            default_headers={"Accept-Encoding": "identity"},
            http_client=http_client,
        )

    # Everything below runs in the loop.

    async def _ask_all(
        self,
        requests: Sequence[ChatRequest],
        attempts: list[_Attempts],
        due: float,
        on_result: OnResult,
    ) -> list[Reply | CollabError]:
        async def ask(index: int, request: ChatRequest) -> Reply | CollabError:
            result = await self._ask_one(request, attempts[index], due)
            on_result(index, result)
            return result

        return await asyncio.gather(*(ask(*each) for each in enumerate(requests)))

    async def _ask_one(
        self, request: ChatRequest, attempts: _Attempts, due: float
    ) -> Reply | CollabError:
        begun = time.monotonic()
        try:
            self._check(request)
            left_s = None if math.isinf(due) else due - begun
            text, finish, usage = await within(self._attempt_all(request, due, attempts), left_s)
            self._check_whole(request, usage)
        except CollabError as error:
            error.attempts = attempts.made
            return error
        except asyncio.TimeoutError:
            text, finish, usage = "", Finish.DEADLINE, None
        seconds = time.monotonic() - begun
        return Reply(text, finish, usage, attempts.made, seconds)

    def _check_whole(self, request: ChatRequest, usage: Usage | None) -> None:
        """Log once that the server seems to have cut a prompt, as Ollama does without an error."""
        if usage is None or self._warned_of_context:
            return
        characters = sum(len(turn.content) for turn in request.turns)
        tokens = usage.prefill + usage.cached
        if characters > _MOST_PER_TOKEN * max(tokens, _FEW_TOKENS):
            self._warned_of_context = True
            log.warning(
                "%s read %d tokens of a prompt of %d characters: its context is too short, and the"
                " rest was cut off. Raise it (Ollama: OLLAMA_CONTEXT_LENGTH, or num_ctx in a"
                " Modelfile), or ask about smaller pieces",
                self.name,
                tokens,
                characters,
            )

    async def _attempt_all(
        self, request: ChatRequest, due: float, attempts: _Attempts
    ) -> tuple[str, Finish, Usage | None]:
        """Send ``request`` until it is answered.

        Raises:
            CollabError: of the last attempt.
        """
        failures = 0
        while True:
            async with self._places:
                attempts.made += 1
                body = self._body(request)
                failure = await self._attempt(body)
            if not isinstance(failure, _Failure):
                return failure
            if self._adapted(failure.report, body):
                continue
            failures += 1
            attempts.made -= not failure.sent
            pause_s = None
            if failure.transient:
                chance = self._random.random()
                pause_s = self._config.retries.pause_s(failures, chance, failure.asked_s)
            if pause_s is None or time.monotonic() + pause_s >= due:
                raise failure.error
            await asyncio.sleep(pause_s)

    async def _attempt(self, body: dict[str, Any]) -> tuple[str, Finish, Usage | None] | _Failure:
        create = self._client.chat.completions.with_raw_response.create
        try:
            sent = create(**body, extra_body=self._extra or None)
            response = await within(sent, self._config.attempt_s)
            return read_completion(response.content, self._token)
        except Reported as error:
            return self._refused(status_of(error.body), error.body, response.headers)
        except ProtocolError as error:
            return _Failure(error, transient=isinstance(error, BrokenOff))
        except TooLarge:
            return _Failure(
                ProtocolError(
                    f"the server's response has more than {_MAX_REPLY_BYTES} bytes",
                    field="url",
                    remedy="lower max_tokens",
                )
            )
        except openai.APIStatusError as error:
            return self._refused(error.status_code, error.body, error.response.headers)
        except (asyncio.TimeoutError, openai.OpenAIError) as error:
            reason = type(error.__cause__ or error).__name__
            return _Failure(
                Unavailable(
                    f"{self._config.url} does not answer: {reason}",
                    field="url",
                    remedy="check that the server runs, and attempt_s",
                ),
                transient=True,
                sent=not isinstance(error.__cause__, (httpx2.ConnectError, httpx2.ConnectTimeout)),
            )

    def _refused(self, status: int, body: object, headers: Mapping[str, str]) -> _Failure:
        """Return the failure that an error report stands for.

        Args:
            status: HTTP status other than 200; 0 if the server names none.
        """
        words = words_of(body)  # unmasked, since the key may resemble the name of a field
        message = f"{status or 'with an error'}: {words_of(body, self._token)}"
        kind = kind_of(body)
        if status in (401, 403):
            return _Failure(
                Unauthenticated(
                    f"the server refuses the API key: {message}",
                    field="token",
                    remedy="check token or token_file",
                )
            )
        if status == 402 or _NO_CREDIT.search(kind):  # a 429 that does not pass
            return _Failure(
                Unavailable(
                    f"the server answers {message}", field="token", remedy="check the key's credit"
                )
            )
        asked_s = asked_pause_s(headers, time.time())
        if is_transient(status) or (not status and _TRANSIENT_KIND.search(kind)):
            asks = f" (asks for a pause of {asked_s:g} s)" if asked_s else ""
            return _Failure(
                Unavailable(
                    f"the server answers {message}{asks}",
                    field="url",
                    remedy="try again later, or with a later deadline",
                ),
                transient=True,
                asked_s=asked_s,
                report=_Report(kind, words, _named(body)),
            )
        if not 400 <= status < 500:
            return _Failure(
                Unavailable(
                    f"the server answers {message}", field="url", remedy="see the server's own log"
                )
            )
        too_long = status == 413 or _TOO_LONG.search(f"{kind} {words}")
        return _Failure(
            InvalidInput(
                f"the server refuses the request: {message}",
                field="turns" if too_long else "url",
                remedy="shorten the prompt, or raise the server's context"
                if too_long
                else "check model, length_field, omit and extra_body",
            ),
            report=_Report(kind, words, _named(body)),
        )

    def _check(self, request: ChatRequest) -> None:
        """Refuse a request that the API cannot express.

        Raises:
            InvalidInput: the request is too long, empty, or uses top_k.
        """
        turns = request.turns
        check_texts(
            turns[-1].content,
            turns[:-1],
            raw=False,
            max_characters=_MAX_CHARACTERS,
            max_turns=MAX_TURNS,
        )
        if request.sampling.top_k:
            raise InvalidInput(
                "is unknown to the server's API", field="top_k", remedy="use top_p, or set it to 0"
            )

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        """Return the body of a request, without the parts that this server refuses."""
        sampling = request.sampling
        turns = fold_system(request.turns) if SYSTEM in self._left_out else request.turns
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [
                {"role": turn.role, "content": whole_characters(turn.content)} for turn in turns
            ],
            "temperature": sampling.temperature,
        }
        if LENGTH not in self._left_out:
            body[self._length_field] = request.max_tokens
        if not sampling.greedy:
            body["seed"] = sampling.seed % _SEEDS
            if sampling.top_p < 1.0:  # the API's own default
                body["top_p"] = sampling.top_p
        if request.guide is not None and request.guide.kind == "json":
            schema = {"name": "reply", "schema": json.loads(request.guide.source)}
            body[FORM] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in body.items() if name not in self._left_out}

    def _adapted(self, report: _Report | None, body: dict[str, Any]) -> bool:
        """Leave out from now on what the server refuses by name; return False if it names nothing.

        Args:
            body: of the request that was refused.
        """
        if report is None:
            return False
        refused = set()
        if _NOT_TAKEN.search(f"{report.kind} {report.words}"):
            fields = {*OPTIONAL, *_LENGTH_FIELDS} & body.keys()
            refused = {name for name in fields if name in report.fields}
            refused = refused or {
                name for name in fields if re.search(rf"(?<!\w){name}(?!\w)", report.words)
            }
        if FORM in body and _NO_SCHEMA.search(report.words):
            refused = {FORM}
        if body["messages"][0]["role"] == SYSTEM and _NO_SYSTEM_TURN.search(report.words):
            refused = {SYSTEM}
        for name in refused:
            part = LENGTH if name in _LENGTH_FIELDS else name
            if name == self._config.length_field:
                (self._length_field,) = {*_LENGTH_FIELDS} - {name}
            elif part not in self._left_out:
                self._left_out.add(part)
                log.warning("%s refuses %s, which is left out from now on", self.name, part)
        return bool(refused)

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
    """Return ``error`` with the most attempts that were made for one request."""
    error.attempts = max((each.made for each in attempts), default=0)
    return error


@dataclass(frozen=True)
class _Report:
    """An error report of the server.

    Attributes:
        fields: fields of the request that it names.
    """

    kind: str
    words: str
    fields: frozenset[str]


@dataclass(frozen=True)
class _Failure:
    """The end of one attempt without a reply.

    Attributes:
        transient: another attempt may succeed.
        asked_s: pause that the server asks for [s].
        report: the server's error report, if it may name a part that it refuses.
        sent: False without a connection to the server.
    """

    error: CollabError
    transient: bool = False
    sent: bool = True
    asked_s: float = 0.0
    report: _Report | None = None


def _api_key(config: RemoteConfig) -> str:
    """Return the API key, which may be empty; raise ConfigError if its variable is not set."""
    variable = config.token_variable
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"the environment has no variable {quoted(variable)}",
            field="token_variable",
            remedy="export it where this process starts, or use token_file",
        )
    return read_token(config.token or os.environ.get(variable, ""), config.token_file)


def _further_fields(text: str) -> dict[str, Any]:
    """Return the fields of ``extra_body``; raise ConfigError for another text."""
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(
            "is no JSON object", field="extra_body", remedy="such as '{\"min_p\": 0.1}'"
        )
    return fields


def _named(body: object) -> frozenset[str]:
    """Return the fields of a request that an error report names, as OpenAI or FastAPI do."""
    reports = body.get("detail", body) if isinstance(body, dict) else body
    found: list[object] = []
    for report in reports if isinstance(reports, list) else [reports]:
        if isinstance(report, dict):
            place = report.get("loc") or report.get("param")
            found += place if isinstance(place, list) else [place]
    return frozenset(name for name in found if isinstance(name, str))


def _closed() -> Unavailable:
    return Unavailable("the model was closed", remedy="start it again")
