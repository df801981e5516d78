"""Learning curves of the text family: one JSON, one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collab_llm_lab.training.loop import CURVE
from collab_llm_lab.training.text.plans import STAGES
from collab_llm_lab.training.text.samples import SUB_DOMAINS


def write_curves(out: Path, folder: Path) -> dict[str, Any]:
    """Write ``text_training.json``, and a picture where matplotlib is installed.

    Args:
        out: folder of the runs; stages without a curve are left out.
        folder: of the two files.
    """
    curves = {
        stage: json.loads((out / stage / CURVE).read_text("utf-8"))
        for stage in STAGES
        if (out / stage / CURVE).exists()
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(curves, indent=1, sort_keys=True)
    (folder / "text_training.json").write_text(text + "\n", encoding="utf-8")
    try:
        import matplotlib
    except ImportError:
        return curves
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(SUB_DOMAINS), figsize=(12, 3.4), sharey=True)
    for axis, sub_domain in zip(axes, SUB_DOMAINS, strict=True):
        for stage, curve in curves.items():
            points = [point for point in curve if f"nats_{sub_domain}" in point]
            if points:
                minutes = [point["seconds"] / 60 for point in points]
                axis.plot(minutes, [p[f"nats_{sub_domain}"] for p in points], ".-", label=stage)
        axis.set_title(sub_domain)
        axis.set_xlabel("time [min]")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out text [nats per token]")
    if axes[-1].has_data():
        axes[-1].legend(loc="upper right", fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "text_training.png", dpi=110)
    pyplot.close(figure)
    return curves
