"""``collab-llm bench jupiter``, decoding over four workers in four modes (paper 004, Table V).

The workers share this machine's cores. Each is slowed down, so that together they need no more than
the cores have, and so that passes take most of the time, as they do with a large model (EMULATION).
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.bench.harness import Log
from collab_llm_lab.bench.jupiter.local_workers import LocalWorker, local_workers
from collab_llm_lab.bench.jupiter.material import Ids, Questions, random_ids
from collab_llm_lab.bench.jupiter.real import (
    control,
    durations,
    passed,
    pipeline,
    write_patient,
)
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.protocols.jupiter.drafters import Draft, Drafter, MedusaChain, NoDrafter
from collab_llm_nodes.protocols.jupiter.generation import answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig, LaneAnswer
from collab_llm_nodes.protocols.jupiter.messages import Step, Want, WorkerInfo
from collab_llm_nodes.protocols.jupiter.outline import MOST_POINTS
from collab_llm_nodes.protocols.jupiter.partition import Placement
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, Plan

SLOWDOWN = 16.0
"""Least emulated slow-down."""
OUTLINE_TOKENS = 80
POINT_TOKENS = 64
ANSWER_TOKENS = OUTLINE_TOKENS + 4 * POINT_TOKENS
DRAFTED = 5
"""Tokens of a draft: one for each Medusa head."""
LONG = 160
"""Tokens of an answer along its outline, at least: shorter ones are mostly outline."""
_DRAWN = 8
"""Questions tried for each that is answered at length."""
SUPPOSED = 0.85
"""SUPPOSED chance of a drafted token to be right: some 63 % of drafted tokens are then accepted."""
_PROBED = 32  # tokens before the passes that measure the LM head


@dataclass(frozen=True)
class OracleDrafter:
    """A drafter that knows the answers: a better self-drafter than the model has (SUPPOSED).

    Each token that it proposes is right with the chance ``share``. It asks for the heads' guesses
    and forgets them, so that they take their time.

    Args:
        texts: prompts with their answers.
    """

    texts: tuple[tuple[int, ...], ...]
    share: float = SUPPOSED
    guesses: int = 1

    def propose(self, tokens: Sequence[int], guesses: Sequence[int], most: int) -> Draft:
        held = len(tokens)
        begun = tuple(tokens)
        text = next((t for t in self.texts if len(t) > held and t[:held] == begun), begun)
        right = text[held : held + min(DRAFTED, most)]
        chance = random.Random(hash(begun))
        return Draft(tuple(t if chance.random() < self.share else int(t == 0) for t in right))


@dataclass
class Decoded:
    """Sums of one decoding mode over all questions."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: int = 0

    def add(self, lanes: Sequence[LaneAnswer], seconds: float, joined: int) -> None:
        """Count an answer of ``joined`` tokens, which these lanes took."""
        self.answers += 1
        self.tokens += joined
        self.seconds += seconds
        self.passes += sum(lane.passes for lane in lanes)
        self.drafted += sum(lane.drafted for lane in lanes)
        self.accepted += sum(sum(lane.accepted) for lane in lanes)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the report."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "answer_tokens": self.tokens / self.answers,
            "passes": self.passes,
        }


class DecodingModes:
    """Asks questions in the modes that are compared, and adds up their times and tokens.

    Args:
        reader: of the model's questions.

    Attributes:
        sums: by mode.
    """

    def __init__(self, made: Pipeline, reader: Questions) -> None:
        self._made, self._prompts = made, reader.prompts
        self.sums: dict[str, Decoded] = {}

    def in_sequence(self, mode: str, ids: Ids, drafter: Drafter) -> list[LaneAnswer]:
        """Return the lane of an answer."""
        begun = time.perf_counter()
        lane = answer(self._made, ids, DecodeConfig(ANSWER_TOKENS, drafter=drafter), control())
        self._add(mode, [lane], begun, [lane])
        return [lane]

    def in_points(
        self, mode: str, ids: Ids, plain: Ids, drafter: Drafter, least: int = 0
    ) -> list[LaneAnswer]:
        """Return the lanes of an answer along an outline: the outline's own, then its points'.

        Args:
            plain: the question without the directive; asked if the outline has too few points.
            least: tokens of the joined answer; a shorter one is not added up, and has no lanes.
        """
        begun = time.perf_counter()
        outline, found = answer_in_points(
            self._made,
            ids,
            DecodeConfig(OUTLINE_TOKENS, drafter=drafter, stop=self._prompts.ended),
            self._prompts.requests,
            DecodeConfig(POINT_TOKENS, drafter=drafter, stop=self._prompts.point_ended),
            control(),
            most=MOST_POINTS,
        )
        if not found:
            found = [
                answer(self._made, plain, DecodeConfig(ANSWER_TOKENS, drafter=drafter), control())
            ]
        if sum(len(lane.tokens) for lane in found) < least:
            return []
        self._add(mode, [outline, *found], begun, found)
        return [outline, *found]

    def differ_alone(self, points: Sequence[LaneAnswer]) -> int:
        """Return how many lanes, asked alone without sharing anything, are answered otherwise."""
        differ = 0
        asked = (
            DecodeConfig(POINT_TOKENS, drafter=NoDrafter(), stop=self._prompts.point_ended)
            if len(points) > 1
            else DecodeConfig(ANSWER_TOKENS, drafter=NoDrafter())
        )
        for lane in points:
            prompt = lane.known[: len(lane.known) - len(lane.tokens)]
            differ += answer(self._made, prompt, asked, control()).tokens != lane.tokens
        return differ

    def figures(self) -> dict[str, Any]:
        """Return the figures of each mode, and ``speedup`` over naive."""
        found: dict[str, Any] = {name: mode.figures() for name, mode in self.sums.items()}
        naive = found["naive"]["tokens_per_s"]
        speedup = {name: row["tokens_per_s"] / naive for name, row in found.items()}
        return {**found, "speedup": speedup}

    def _add(
        self, mode: str, lanes: Sequence[LaneAnswer], begun: float, joined: Sequence[LaneAnswer]
    ) -> None:
        seconds = time.perf_counter() - begun
        tokens = sum(len(lane.tokens) for lane in joined)
        self.sums.setdefault(mode, Decoded()).add(lanes, seconds, tokens)


def run_decode(
    model: str,
    questions: int,
    log: Log,
    *,
    stages: int = 4,
    slowdown: float = 0.0,
    least: int = LONG,
    seed: int = 0,
) -> dict[str, Any]:
    """Time the decoding modes: plain, self-drafting, outline with points, and both.

    Args:
        model: a model of the text domain with Medusa heads.
        questions: each is answered once in each mode.
        slowdown: EMULATION: a pass takes so many times as long; 0: ``SLOWDOWN``, or as much as the
            stages on one core need.
        least: tokens of an answer along its outline; questions with shorter ones are passed over.

    Returns:
        ``decode.<naive|sd|op|both>`` with ``tokens_per_s`` (of the joined answer over the whole
        time: prompt, outline and reading of points included), ``acceptance`` (of drafted tokens),
        ``answer_tokens`` and ``passes``; ``sd_supposed`` and ``both_supposed``, the same with
        drafts that are as often right as :class:`OracleDrafter` supposes; ``decode.speedup`` over
        naive;
        ``real.mismatches``: answers with drafts, and points in lanes, that differ from those
        without; ``drawn``: questions tried, to find those; ``head_layers``, and ``layers`` of each
        stage, ``slowdown``, ``stages``, and ``text_model_tensor_mb`` of the largest worker.

    Raises:
        InvalidInput: no answer is so long.
    """
    cores = sorted(os.sched_getaffinity(0))
    slowdown = slowdown or max(SLOWDOWN, 2.0 * stages / len(cores))
    reader = Questions(read_facts(ModelConfig(model)).tokenizer)
    asked_of = reader.outlined(_DRAWN * questions, seed)
    mismatches = answered = drawn = 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_"))
        config = write_patient(Path(folder))
        running = stack.enter_context(
            local_workers(stages, model, config=config, cores=cores, emulated_slowdown=slowdown)
        )
        head = head_layers(running, random_ids(model, _PROBED))
        made = stack.enter_context(pipeline(running, balanced_head(head), lanes=16))
        chain = made.chain(control().due)
        modes = DecodingModes(made, reader)
        while answered < questions and asked_of:
            plain, directed = asked_of.pop(0)
            drawn += 1
            log(f"decoding, question {answered + 1} of {questions} ...")
            points = modes.in_points("op", directed, plain, NoDrafter(), least)
            if not points:
                continue
            answered += 1
            first = modes.in_sequence("naive", plain, NoDrafter())
            oracle = OracleDrafter(tuple(lane.known for lane in (*first, *points)))
            for suffix, drafter in (("", MedusaChain()), ("_supposed", oracle)):
                one = modes.in_sequence(f"sd{suffix}", plain, drafter)
                both = modes.in_points(f"both{suffix}", directed, plain, drafter)
                mismatches += _differ(first, one) + _differ(points, both)
            mismatches += modes.differ_alone(points[1:])
    if not answered:
        raise InvalidInput(
            f"none of {drawn} answers has {least} tokens",
            field="model",
            remedy="take a model that writes outlines with points",
        )
    return {
        "decode": modes.figures(),
        "drawn": drawn,
        "real": {"mismatches": mismatches},
        "head_layers": head,
        "layers": [part.last - part.first for part in chain.parts],
        "slowdown": slowdown,
        "stages": stages,
        "text_model_tensor_mb": max(chain.bytes) / 1e6,
    }


def _differ(right: Sequence[LaneAnswer], found: Sequence[LaneAnswer]) -> int:
    differ = abs(len(right) - len(found))
    return differ + sum(a.tokens != b.tokens for a, b in zip(right, found, strict=False))


def head_layers(running: Sequence[LocalWorker], ids: Ids, repeats: int = 5) -> float:
    """Return the time of the LM head, with the heads' guesses, in layers of the last worker."""
    draft = tuple(ids[: DRAFTED + 1])
    with pipeline(running) as made:
        parts = made.chain(control().due).parts
        passed(made, [Step(0, 0, tuple(ids))])
        step = Step(0, len(ids), draft, want=Want.VERDICT, rows=len(draft), guesses=1)
        times = [durations(passed(made, [step])) for _ in range(repeats + 1)][1:]
        passed(made, [Step(0, close=True)])
    stage = [statistics.median(row[i] for row in times) for i in range(len(parts))]
    layers = [part.last - part.first for part in parts]
    before = [seconds / count for seconds, count in zip(stage, layers, strict=True)][:-1]
    if not before:
        return 0.0
    return max(0.0, stage[-1] / statistics.mean(before) - layers[-1])


def balanced_head(head_layers: float) -> Plan:
    """Return a plan in which the LM head counts as so many layers of the last worker."""

    def plan(devices: Sequence[str], info: WorkerInfo) -> Sequence[Placement]:
        count = min(len(devices), info.num_layers)
        share = (info.num_layers + head_layers) / count
        ends = [min(info.num_layers - count + i, max(i, round(share * i))) for i in range(count)]
        ends.append(info.num_layers)
        return [Placement(d, a, b) for d, a, b in zip(devices, ends, ends[1:], strict=False)]

    return plan
