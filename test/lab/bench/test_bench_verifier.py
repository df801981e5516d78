"""The load generator of verifiers: robots that draft, and robots for which the verifier drafts."""

from __future__ import annotations

import pytest

from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.bench.verifier import (
    LOADS,
    _capacity,
    _verifier,
    drive_robots,
    record,
    run_with_select,
)
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.process import wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient


def test_streamed_answers_are_those_of_robots_that_draft() -> None:
    recordings, address = record(scene_prompts(2, seed=3)), f"127.0.0.1:{free_port()}"
    load = LOADS["verifier_drafts"]
    with _verifier(address, load) as process:
        with VerifierClient(ClientLinkConfig(address=address)) as client:
            wait_for_verifier(client, process)
        driving = drive_robots(address, recordings, 2, 0.01, load, warm_up_s=0.01)
        tally = run_with_select(driving)
    assert tally.mismatches == 0
    assert tally.tokens > len(tally.rounds_s)
    assert min(tally.draft_s) > 0


def test_capacity_is_the_number_of_robots_that_wait_as_long() -> None:
    robots = {  # a token every 1 and 5 ms
        "1": {"tokens_per_s": 1000.0, "server_ms_per_token": 1.0},
        "8": {"tokens_per_s": 1600.0, "server_ms_per_token": 0.5},
    }
    times = {"drafting_ms": 4.0, "compute_ms": 10.0}
    verifier = {
        "1": {"tokens_per_s": 500.0, "server_ms_per_token": 1.5, **times},
        "8": {"tokens_per_s": 800.0, "server_ms_per_token": 1.0, **times},
    }
    found = _capacity(robots, verifier)
    assert found["1"] == {
        "token_ms": 2.0,
        "robots": pytest.approx(1 + 7 / 4),  # between the two that were measured
        "measured": pytest.approx(2.75),
        "server_time": 1.5,
        "predicted": 1.4,
    }
    assert found["8"]["robots"] == pytest.approx(16), "twice as many as were measured"
