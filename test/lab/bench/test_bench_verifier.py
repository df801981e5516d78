"""The load generator of verifiers: robots that draft, and robots for which the verifier drafts."""

from __future__ import annotations

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


def test_the_gain_in_capacity_is_that_in_tokens() -> None:
    robots = {"4": {"tokens_per_s": 300.0}}
    verifier = {"4": {"tokens_per_s": 200.0, "drafting_ms": 4.0, "compute_ms": 10.0}}
    assert _capacity(robots, verifier) == {"4": {"measured": 1.5, "predicted": 1.4}}
