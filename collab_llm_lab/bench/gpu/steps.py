"""The steps in the order in which they run: what must be right first, then what it costs."""

from __future__ import annotations

from dataclasses import dataclass

_PACKAGE = "collab_llm_lab.bench.gpu"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        function: ``module:name``; called with a ``lab.Lab``.
        seconds: expected time on an H100. A step that takes twice as long is ended; one for which
            the budget does not suffice is skipped.
        shows: one line for the summary's readers.
    """

    name: str
    function: str
    seconds: float
    shows: str


def _step(name: str, module: str, seconds: float, shows: str) -> Step:
    return Step(name, f"{_PACKAGE}.{module}:{name}", seconds, shows)


STEPS = (
    _step("machine", "hardware", 25, "versions, bandwidth, products, cost of a launch"),
    _step("attention", "hardware", 30, "kernels of attention at 16 lengths, cuDNN on and off"),
    _step("exact", "exactness", 50, "2B float32: engine equals transformers"),
    _step("stages", "exactness", 30, "2B widths float32: two stages equal the whole"),
    _step("precision", "exactness", 60, "7B bfloat16: error against float32, argmax flips"),
    _step("passes", "speed", 70, "7B: decode, verify, prefill, picture, sessions, exits"),
    _step("graph", "graph", 40, "7B: a captured layer loop, the ceiling"),
    _step("generation", "speed", 40, "7B: tokens/s beside transformers' generate"),
    _step("serving", "serving", 60, "7B over gRPC: what a round costs beside the pass"),
    _step("drafting", "drafting", 35, "2B bfloat16: draft step, 16 branches, predictions"),
    _step("memory", "upkeep", 20, "200 sessions opened and closed: memory given back"),
    _step("launches", "upkeep", 20, "kernels, copies and waits of one pass"),
)
