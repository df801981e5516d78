"""Scores from SGLang's ``/generate``: one request computes and returns the draft's tail alone.

``logprob_start_len`` is the last confirmed token: reuse of the prefix ends exactly there. The entry
at the start has no value, and pads of images shift what precedes it, so entries are counted from
the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from collab_llm_nodes.models.guide import refused
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, StockHttp, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.reference import PROBE, Reference
from collab_llm_nodes.protocols.edge_cloud.stock.server import (
    LAW,
    REVISION_TOKENS,
    Facts,
    Row,
    ServedPrompt,
    check_tokens,
    context_of,
    data_url,
    wrong_answer,
)
from collab_llm_nodes.protocols.edge_cloud.stock.session import Score

GENERATE = "/generate"
_LAW = {**LAW, "top_k": -1}


class SglangServer:
    """Requests to one SGLang; see ``StockServer``."""

    def __init__(self, http: StockHttp, model: str, reference: Reference) -> None:
        self._http, self._model, self._reference = http, model, reference

    async def check(self) -> Facts:
        context = await context_of(self._http, self._model)
        ids = self._reference.encode(Prompt(PROBE, raw=True))
        await check_tokens(self._http, self._model, {"prompt": PROBE}, ids, "tokenizer")
        answer = await self._http.post(
            GENERATE, _body(ids, REVISION_TOKENS, 0, ignore_eos=True), ignore_bytes
        )
        return Facts(context, tuple(_ids(answer)))

    async def read(self, opened: Open, count: Count) -> ServedPrompt:
        prompt = Prompt(opened.text, opened.images, turns=opened.turns, raw=opened.raw)
        ids = self._reference.encode(prompt)
        images = [data_url(image) for image in opened.images]
        answer = await self._http.post(GENERATE, _body(ids, 1, 0, images=images), count)
        length = _meta(answer).get("prompt_tokens")
        if not isinstance(length, int) or length < len(ids):
            raise wrong_answer("no number of prompt tokens")
        if not images and length != len(ids):
            raise wrong_answer("it has read other tokens")
        return ServedPrompt(ids, length, images or None)

    async def score(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        ids = (*prompt.ids, *score.prefix, *score.tokens)
        start = prompt.length + len(score.prefix) - 1
        body = _body(ids, 1, top, images=prompt.pictures)
        body |= {"return_logprob": True, "logprob_start_len": start}
        body |= {"top_logprobs_num": max(1, top), "return_text_in_logprobs": False}
        answer = await self._http.post(GENERATE, body, count)
        meta, tokens = _meta(answer), score.tokens
        if meta.get("prompt_tokens") != start + 1 + len(tokens):
            raise wrong_answer("it has read other tokens")
        read = [_entry(e)[0] for e in _tail(meta.get("input_token_logprobs"), len(tokens))]
        if read != list(tokens):
            raise wrong_answer("log-probabilities of other tokens")
        listed = _tail(meta.get("input_top_logprobs"), len(tokens))
        rows = [_row(each, top) for each in listed]
        if not top:
            (drawn,) = _ids(answer)[:1] or [-1]
            return [*rows, {drawn: 0.0}]
        return [*rows, _row(_tail(meta.get("output_top_logprobs"), 1)[0], top)]

    async def choose(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], allowed: Sequence[int], count: Count
    ) -> int:
        raise refused("none of the likeliest tokens is allowed, and SGLang takes no list", "none")

    async def stream(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], most: int, count: Count
    ) -> AsyncGenerator[int, None]:
        body = _body((*prompt.ids, *prefix), most, 0, images=prompt.pictures)
        known = 0
        async for event in self._http.events(GENERATE, body | {"stream": True}, count):
            ids, made = _ids(event), _meta(event).get("completion_tokens")
            # All so far, or with --stream-output the new ones alone.
            for token in ids[known:] if len(ids) == made else ids:
                known += 1
                yield token


def _body(
    ids: tuple[int, ...], most: int, top: int, images: object = None, **fields: Any
) -> dict[str, Any]:
    law = {"temperature": 1.0 if top else 0.0, "max_new_tokens": most, **_LAW, **fields}
    body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": law}
    return body | ({"image_data": images} if images else {})


def _meta(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise wrong_answer("no meta_info")
    return meta


def _ids(answer: Mapping[str, Any]) -> list[int]:
    ids = answer.get("output_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise wrong_answer("no output_ids")
    return ids


def _tail(entries: object, count: int) -> list[Any]:
    """Return the last ``count`` entries."""
    if not isinstance(entries, list) or len(entries) < count:
        raise wrong_answer("no log-probabilities")
    return entries[len(entries) - count :]


def _entry(entry: object) -> tuple[int, float]:
    """Return token and log-probability of ``[log-probability, id, text]``."""
    if not isinstance(entry, (list, tuple)) or len(entry) < 2:
        raise wrong_answer("a log-probability without token")
    value, token = entry[:2]
    if not isinstance(token, int) or not isinstance(value, (int, float)) or value != value:
        raise wrong_answer("a log-probability that is no number")
    return token, float(value)


def _row(entries: object, top: int) -> Row:
    if not isinstance(entries, list) or not entries:
        raise wrong_answer("no log-probabilities")
    row = dict(_entry(each) for each in entries)
    likeliest = sorted(row.items(), key=lambda each: -each[1])[: max(1, top)]
    return dict(likeliest)
