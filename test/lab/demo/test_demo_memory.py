"""The memory's part of the demo: what is printed and written about a question."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from collab_llm_lab.demo.memory import Piece, Recollection, figures_of, show
from collab_llm_nodes.protocols.base import Source

RECOLLECTION = Recollection(
    "Where was [red]the ball[/red] last seen?",
    "in the hall",
    (("in", Source.ACCEPTED), (" the", Source.CLOUD), (" hall", Source.CLOUD)),
    (Piece("episode 1", "At 10:33, seen from (1.0, 2.0): a ball [is] near.", 0.75),),
    True,
    0.5,
)


def test_question_answer_writers_and_pieces_are_printed() -> None:
    console = Console(file=io.StringIO(), width=120)
    show(RECOLLECTION, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Where was [red]the ball[/red] last seen?" in printed
    assert "answer: in the hall" in printed
    assert "written by: both sides, the cloud" in printed
    assert "75%" in printed
    assert "a ball [is] near." in printed


def test_a_thing_that_is_not_in_memory_is_reported() -> None:
    console = Console(file=io.StringIO(), width=120)
    nothing = replace(RECOLLECTION, text="", words=(), found=(), missing="no document names 'ball'")
    show(nothing, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not in memory: no document names 'ball'" in printed
    assert "answer:" not in printed
    assert figures_of(nothing)["missing"] == nothing.missing


def test_the_file_counts_the_tokens_of_each_side() -> None:
    written = json.loads(json.dumps(figures_of(RECOLLECTION)))
    assert written["tokens_by_source"] == {
        "accepted": 1,
        "device": 0,
        "cloud": 2,
        "recovered": 0,
        "unverified": 0,
    }
    assert written["found"] == [
        {"name": "episode 1", "text": RECOLLECTION.found[0].text, "weight": 0.75},
    ]
