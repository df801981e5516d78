"""Privacy of MinionS: the real sandbox and the machine together, over a long document."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from minions_world import World, chunk_of, final, more, paper, plan, run_in
from served_minions import HONEST, KEPT, pages, weigh_page

from collab_llm_nodes.protocols.minions.jobs import MAX_SAMPLES, Fault
from collab_llm_nodes.protocols.minions.messages import (
    Kind,
    Mark,
)
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.settings import MinionsConfig

_PAGES = 40


def _program(body: str) -> str:
    return f"```python\ndef prepare_jobs(context, last_jobs):\n{body}\n```"


_ZOOM = _program(
    "    hits = [job.manifest for job in last_jobs if job.output.answer]\n"
    "    return [JobManifest(m.chunk, 'Extract the unit.', chunk_id=m.chunk) for m in hits]"
)
_TELLING_TASKS = _program(
    "    return [JobManifest(c, 'Extract: ' + c, c, c, c, c) for c in chunk_by_page(context)]"
)
_TELLING_ERROR = _program("    raise ValueError(context[0])")
_TELLING_RESULT = _program("    return context")
_NO_PROGRAM = "```python\nraise ValueError('no')\n```"


def _drive(
    sandbox: Sandbox, remote: Sequence[str], config: MinionsConfig
) -> tuple[World, str, frozenset[Mark]]:
    world = World(
        remote, worker=lambda prompt: weigh_page(chunk_of(prompt)), run_program=run_in(sandbox)
    )
    outcome = world.drive(minions("How heavy is it?", [pages(_PAGES)], config))
    return world, outcome.answer, outcome.marks


@pytest.mark.parametrize("carry", ["retries", "scratchpad", "history"])
@pytest.mark.parametrize(
    "remote",
    [
        [HONEST, final("7 kg")],
        [HONEST, more(missing_info="the unit", scratchpad="7"), _ZOOM, final("7 kg")],
        [_TELLING_TASKS, HONEST, final("7 kg")],
        [_TELLING_ERROR, _TELLING_RESULT, HONEST, final("7 kg")],
        [_NO_PROGRAM] * 3 + [plan("Extract the weight."), final("7 kg")],
        [_TELLING_ERROR] * 3 + ["no plan"] + [plan("Extract the weight."), final("7 kg")],
    ],
    ids=["honest", "zoom", "telling tasks", "telling errors", "plan", "fallback"],
)
def test_no_canary_crosses(sandbox: Sandbox, remote: list[str], carry: str) -> None:
    world, answer, _ = _drive(sandbox, remote, paper(carry=carry, tasks=0))
    assert answer == "7 kg"
    assert "canary-" not in world.wire
    assert "Weight 7 kg." in world.wire
    assert any("canary-3" in chunk_of(p) for prompts in world.prompts for p in prompts)


def test_the_zoom_sees_last_rounds_outputs(sandbox: Sandbox) -> None:
    remote = [HONEST, more(missing_info="the unit"), _ZOOM, final("7 kg")]
    world, _, _ = _drive(sandbox, remote, paper())
    assert len(world.rounds[0].jobs) == _PAGES
    (job,) = world.rounds[1].jobs
    assert job.manifest.job_id == f"c{KEPT + 1}_t2_s0"


def test_the_remotes_own_tasks_are_quoted_and_no_others(sandbox: Sandbox) -> None:
    world, _, _ = _drive(sandbox, [HONEST, final()], paper())
    assert "Task t1: Extract the weight." in world.wire
    world, _, _ = _drive(sandbox, [_TELLING_TASKS, HONEST, final()], paper(tasks=0))
    assert Fault.NOT_WRITTEN.message in world.wire
    assert "Extract: Page" not in world.wire


def test_every_byte_that_crosses_has_a_kind(sandbox: Sandbox) -> None:
    world, _, _ = _drive(sandbox, [HONEST, final()], paper())
    total = sum(len(p.text) for ask in world.sent for m in ask.messages for p in m.parts)
    assert total == sum(len(m.text) for ask in world.sent for m in ask.messages)
    kinds = {p.kind for ask in world.sent for m in ask.messages for p in m.parts}
    assert kinds == {Kind.INSTRUCTIONS, Kind.QUESTION, Kind.EXTRACT}


def test_a_program_may_not_make_a_million_jobs(sandbox: Sandbox) -> None:
    flood = _program("    return [JobManifest(context[0], 'a')] * 10**6")
    world, _, marks = _drive(sandbox, [flood, final()], paper(samples=0))
    assert len(world.prompts[0]) <= MAX_SAMPLES
    assert Mark.PARTIAL in marks
