"""Requests that vLLM refuses with 400: a picture travels again only if it was forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from session_links import GREEDY

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.methods import MethodChoice
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.server import ServedPrompt
from collab_llm_nodes.protocols.edge_cloud.stock.session import Score
from collab_llm_nodes.protocols.edge_cloud.stock.vllm import VllmServer

FORGOTTEN = "Cache miss for image at index 0 but data is not provided."
TOO_MANY = "Requested prompt logprobs of 21, which is greater than max allowed: 20"


class Refusing:
    """Reads prompts; refuses each request that shows pictures by name."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.shown: list[str | None] = []

    async def post(self, path: str, body: Mapping[str, Any], count: Count) -> dict[str, Any]:
        (part,) = body["content_parts"]
        self.shown.append(part["url"])
        if part["url"] is None:
            raise InvalidInput(f"the server answers 400: {self.words}", field="url")
        return {
            "prompt_token_ids": body["token_ids"],
            "choices": [{"index": 0, "token_ids": [7]}],
        }


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load("nav-target")


def served(http: Any, reference: Reference) -> tuple[VllmServer, ServedPrompt]:
    server = VllmServer(http, "m", reference, MethodChoice("one_request"))
    server.generates = True
    opened = Open("find the red ball.", (b"picture",), GREEDY, 8, reference.vocabulary)
    return server, asyncio.run(server.read(opened, ignore_bytes))


def test_a_forgotten_picture_travels_again(reference: Reference) -> None:
    http = Refusing(FORGOTTEN)
    server, prompt = served(http, reference)
    assert asyncio.run(server.choose(prompt, (), [7], ignore_bytes)) == 7
    read, named, whole = http.shown
    assert (named, whole) == (None, read)


def test_no_picture_travels_again_for_another_refusal(reference: Reference) -> None:
    http = Refusing(TOO_MANY)
    server, prompt = served(http, reference)
    with pytest.raises(InvalidInput) as caught:
        asyncio.run(server.score(prompt, Score((), (3,)), 21, ignore_bytes))
    assert caught.value.field == "top_k"
    assert "--max-logprobs" in caught.value.remedy
    assert http.shown[1:] == [None]
