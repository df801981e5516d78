"""The report of a training, for people and for ``bench pair``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collab_llm_nodes.durable import replacing
from collab_llm_nodes.errors import InvalidInput, translate_errors

REPORT = "report.json"


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """Write ``report`` to the folder of its training."""
    with replacing(out / REPORT) as file:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read_report(out: Path) -> dict[str, Any]:
    """Return the report in the folder of a training.

    Raises:
        InvalidInput: there is none, or it is damaged.
    """
    with translate_errors(
        InvalidInput,
        f"cannot read {out / REPORT}",
        field="--out",
        remedy=f"delete {out / 'report'}, if it is there, and give the command again",
    ):
        return dict(json.loads((out / REPORT).read_text(encoding="utf-8")))
