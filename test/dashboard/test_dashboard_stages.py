"""The panel of a model over several workers: what is drawn, and what strangers cannot do to it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from dashboard_graph import graph
from started_nodes import start

from collab_llm_nodes.dashboard.stages import (
    NAME,
    ROWS,
    SPANS,
    Stage,
    Stages,
    Timeline,
    stages_html,
    stages_text,
    timeline,
    timeline_svg,
)

__all__ = ["graph"]  # fixture

EVIL = '<img src=x onerror="alert(1)">'


def test_bars_stand_where_their_times_are() -> None:
    line = timeline(["a", "b"], [(0, 0, 1.0, 1.5), (1, 0, 1.5, 2.0), (0, 1, 1.5, 2.0)])
    drawn = timeline_svg(line)
    bars = [
        (float(x), int(y), float(width), fill)
        for x, y, width, fill in re.findall(
            r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" .*? fill="(#\w+)"/>', drawn
        )
    ]
    first, third, second = bars  # by row
    assert [bar[2] for bar in bars] == [400.0] * 3
    assert second[0] == third[0] == first[0] + 400.0, "each half of the picture"
    assert first[1] == third[1] < second[1]
    assert first[3] == second[3] != third[3], "a colour for each piece of work"
    assert "1000.0 ms" in drawn
    assert timeline_svg(Timeline(("a",))) == ""


def test_what_strangers_tell_is_bounded_and_escaped() -> None:
    odd = [
        (0, 1, math.nan, 1.0),
        (0, 1, 2.0, 1.0),
        (0, 1, -1.0, 1.0),
        (0, 1, 0.0, math.inf),
        (0, 1, 0.0, 1e306),
    ]
    assert timeline(["a"], [*odd, (1, 0, 0.0, 1.0)]).spans == ()
    many = timeline([EVIL] * 99, [(0, n, float(n), n + 1.0) for n in range(9999)])
    assert (len(many.rows), len(many.spans)) == (ROWS, SPANS)
    assert many.spans[-1][1] == 9998, "the last ones"
    assert "<img" not in timeline_svg(many)
    assert timeline(["x" * 999], []).rows == ("x" * NAME,)
    assert "<img" not in stages_html(Stages(stages=(Stage(EVIL, 0, 1, 1),)))


def test_the_words_tell_who_is_missing() -> None:
    told = Stages("m", (Stage("robot", 0, 3, 2_500_000),), ("rover",), 1, 8, 2)
    assert stages_text(told) == "m: 2 of 8 lanes in use, 1 workers lost so far; missing: rover"
    assert "<td>robot</td><td>0 to 3</td><td>2.5 MB</td>" in stages_html(told)
    assert stages_text(Stages("m")).endswith("no chain of workers stands")


@pytest.mark.ros
def test_the_node_shows_what_the_server_tells(graph: Any) -> None:
    from array import array

    from collab_llm.msg import JupiterStages
    from collab_llm.msg import Timeline as TimelineMsg
    from collab_llm_nodes.nodes.dashboard import Dashboard
    from collab_llm_nodes.ros.qos import STATE

    told = JupiterStages(model="m", devices=["robot"], missing=["rover"])
    told.first_layers, told.last_layers = array("I", [0]), array("I", [3])
    told.tensor_bytes = array("Q", [5_000_000])
    told.measured = TimelineMsg(
        rows=["robot 0-3"],
        row=array("H", [0, 7]),
        number=array("I", [2, 2]),
        begin=array("d", [0.0, 0.0]),
        end=array("d", [0.5, 0.5]),
    )
    publisher = graph.node("jupiter_server").create_publisher(
        JupiterStages, "jupiter_stages", STATE
    )
    publisher.publish(told)  # before the dashboard is there: it is latched
    node = start(graph, Dashboard, port=0, rate=20.0)
    seen = graph.wait_for(lambda: node.shown().stages, 60.0)
    assert (seen.stages, seen.missing) == ((Stage("robot", 0, 3, 5_000_000),), ("rover",))
    assert seen.measured.spans == ((0, 2, 0.0, 0.5),), "a row that there is not"
    assert not seen.planned.spans
