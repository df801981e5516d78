"""Comparison of recorded answers with new answers to the same questions.

Pictures and prompts are as recorded, and each waits for the last action. So the pace changes
nothing, and one different answer does not change the questions after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.replay.recording import Action, Recording, Step


@dataclass(frozen=True)
class Reply:
    """The answer to a recorded question, and the seconds that it took."""

    tokens: tuple[int, ...]
    text: str
    action: Action
    tau: float
    seconds: float


Replayer = Callable[[Step], Reply]


@dataclass(frozen=True)
class Comparison:
    """A step and its new answer."""

    step: Step
    reply: Reply

    @property
    def same_action(self) -> bool:
        return self.step.action is not None and self.reply.action.same(self.step.action)

    @property
    def same_text(self) -> bool:
        """Return True if all tokens are the same."""
        return self.reply.tokens == self.step.tokens


@dataclass(frozen=True)
class Report:
    """All steps of a recording.

    Attributes:
        compared: those that could be compared; ``skipped``: the others, unasked.
    """

    recording: Recording
    compared: tuple[Comparison, ...]
    skipped: tuple[Step, ...]

    def differences(self, *, texts: bool) -> list[Comparison]:
        """Return the steps with another action, or, with ``texts``, another token."""
        return [c for c in self.compared if not c.same_action or (texts and not c.same_text)]

    def table(self, *, texts: bool) -> Table:
        """Return the differences, for people."""
        table = Table(title=f"differences to {self.recording.bag.name}")
        for column in ("step", "asked", "recorded", "now"):
            table.add_column(column, justify="right" if column == "step" else "left")
        for c in self.differences(texts=texts):
            before, now = str(c.step.action), str(c.reply.action)
            if c.same_action:
                before, now = c.step.text, c.reply.text
            table.add_row(str(c.step.number), c.step.prompt, before, now, end_section=True)
        return table

    def as_json(self, *, texts: bool) -> dict[str, Any]:
        """Return the report for JSON; only ``figures`` depends on the machine."""
        return {
            "steps": len(self.recording.steps),
            "compared": len(self.compared),
            "action_differences": sum(not c.same_action for c in self.compared),
            "text_differences": sum(not c.same_text for c in self.compared),
            "same": not self.differences(texts=texts),
            "skipped": [{"step": s.number, "why": s.unusable} for s in self.skipped],
            "answers": [
                {
                    "step": c.step.number,
                    "stamp_ns": c.step.stamp,
                    "prompt": c.step.prompt,
                    "same_action": c.same_action,
                    "same_text": c.same_text,
                    "recorded": _as_json(c.step.text, c.step.action),
                    "replayed": _as_json(c.reply.text, c.reply.action),
                }
                for c in self.compared
            ],
            "figures": {
                "tau": {
                    "recorded": _median([c.step.tau for c in self.compared]),
                    "replayed": _median([c.reply.tau for c in self.compared]),
                },
                "answer_s": {
                    "recorded": _median([c.step.seconds for c in self.compared]),
                    "replayed": _median([c.reply.seconds for c in self.compared]),
                },
            },
        }


def compare(
    recording: Recording,
    replayer: Replayer,
    *,
    speed: float = 0.0,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Report:
    """Ask all steps of ``recording`` that can be compared.

    Args:
        speed: not faster than this many times the recorded pace; 0: as fast as answers come.
        on_step: called with each step before it is asked.

    Raises:
        InvalidInput: no step can be compared.
        CollabError: what ``replayer`` raises.
    """
    usable = [s for s in recording.steps if not s.unusable]
    skipped = tuple(s for s in recording.steps if s.unusable)
    if not usable:
        why = "; ".join(sorted({s.unusable for s in skipped}))
        raise InvalidInput(f"no answer of {recording.bag} can be compared: {why}", field="bag")
    compared, begun, first = [], time.monotonic(), usable[0]
    for step in usable:
        if step.epoch != first.epoch:
            begun, first = time.monotonic(), step
        if speed:
            due = begun + (step.stamp - first.stamp) * 1e-9 / speed
            time.sleep(max(0.0, due - time.monotonic()))
        on_step(step)
        compared.append(Comparison(step, replayer(step)))
    return Report(recording, tuple(compared), skipped)


def _as_json(text: str, action: Action | None) -> dict[str, Any]:
    if action is None:
        return {"text": text, "action": None}
    values = asdict(action) | {"kind": action.kind.name, "code": action.code.name}
    return {"text": text, "action": str(action), **values}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
