"""SGLang's ``/generate`` as its sources describe it; no SGLang has run here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from session_links import GREEDY

from collab_llm_nodes.errors import NotFound, ProtocolError, VocabularyMismatch
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.reference import PROBE, Reference
from collab_llm_nodes.protocols.edge_cloud.stock.server import Facts, ServedPrompt
from collab_llm_nodes.protocols.edge_cloud.stock.session import Score
from collab_llm_nodes.protocols.edge_cloud.stock.sglang import SglangServer

TEXT = "Where is the chair?"
PADS = 6  # tokens of a picture, beside its placeholder


class FakeSglang:
    """Answers in SGLang's form: entries from ``logprob_start_len`` on, the first without value."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.bodies: list[Mapping[str, Any]] = []
        self.meta: dict[str, Any] = {}  # of the next answer, instead of the honest one
        self.disjoint = False  # --stream-output

    async def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/models"
        return {"data": [{"id": "m", "max_model_len": 512}]}

    async def post(self, path: str, body: Mapping[str, Any], count: Count) -> dict[str, Any]:
        self.bodies.append(body)
        if path == "/tokenize":
            return {"tokens": list(self.reference.encode(Prompt(body["prompt"], raw=True)))}
        assert path == "/generate"
        ids, law = body["input_ids"], body["sampling_params"]
        length = len(ids) + (PADS if body.get("image_data") else 0)
        meta: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": 1}
        if body.get("return_logprob"):
            kept = length - body["logprob_start_len"]
            top = body["top_logprobs_num"]
            read = [[-1.0, token, None] for token in ids[-kept:]]
            meta |= {
                "input_token_logprobs": [[None, ids[-kept], None], *read[1:]],
                "input_top_logprobs": [None, *(_top(token, top) for token in ids[-kept:-1])],
                "output_top_logprobs": [_top(ids[-1], top)],
            }
        new = [_next(ids[-1])]
        while len(new) < law["max_new_tokens"]:
            new.append(_next(new[-1]))
        return {"output_ids": new, "meta_info": {**meta, **self.meta}}

    async def events(
        self, path: str, body: Mapping[str, Any], count: Count
    ) -> AsyncIterator[dict[str, Any]]:
        whole = (await self.post(path, body, count))["output_ids"]
        for n in range(1, len(whole) + 1):
            ids = whole[n - 1 : n] if self.disjoint else whole[:n]
            yield {"output_ids": ids, "meta_info": {"completion_tokens": n}}


def _next(token: int) -> int:
    return (7 * token + 3) % 400


def _top(token: int, top: int) -> list[list[Any]]:
    return [[-0.5 - n, _next(token) + n, None] for n in range(top)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load("nav-target")


@pytest.fixture
def fake(reference: Reference) -> FakeSglang:
    return FakeSglang(reference)


@pytest.fixture
def server(fake: FakeSglang, reference: Reference) -> SglangServer:
    http: Any = fake
    return SglangServer(http, "m", reference)


def read(server: SglangServer, *images: bytes) -> ServedPrompt:
    return asyncio.run(server.read(Open(TEXT, images, GREEDY, 8, ""), ignore_bytes))


def test_a_server_is_checked(server: SglangServer, fake: FakeSglang, reference: Reference) -> None:
    ids = list(reference.encode(Prompt(PROBE, raw=True)))
    expected = [_next(ids[-1])]
    while len(expected) < 8:
        expected.append(_next(expected[-1]))
    assert asyncio.run(server.check()) == Facts(512, tuple(expected))


def test_another_tokenizer_or_model_is_refused(fake: FakeSglang, reference: Reference) -> None:
    http: Any = fake
    with pytest.raises(NotFound):
        asyncio.run(SglangServer(http, "other", reference).check())
    fake.reference = Reference.load("text-target")
    with pytest.raises(VocabularyMismatch):
        asyncio.run(SglangServer(http, "m", reference).check())


@pytest.mark.parametrize("images", [(), (b"picture",)])
@pytest.mark.parametrize("top", [0, 5])
def test_the_rows_of_a_draft_are_counted_from_the_end(
    server: SglangServer, fake: FakeSglang, images: tuple[bytes, ...], top: int
) -> None:
    prompt = read(server, *images)
    score = Score((9, 8), (11, 12, 13))
    rows = asyncio.run(server.score(prompt, score, top, ignore_bytes))
    assert [max(row, key=row.__getitem__) for row in rows] == [_next(t) for t in (8, 11, 12, 13)]
    assert all(len(row) == max(1, top) for row in rows)
    body = fake.bodies[-1]
    assert body["logprob_start_len"] == prompt.length + 1  # the last confirmed token
    assert prompt.length == len(prompt.ids) + (PADS if images else 0)


def test_without_a_draft_the_next_token_is_the_row(server: SglangServer) -> None:
    rows = asyncio.run(server.score(read(server), Score((9,), ()), 0, ignore_bytes))
    assert rows == [{_next(9): 0.0}]


@pytest.mark.parametrize("disjoint", [False, True])
def test_streams_of_both_kinds_give_each_token_once(
    server: SglangServer, fake: FakeSglang, disjoint: bool
) -> None:
    fake.disjoint = disjoint

    async def tokens(prompt: ServedPrompt) -> list[int]:
        return [t async for t in server.stream(prompt, (9,), 4, ignore_bytes)]

    first = _next(9)
    assert asyncio.run(tokens(read(server)))[:2] == [first, _next(first)]
    assert len(asyncio.run(tokens(read(server)))) == 4


@pytest.mark.parametrize(
    "lie",
    [
        {"prompt_tokens": 5},
        {"input_token_logprobs": None},
        {"input_token_logprobs": [[-1.0, 1, None]] * 9},
        {"input_top_logprobs": [None]},
        {"input_top_logprobs": [None, [], [], []]},
        {"input_top_logprobs": [[["x", 3, None]]] * 4},
    ],
)
def test_answers_that_do_not_fit_are_refused(
    server: SglangServer, fake: FakeSglang, lie: dict[str, Any]
) -> None:
    prompt = read(server)
    fake.meta = lie
    with pytest.raises(ProtocolError):
        asyncio.run(server.score(prompt, Score((9, 8), (11, 12, 13)), 0, ignore_bytes))
