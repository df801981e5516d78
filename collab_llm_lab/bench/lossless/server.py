"""``collab-llm check lossless --server URL``: a stock server as the target, against itself.

The server's own greedy answers come from its chat API, in one request each: by its own template,
its own pictures and its own decoding loop. The edge-cloud path must give the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from collab_llm_lab.bench.jupiter.questions import QUESTIONS
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.http import StockHttp, ignore_bytes
from collab_llm_nodes.protocols.edge_cloud.stock.server import context_of, data_url
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig

MAX_TOKENS = 64
DEADLINE_S = 300.0
CHAT = "/v1/chat/completions"
METHODS = {"vllm": ("probes", "one_request"), "sglang": ("auto",)}


def check_server(
    config: TargetLinkConfig, *, draft: str, prompts: int, seed: int, console: Console
) -> dict[str, Any]:
    """Compare answers to ``prompts`` prompts, by each method of the server.

    Pictures and text where the model sees, else text.

    Args:
        draft: folder, hub id or shipped name of the draft model.

    Returns:
        ``<method>`` with ``answers, tokens, rounds, tau, mismatches, bytes_up_per_round,
        bytes_down_per_round``; ``mismatches`` of all.
    """
    set_threads(ModelConfig(path=draft))
    engine = Engine(load(ModelConfig(path=draft)))
    asked = server_prompts(engine, prompts, seed)
    right = own_answers(config, asked)
    results: dict[str, Any] = {"server": config.url, "kind": config.kind, "model": config.model}
    for method in METHODS[config.kind]:
        row = _compare(config, method, engine, asked, right, console)
        results[method] = row
        console.print(
            f"{method}: {row['answers']} answers, {row['tokens']} tokens,"
            f" tau {row['tau']:.2f}: {row['mismatches']} mismatches"
        )
    results["mismatches"] = sum(results[m]["mismatches"] for m in METHODS[config.kind])
    return results


def server_prompts(draft: Engine, count: int, seed: int) -> list[Prompt]:
    """Return questions for the model that ``draft`` drafts for: with pictures if it sees."""
    if draft.loaded.sees:
        return scene_prompts(count, seed)
    questions = [question for group in QUESTIONS.values() for question in group]
    earlier = (Turn("user", questions[0]), Turn("assistant", "It depends."))
    return [
        Prompt(questions[n % len(questions)], turns=earlier * (n // len(questions)))
        for n in range(seed, seed + count)
    ]


def own_answers(config: TargetLinkConfig, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | str]:
    """Return the server's own greedy answers: their tokens, or texts if it returns no ids.

    Raises:
        NotFound: it does not serve the model.
        CollabError: it gives no answer; see ``StockHttp.post``.
    """
    return asyncio.run(_own_answers(config, prompts))


async def _own_answers(
    config: TargetLinkConfig, prompts: Sequence[Prompt]
) -> list[tuple[int, ...] | str]:
    patient = replace(config.link, verdict_deadline_s=DEADLINE_S)
    http = StockHttp(replace(config, link=patient))
    try:
        await context_of(http, config.model)
        bodies = [_chat_body(config.model, prompt) for prompt in prompts]
        return [_read(await http.post(CHAT, body, ignore_bytes)) for body in bodies]
    finally:
        await http.close()


def _chat_body(model: str, prompt: Prompt) -> dict[str, Any]:
    """Return the request for a greedy answer to ``prompt``."""
    pictures = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in prompt.images
    ]
    content: Any = [*pictures, {"type": "text", "text": prompt.text}] if pictures else prompt.text
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.turns]
    return {
        "model": model,
        "messages": [*turns, {"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }


def _read(answer: Any) -> tuple[int, ...] | str:
    """Return tokens or text of a chat's answer."""
    try:
        (choice,) = answer["choices"]
        ids = choice.get("token_ids")
        return tuple(ids) if ids else str(choice["message"]["content"] or "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            "the server's answer is no chat completion", field="--server", remedy="see its log"
        ) from error


def _compare(
    config: TargetLinkConfig,
    method: str,
    draft: Engine,
    prompts: Sequence[Prompt],
    right: Sequence[tuple[int, ...] | str],
    console: Console,
) -> dict[str, Any]:
    total, mismatches = EdgeCloudMetrics(), 0
    with StockClient(replace(config, method=method)) as client:
        runner = RemoteRunner(draft, client)
        for number, (prompt, expected) in enumerate(zip(prompts, right, strict=True)):
            made = runner.generate(prompt, max_tokens=MAX_TOKENS, deadline_s=DEADLINE_S)
            total.add(made.metrics)
            got = made.text if isinstance(expected, str) else made.tokens
            if got != expected:
                mismatches += 1
                found = f" {method}, prompt {number}: {got} instead of {expected}"
                console.print(Text.assemble(("MISMATCH", "red"), found))
    return {
        "answers": len(prompts),
        "tokens": total.tokens,
        "rounds": total.rounds,
        "tau": total.tau,
        "mismatches": mismatches,
        "bytes_up_per_round": total.bytes_up / total.rounds,
        "bytes_down_per_round": total.bytes_down / total.rounds,
    }
