"""The baselines of paper 001 beside DRAGON's own machines, live over the same emulated link.

crcg             the device reads its own documents in one context, which its caches hold already
drcg_text        the cloud sends its documents' text; the device reads all documents in one context
drcg_kv          the cloud sends the KV caches of its documents; the device goes on behind them
drdg_sw_compact  both sides write alone; the cloud's drafts come at the end, as DRAGON sends drafts
drdg_sw_full     likewise, but each draft with a probability for each token of the vocabulary

EMULATION: passes take the stated time, and reading a document's text the stated time per token.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.decoding.aggregation import AggregationConfig, AggregationLaw, Party
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Session
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.dragon import codec
from collab_llm_nodes.protocols.dragon.device import identity_of
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.messages import Draft, Open
from collab_llm_nodes.protocols.dragon.side import SideDecoder

CRCG, TEXT, KV = "crcg", "drcg_text", "drcg_kv"
SEQUENCE, SEQUENCE_FULL = "drdg_sw_compact", "drdg_sw_full"
BASELINES = (SEQUENCE, SEQUENCE_FULL, CRCG, TEXT, KV)
VOCABULARY = 50_272
"""Entries of a full vector, as in paper 001 (OPT)."""
_SERVICE = "collab_llm.bench.Baselines"
_DEADLINE_S = 300.0
_CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    # A window of the first size would let 64 kB through in each round trip.
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class Pace:
    """Least times of what a side does: a pass, and reading one token of a document [s]."""

    pass_s: float
    prefill_s: float = 0.0


@dataclass(frozen=True)
class Written:
    """One answer of a baseline; times from the question, bytes of all messages."""

    tokens: tuple[int, ...]
    first_s: float
    total_s: float
    bytes_up: int
    bytes_down: int


class OneContext:
    """A decoder behind one context.

    Args:
        session: holds the beginning of the context.
        ids: the rest of it.
    """

    def __init__(self, session: Session, ids: Sequence[int]) -> None:
        self._session, self._new = session, list(ids)

    def next(self) -> tuple[NDArray[np.float32], float]:
        """Return the distribution of the next token, and the weight of a side alone."""
        logits = self._session.feed(self._new, last=1)
        self._new.clear()
        p: NDArray[np.float32] = torch.softmax(logits[-1].float(), dim=-1).cpu().numpy()
        return p, 0.0

    def push(self, token: int) -> None:
        """Append ``token`` to the answer."""
        self._new.append(token)

    def close(self) -> None:
        """Free the KV cache."""
        self._session.close()


def drafts(
    decoder: SideDecoder | OneContext, law: AggregationLaw, party: Party, eos: frozenset[int]
) -> Iterator[Draft]:
    """Yield the drafts of a side that writes alone, without an end but ``eos``."""
    position, ended = 0, False
    while not ended:
        draft = law.propose(*decoder.next(), position, party)
        yield Draft(position, 0, draft, 0.0, position, 0.0)
        decoder.push(draft.token)
        position, ended = position + 1, draft.token in eos


def paced(steps: Iterator[Draft], count: int, first_s: float, pass_s: float) -> Iterator[Draft]:
    """Yield ``count`` of ``steps`` at most, the first after ``first_s`` at least."""
    due = time.monotonic() + first_s
    for _, step in zip(range(count), steps, strict=False):
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + pass_s
        yield step


class Cloud:
    """The cloud's part of the baselines, as a service.

    Attributes:
        pace: of its passes.
    """

    def __init__(self, engine: Engine, side: ModelSide) -> None:
        self._engine, self._side = engine, side
        self._caches: dict[tuple[str, ...], bytes] = {}
        self.pace = Pace(0.0)
        self._server = grpc.server(ThreadPoolExecutor(1, "bench-baselines"))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(lambda data, _, answer=answer: answer(data))
            for name, answer in (
                (TEXT, self._text),
                (KV, self._kv),
                (SEQUENCE, lambda data: self._sequence(data, b"")),
                (SEQUENCE_FULL, lambda data: self._sequence(data, bytes(2 * VOCABULARY))),
            )
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop(0.0).wait()

    def texts(self, query: str) -> tuple[str, ...]:
        """Return the documents for ``query``."""
        return tuple(hit.chunk.text for hit in self._side.retrieve(query).hits)

    def cache(self, texts: tuple[str, ...]) -> bytes:
        """Return the file of a session that holds ``texts``; it is made the first time only."""
        if texts not in self._caches:
            ids = self._side.layout.documents(texts)
            session = self._engine.open(EncodedPrompt(ids))
            session.feed(ids, last=0)
            with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
                file = Path(folder) / "kv"
                session.save(file)
                self._caches[texts] = file.read_bytes()
            session.close()
        return self._caches[texts]

    def _text(self, request: bytes) -> bytes:
        return json.dumps(self.texts(_opened(request).query)).encode()

    def _kv(self, request: bytes) -> bytes:
        texts = self.texts(_opened(request).query)
        return _framed([json.dumps(texts).encode(), self.cache(texts)])

    def _sequence(self, request: bytes, vector: bytes) -> bytes:
        """Return all drafts of an answer that this side writes alone, with ``vector`` for each."""
        opened = _opened(request)
        info = self._side.info
        law = AggregationLaw(opened.law, info.vocab_size, opened.temperature, opened.seed)
        decoder = self._side.decoder(opened.query, opened.max_tokens)
        pass_s = self.pace.pass_s
        written = paced(
            drafts(decoder, law, Party.CLOUD, info.eos), opened.max_tokens, pass_s, pass_s
        )
        parts = [part for draft in written for part in (codec.encode_cloud(draft), vector)]
        decoder.close()
        return _framed(parts)


class Baselines:
    """The device's part, and the link to the cloud's; made by :func:`baselines`."""

    def __init__(
        self, engine: Engine, side: ModelSide, cloud: Cloud, link: LinkProxy, channel: grpc.Channel
    ) -> None:
        self._engine, self._side = engine, side
        self._cloud, self._link, self._channel = cloud, link, channel
        self._pace = Pace(0.0)

    def set(self, device: Pace, cloud: Pace, profile: LinkProfile) -> None:
        """Have passes, reading and link take so long from now on."""
        self._pace, self._cloud.pace = device, cloud
        self._link.change(profile)

    def ask(
        self, method: str, query: str, law: AggregationConfig, *, tokens: int, seed: int
    ) -> Written:
        """Return the answer of ``method``: ``tokens`` tokens at most, sampled at temperature 1."""
        info = self._side.info
        opened = Open(query, tokens, identity_of(info), law, 1.0, seed)
        rule = AggregationLaw(law, info.vocab_size, 1.0, seed)
        if method == KV:  # kept beside the index, as the device keeps those of its own documents
            self._cloud.cache(self._cloud.texts(query))
        begun = time.monotonic()
        if method == CRCG:
            return self._central(begun, rule, tokens, self._own(query), query, (0, 0))
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        request = codec.encode_device(opened)
        coming = call.future(request, timeout=_DEADLINE_S)  # before anything is retrieved here
        if method in (SEQUENCE, SEQUENCE_FULL):
            return self._together(begun, rule, query, tokens, coming, len(request))
        own = self._own(query)
        reply: bytes = coming.result()
        size = (len(request), len(reply))
        if method == TEXT:
            return self._central(begun, rule, tokens, (*json.loads(reply), *own), query, size)
        texts, file = _parts(reply)
        return self._central(begun, rule, tokens, (*json.loads(texts), *own), query, size, file)

    def _own(self, query: str) -> tuple[str, ...]:
        return tuple(hit.chunk.text for hit in self._side.retrieve(query).hits)

    def _central(
        self,
        begun: float,
        law: AggregationLaw,
        tokens: int,
        texts: tuple[str, ...],
        query: str,
        size: tuple[int, int],
        file: bytes = b"",
    ) -> Written:
        """Write an answer behind one context of ``texts``, whose beginning ``file`` holds."""
        documents = self._side.layout.documents(texts)
        ids = (*documents, *self._side.layout.after(query))
        from_text = size[1] > 0 and not file
        reading_s = len(documents) * self._pace.prefill_s if from_text else 0.0
        session = self._restored(file) if file else self._engine.open(EncodedPrompt(ids))
        decoder = OneContext(session, ids[session.length :])
        steps = drafts(decoder, law, Party.DEVICE, self._side.info.eos)
        found, first_s = list[int](), 0.0
        for step in paced(steps, tokens, reading_s + self._pace.pass_s, self._pace.pass_s):
            found.append(step.draft.token)
            first_s = first_s or time.monotonic() - begun
        total_s = time.monotonic() - begun
        decoder.close()
        return Written(tuple(found), first_s, total_s, *size)

    def _restored(self, file: bytes) -> Session:
        with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
            path = Path(folder) / "kv"
            path.write_bytes(file)
            return self._engine.restore(path)

    def _together(
        self,
        begun: float,
        law: AggregationLaw,
        query: str,
        tokens: int,
        coming: grpc.Future,
        bytes_up: int,
    ) -> Written:
        """Write alone, then judge the drafts of both sides in one go.

        Behind the first draft that is not the target, drafts stand behind another text than the
        answer's: what comes out is not distributed as the mixture.
        """
        decoder = self._side.decoder(query, tokens)
        pass_s = self._pace.pass_s
        own = list(
            paced(drafts(decoder, law, Party.DEVICE, self._side.info.eos), tokens, pass_s, pass_s)
        )
        decoder.close()
        reply: bytes = coming.result()
        theirs = [codec.decode_cloud(part) for part in _parts(reply)[::2]]
        found = [
            law.judge((mine.draft, draft.draft), position).token
            for position, (mine, draft) in enumerate(zip(own, theirs, strict=False))
            if isinstance(draft, Draft)
        ]
        total_s = time.monotonic() - begun
        return Written(tuple(found), total_s, total_s, bytes_up, len(reply))


@contextlib.contextmanager
def baselines(
    engines: tuple[Engine, Engine], sides: tuple[ModelSide, ModelSide]
) -> Iterator[Baselines]:
    """Serve the cloud's part, and yield the device's."""
    with contextlib.ExitStack() as stack:
        cloud = Cloud(engines[1], sides[1])
        stack.callback(cloud.close)
        link = stack.enter_context(LinkProxy(f"127.0.0.1:{cloud.port}"))
        channel = grpc.insecure_channel(link.address, options=_CHANNEL)
        stack.callback(channel.close)
        grpc.channel_ready_future(channel).result(_DEADLINE_S)
        yield Baselines(engines[0], sides[0], cloud, link, channel)


def _opened(request: bytes) -> Open:
    opened = codec.decode_device(request)
    assert isinstance(opened, Open)
    return opened


def _framed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _parts(data: bytes) -> list[bytes]:
    found, start = list[bytes](), 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        found.append(data[start + 4 : end])
        start = end
    return found
