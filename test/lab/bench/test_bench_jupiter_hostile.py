"""The attacks of ``bench jupiter-hostile`` attack, and an honest coordinator notices what is wrong.

A worker with a tiny model, in this process, stands in for the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from attacking import assert_attacks
from jupiter_bed import folder, workers
from waiting import wait_for

from collab_llm_lab.bench.hostile.jupiter_server import JUPITER, Passes, record
from collab_llm_lab.bench.hostile.robots import Endpoint, Observed, Robots
from collab_llm_lab.bench.hostile.table import ATTACKS
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.jupiter.worker import StageWorker
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.server import ServerHandle

WAIT_S = 60.0
TOKEN = "only-coordinators-with-this"


@pytest.fixture(scope="module")
def answers() -> list[Passes]:
    return record(ModelConfig(str(folder())), 3)


@pytest.fixture
def worker() -> Iterator[ServerHandle[StageWorker]]:
    with workers(1, token=TOKEN, heads="", metrics_address="127.0.0.1:0") as ((handle,), _):
        yield handle


def work(
    worker: ServerHandle[StageWorker], *answers: Passes, token: str = TOKEN, seconds: float = 0.0
) -> Observed:
    async def ask() -> Observed:
        endpoint = Endpoint(f"127.0.0.1:{worker.port}", token=token)
        robots = Robots(endpoint, answers, JUPITER.converse, JUPITER.robots)
        seen = await robots.work(seconds)
        robots.close()
        return seen

    wait_for(lambda: worker.sessions == 0, WAIT_S)  # the coordinator before may still be leaving
    return asyncio.run(within(ask(), WAIT_S))


def test_drafts_are_accepted_in_part(answers: list[Passes]) -> None:
    accepted = [len(outcome.path) for answer in answers for outcome in answer.outcomes[1:]]
    drafted = [len(step.ids) - 1 for answer in answers for step in answer.steps[1:]]
    assert 0 < sum(accepted) < sum(drafted)
    for answer in answers:
        assert len(answer.steps) == len(answer.outcomes) > 1


def test_a_coordinator_has_the_models_own_outcomes_and_notices_others(
    worker: ServerHandle[StageWorker], answers: list[Passes]
) -> None:
    seen = work(worker, answers[0])
    assert (seen.wrong, seen.failures) == (0, [])
    assert len(seen.rounds_s) == len(answers[0].steps) - 1
    first, *others = answers[0].outcomes
    other = replace(answers[0], outcomes=(replace(first, next=first.next + 1), *others))
    assert work(worker, other).wrong == 1
    refused = work(worker, answers[0], token="wrong")
    assert len(refused.failures) == 1


def test_one_chain_serves_answer_after_answer(
    worker: ServerHandle[StageWorker], answers: list[Passes]
) -> None:
    for seconds in (0.5, 10.0):  # a machine that stalls needs longer for two answers
        seen = work(worker, *answers, seconds=seconds)
        assert (seen.wrong, seen.failures) == (0, [])
        if len(seen.openings_s) > 1:
            break
    assert len(seen.openings_s) > 1


@pytest.mark.parametrize("name", ATTACKS["jupiter"])
def test_every_attack_on_a_worker_sends(
    name: str, worker: ServerHandle[StageWorker], answers: list[Passes]
) -> None:
    assert_attacks(JUPITER, name, worker, TOKEN, JUPITER.recorded(answers[0]))
