"""``collab-llm check lossless --server URL``: a stock server as the target, against itself.

The server's own greedy answers come from its chat API, in one request each: by its own template,
its own pictures and its own decoding loop. The edge-cloud path must give the same tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
from rich.console import Console
from rich.text import Text

from collab_llm_lab.bench.jupiter.questions import QUESTIONS
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.settings import TargetLinkConfig
from collab_llm_nodes.transport.credentials import read_token

MAX_TOKENS = 48
DEADLINE_S = 300.0
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
    right = [own_answer(config, prompt) for prompt in asked]
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


def own_answer(config: TargetLinkConfig, prompt: Prompt) -> tuple[int, ...] | str:
    """Return the server's own greedy answer: its tokens, or its text if it returns no ids.

    Raises:
        Unavailable: it gives none.
    """
    pictures = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:;base64,{base64.b64encode(image).decode()}"},
        }
        for image in prompt.images
    ]
    content: Any = [*pictures, {"type": "text", "text": prompt.text}] if pictures else prompt.text
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.turns]
    token = read_token(config.token, config.token_file)
    body = {
        "model": config.model,
        "messages": [*turns, {"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }
    try:
        response = httpx2.post(
            f"{config.base_url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=DEADLINE_S,
            trust_env=False,
        )
        (choice,) = response.raise_for_status().json()["choices"]
    except (httpx2.HTTPError, KeyError, ValueError) as error:
        raise Unavailable(f"no answer: {error}", field="--server", remedy="see its log") from error
    ids = choice.get("token_ids")
    return tuple(ids) if ids else str(choice["message"]["content"])


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
