"""Scores from vLLM, by two methods.

probes: gamma + 1 requests of one token each, which use the server's prefix cache. one_request: the
log-probabilities of a prompt that ends with the draft; vLLM then reads the whole prompt again.
Never together with ``skip_reading_prefix_cache: false``, which ends vLLM 0.32 for all its clients.

Texts go to ``/v1/completions`` as ids. Pictures go to ``/inference/v1/generate`` if the server has
it (``--enable-scale-out``): there the picture travels once. Else they go to
``/v1/chat/completions`` with every request, the answer so far as text, and the ids that the server
makes of it are compared with ours.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.errors import InvalidInput, NotFound, ProtocolError, Unauthenticated
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.stock.http import Count, StockHttp, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.methods import PROBES, MethodChoice
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
from collab_llm_nodes.protocols.edge_cloud.stock.vllm_answers import (
    choices_of,
    row_of_chat,
    row_of_completion,
    row_of_generation,
    rows_of_prompt,
    streamed_tokens,
    token_of,
    tokens_of,
)

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"

_LAW = {**LAW, "top_k": 0}
"""Stated in each request: vLLM takes what it leaves out from generation_config.json."""
_FORGOTTEN = "cache miss for"
"""In vLLM's refusal of a picture by a name that it no longer knows."""


@dataclass(frozen=True)
class _Pictures:
    """Images of a prompt as content parts: whole, and by the name that the server knows them by."""

    turns: tuple[dict[str, Any], ...]
    whole: tuple[dict[str, Any], ...]
    named: tuple[dict[str, Any], ...]


class VllmServer:
    """Requests to one vLLM; see ``StockServer``.

    Args:
        choice: of the method.

    Attributes:
        generates: pictures go to ``/inference/v1/generate``.
    """

    def __init__(
        self, http: StockHttp, model: str, reference: Reference, choice: MethodChoice
    ) -> None:
        self._http, self._model, self._reference = http, model, reference
        self.generates = False
        self.choice = choice

    async def check(self) -> Facts:
        ids = await self._check_tokens()
        context = await context_of(self._http, self._model)
        body = self._completion([ids], max_tokens=REVISION_TOKENS, ignore_eos=True)
        answer = await self._http.post(COMPLETIONS, body, ignore_bytes)
        self.generates = await self._has_generate(ids)
        revision = tuple(token_of(t) for t in tokens_of(choices_of(answer, 1)[0]))
        return Facts(context, revision)

    async def read(self, opened: Open, count: Count) -> ServedPrompt:
        prompt = Prompt(opened.text, opened.images, turns=opened.turns, raw=opened.raw)
        ids = self._reference.encode(prompt)
        pictures = self._pictures(prompt) if prompt.images else None
        served = ServedPrompt(ids, len(ids), pictures)
        if pictures is None:
            body = self._completion([ids], return_token_ids=True)
            answer = await self._http.post(COMPLETIONS, body, count)
            self._check_ids(choices_of(answer, 1)[0].get("prompt_token_ids"), ids)
            return served
        if self.generates:
            body = self._generation(served, ids, pictures.whole, return_token_ids=True)
            answer = await self._http.post(GENERATE, body, count)
        else:
            answer = await self._http.post(CHAT, self._chat(served, (), {}), count)
        length = self._check_ids(answer.get("prompt_token_ids"), ids)
        return ServedPrompt(ids, length, pictures)

    async def score(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        try:
            if prompt.pictures is not None and not self.generates:
                return await self._score_chat(prompt, score, top, count)
            return await self._score_chosen(prompt, score, top, count)
        except InvalidInput as error:
            if top and "logprobs" in error.args[0]:
                error.field, error.remedy = "top_k", _MAX_LOGPROBS
            raise

    async def _score_chosen(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        """Score by the method that seems the cheaper one."""
        method = self.choice.next()
        begun, size = time.monotonic(), 0

        def count_round(up: int, down: int) -> None:
            nonlocal size
            size += up + down
            count(up, down)

        ask = self._probe if method == PROBES else self._score_at_once
        rows = await ask(prompt, score, top, count_round)
        self.choice.learn(method, time.monotonic() - begun, size)
        return rows

    async def choose(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], allowed: Sequence[int], count: Count
    ) -> int:
        sampling = {"allowed_token_ids": list(allowed)}
        if prompt.pictures is not None and self.generates:
            answer = await self._generate(prompt, (*prompt.ids, *prefix), sampling, count)
        else:
            path, body = self._continuation(prompt, prefix, sampling)
            answer = await self._http.post(path, body, count)
        (token,) = row_of_generation(choices_of(answer, 1)[0], 0)
        return token

    async def stream(
        self, prompt: ServedPrompt, prefix: tuple[int, ...], most: int, count: Count
    ) -> AsyncGenerator[int, None]:
        sent = 0
        for whole in (False, True):
            path, body = self._continuation(prompt, prefix, {"max_tokens": most}, whole=whole)
            try:
                async for event in self._http.events(path, body | {"stream": True}, count):
                    for token in streamed_tokens(event):
                        sent += 1
                        yield token
                return
            except InvalidInput as error:
                if sent or whole or not _forgotten(error):
                    raise

    def _continuation(
        self,
        prompt: ServedPrompt,
        prefix: tuple[int, ...],
        sampling: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Return path and body of a greedy request after ``prefix`` that returns token ids.

        Args:
            whole: show pictures to ``GENERATE`` whole, not by name.
        """
        ids = (*prompt.ids, *prefix)
        if not isinstance(prompt.pictures, _Pictures):
            return COMPLETIONS, self._completion([ids], return_token_ids=True, **sampling)
        if not self.generates:
            return CHAT, self._chat(prompt, prefix, sampling)
        parts = prompt.pictures.whole if whole else prompt.pictures.named
        return GENERATE, self._generation(prompt, ids, parts, sampling)

    # Ways to score a draft.

    async def _probe(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        start = (*prompt.ids, *score.prefix)
        prefixes = [(*start, *score.tokens[:n]) for n in range(len(score.tokens) + 1)]
        if prompt.pictures is None:
            body = self._completion(prefixes, top)
            answer = await self._http.post(COMPLETIONS, body, count)
            self._check_count(answer, sum(map(len, prefixes)))
            return [row_of_completion(c, top) for c in choices_of(answer, len(prefixes))]
        rows = [self._generated_row(prompt, prefix, top, count) for prefix in prefixes]
        return await asyncio.gather(*rows)

    async def _generated_row(
        self, prompt: ServedPrompt, ids: tuple[int, ...], top: int, count: Count
    ) -> Row:
        sampling = {"detokenize": False, "logprobs": max(1, top), **_law(top)}
        answer = await self._generate(prompt, ids, sampling, count)
        self._check_count(answer, prompt.length + len(ids) - len(prompt.ids))
        return row_of_generation(choices_of(answer, 1)[0], top)

    async def _score_at_once(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        ids = (*prompt.ids, *score.prefix, *score.tokens)
        if prompt.pictures is None:
            body = self._completion([ids], top, prompt_logprobs=max(1, top))
            answer = await self._http.post(COMPLETIONS, body, count)
            self._check_count(answer, len(ids))
            choice = choices_of(answer, 1)[0]
            last = row_of_completion(choice, top)
            return [*rows_of_prompt(choice.get("prompt_logprobs"), score.tokens, top), last]
        sampling = {"prompt_logprobs": max(1, top), "logprobs": max(1, top), **_law(top)}
        answer = await self._generate(prompt, ids, sampling, count)
        self._check_count(answer, prompt.length + len(ids) - len(prompt.ids))
        last = row_of_generation(choices_of(answer, 1)[0], top)
        return [*rows_of_prompt(answer.get("prompt_logprobs"), score.tokens, top), last]

    async def _score_chat(
        self, prompt: ServedPrompt, score: Score, top: int, count: Count
    ) -> Sequence[Row]:
        """Score over the chat API, which reads the answer so far as text."""
        answer_so_far = (*score.prefix, *score.tokens)
        fields = {
            "prompt_logprobs": max(1, top),
            "logprobs": True,
            "top_logprobs": max(1, top),
            "return_tokens_as_token_ids": True,
            **_law(top),
        }
        answer = await self._http.post(CHAT, self._chat(prompt, answer_so_far, fields), count)
        try:
            self._check_ids(answer.get("prompt_token_ids"), (*prompt.ids, *answer_so_far))
        except ProtocolError as error:
            error.remedy = "start vLLM with --enable-scale-out: as text, tokens may become others"
            raise
        last = row_of_chat(choices_of(answer, 1)[0], top)
        return [*rows_of_prompt(answer.get("prompt_logprobs"), score.tokens, top), last]

    async def _generate(
        self,
        prompt: ServedPrompt,
        ids: tuple[int, ...],
        sampling: Mapping[str, Any],
        count: Count,
    ) -> dict[str, Any]:
        """Generate with the pictures by name; whole, where the server has forgotten them."""
        assert isinstance(prompt.pictures, _Pictures)
        try:
            body = self._generation(prompt, ids, prompt.pictures.named, sampling)
            return await self._http.post(GENERATE, body, count)
        except InvalidInput as error:
            if not _forgotten(error):
                raise
            body = self._generation(prompt, ids, prompt.pictures.whole, sampling)
            return await self._http.post(GENERATE, body, count)

    # Bodies of requests.

    def _completion(
        self, prompts: Sequence[tuple[int, ...]], top: int = 0, **fields: Any
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": 1,
            "logprobs": max(1, top),
            "return_tokens_as_token_ids": True,
            **_LAW,
            **_law(top),
            **fields,
        }

    def _generation(
        self,
        prompt: ServedPrompt,
        ids: tuple[int, ...],
        parts: Sequence[dict[str, Any]],
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        law = {"max_tokens": 1, "temperature": 0.0, **_LAW, **(sampling or {})}
        return {
            "model": self._model,
            "token_ids": list(ids),
            "content_parts": list(parts),
            "sampling_params": law,
            **fields,
        }

    def _chat(
        self, prompt: ServedPrompt, answer: tuple[int, ...], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        assert isinstance(prompt.pictures, _Pictures)
        turns = list(prompt.pictures.turns)
        if answer:
            turns.append({"role": "assistant", "content": self._reference.decode(answer)})
        return {
            "model": self._model,
            "messages": turns,
            "max_tokens": 1,
            "temperature": 0.0,
            "add_generation_prompt": not answer,
            "continue_final_message": bool(answer),
            "return_token_ids": True,
            **_LAW,
            **fields,
        }

    def _pictures(self, prompt: Prompt) -> _Pictures:
        names = [uuid.uuid4().hex for _ in prompt.images]
        urls = [data_url(image) for image in prompt.images]
        whole = [
            {"type": "image_url", "url": url, "uuid": name}
            for url, name in zip(urls, names, strict=True)
        ]
        named = [{"type": "image_url", "url": None, "uuid": name} for name in names]
        shown = [
            {"type": "image_url", "image_url": {"url": url}, "uuid": name}
            for url, name in zip(urls, names, strict=True)
        ]
        turns: list[dict[str, Any]] = [
            {"role": turn.role, "content": turn.content} for turn in prompt.turns
        ]
        turns.append({"role": "user", "content": [*shown, {"type": "text", "text": prompt.text}]})
        return _Pictures(tuple(turns), tuple(whole), tuple(named))

    # Checks of the server and its answers.

    async def _check_tokens(self) -> tuple[int, ...]:
        """Compare the server's tokenizer and template with ours; return the ids of the probe."""
        plain = self._reference.encode(Prompt(PROBE, raw=True))
        chat = self._reference.encode(Prompt(PROBE, turns=_EARLIER))
        messages = [*({"role": t.role, "content": t.content} for t in _EARLIER), _PROBE_TURN]
        await check_tokens(self._http, self._model, {"prompt": PROBE}, plain, "tokenizer")
        await check_tokens(self._http, self._model, {"messages": messages}, chat, "chat template")
        return plain

    async def _has_generate(self, ids: tuple[int, ...]) -> bool:
        if not self._reference.sees:
            return False
        body = {"model": self._model, "token_ids": list(ids), "sampling_params": {"max_tokens": 1}}
        try:
            await self._http.post(GENERATE, body, ignore_bytes)
        except (NotFound, Unauthenticated):  # 403 without --enable-scale-out
            return False
        return True

    def _check_ids(self, returned: object, sent: tuple[int, ...]) -> int:
        """Compare the ids that the server has read with those sent; return how many it has read."""
        ids = tuple(returned) if isinstance(returned, list) else ()
        if self._reference.unexpanded(ids) != sent:
            raise wrong_answer("it has read other tokens")
        return len(ids)

    def _check_count(self, answer: Mapping[str, Any], sent: int) -> None:
        usage = answer.get("usage")
        if not isinstance(usage, dict) or usage.get("prompt_tokens") != sent:
            raise wrong_answer(f"it has not read {sent} tokens")


_EARLIER = (Turn("user", "Where is the chair?"), Turn("assistant", "On the left."))
_PROBE_TURN = {"role": "user", "content": PROBE}

_MAX_LOGPROBS = "at most the server's --max-logprobs (20 by default; a guide needs 20)"


def _forgotten(error: InvalidInput) -> bool:
    """Return True if the server refused a request because it has forgotten a picture."""
    return _FORGOTTEN in error.args[0].lower()


def _law(top: int) -> dict[str, float]:
    """Return the temperature: greedy, or the law that the log-probabilities are of."""
    return {"temperature": 1.0 if top else 0.0}
