"""The check and the benchmark of stock servers, on a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_vllm import MODEL, FakeVllm
from rich.console import Console
from typer.testing import CliRunner

from collab_llm_lab.bench.edge_cloud_server import (
    GAMMA,
    Measured,
    Script,
    by_server,
    measure_robots,
    own_tokens,
    run_server,
)
from collab_llm_lab.bench.lossless.server import (
    MAX_TOKENS,
    check_server,
    own_answers,
    server_prompts,
)
from collab_llm_nodes.cli import app
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError, ModelError, NotFound, ProtocolError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
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


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"index": 0}]}])
def test_an_answer_that_is_no_chat_is_refused(server: FakeVllm, answer: dict[str, Any]) -> None:
    server.fault = lambda path, body, honest: answer if "chat" in path else None
    with pytest.raises(ProtocolError):
        own_answers(server.config(link=PATIENT), [Prompt("Why?")])


def test_a_model_that_the_server_does_not_list_is_not_found(server: FakeVllm) -> None:
    with pytest.raises(NotFound) as caught:
        own_answers(server.config(link=PATIENT, model="nothing"), [Prompt("Why?")])
    assert caught.value.field == "model"


def text_instead_of_ids(server: FakeVllm, text: str | None = None) -> None:
    """Have ``server`` answer chats without ids: with its own text, or ``text``."""

    def fault(path: str, body: dict[str, Any], honest: dict[str, Any]) -> Any:
        if path != "/v1/chat/completions":
            return None
        (choice,) = honest["choices"]
        own = server.reference.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        return {"choices": [{"index": 0, "message": {"content": own if text is None else text}}]}

    server.fault = fault


def test_a_server_without_token_ids_is_measured_by_the_tokens_that_it_streams(
    server: FakeVllm, draft: Engine
) -> None:
    config, prompts = server.config(link=PATIENT), server_prompts(draft, 2, 0)
    known = own_answers(config, prompts)
    text_instead_of_ids(server)
    texts = own_answers(config, prompts)
    assert all(isinstance(text, str) for text in texts)
    assert own_tokens(config, draft, prompts, texts) == known


def test_a_server_whose_stream_is_another_answer_is_not_measured(server: FakeVllm) -> None:
    text_instead_of_ids(server, "whatever")
    with pytest.raises(ModelError, match="whatever"):
        run_server(
            server.config(link=PATIENT),
            draft="text-worker",
            answers=1,
            robots=[1],
            seconds=1.0,
            seed=0,
            console=QUIET,
        )


def test_a_robot_that_fails_ends_the_measurement(server: FakeVllm) -> None:
    with (
        StockClient(server.config(link=PATIENT)) as client,
        pytest.raises(ZeroDivisionError),  # there are no scripts
    ):
        measure_robots(client, [], 1, 0.5)


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


BENCH, CHECK = ["bench", "edge-cloud"], ["check", "lossless"]
SERVER = ["--server", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ([*BENCH, "--robots", "1"], "--robots"),
        ([*BENCH, "--unencrypted"], "--unencrypted"),
        ([*CHECK, "--api-key-file", "y"], "--api-key-file"),
        ([*CHECK, "--kind", "vllm"], "--kind"),
        ([*BENCH, *SERVER, "--no-ablations"], "--ablations"),
        ([*BENCH, *SERVER, "--vocabulary", "0"], "--vocabulary"),
        ([*CHECK, *SERVER, "--samples", "100"], "--samples"),
    ],
)
def test_an_option_without_effect_is_refused(command: list[str], option: str) -> None:
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"{option}: has no effect" in result.output


@pytest.mark.parametrize("command", [BENCH, CHECK], ids=" ".join)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ([*SERVER, "--kind", "verifier"], "--kind"),
        ([*SERVER, "--kind", "tgi"], "kind"),
        (["--server", "https://[::1"], "url"),
        (["--server", "http://gpu.example.org:8000"], "url"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    command: list[str], options: list[str], field: str
) -> None:
    error = CliRunner().invoke(app, [*command, *options]).exception
    assert isinstance(error, ConfigError)
    assert error.field == field


def test_a_remote_server_is_asked_without_encryption_if_that_is_allowed() -> None:
    """The name cannot be resolved, so that nothing is asked."""
    options = ["--server", "http://stock.invalid:8000", "--unencrypted", "--prompts", "1"]
    error = CliRunner().invoke(app, [*CHECK, *options]).exception
    assert isinstance(error, CollabError)
    assert error.code == "UNAVAILABLE"
