"""``collab-llm replay``: read, ask, compare, print."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_nodes.errors import ConfigError, printable
from collab_llm_nodes.replay.compare import compare
from collab_llm_nodes.replay.recording import read_recording
from collab_llm_nodes.replay.replayers import Models, in_process, through_nodes


def run_replay(
    bag: Path,
    models: Models,
    *,
    nodes: bool,
    params: Path | None,
    texts: bool,
    speed: float,
    namespace: str | None,
    console: Console,
) -> dict[str, Any]:
    """Replay ``bag`` and print what differs.

    Args:
        nodes: through the real nodes, with ``params`` after the recorded parameters; else in
            this process.
        texts: another text is a difference too.
        speed: see ``compare``.

    Returns:
        The report for JSON; ``same`` is true if nothing differs.

    Raises:
        CollabError: the bag or a model cannot be used, or a step had no answer.
    """
    if params is not None and not nodes:
        raise ConfigError("parameters are those of nodes", field="config", remedy="add --nodes")
    recording = read_recording(bag, namespace)
    models = models.named(recording)
    answered = through_nodes(recording, models, params) if nodes else in_process(recording, models)
    with console.status("loading the models ...") as status, answered as replayer:
        report = compare(
            recording,
            replayer,
            speed=speed,
            on_step=lambda step: status.update(f"step {step.number} of {len(recording.steps)} ..."),
        )
    results = report.as_json(texts=texts) | {
        "bag": bag.name,
        "models": asdict(models),
        "nodes": nodes,
    }
    if not results["same"]:
        console.print(report.table(texts=texts))
    if recording.epochs > 1:
        console.print(f"the clock was set back: {recording.epochs} drives, one after the other")
    for step in report.skipped:
        why = printable(step.unusable)
        console.print(f"step {step.number} left out: {why}", highlight=False)
    console.print(
        f"{results['compared']} of {results['steps']} answers compared: "
        f"{results['action_differences']} other actions, {results['text_differences']} other texts"
    )
    return results
