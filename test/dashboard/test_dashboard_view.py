"""The content of the dashboard's page, without a server."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from dashboard_graph import EVIL, A, B, R, U

from collab_llm_nodes.dashboard import drawing
from collab_llm_nodes.dashboard.stages import Stages
from collab_llm_nodes.dashboard.view import (
    ANSWERS,
    PATH_POINTS,
    SAMPLES,
    SILENT_S,
    STATUSES,
    TEXT,
    Action,
    Answer,
    Figures,
    Goal,
    Level,
    Link,
    Motion,
    Path,
    Reading,
    View,
    direction,
    words,
)
from collab_llm_nodes.robot.executor import Pose2D


def test_words_are_the_text_again_by_token() -> None:
    text = "the ball is left. turn left"
    ends, sources = [3, 8, 11, 17, 22, 27], [A, A, R, A, A, B]
    shown = words(text, ends, sources, span=(18, 27))
    assert "".join(w.text for w in shown) == text
    assert [(w.text, w.source) for w in shown[:4]] == [
        ("the", A),
        (" ball", A),
        (" is", R),
        (" left.", A),
    ]
    assert [w.text for w in shown if w.matched] == ["turn", " left"]
    assert [w.source for w in shown if w.matched] == [A, B]


@pytest.mark.parametrize(
    ("ends", "sources"),
    [([], []), ([3], [A]), ([3, 900], [A, A]), ([3, 8], [A]), ([3, 8], [A, 77]), ([8, 3], [A, A])],
)
def test_words_of_tokens_that_do_not_fit_the_text_lose_nothing(
    ends: list[int], sources: list[int]
) -> None:
    text = "the ball is left"
    for span in ((0, 0), (4, 8), (10, 999), (12, 3)):
        assert "".join(w.text for w in words(text, ends, sources, span)) == text


def test_a_tokens_source_is_known_up_to_its_end_only() -> None:
    shown = words("the ball", [3], [R])
    assert [(w.text, w.source) for w in shown] == [("the", R), (" ball", None)]


def test_text_of_models_is_never_markup() -> None:
    drawn = drawing.answer_html(words(EVIL, [5, len(EVIL)], [A, R]))
    assert "<img" not in drawn
    assert "<script" not in drawn
    assert html.unescape(re.sub(r"</?span[^>]*>", "", drawn)) == EVIL
    assert drawn.count("<span") == 2
    assert 'class="token accepted"' in drawn
    view = View(1.0)
    view.on_health(f"{EVIL}: {EVIL}", 2, EVIL, now=0.0)
    table = drawing.health_html(view.snapshot(0.0).health)
    assert "<img" not in table
    assert "<script" not in table
    assert '"window' not in table  # which would end the attribute it stands in


def test_a_direction_is_where_a_pinhole_camera_sees_it() -> None:
    fov = math.radians(90)
    assert direction(0.0, fov).x == 0.5
    assert direction(math.radians(44.999), fov).x == pytest.approx(0.0, abs=1e-4)
    left = direction(math.radians(30), fov)
    assert left.inside
    assert left.x == pytest.approx(0.5 - 0.5 * math.tan(math.radians(30)))
    assert direction(math.radians(-30), fov).x == pytest.approx(1 - left.x)
    assert (direction(1.5, fov).x, direction(1.5, fov).inside) == (0.0, False)
    assert (direction(-1.5, fov).x, direction(-1.5, fov).inside) == (1.0, False)


def test_the_direction_follows_the_turn() -> None:
    view = View(math.radians(90))
    view.on_pose(Pose2D(yaw=3.0), 0.0)
    assert view.snapshot(0.0).direction is None
    view.on_action(Action(kind="turn", value=1.0))
    begun = view.snapshot(0.0)
    assert begun.direction is not None
    assert begun.direction.angle == pytest.approx(1.0)
    assert begun.done == 0.0
    view.on_pose(Pose2D(yaw=3.5 - 2 * math.pi), 0.0)  # across the seam of the angles
    half = view.snapshot(0.0)
    assert half.direction is not None
    assert half.direction.angle == pytest.approx(0.5)
    assert half.done == pytest.approx(0.5)
    view.on_action(Action(kind="forward", value=0.5))
    view.on_pose(Pose2D(x=0.25, yaw=-2.8), 0.0)
    ahead = view.snapshot(0.0)
    assert ahead.direction is not None
    assert ahead.direction.x == 0.5
    assert ahead.done == pytest.approx(0.5)
    view.on_action(Action(kind="none", reason="NEGATED"))
    assert view.snapshot(0.0).direction is None


def test_what_the_action_was_read_from_is_marked_in_its_own_answer_only() -> None:
    view = View(1.0)
    view.on_action(Action(session="a", kind="turn", value=1.0, span=(4, 8)))
    view.on_answer(Answer(session="a", text="now turn", ends=(3, 8), sources=(A, B)))
    assert [w.text for w in view.snapshot(0.0).words if w.matched] == [" turn"] or [
        w.text for w in view.snapshot(0.0).words if w.matched
    ] == ["turn"]
    view.on_answer(Answer(session="b", text="now turn", ends=(3, 8), sources=(A, B)))
    assert not any(w.matched for w in view.snapshot(0.0).words)


def test_the_path_keeps_its_length_and_its_end() -> None:
    path = Path()
    for n in range(100_000):
        path.add(0.02 * n, 0.0)
    assert PATH_POINTS / 2 <= len(path.points) <= PATH_POINTS
    assert path.points[0] == (0.0, 0.0)
    assert path.points[-1][0] == pytest.approx(2000.0, abs=15.0)
    path.add(-500.0, 3.0)  # another room, or odometry began again
    assert path.points == [(-500.0, 3.0)]


def test_odometry_that_is_no_number_is_not_drawn() -> None:
    view = View(1.0)
    view.on_pose(Pose2D(1.0, 2.0), 0.0)
    view.on_pose(Pose2D(math.nan, 2.0), 0.0)
    assert view.snapshot(0.0).pose == Pose2D(1.0, 2.0)
    assert "nan" not in drawing.path_svg(view.snapshot(0.0).path, view.snapshot(0.0).pose)


NO_FIGURES = [math.nan, math.inf, -math.inf, 1e300]


@pytest.mark.parametrize("bad", NO_FIGURES)
def test_what_is_no_number_is_neither_shown_nor_computed_with(bad: float) -> None:
    view = View(1.0)
    view.on_pose(Pose2D(1.0, 2.0), 0.0)
    for pose in (Pose2D(bad, 2.0), Pose2D(1.0, bad), Pose2D(1.0, 2.0, bad)):
        view.on_pose(pose, 0.0)
    for kind in ("forward", "turn"):
        view.on_action(Action(kind=kind, value=bad))
        assert (view.snapshot(0.0).done, view.snapshot(0.0).direction) == (0.0, None)
    view.on_link(Link("UP", rtt_s=bad), 0.0)
    names = [each.name for each in fields(Figures) if each.name not in ("rounds", "tokens")]
    changes: dict[str, Any] = dict.fromkeys(names, bad)
    figures = replace(Figures(2, 3), **changes)
    view.on_answer(Answer(text="x", final=True, figures=figures))
    view.on_reading(Reading(figures={"sent_bytes": 1.0, "jobs.1": 2.0, "cost_usd": bad}))
    shown = view.snapshot(0.0)
    assert shown.pose == Pose2D(1.0, 2.0)
    assert shown.action is not None
    assert "no number" in shown.action.reason
    assert shown.link.rtt_s == 0.0
    assert shown.answer.figures == Figures(2, 3)
    assert shown.reading is not None
    assert "cost_usd" not in shown.reading.figures
    charts = (drawing.stages_chart(shown.answers), drawing.rates_chart(shown.answers))
    json.dumps([*charts, drawing.rtt_chart(shown.rtts)], allow_nan=False)
    drawing.path_svg(shown.path, shown.pose)


def test_no_figure_outlives_what_it_was_measured_on() -> None:
    view = View(1.0)
    view.on_pose(Pose2D(1.0, 2.0), now=0.0)
    view.on_link(Link("UP", rtt_s=0.02, sessions=2), now=0.0)
    assert view.snapshot(0.0).link.rtt_s == 0.02
    view.on_link(Link("CONNECTING", rtt_s=0.02), now=1.0)
    assert view.snapshot(1.0).link.rtt_s == 0.0, "the link is down"
    view.on_link(Link("UP", rtt_s=0.03), now=2.0)
    for second in range(3, 9):
        view.sample(float(second))
    silent = view.snapshot(8.0)
    assert (silent.link.rtt_s, silent.link.sessions) == (0.0, 0), "the bridge is silent"
    measured = drawing.rtt_chart(silent.rtts)["series"][0]["data"]
    assert measured == [20.0, None, 30.0, 30.0, 30.0, 30.0, None, None, None][: len(measured)]
    assert measured[-1] is None
    assert (silent.pose, silent.pose_age) == (None, 8.0)
    view.on_stages(Stages(model="m"))
    view.on_stages(None)
    assert view.snapshot(8.0).stages is None


def test_reasons_without_words_are_told_by_their_names() -> None:
    assert Motion(reasons=("LINK_DOWN",), text="no link").words == "no link"
    told = Motion(reasons=("LINK_DOWN", "LOW_BATTERY"), text="no link").words
    assert told == "no link; LOW_BATTERY"
    assert Motion(reasons=("LINK_DOWN", "LOW_BATTERY")).words == "LINK_DOWN; LOW_BATTERY"


def test_the_robot_points_where_it_goes() -> None:
    """The odometry frame's x is up in the picture, y is left."""
    drawn = drawing.path_svg([(0.0, 0.0), (1.0, 2.0)], Pose2D(1.0, 2.0, math.pi / 2))
    assert "translate(-2.000 -1.000) rotate(-90.0)" in drawn
    assert "0.00,0.00 -2.00,-1.00" in drawn.replace("-0.00", "0.00")


def test_memory_is_bounded_whatever_arrives() -> None:
    view = View(1.0)
    for n in range(3 * STATUSES):
        view.on_draft(str(n), 4, solo=False, ahead=False)
        view.on_answer(Answer(session=str(n), text="x" * 10 * TEXT, final=True))
        view.on_link(Link("UP", rtt_s=0.01), now=2.0 * n)
        view.on_health(f"node{n}: part", 0, "y" * 10_000, now=0.0)
    shown = view.snapshot(0.0)
    assert len(shown.answers) == ANSWERS
    assert len(shown.rtts) == SAMPLES
    assert len(shown.health) == STATUSES
    assert len(shown.answer.text) == TEXT
    assert all(not a.text for a in shown.answers)
    assert len(view._modes) <= 8


def test_times_of_an_answer_add_up() -> None:
    figures = Figures(total_s=1.0, draft_s=0.2, wait_s=0.6, verify_s=0.4)
    assert figures.stages == pytest.approx({"draft": 0.2, "verify": 0.4, "link": 0.2, "other": 0.2})
    ahead = replace(figures, verify_s=0.9)  # while nobody waited for it
    assert sum(ahead.stages.values()) == pytest.approx(1.0)
    chart = drawing.stages_chart([Answer(figures=figures), Answer(figures=ahead)])
    assert [s["data"] for s in chart["series"]] == [
        [200, 200],
        [400, 600],
        [200, 0],
        [200, 200],
    ]


def test_charts_of_rates_and_round_trips() -> None:
    with_hits = Figures(tau=2.5, cache_hits=3, cache_lookups=4)
    alone = Answer(figures=Figures(tau=1.0), mode="cloud alone")
    rates = drawing.rates_chart([Answer(figures=with_hits, mode="draft and verify"), alone, alone])
    assert {s["name"]: s["data"] for s in rates["series"]} == {
        "tau": [2.5, 1.0, 1.0],
        "cache hits": [75, None, None],
        "draft and verify": [0, None, None],
        "cloud alone": [None, 0, 0],
    }
    view = View(1.0)
    for n, state in enumerate(("UP", "UP", "DOWN")):
        view.on_link(Link(state, rtt_s=0.02), now=n / 2)  # twice a second: one sample each second
    assert drawing.rtt_chart(view.snapshot(0.0).rtts)["series"][0]["data"] == [20.0, None]


@pytest.mark.parametrize(
    ("drafts", "sources", "mode"),
    [
        ([(4, False, False)], [A, B], "draft and verify"),
        ([(4, False, False), (4, False, True), (4, False, False)], [A], "push-ahead"),
        ([(0, True, False)], [R, R], "cloud alone"),
        ([(4, False, False)], [A, U], "robot ends it"),
        ([], [U, U], "robot alone"),
    ],
)
def test_how_an_answer_was_decoded(
    drafts: list[tuple[int, bool, bool]], sources: list[int], mode: str
) -> None:
    view = View(1.0)
    for tokens, solo, ahead in drafts:
        view.on_draft("s", tokens, solo=solo, ahead=ahead)
    view.on_answer(Answer(session="s", text="x", sources=tuple(sources)))
    assert mode in view.snapshot(0.0).answer.mode


def test_silence_is_told() -> None:
    view = View(1.0)
    assert view.snapshot(0.0).link.state == "UNKNOWN"
    view.on_link(Link("UP"), now=10.0)
    view.on_health("robot/navigator: node", Level.OK, "active", now=10.0)
    view.on_health("slow: node", Level.OK, "active", now=0.0)
    view.on_health("slow: node", Level.OK, "active", now=10.0)  # every ten seconds
    fresh, stale = view.snapshot(10.0 + SILENT_S), view.snapshot(10.1 + SILENT_S)
    assert (fresh.link.state, stale.link.state) == ("UP", "UNKNOWN")
    assert [h.level for h in fresh.health] == [Level.OK, Level.OK]
    assert [(h.name, h.level) for h in stale.health] == [
        ("robot/navigator", Level.STALE),
        ("slow", Level.OK),
    ]


def test_the_worst_part_speaks_for_its_node() -> None:
    view = View(1.0)
    view.on_health("b: node", Level.OK, "active", now=0.0)
    view.on_health("a: node", Level.OK, "active", now=0.0)
    view.on_health("b: odom", Level.ERROR, "silent for 3 s", now=0.0)
    view.on_health("b: camera", Level.WARN, "slow", now=0.0)
    view.on_health("c: node", 200, "a level nobody knows", now=0.0)
    shown = view.snapshot(0.0).health
    assert [(h.name, h.level) for h in shown] == [
        ("b", Level.ERROR),
        ("c", Level.ERROR),
        ("a", Level.OK),
    ]
    assert shown[0].message == "odom: silent for 3 s"
    assert shown[2].message == "active"
    assert len(shown[0].parts) == 3


def test_a_goal_is_busy_while_anything_is_followed() -> None:
    assert not Goal().busy
    assert not Goal("ended", "x", error="NO_ODOMETRY").busy
    assert Goal("ended", "x", followed="find the cone").busy
    assert all(Goal(state, "x").busy for state in ("sent", "running", "cancelling"))


def test_a_question_about_documents_shows_rounds_jobs_and_both_ledgers() -> None:
    view = View(math.radians(90.0))
    assert view.snapshot(0.0).reading is None
    figures = {
        **{"sent_bytes": 60.0, "sent_question": 20.0, "sent_extract": 40.0, "cost_usd": math.nan},
        **{"jobs.1": 12.0, "kept.1": 1.0, "sent_extract.1": 40.0, "jobs.2": 3.0},
        **{"remote_prefill_tokens": 99.0, "remote_prefill_tokens.1": 99.0},
    }
    view.on_reading(Reading("s", EVIL, "7 kg", "execute", figures=figures))
    reading = view.snapshot(0.0).reading
    assert reading is not None
    assert reading.sent == {"question": 20.0, "extract": 40.0}
    assert [number for number, _ in reading.rounds] == [1, 2]
    assert "cost_usd" not in reading.figures
    told = [
        dict(re.findall(r"<span>([a-z ]+) <strong>(\d+)</strong></span>", row))
        for row in drawing.rounds_html(reading).split("</p>")
    ]
    assert told[0] == {"jobs": "12", "kept": "1", "bytes sent": "40", "remote prefill": "99"}
    assert told[1] == {"jobs": "3"}


def test_a_question_of_a_page_keeps_its_documents_and_what_was_told() -> None:
    view = View(1.0)
    view.on_documents_asked("how heavy?", ["manual.pdf"])
    view.on_reading(Reading("s", "how heavy?", figures={"sent_bytes": 60.0, "jobs.1": 2.0}))
    view.on_reading_error("how heavy?", "DEADLINE_EXCEEDED: late")
    reading = view.snapshot(0.0).reading
    assert reading is not None
    assert (reading.documents, reading.final) == (("manual.pdf",), True)
    assert (reading.error, len(reading.rounds)) == ("DEADLINE_EXCEEDED: late", 1)
    view.on_reading(Reading("t", "asked by somebody else?"))
    other = view.snapshot(0.0).reading
    assert other is not None
    assert other.documents == ()


def test_what_strangers_tell_of_a_reading_is_bounded() -> None:
    view = View(math.radians(90.0))
    many = {f"jobs.{n}": 1.0 for n in range(900)} | {"<b>.1": 1.0, "sent_bytes": 0.0}
    view.on_reading(Reading("s", "q" * 9999, "t" * 9999, "s" * 9999, figures=many))
    reading = view.snapshot(0.0).reading
    assert reading is not None
    assert len(reading.rounds) == 50
    assert len(reading.question) == len(reading.text) == TEXT
    assert "<b>" not in drawing.rounds_html(reading)
