"""``python -m collab_llm_lab.bench.gpu``, which ``scripts/gpu_check`` runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.gpu import environment, runner
from collab_llm_lab.bench.gpu.runner import STEPS, Step
from collab_llm_lab.bench.gpu.worker import true_or_tiny


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that are asked for; 1 if one of them failed, or none ran."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check and measure the engine on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--device", help="cuda or cpu; by default cuda, with --tiny cpu")
    parser.add_argument(
        "--steps", help="some of them, with commas: " + ",".join(s.name for s in STEPS)
    )
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all steps together")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("out/gpu_check.json"),
        metavar="FILE",
        help="the results, written after each finding",
    )
    parser.add_argument("--needs", action="store_true", help="print the packages needed, and end")
    parser.add_argument(
        "--wheels", metavar="DIR", default=".whl", help="installed for this run (scripts/gpu_check)"
    )
    options = parser.parse_args(arguments)
    if options.needs:
        environment.print_needs()
        return 0
    steps: Sequence[Step] = STEPS
    if options.steps is not None:
        asked = [name.strip() for name in options.steps.split(",")]
        unknown = [name for name in asked if name not in {step.name for step in STEPS}]
        if unknown:
            parser.error(f"no step {unknown[0]!r}; there are {', '.join(s.name for s in STEPS)}")
        steps = tuple(step for step in STEPS if step.name in asked)
    form = "tiny" if options.tiny else "true"
    device = options.device or ("cpu" if options.tiny else "cuda")
    facts = environment.describe()
    for warning in facts["warnings"]:
        print(f"WARNING  {warning}", flush=True)
    results: dict[str, Any] = {
        "form": form,
        "device": device,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": facts,
        "steps": {},
    }
    try:
        runner.write(options.json, results)
    except OSError as error:
        parser.error(f"--json: {error}")
    runner.run_steps(
        steps,
        partial(true_or_tiny, form, device),
        budget_s=options.budget_s,
        results=results,
        keep=lambda found: runner.write(options.json, found),
        say=lambda text: print(text, flush=True),
    )
    print("\n" + "\n".join(runner.summary(results)), flush=True)
    statuses = [record["status"] for record in results["steps"].values()]
    return int(runner.FAILED in statuses or runner.OK not in statuses)


if __name__ == "__main__":
    sys.exit(main())
