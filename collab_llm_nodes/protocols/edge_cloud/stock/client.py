"""Sessions at a stock server: the client that takes the place of ``VerifierClient``.

Each session's stream is a loop over one inbox: drafts of the session link and results of requests
go into ``StockSession``, whose actions are requests and verdicts. A lost server is found by a
failed request; when it is back it is checked again, and the link opens the stream again with the
confirmed tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig
from collab_llm_nodes.errors import CollabError, ModelError, Unavailable
from collab_llm_nodes.models.vocabulary import check_same
from collab_llm_nodes.protocols.edge_cloud.messages import (
    Draft,
    Open,
    Opened,
    ServerMessage,
    Verdict,
)
from collab_llm_nodes.protocols.edge_cloud.sessions import (
    LinkStatus,
    Outbox,
    SessionClient,
    SessionHandle,
)
from collab_llm_nodes.protocols.edge_cloud.stock.http import Pause, StockHttp
from collab_llm_nodes.protocols.edge_cloud.stock.methods import MethodChoice
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.server import (
    GUIDED_TOP,
    Facts,
    Row,
    ServedPrompt,
    StockServer,
    best_allowed,
    check_law,
    laws_of,
    wrong_answer,
)
from collab_llm_nodes.protocols.edge_cloud.stock.session import (
    Action,
    Score,
    StockSession,
    Stream,
)
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.protocols.edge_cloud.stock.sglang import SglangServer
from collab_llm_nodes.protocols.edge_cloud.stock.vllm import VllmServer
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.credentials import read_token
from collab_llm_nodes.transport.heartbeat import HeartbeatConfig

if TYPE_CHECKING:  # llguidance is loaded where guides are used
    from collab_llm_nodes.models.guided_text import GuidedText

log = logging.getLogger(__name__)

A = TypeVar("A", Score, Stream)

_SIGN_S = 2.0  # timeout of a health check
_PINGS = 3  # round trips measured after connecting


@dataclass(frozen=True)
class Served:
    """A server that has passed all checks, and what it serves."""

    server: StockServer
    http: StockHttp
    facts: Facts


@contextmanager
def _readable() -> Iterator[None]:
    """Turn errors of reading an answer into ProtocolError: the server may send anything."""
    try:
        yield
    except (CollabError, asyncio.TimeoutError):
        raise
    except Exception as error:
        raise wrong_answer(f"{type(error).__name__} while it was read") from error


class StockClient(SessionClient[Served]):
    """A connection to one stock server; see ``SessionClient`` for the other arguments.

    Raises:
        ConfigError: the token's file cannot be read.
        ModelError: the files of ``config.tokenizer`` cannot be read.
    """

    config: TargetLinkConfig

    def __init__(
        self,
        config: TargetLinkConfig,
        on_state: Callable[[LinkStatus], None] = lambda status: None,
        heartbeat: HeartbeatConfig | None = None,
    ) -> None:
        read_token(config.token, config.token_file)  # a missing file is no fault of the server
        self.reference = Reference.load(config.tokenizer)
        self._pause = Pause()
        super().__init__(config, on_state, heartbeat)

    def make_session(
        self, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> SessionHandle:
        return _StockStream(self, opened, on_message)

    # Everything below runs in the background thread.

    async def connect(self, deadline_s: float) -> Served:
        """Return the server once it has passed all checks, which may take a whole answer's time."""
        config = self.config
        await self._pause.over()
        http = StockHttp(config, self._pause)
        server: StockServer
        if config.kind == "vllm":
            choice = MethodChoice(config.method, config.seconds_per_megabyte / 1e6)
            server = VllmServer(http, config.model, self.reference, choice)
        else:
            server = SglangServer(http, config.model, self.reference)
        try:
            with _readable():
                facts = await within(server.check(), config.link.verdict_deadline_s)
            for _ in range(_PINGS):
                await self._ping(http)
        except asyncio.TimeoutError:
            await http.close()
            raise Unavailable("the server is too slow to be checked", field="url") from None
        except BaseException:
            await http.close()
            raise
        self.model, self.vocabulary = config.model, self.reference.vocabulary
        return Served(server, http, facts)

    async def look_after(self, connection: Served) -> None:
        self._change("UP", None)
        beats = asyncio.ensure_future(self.keep_heartbeat(lambda: self._ping(connection.http)))
        try:
            await connection.http.broken.wait()
        finally:
            beats.cancel()

    async def disconnect(self, connection: Served, grace_s: float | None = None) -> None:
        await asyncio.sleep(grace_s or 0.0)
        await connection.http.close()

    async def _ping(self, http: StockHttp) -> bool:
        begun = time.monotonic()
        alive = await http.alive(_SIGN_S)
        if alive:
            self.record_rtt(time.monotonic() - begun)
        return alive


class _StockStream(SessionHandle):
    """A session at a stock server."""

    def __init__(
        self, client: StockClient, opened: Open, on_message: Callable[[ServerMessage], None]
    ) -> None:
        super().__init__(client, opened, on_message)
        self.client = client
        self._revision: tuple[int, ...] | None = None  # of the model that began the answer

    async def _exchange(self, outbox: Outbox, deadline_s: float) -> None:
        try:
            served = await within(self.client.connected(), deadline_s)
        except asyncio.TimeoutError:
            raise Unavailable("the server is not connected", field="url") from None
        self._check_revision(served.facts)
        if not self._connected():
            return
        opened = await outbox.get()
        assert isinstance(opened, Open)
        check_law(opened.sampling, guided=opened.guide is not None)
        stock, reference = self.client, self.client.reference
        check_same(opened.vocabulary, reference.vocabulary, draft="model", target=stock.model)
        guide = reference.guides.open(opened.guide) if opened.guide is not None else None
        with _readable():
            prompt = await served.server.read(opened, self.count)
        session = StockSession(
            opened,
            eos=reference.eos,
            vocab_size=reference.vocab_size,
            room=served.facts.context - prompt.length,
            ahead=stock.config.score_ahead,
            guide=guide,
        )
        self.receive(Opened(uuid.uuid4().hex, prompt.length, guide is not None))
        law = _Law(opened.sampling, reference.vocab_size, guide)
        await _Stream(self, served.server, prompt, law, session, outbox).run()

    def _check_revision(self, facts: Facts) -> None:
        """Refuse to go on with an answer that another model has begun."""
        if self._revision not in (None, facts.revision):
            raise ModelError(
                "the server has changed its model in mid-answer",
                field="model",
                remedy="ask again; the new one answers from the beginning",
            )
        self._revision = facts.revision


@dataclass(frozen=True)
class _Law:
    """The law of an answer, as a server's lists of likeliest tokens determine it."""

    sampling: SamplingConfig
    vocab_size: int
    guide: GuidedText | None

    @property
    def top(self) -> int:
        """Number of likeliest tokens to ask for; 0: the greedy one alone."""
        if self.guide is not None:
            return GUIDED_TOP
        return 0 if self.sampling.greedy else self.sampling.top_k

    def distributions(self, rows: Sequence[Row]) -> list[Distribution]:
        """Return the distributions that ``rows`` determine."""
        return laws_of(rows, self.sampling, self.vocab_size)


class _Stream:
    """The requests of one stream, from ``Opened`` to its end."""

    def __init__(
        self,
        handle: _StockStream,
        server: StockServer,
        prompt: ServedPrompt,
        law: _Law,
        session: StockSession,
        outbox: Outbox,
    ) -> None:
        self._handle, self._server, self._prompt = handle, server, prompt
        self._law, self._session, self._outbox = law, session, outbox
        self._requests: set[asyncio.Task[None]] = set()
        self._error: CollabError | None = None

    async def run(self) -> None:
        """Handle the drafts of the outbox until it ends.

        Raises:
            CollabError: a request failed that this round needs, or a draft is invalid.
        """
        try:
            while isinstance(message := await self._outbox.get(), Draft):
                self._perform(self._session.on_draft(message))
        finally:
            for request in self._requests:
                request.cancel()
        if self._error is not None:
            raise self._error

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Verdict):
                self._handle.receive(action)
            elif isinstance(action, Score):
                self._start(self._score, action)
            else:
                self._start(self._stream, action)

    def _start(self, request: Callable[[A], Awaitable[None]], action: A) -> None:
        task = asyncio.ensure_future(self._guarded(request, action))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _guarded(self, request: Callable[[A], Awaitable[None]], action: A) -> None:
        """End the stream if ``request`` fails."""
        try:
            with _readable():
                await request(action)
        except CollabError as error:
            self._fail(error)

    def _fail(self, error: CollabError) -> None:
        self._error = self._error or error
        self._outbox.put_nowait(None)

    async def _score(self, score: Score) -> None:
        begun, law = time.monotonic(), self._law
        try:
            rows = await self._server.score(self._prompt, score, law.top, self._handle.count)
            if law.guide is not None:
                rows = await self._within(law.guide, score, rows)
        except CollabError:
            if self._session.on_lost(score):
                raise
            return  # asked ahead; it is asked again if its round comes
        laws = law.distributions(rows)
        self._perform(self._session.on_scores(score, laws, self._server_s(begun)))

    async def _within(self, guide: GuidedText, score: Score, rows: Sequence[Row]) -> Sequence[Row]:
        """Return rows of the likeliest token that ``guide`` allows after each prefix.

        It mostly is among those of ``rows``; else the server is asked for it.
        """
        found: list[Row] = []
        masks = guide.rows(score.prefix, score.tokens)
        for n, (row, allowed) in enumerate(zip(rows, masks, strict=True)):
            token = best_allowed(row, allowed)
            if token is None:
                prefix, ids = (*score.prefix, *score.tokens[:n]), allowed.nonzero()[0].tolist()
                token = await self._server.choose(self._prompt, prefix, ids, self._handle.count)
                if not allowed[token : token + 1].any():
                    raise wrong_answer("a token that was not allowed")
            found.append({token: 0.0})
        return found

    async def _stream(self, stream: Stream) -> None:
        prefix, begun = stream.prefix, time.monotonic()
        end = len(prefix) + stream.count
        tokens = self._server.stream(self._prompt, prefix, stream.count, self._handle.count)
        async with aclosing(tokens):
            async for token in tokens:
                if self._session.finished or len(prefix) == end:
                    raise wrong_answer("more tokens than were asked for")
                laws = self._law.distributions([{token: 0.0}])
                waited_s = time.monotonic() - begun
                seconds = self._server_s(begun) if prefix == stream.prefix else waited_s
                self._perform(self._session.on_scores(Score(prefix, ()), laws, seconds))
                prefix, begun = (*prefix, token), time.monotonic()
        if not self._session.finished and len(prefix) < end:
            raise Unavailable("the server ended its answer early", field="url")

    def _server_s(self, begun: float) -> float:
        """Return the time since ``begun`` without the network's share [s]."""
        return max(0.0, time.monotonic() - begun - self._handle.client.rtt_s)
