"""Recorded answers of real stock servers: how they are recorded, and played back.

scripts/stock_server.sh nav-target 8000 &
scripts/with-ros python test/support/stock_recording.py http://127.0.0.1:8000 nav-target FILE
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, StockHttp, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.methods import MethodChoice
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference
from collab_llm_nodes.protocols.edge_cloud.stock.server import Facts, Row
from collab_llm_nodes.protocols.edge_cloud.stock.session import Score
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.protocols.edge_cloud.stock.vllm import VllmServer

TEXT = "find the red ball. history: none."
TOP = 5
GENERATED = 8


def anonymous(body: Any) -> Any:
    """Return ``body`` without pictures and their names, which differ from run to run."""
    if isinstance(body, Mapping):
        hidden = {name: "..." for name in ("url", "uuid") if body.get(name) is not None}
        return {**{name: anonymous(value) for name, value in body.items()}, **hidden}
    return [anonymous(each) for each in body] if isinstance(body, (list, tuple)) else body


class Recorder(StockHttp):
    """A connection that keeps what it asks and what it is answered."""

    def __init__(self, config: TargetLinkConfig) -> None:
        super().__init__(config)
        self.exchanges: list[dict[str, Any]] = []

    async def get(self, path: str) -> dict[str, Any]:
        return self._keep(path, None, await super().get(path))

    async def post(self, path: str, body: Mapping[str, Any], count: Count) -> dict[str, Any]:
        return self._keep(path, body, await super().post(path, body, count))

    async def events(
        self, path: str, body: Mapping[str, Any], count: Count
    ) -> AsyncIterator[dict[str, Any]]:
        events = [event async for event in super().events(path, body, count)]
        self._keep(path, body, events)
        for event in events:
            yield event

    def _keep(self, path: str, body: Any, answer: Any) -> Any:
        self.exchanges.append({"path": path, "body": anonymous(body), "answer": answer})
        return answer


class Player:
    """Answers as recorded, in the same order, and checks that the same is asked."""

    def __init__(self, exchanges: Sequence[Mapping[str, Any]]) -> None:
        self._left = list(exchanges)

    async def get(self, path: str) -> dict[str, Any]:
        return self._next(path, None)

    async def post(self, path: str, body: Mapping[str, Any], count: Count) -> dict[str, Any]:
        return self._next(path, body)

    async def events(
        self, path: str, body: Mapping[str, Any], count: Count
    ) -> AsyncIterator[dict[str, Any]]:
        for event in self._next(path, body):
            yield event

    def _next(self, path: str, body: Any) -> Any:
        expected = self._left.pop(0)
        assert path == expected["path"]
        assert anonymous(body) == expected["body"]
        return expected["answer"]


@dataclass(frozen=True)
class Played:
    """What a server has said about one prompt.

    Attributes:
        alone: its greedy answer, streamed.
        greedy: rows of a draft, one token of which is wrong, by method.
        top: the same with the ``TOP`` likeliest tokens.
    """

    facts: Facts
    length: int
    alone: tuple[int, ...]
    draft: tuple[int, ...]
    greedy: Mapping[str, Sequence[Row]]
    top: Mapping[str, Sequence[Row]]


async def play(
    http: Any, model: str, picture: bytes | None, *, generates: bool, tokenizer: str = ""
) -> Played:
    """Ask a vLLM everything that its sessions ask.

    Args:
        generates: use ``/inference/v1/generate`` where the server has it.
        tokenizer: folder of the model that the server served; that of ``model`` if empty.
    """
    reference = Reference.load(tokenizer or model)
    server = VllmServer(http, model, reference, MethodChoice("auto"))
    facts = await server.check()
    server.generates = server.generates and generates
    images = () if picture is None else (picture,)
    opened = Open(TEXT, images, SamplingConfig(), GENERATED, reference.vocabulary)
    prompt = await server.read(opened, ignore_bytes)
    alone = [token async for token in server.stream(prompt, (), GENERATED, ignore_bytes)]
    draft = (alone[2], alone[3], (alone[4] + 1) % reference.vocab_size)
    score = Score(tuple(alone[:2]), draft)
    rows: dict[int, dict[str, Sequence[Row]]] = {0: {}, TOP: {}}
    for top, found in rows.items():
        for method in ("probes", "one_request"):
            server.choice.only = method
            found[method] = await server.score(prompt, score, top, ignore_bytes)
    return Played(facts, prompt.length, tuple(alone), draft, rows[0], rows[TOP])


async def record(url: str, model: str, picture: bytes) -> dict[str, Any]:
    """Return the exchanges of all ways to ask the vLLM at ``url``."""
    recorded = {}
    for name, shown, generates in WAYS:
        config = TargetLinkConfig(
            kind="vllm",
            url=url,
            model=model,
            tokenizer=model,
            link=LinkConfig(verdict_deadline_s=120.0),
            parallel=1,  # in order
        )
        http = Recorder(config)
        await play(http, model, picture if shown else None, generates=generates)
        await http.close()
        recorded[name] = http.exchanges
    return recorded


WAYS = (("text", False, True), ("picture", True, True), ("chat", True, False))
"""Name, with a picture or not, and by ``/inference/v1/generate`` or not."""

if __name__ == "__main__":
    from collab_llm_lab.bench.scenes import scene_prompts

    url, model, file = sys.argv[1:]
    (scene,) = scene_prompts(1, 0)
    Path(file).write_text(json.dumps(asyncio.run(record(url, model, scene.images[0]))) + "\n")
