"""Reports of an answer to its caller: its progress, its end and its cost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.protocols.base import Progress, Request, Source
from collab_llm_nodes.protocols.jupiter.lane import LaneAnswer
from collab_llm_nodes.protocols.jupiter.outline import join_points, read_point
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline

_HALF_A_NUMBER = re.compile(r"\s*\d{0,2}[.)]?\s*")


@dataclass
class JupiterMetrics(GenerationMetrics):
    """The cost of one answer. A round is a pass with a verdict.

    Attributes:
        drafted, accepted: draft tokens that were verified, and those that were accepted.
        outline_tokens: those of ``tokens`` that belong to the outline, not to the text.
        points: points of the outline that were expanded; 0 for an answer in sequence.
        stages: workers that held the model when the answer ended.
        losses: workers lost during the answer.
    """

    drafted: int = 0
    accepted: int = 0
    outline_tokens: int = 0
    points: int = 0
    stages: int = 0
    losses: int = 0

    def figures(self) -> Mapping[str, float]:
        """Return the counters and ratios beyond those of every protocol."""
        names = ("drafted", "accepted", "outline_tokens", "points", "stages", "losses")
        return {
            "tau": self.tokens / self.rounds if self.rounds else 0.0,
            "acceptance": self.accepted / self.drafted if self.drafted else 0.0,
            **{name: float(getattr(self, name)) for name in names},
        }


class AnswerReporter:
    """Reports of one answer, made from its lanes.

    Args:
        decode: returns the text of tokens without special ones.
        begun_thought: marker of a thought in which every answer begins; usually empty.
        limit: tokens of the answer at most.
        emit: called with each report.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        request: Request,
        *,
        decode: Callable[[Sequence[int]], str],
        begun_thought: str,
        limit: int,
        emit: Callable[[Progress], None],
    ) -> None:
        self._pipeline = pipeline
        self._decode = decode
        self._limit = limit
        self._emit = emit
        self._begun = request.asked_at or time.monotonic()
        self._losses = len(pipeline.losses)
        self._first_s = 0.0
        self._begun_thought = "" if request.raw else begun_thought
        self._text = Detokeniser(decode, self._begun_thought)
        self._outline: list[LaneAnswer] = []

    def on_tokens(self, lanes: Sequence[LaneAnswer]) -> None:
        """Report an answer written in sequence."""
        self._emit(self.in_sequence(lanes[0]))

    def on_outline(self, lanes: Sequence[LaneAnswer]) -> None:
        """Report that the outline grows; it is no part of the answer's text."""
        self._outline = [*lanes]
        self._emit(Progress(stage="outline", metrics=self._metrics([])))

    def on_points(self, lanes: Sequence[LaneAnswer]) -> None:
        """Report an answer written point by point."""
        self._emit(self.points(lanes))

    def in_sequence(self, lane: LaneAnswer, *, final: bool = False) -> Progress:
        """Return the report of an answer written by one lane."""
        self._text.update(lane.tokens, final=final)
        sources = (Source.ACCEPTED if drafted else Source.RECOVERED for drafted in lane.accepted)
        return Progress(
            self._text.text,
            tuple(lane.tokens),
            tuple(int(source) for source in sources),
            self._text.ends,
            stage="answer",
            share_done=min(1.0, len(lane.tokens) / self._limit),
            metrics=self._metrics([lane]),
        )

    def points(self, lanes: Sequence[LaneAnswer], *, final: bool = False) -> Progress:
        """Return the report of an answer in points: the complete ones, and the one after them.

        Points grow side by side, but the reported text only ever grows at its end.
        """
        texts: list[str] = []
        for lane in lanes:
            decoded = self._decode(lane.tokens).rstrip("\N{REPLACEMENT CHARACTER}")
            text = self._begun_thought + decoded
            growing = not (lane.finished or final)
            if not (growing and _HALF_A_NUMBER.fullmatch(text)):  # may be left out later
                texts.append(read_point(text)[0])
            if growing:
                break
        done = sum(lane.finished for lane in lanes)
        return Progress(
            join_points(texts),
            stage="points",
            share_done=done / len(lanes),
            metrics=self._metrics(lanes, points=len(lanes)),
        )

    def _metrics(self, lanes: Sequence[LaneAnswer], points: int = 0) -> JupiterMetrics:
        every, now = [*self._outline, *lanes], time.monotonic() - self._begun
        if lanes and not self._first_s:
            self._first_s = now
        chain = self._pipeline.current
        return JupiterMetrics(
            rounds=sum(lane.passes for lane in every),
            tokens=sum(len(lane.tokens) for lane in every),
            time_to_first_token_s=self._first_s,
            total_s=now,
            drafted=sum(lane.drafted for lane in every),
            accepted=sum(sum(lane.accepted) for lane in every),
            outline_tokens=sum(len(lane.tokens) for lane in self._outline),
            points=points,
            stages=len(chain.parts) if chain is not None else 0,
            losses=len(self._pipeline.losses) - self._losses,
        )
