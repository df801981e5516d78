"""The check and the benchmark of stock servers, on a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_vllm import MODEL, FakeVllm
from rich.console import Console

from collab_llm_lab.bench.edge_cloud_server import (
    GAMMA,
    Measured,
    Script,
    by_server,
    measure_robots,
)
from collab_llm_lab.bench.lossless.server import MAX_TOKENS, check_server, server_prompts
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.stock.client import StockClient
from collab_llm_nodes.protocols.edge_cloud.stock.reference import Reference

QUIET = Console(quiet=True)
PATIENT = LinkConfig(verdict_deadline_s=60.0)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm(Reference.load(MODEL)) as serving:
        yield serving


@pytest.fixture(scope="module")
def draft() -> Engine:
    return Engine(load(ModelConfig(path="text-worker")))


def test_the_check_finds_no_mismatch_at_an_honest_server(server: FakeVllm) -> None:
    config = server.config(link=PATIENT)
    results = check_server(config, draft="text-worker", prompts=2, seed=0, console=QUIET)
    assert results["mismatches"] == 0
    for method in ("probes", "one_request"):
        assert results[method]["answers"] == 2
        assert results[method]["tokens"] > 2
        assert results[method]["bytes_down_per_round"] > 0


def test_the_check_counts_answers_that_differ(server: FakeVllm) -> None:
    def differ(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if path != "/v1/chat/completions":
            return None
        (choice,) = honest["choices"]
        return {"choices": [{**choice, "token_ids": [*choice["token_ids"][:-1], 7]}]}

    server.fault = differ
    config = server.config(link=PATIENT)
    results = check_server(config, draft="text-worker", prompts=1, seed=0, console=QUIET)
    assert results["mismatches"] == 2  # by each method


def test_a_script_spoils_some_drafts_and_knows_the_verdicts(draft: Engine) -> None:
    (prompt,) = server_prompts(draft, 1, 0)
    answer = tuple(range(10, 10 + MAX_TOKENS))
    script = Script.of(prompt, answer, draft)
    assert tuple(t for verdict in script.verdicts for t in verdict) == answer
    spoiled = [d.tokens != v[:-1] for d, v in zip(script.drafts, script.verdicts, strict=True)]
    assert any(spoiled)
    assert not all(spoiled)
    assert all(len(d.tokens) <= GAMMA for d in script.drafts)


def test_many_robots_get_the_verdicts_of_their_scripts(server: FakeVllm, draft: Engine) -> None:
    prompts = server_prompts(draft, 2, 0)
    scripts = [
        Script.of(prompt, server.greedy(server.reference.encode(prompt), MAX_TOKENS), draft)
        for prompt in prompts
    ]
    with StockClient(server.config(link=PATIENT)) as client:
        row = measure_robots(client, scripts, 3, 0.5)
    assert row["output_mismatches"] == 0
    assert row["answers"] >= 3
    assert row["rounds_per_s"] > 0
    assert row["bytes_up_per_round"] > 0


def test_rows_are_by_server_then_robots_then_method() -> None:
    row, mode = {"output_mismatches": 1}, {"sd": {"output_mismatches": 2}}
    measured = [Measured("vllm", m, mode, {"8": row}) for m in ("probes", "one_request")]
    measured.append(Measured("ours", "", mode, {"8": row}))
    both = {"probes": row, "one_request": row}
    assert by_server(measured) == {
        "vllm": {"modes": {"probes": mode, "one_request": mode}, "8": both},
        "ours": {"modes": mode, "8": row},
    }
    assert sum(rows.output_mismatches for rows in measured) == 9
