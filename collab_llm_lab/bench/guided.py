"""``collab-llm bench guided``: a pair of models with and without a guide, in one process.

Nothing is emulated. The guided answers of each mode are compared with those of the guided target
alone, and all answers are read by the parser of the robot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.rendering import show_rows
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.home.answers import ACTIONS as ACTIONS_SAID
from collab_llm_lab.home.answers import MAX_TOKENS
from collab_llm_lab.training.pair.speculation import plain_runner
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.runner import Generation
from collab_llm_nodes.robot.grammar import Code, actions_pattern, parse
from collab_llm_nodes.robot.search import MARKER

WARM_UP = 2
"""Answers of each row that are not measured."""
ACTIONS = Guide("regex", actions_pattern())
SENTENCES = Guide("regex", rf"([a-z ,]{{3,120}}\. ){{1,2}}{MARKER} ({'|'.join(ACTIONS_SAID)})\.")
"""The form that the embedded pair is trained for."""
GUIDES: Mapping[str, Guide | None] = {"free": None, "actions": ACTIONS, "sentences": SENTENCES}
_PLACES = ("far left", "left", "ahead", "right", "far right", "not in view")
_QUESTION = (
    "You steer a walking robot. It looks for the red chair. The red chair is {place}. Answer with"
    ' one sentence of the form "The next action is ACTION." where ACTION is move forward 50 cm,'
    " turn left 30 degree, turn right 30 degree or stop."
)


def run_guided(
    *, target: str, draft: str, answers: int, gamma: int, seed: int, console: Console
) -> dict[str, Any]:
    """Decode ``answers`` answers without and with guides, by the target alone and with drafts.

    Args:
        target, draft: models by folder, hub id or shipped name; ``draft`` may be the target.

    Returns:
        ``rows.<guide>.<alone | drafted>`` with ``tau`` (tokens per pass of the target),
        ``tokens, ms, draft_ms`` per answer, ``readable`` (share that the parser reads as an
        action) and ``mismatches`` (answers that differ from the target's alone); ``tau``,
        ``guided_tau``, ``ms`` and ``guided_ms`` of the drafted rows ``free`` and ``actions``.
    """
    set_threads(ModelConfig(path=draft), ModelConfig(path=target))
    pair = Engine(load(ModelConfig(path=draft))), Engine(load(ModelConfig(path=target)))
    return compare_guided(*pair, _prompts(pair[1], answers + WARM_UP, seed), gamma, console)


def compare_guided(
    draft: Engine, target: Engine, prompts: Sequence[Prompt], gamma: int, console: Console
) -> dict[str, Any]:
    """Return what :func:`run_guided` does, for a pair that is loaded."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for name, guide in GUIDES.items():
        alone = _answers(draft, target, prompts, 0, guide)
        drafted = _answers(draft, target, prompts, gamma, guide)
        rows[name] = {"alone": _row(alone, alone), "drafted": _row(drafted, alone)}
    table = {(name, mode): row for name, modes in rows.items() for mode, row in modes.items()}
    columns = {
        "tau": "{tau:.2f}",
        "tokens": "{tokens:.1f}",
        "ms": "{ms:.1f}",
        "drafting ms": "{draft_ms:.1f}",
        "readable": "{readable:.0%}",
        "mismatches": "{mismatches}",
    }
    show_rows(console, "guided answers", ("guide", "decoded"), table, columns)
    free, guided = rows["free"]["drafted"], rows["actions"]["drafted"]
    return {
        "gamma": gamma,
        "rows": rows,
        "tau": free["tau"],
        "guided_tau": guided["tau"],
        "ms": free["ms"],
        "guided_ms": guided["ms"],
        "ok": not any(row["mismatches"] for row in table.values()),
    }


def _answers(
    draft: Engine, target: Engine, prompts: Sequence[Prompt], gamma: int, guide: Guide | None
) -> list[Generation]:
    """Return the greedy answers, by plain speculation: no draft is made for nothing."""
    runner = plain_runner(draft, target, gamma)
    found = [runner.generate(prompt, max_tokens=MAX_TOKENS, guide=guide) for prompt in prompts]
    return found[WARM_UP:]


def _row(found: Sequence[Generation], alone: Sequence[Generation]) -> dict[str, Any]:
    total, count = EdgeCloudMetrics(), len(found)
    for each in found:
        total.add(each.metrics)
    return {
        "tau": total.tau,
        "tokens": total.tokens / count,
        "ms": 1e3 * total.total_s / count,
        "draft_ms": 1e3 * total.draft_s / count,
        "readable": sum(parse(each.text).code is Code.OK for each in found) / count,
        "mismatches": sum(a.tokens != b.tokens for a, b in zip(found, alone, strict=True)),
    }


def _prompts(target: Engine, count: int, seed: int) -> list[Prompt]:
    """Return questions of the robot: about pictures, or about places if the model sees none."""
    if target.loaded.image_processor is not None:
        return scene_prompts(count, seed)
    places = [_PLACES[(seed + i) % len(_PLACES)] for i in range(count)]
    return [Prompt(_QUESTION.format(place=place)) for place in places]
