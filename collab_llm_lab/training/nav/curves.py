"""Learning curves of the embedded pair: one JSON, one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collab_llm_lab.training.nav.architecture import SIZES, build
from collab_llm_lab.training.nav.trainer import TrainConfig
from collab_llm_lab.training.nav.wording import corpus
from collab_llm_nodes.models.tokenizer import train_tokenizer

_SHOWN = {
    "in_view_direction": "direction of things in view",
    "not_in_view": "things not in view",
    "held_out_wording": "wording stage: unseen words",
}


def write_curves(runs: dict[str, tuple[TrainConfig, Path]], folder: Path) -> dict[str, Any]:
    """Write ``nav_training.json`` and ``.png``; ``runs`` maps a stage to its plan and run folder.

    A stage that ``runs`` lacks keeps what an earlier file in ``folder`` says of it.
    Per stage the JSON holds the parameters, the plan's main figures and the curve: shares of
    held-out questions answered right in free running, over steps, seconds and pictures seen.
    """
    tokenizer = train_tokenizer(corpus())
    file = folder / "nav_training.json"
    result: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for stage, (plan, run) in runs.items():
        curve = json.loads((run / "curve.json").read_text(encoding="utf-8"))
        for point in curve:
            point["pictures"] = point["step"] * plan.batch
        model = build(SIZES[plan.role], tokenizer, 0)
        result[stage] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": plan.steps,
            "batch": plan.batch,
            "questions": plan.questions,
            "learning_rate": plan.learning_rate,
            "dagger_steps": plan.dagger_steps,
            "curve": curve,
        }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")
    _plot(result, folder / "nav_training.png")
    return result


def _plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_SHOWN), figsize=(12, 3.4), sharey=True)
    for axis, (key, title) in zip(axes, _SHOWN.items(), strict=True):
        for stage, facts in result.items():
            curve = facts["curve"]
            if ("held_out_wording" in curve[0]) != (key == "held_out_wording"):
                continue
            axis.plot(
                [p["pictures"] / 1000 for p in curve],
                [p[key] for p in curve],
                marker=".",
                label=f"{stage}, {facts['parameters'] / 1e6:.2f} M parameters",
            )
        axis.set_title(title)
        axis.set_xlabel("pictures seen [thousand]")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    axes[0].set_ylabel("held-out answers right")
    axes[0].set_ylim(0, 1.02)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
