"""The page itself, in NiceGUI: built once per viewer, then changed where a snapshot differs.

Text from models and nodes is shown in labels, which the browser treats as text, or is escaped in
``drawing.py`` and sanitised again by the browser.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from nicegui import Client, ui

from collab_llm_nodes.dashboard import drawing
from collab_llm_nodes.dashboard.http_api import BAR, only_the_stop
from collab_llm_nodes.dashboard.robot import Robot
from collab_llm_nodes.dashboard.stages import Stages, stages_html, stages_text, timeline_svg
from collab_llm_nodes.dashboard.view import (
    Action,
    Answer,
    Goal,
    Link,
    Reading,
    Recall,
    Snapshot,
    words,
)
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.base import Source
from collab_llm_nodes.protocols.minions.metrics import marks_in
from collab_llm_nodes.robot.mission import MAX_INSTRUCTION

_WRITERS = {
    Source.ACCEPTED: "by both sides",
    Source.DEVICE: "by the robot",
    Source.CLOUD: "by the cloud",
    Source.RECOVERED: "by neither's draft",
    Source.UNVERIFIED: "by the robot alone",
}
"""The sides that write an answer of DRAGON."""
_FULL = "As many pages are open as max_viewers allows; close one and load this page again."
_REDIRECT_S = 1.0
_PASTED = 100_000
"""Largest pasted text [characters]."""
_LOADING = 16
"""Requested pages that are kept although their web socket has not connected yet."""


class Host:
    """The robot that the pages show; changed from the node's thread, read in the pages'.

    Attributes:
        robot: None while no node serves.
    """

    def __init__(self) -> None:
        self.robot: Robot | None = None
        self.max_viewers = 1
        self.period = 0.2
        self._loading: dict[str, Client] = {}  # the oldest first
        self._open: set[str] = set()

    def serve(self, robot: Robot, max_viewers: int, rate: float) -> None:
        """Show ``robot``, updated ``rate`` times per second.

        Raises:
            ConfigError: another robot is shown; there is one NiceGUI per process.
        """
        if self.robot is not None:
            raise ConfigError("this process has a dashboard", remedy="one per process")
        self.robot, self.max_viewers, self.period = robot, max_viewers, 1.0 / rate
        self._loading, self._open = {}, set()  # those of before have lost their server

    def leave(self) -> None:
        """Stop showing the robot."""
        self.robot = None

    @property
    def viewers(self) -> int:
        """Pages that are open."""
        return len(self._open)

    @property
    def full(self) -> bool:
        """There is no room for another viewer."""
        return len(self._open) >= self.max_viewers

    def load(self, page: Client) -> None:
        """Keep a page until its web socket connects, or until many newer ones were requested.

        A client that only requests pages is no viewer and takes no place.
        """
        self._loading[page.id] = page
        if len(self._loading) > _LOADING:
            next(iter(self._loading.values())).delete()

    def admit(self, page: str) -> bool:
        """Count a page whose web socket has connected; return False if there is no room."""
        self._loading.pop(page, None)
        if page not in self._open and self.full:
            return False
        self._open.add(page)
        return True

    def dismiss(self, page: str) -> None:
        """Forget a closed page."""
        self._loading.pop(page, None)
        self._open.discard(page)


def install(parent: FastAPI, host: Host) -> None:
    """Put NiceGUI and the page into ``parent``; once per process."""

    @ui.page("/")
    def index() -> Response | None:
        client = ui.context.client
        if host.full:
            client.delete()  # frees its memory
            return HTMLResponse(only_the_stop(_FULL), 503)

        async def admit() -> None:
            if not host.admit(client.id):
                client.open("/")  # which explains it
                await asyncio.sleep(_REDIRECT_S)
                client.delete()

        client.on_connect(admit)
        client.on_delete(lambda: host.dismiss(client.id))
        host.load(client)
        ui.add_head_html('<link rel="stylesheet" href="/static/style.css">')
        ui.add_body_html(BAR)
        _Page(host)
        return None

    ui.run_with(
        parent,
        title="collab_llm",
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=5.0,
        message_history_length=100,
    )


class _Page:
    """One viewer's page."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._charted: Answer | None = None
        self._sampled = 0.0
        with ui.element("div").classes("board"):
            with ui.element("div").classes("stack"):
                self._build_camera()
                self._build_instruction()
                self._build_answer()
                self._build_reading()
                self._build_recall()
                self._build_stages()
            with ui.element("div").classes("stack"):
                self._build_motion()
                self._build_link()
                self._build_health()
            with ui.element("div").classes("stack"):
                self._build_charts()
        ui.timer(host.period, self._refresh)

    # Building.

    def _build_camera(self) -> None:
        with ui.element("div").classes("panel"):
            with ui.element("div").classes("camera"):
                ui.html('<img id="camera" alt="camera">', sanitize=False)
                self._overlay = ui.html("")
            self._seen = ui.label().classes("quiet")

    def _build_instruction(self) -> None:
        with ui.element("div").classes("panel"):
            self._wish = _input("Instruction", "find the red ball", "instruction")
            self._wish.on("keydown.enter", self._send)
            with ui.row():
                ui.button("Go", on_click=self._send).props("data-id=go")
                self._cancel = ui.button("Cancel", on_click=self._give_up)
                self._cancel.props("data-id=cancel outline")
                self._goal = ui.label().props("data-id=goal")
            self._pending = ui.row()
            with self._pending:
                self._waits = ui.label().props("data-id=pending")
                self._confirms = ui.button(on_click=self._confirm).props("data-id=confirm")

    def _build_answer(self) -> None:
        with ui.element("div").classes("panel"):
            _heading("Answer")
            self._asked = ui.label().classes("quiet")
            self._answer = ui.html("").classes("answer").props("data-id=answer")
            self._error = ui.label().classes("error")
            self._figures = ui.label().classes("quiet")
            ui.html(
                '<span class="token accepted">accepted draft</span> · '
                '<span class="token recovered">recovered</span> · '
                '<span class="token bonus">bonus</span> · '
                '<span class="token unverified">unverified</span> · '
                '<span class="token matched">read as the action</span>'
            ).classes("quiet")

    def _build_reading(self) -> None:
        """A panel that appears as soon as a server answers questions about documents."""
        self._reading = ui.element("div").classes("panel").props("data-id=reading")
        with self._reading:
            _heading("Question about documents")
            self._about = _input("Question", "which battery was changed in March?", "about")
            self._about.on("keydown.enter", self._ask_documents)
            self._files = _input("Files on the robot", "manual.pdf, log.md", "files")
            self._pasted = (
                ui.textarea("A text")
                .classes("wide")
                .props(f"maxlength={_PASTED} rows=2 data-id=pasted")
            )
            ui.button("Ask", on_click=self._ask_documents).props("data-id=ask")
            self._question = ui.label().classes("quiet")
            self._found = ui.label().classes("answer")
            self._documents = ui.label().classes("quiet").props("data-id=documents")
            self._reading_error = ui.label().classes("error")
            self._rounds = ui.html("").props("data-id=rounds")
            self._sent = ui.label().classes("quiet")
            self._cost = ui.label().classes("quiet")
        self._reading.set_visibility(False)

    def _build_recall(self) -> None:
        """A panel that appears as soon as a server answers from the robot's own documents."""
        self._recall = ui.element("div").classes("panel").props("data-id=recall")
        with self._recall:
            _heading("The robot's memory")
            self._query = _input("Question", "where did I last see the red ball?", "question")
            self._query.on("keydown.enter", self._ask)
            self._recalled = ui.label().classes("quiet")
            self._recollection = ui.html("").classes("answer").props("data-id=recollection")
            self._recall_error = ui.label().classes("error")
            self._sides = ui.label().classes("quiet")
            ui.html(
                '<span class="token accepted">written by both sides</span> · '
                '<span class="token device">by the robot</span> · '
                '<span class="token cloud">by the cloud</span> · '
                '<span class="token recovered">by neither\'s draft</span> · '
                '<span class="token unverified">by the robot alone</span>'
            ).classes("quiet")
            self._found_pieces = ui.html("").props("data-id=found")
        self._recall.set_visibility(False)

    def _build_stages(self) -> None:
        """A panel that appears with the first message about a model over several workers."""
        self._stages = ui.element("div").classes("panel").props("data-id=stages")
        with self._stages:
            _heading("Model over several workers")
            self._workers = ui.label().classes("quiet")
            self._layers = ui.html("")
            self._planned = ui.label("prefill as planned").classes("quiet")
            self._planned_line = ui.html("").props("data-id=planned")
            self._measured = ui.label("last passes as measured").classes("quiet")
            self._measured_line = ui.html("").props("data-id=measured")
        self._stages.set_visibility(False)

    def _build_motion(self) -> None:
        with ui.element("div").classes("panel"):
            _heading("Action and path")
            self._action = ui.label().props("data-id=action")
            self._progress = ui.linear_progress(0.0, show_value=False)
            self._path = ui.html("").props("data-id=path")
            self._where = ui.label().classes("quiet").props("data-id=pose")

    def _build_link(self) -> None:
        with ui.element("div").classes("panel"):
            _heading("Verifier")
            self._link = ui.label().props("data-id=link")
            self._model = ui.label().classes("quiet")
            self._link_error = ui.label().classes("error")

    def _build_health(self) -> None:
        with ui.element("div").classes("panel"):
            _heading("Diagnostics")
            self._health = ui.html("").props("data-id=health")

    def _build_charts(self) -> None:
        self._charts = []
        for heading, options in (
            ("Time of an answer", drawing.stages_chart(())),
            ("Tokens per round, hit rate, mode", drawing.rates_chart(())),
            ("Round trip to the verifier", drawing.rtt_chart(())),
        ):
            with ui.element("div").classes("panel"):
                _heading(heading)
                self._charts.append(ui.echart(options).classes("chart"))

    # Commands of the viewer.

    def _send(self) -> None:
        wish = (self._wish.value or "").strip()[:MAX_INSTRUCTION]
        if not wish:
            ui.notify("Nothing to do: write where to go, then press Enter or Go.", type="warning")
        elif self._host.robot is not None:
            robot = self._host.robot
            if robot.shown().goal.busy and not robot.is_stop(wish):
                ui.notify("An instruction is being followed: cancel it first.", type="warning")
            robot.instruct(wish)

    def _confirm(self) -> None:
        if self._host.robot is not None:
            self._host.robot.confirm()

    def _ask(self) -> None:
        question = (self._query.value or "").strip()[:MAX_INSTRUCTION]
        if not question:
            ui.notify("Write a question, then press Enter.", type="warning")
        elif self._host.robot is not None:
            self._host.robot.ask(question)

    def _ask_documents(self) -> None:
        question = (self._about.value or "").strip()[:MAX_INSTRUCTION]
        files = (self._files.value or "")[:MAX_INSTRUCTION].split(",")
        documents = [(file.strip(), "") for file in files if file.strip()]
        if text := (self._pasted.value or "").strip()[:_PASTED]:
            documents.append(("pasted text", text))
        if not question:
            ui.notify("Write a question, then press Enter or Ask.", type="warning")
        elif self._host.robot is not None:
            self._host.robot.ask_documents(question, tuple(documents))

    def _give_up(self) -> None:
        if self._host.robot is not None:
            self._host.robot.cancel()

    # Updates.

    def _refresh(self) -> None:
        if self._host.robot is None:
            self._goal.set_text("the dashboard was shut down")
            return
        shown = self._host.robot.shown()
        self._overlay.set_content(drawing.direction_svg(shown.direction))
        self._seen.set_text(_seen_text(shown))
        self._goal.set_text(goal_text(shown.goal))
        self._cancel.set_enabled(shown.goal.busy)
        self._pending.set_visibility(bool(shown.pending))
        self._waits.set_text(f'"{shown.pending}" waits for you to confirm it.')
        motion, _ = self._host.robot.motion()
        dry = motion is not None and "DRY_RUN" in motion.reasons
        self._confirms.set_text(f"Confirm: {'a dry run' if dry else 'the robot moves'}")
        self._show_answer(shown)
        self._reading.set_visibility(shown.reads or shown.reading is not None)
        self._show_reading(shown.reading)
        self._recall.set_visibility(shown.remembers or shown.recall is not None)
        self._show_recall(shown.recall)
        self._show_stages(shown.stages)
        self._action.set_text(action_text(shown.action))
        self._progress.set_value(round(shown.done, 2))
        self._path.set_content(drawing.path_svg(shown.path, shown.pose))
        self._where.set_text(_pose_text(shown))
        self._link.set_text(link_text(shown.link))
        self._model.set_text(f"{shown.link.model or 'no model known'} at {shown.link.verifier}")
        self._link_error.set_text(shown.link.error)
        self._health.set_content(drawing.health_html(shown.health))
        self._show_charts(shown)

    def _show_answer(self, shown: Snapshot) -> None:
        answer = shown.answer
        self._asked.set_text(answer.prompt)
        self._answer.set_content(drawing.answer_html(shown.words))
        self._error.set_text(answer.error)
        self._figures.set_text(figures_text(answer))

    def _show_reading(self, reading: Reading | None) -> None:
        if reading is None:
            return
        self._question.set_text(reading.question)
        self._found.set_text(reading.text if reading.final else f"{reading.stage} ...")
        self._documents.set_text(f"from: {', '.join(reading.documents)}" * bool(reading.documents))
        self._reading_error.set_text(reading_error(reading))
        self._rounds.set_content(drawing.rounds_html(reading))
        self._sent.set_text(sent_text(reading))
        self._cost.set_text(cost_text(reading))

    def _show_recall(self, recall: Recall | None) -> None:
        if recall is None:
            return
        self._recalled.set_text(recall.question)
        pieces = words(recall.text, recall.ends, recall.sources)
        self._recollection.set_content(drawing.answer_html(pieces))
        self._recall_error.set_text(recall.error)
        self._sides.set_text(sides_text(recall))
        self._found_pieces.set_content(drawing.found_html(recall.found))

    def _show_stages(self, shown: Stages | None) -> None:
        self._stages.set_visibility(shown is not None)
        if shown is None:
            return
        self._workers.set_text(stages_text(shown))
        self._layers.set_content(stages_html(shown))
        self._planned.set_visibility(bool(shown.planned.spans))
        self._planned_line.set_content(timeline_svg(shown.planned))
        self._measured.set_visibility(bool(shown.measured.spans))
        self._measured_line.set_content(timeline_svg(shown.measured))

    def _show_charts(self, shown: Snapshot) -> None:
        """Send charts that changed: each is sent as a whole, the round trips once a second."""
        stages, rates, rtts = self._charts
        newest = shown.answers[-1] if shown.answers else None
        if newest is not self._charted:
            self._charted = newest
            stages.options.update(drawing.stages_chart(shown.answers))
            rates.options.update(drawing.rates_chart(shown.answers))
            stages.update()
            rates.update()
        if shown.sampled_at != self._sampled:
            self._sampled = shown.sampled_at
            rtts.options.update(drawing.rtt_chart(shown.rtts))
            rtts.update()


def _heading(text: str) -> None:
    ui.html(text, tag="h2")


def _input(label: str, example: str, name: str) -> ui.input:
    """Return a line for a text as long as an instruction; ``name`` is its ``data-id``."""
    made = ui.input(label, placeholder=example)
    return made.classes("wide").props(f"maxlength={MAX_INSTRUCTION} data-id={name}")


# Words.


def goal_text(goal: Goal) -> str:
    """Return how the instruction fares, in words."""
    if goal.state == "sent":
        return f'"{goal.instruction}": sent'
    if goal.state == "cancelling":
        return f'"{goal.instruction}": being cancelled'
    if goal.state == "running":
        return f'"{goal.instruction}": step {goal.step}'
    if goal.followed:
        return f'"{goal.followed}" is being followed, given elsewhere'
    if goal.state == "ended":
        return f'"{goal.instruction}": {goal.error or "arrived"}'
    return ""


_ENDS = {
    "stop": "stop: the model says it has arrived",
    "give up": "give up: the model has not found it",
    "reply": "reply: the model answers in words",
}


def action_text(action: Action | None) -> str:
    """Describe the action of the robot."""
    if action is None:
        return "no action yet"
    if action.reason:
        return f"no motion: {action.reason}"
    if action.kind == "forward":
        return f"drive {action.value:.2f} m ahead"
    if action.kind == "turn":
        side = "left" if action.value > 0 else "right"
        return f"turn {side} by {abs(math.degrees(action.value)):.0f}°"
    return _ENDS.get(action.kind, "no motion")


def figures_text(answer: Answer) -> str:
    """An answer's counters on one line."""
    figures = answer.figures
    if not figures.rounds:
        return answer.mode
    hits = "" if figures.hit_rate is None else f", cache hits {figures.hit_rate:.0%}"
    return (
        f"{answer.mode}: {figures.tokens} tokens in {figures.rounds} rounds (tau {figures.tau:.2f})"
        f"{hits}, {1e3 * figures.total_s:.0f} ms, first tokens after"
        f" {1e3 * figures.first_token_s:.0f} ms"
    ).removeprefix(": ")


def sides_text(recall: Recall) -> str:
    """Return how many tokens each side has written, on one line."""
    counts = Counter(recall.sources)
    shares = ", ".join(
        f"{counts[source]} {side}" for source, side in _WRITERS.items() if counts[source]
    )
    if not shares:
        return "" if recall.final else "looking for documents ..."
    return f"{len(recall.sources)} tokens: {shares}"


def reading_error(reading: Reading) -> str:
    """Return why a reading failed, or what is to be said against its answer; empty if nothing."""
    marks = sorted(marks_in(reading.figures)) if reading.final else []
    return " ".join(filter(None, (reading.error, *(mark.message for mark in marks))))


def sent_text(reading: Reading) -> str:
    """Return the bytes that the remote model has read, on one line; empty if none."""
    if "sent_bytes" not in reading.figures:
        return ""
    kinds = ", ".join(f"{name} {count:.0f}" for name, count in reading.sent.items() if count)
    return f"read by the remote: {reading.figures.get('sent_bytes', 0):.0f} bytes ({kinds})"


def cost_text(reading: Reading) -> str:
    """Return the cost of the reading so far, on one line; empty if none."""
    figures = reading.figures
    if not figures:
        return ""
    roles = []
    for role in ("remote", "local"):
        counts = (f"{figures.get(f'{role}_{n}_tokens', 0):.0f} {n}" for n in drawing.TOKENS)
        roles.append(f"{role} {', '.join(counts)}")
    usd = ""
    if "cost_usd" in figures:
        usd = f"; {figures['cost_usd']:.4f} US dollars by the price table"
    return f"tokens: {'; '.join(roles)}{usd}"


def link_text(link: Link) -> str:
    """The state of the link on one line."""
    rtt = f", round trip {1e3 * link.rtt_s:.1f} ms" if link.rtt_s else ""
    sessions = f", {link.sessions} sessions" if link.sessions != 1 else ", 1 session"
    return f"{link.state}{rtt}{sessions}, {link.reconnects} reconnects"


def _seen_text(shown: Snapshot) -> str:
    if shown.frame_age is None:
        return "no picture yet (topic observation)"
    return f"picture {shown.frame_age:.1f} s old" if shown.frame_age > 1.0 else ""


def _pose_text(shown: Snapshot) -> str:
    if shown.pose_age is None:
        return "no odometry yet (topic odom)"
    if shown.pose is None:
        return f"odometry is silent for {shown.pose_age:.0f} s"
    pose = shown.pose
    return f"x {pose.x:.2f} m, y {pose.y:.2f} m, heading {math.degrees(pose.yaw):.0f}°"
