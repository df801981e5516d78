"""Content of the page, without clock, ROS or browser.

The node passes messages to a :class:`View`; :meth:`View.snapshot` returns an immutable value for
the pages, shared between threads by reference. Memory is bounded. Times are seconds of one
monotonic clock, given by the caller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

from collab_llm_nodes.dashboard.stages import Stages
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.protocols.minions.metrics import by_round
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.guard import REASONS

ANSWERS = 60
"""Answers in the charts."""
SAMPLES = 120
"""Round-trip times in the chart, one per second."""
PATH_POINTS = 400
STATUSES = 400
"""Diagnostics kept, of all nodes together; further names are not."""
TEXT = 4000
"""Characters of any text that is shown; texts come from models and strangers."""
FOUND = 8
"""Pieces of documents that are shown beside an answer, and questions whose pieces are kept."""
ROUNDS = 50
"""Rounds of a question about documents that are shown."""
SILENT_S = 3.0
"""Silence after which a topic with about one message per second is stale. Diagnostics with a
longer period are stale after three periods."""


_MOST = 1e9
"""No figure of a robot is larger."""


def usable(*numbers: float) -> bool:
    """Return True if these numbers of a message can be shown and computed with.

    A message can hold NaN, infinities, and numbers that become infinite in a sum.
    """
    return all(abs(number) <= _MOST for number in numbers)


class Level(IntEnum):
    """Levels of diagnostics, the numbers of ``diagnostic_msgs/DiagnosticStatus``."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Figures:
    """Counters and times of one answer; see ``msg/GenerationMetrics``."""

    rounds: int = 0
    tokens: int = 0
    tau: float = 0.0
    cache_hits: int = 0
    cache_lookups: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    wait_s: float = 0.0

    @property
    def usable(self) -> Figures:
        """Return a copy with 0 for each number that is not usable."""
        bad = [each.name for each in fields(self) if not usable(getattr(self, each.name))]
        return replace(self, **dict.fromkeys(bad, 0)) if bad else self

    @property
    def hit_rate(self) -> float | None:
        """Share of rounds that a pre-draft served; None where none could."""
        return self.cache_hits / self.cache_lookups if self.cache_lookups else None

    @property
    def stages(self) -> dict[str, float]:
        """``total_s`` taken apart [s]: drafting, the verifier's compute, the rest of the wait for
        it (link and queue), and everything else at the robot.

        With drafts sent ahead the verifier computes while nobody waits; what counts here is what
        the answer had to wait for, so its share is at most the wait.
        """
        verify = min(self.verify_s, self.wait_s)
        link = self.wait_s - verify
        rest = max(0.0, self.total_s - self.draft_s - self.wait_s)
        return {"draft": self.draft_s, "verify": verify, "link": link, "other": rest}


@dataclass(frozen=True)
class Answer:
    """One answer so far; see ``msg/GeneratedText``.

    Attributes:
        ends: where each token's text ends in ``text`` [characters].
        error: why it ended early; empty unless it did.
        mode: how it was decoded, for people.
    """

    session: str = ""
    prompt: str = ""
    text: str = ""
    ends: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    final: bool = False
    error: str = ""
    figures: Figures = field(default_factory=Figures)
    mode: str = ""


@dataclass(frozen=True)
class Reading:
    """A question about documents so far, as Minion or MinionS answer it.

    Attributes:
        stage: current stage, as the protocol names it.
        error: why it ended early; empty unless it did.
        figures: both ledgers and the jobs by name (docs/minions.md), in all.
        rounds: the same by round: number and figures.
        documents: names of those that it was asked about, if it was asked on a page.
    """

    session: str = ""
    question: str = ""
    text: str = ""
    stage: str = ""
    final: bool = False
    error: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    rounds: tuple[tuple[int, Mapping[str, float]], ...] = ()
    documents: tuple[str, ...] = ()

    @property
    def sent(self) -> Mapping[str, float]:
        """Bytes that the remote model has read, by kind."""
        kinds = {name: n for name, n in self.figures.items() if name.startswith("sent_")}
        return {name.removeprefix("sent_"): n for name, n in kinds.items() if name != "sent_bytes"}


def reads(figures: Mapping[str, float]) -> bool:
    """Return True if an answer with these figures is one about documents."""
    return "sent_bytes" in figures


@dataclass(frozen=True)
class Found:
    """A piece of the robot's own documents; ``weight`` is its share in the robot's side."""

    name: str
    text: str
    weight: float


@dataclass(frozen=True)
class Recall:
    """A question about the robot's own documents so far, as DRAGON answers it.

    Attributes:
        ends, sources: [tokens] as in ``Answer``.
        stage: current stage, as the protocol names it.
        error: why it ended early; empty unless it did.
        found: pieces that the answer rests on; None: the robot still looks for them.
    """

    session: str = ""
    question: str = ""
    text: str = ""
    ends: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    stage: str = ""
    final: bool = False
    error: str = ""
    found: tuple[Found, ...] | None = None


def recalls(figures: Mapping[str, float]) -> bool:
    """Return True if an answer with these figures is DRAGON's."""
    return "cloud_documents" in figures


@dataclass(frozen=True)
class Word:
    """A piece of an answer that is drawn in one style.

    Attributes:
        source: where its token comes from; None where that is not known.
        matched: the action was read from here.
    """

    text: str
    source: Source | None = None
    matched: bool = False


@dataclass(frozen=True)
class Action:
    """Action that was read from an answer; see ``msg/NavigationAction``.

    Attributes:
        kind: "none", "stop", "forward", "turn", "give up" or "reply".
        value: [m] or [rad], + = left.
        reason: why there is no motion; empty if there is one.
        span: where it starts and ends in the text [characters].
    """

    session: str = ""
    kind: str = "none"
    value: float = 0.0
    reason: str = ""
    span: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Motion:
    """State of motion_guard; see ``msg/MotionState``."""

    allowed: bool = False
    emergency_stop: bool = False
    reasons: tuple[str, ...] = ()
    text: str = ""
    speed_limit: float = 0.0
    linear: float = 0.0
    angular: float = 0.0

    @property
    def words(self) -> str:
        """The reasons for people; those that motion_guard has no words for by their names."""
        known = REASONS if self.text else ()
        unknown = [reason for reason in self.reasons if reason not in known]
        return "; ".join(filter(None, [self.text, *unknown]))

    @property
    def stopped(self) -> bool:
        """The emergency stop is set, and all guards and drivers have confirmed it."""
        return self.emergency_stop and "STOP_UNCONFIRMED" not in self.reasons


@dataclass(frozen=True)
class Link:
    """The connection to the verifier; see ``msg/LinkState``."""

    state: str = "UNKNOWN"
    verifier: str = ""
    model: str = ""
    rtt_s: float = 0.0
    reconnects: int = 0
    sessions: int = 0
    error: str = ""


@dataclass(frozen=True)
class Health:
    """Health of one node.

    Attributes:
        level, message: of its worst part.
        parts: what it says of itself and its parts, each as (name, level, message).
    """

    name: str
    level: Level
    message: str
    parts: tuple[tuple[str, Level, str], ...] = ()


@dataclass(frozen=True)
class _Status:
    """One entry of the diagnostics: heard ``at``, ``pause`` after the one before it [s]."""

    level: Level
    message: str
    at: float
    pause: float


@dataclass(frozen=True)
class Goal:
    """The instruction given on a page, and the one that is followed, which may be another.

    Attributes:
        state: "idle", "sent", "running", "cancelling" or "ended".
        error: why it ended, or could not be followed, or the model's reply; empty if the model
            said stop.
        followed: instruction that the navigator follows now, from any source; empty if none.
    """

    state: str = "idle"
    instruction: str = ""
    step: int = 0
    error: str = ""
    followed: str = ""

    @property
    def busy(self) -> bool:
        """Something is being followed; a further instruction would be refused."""
        return bool(self.followed) or self.state in ("sent", "running", "cancelling")


@dataclass(frozen=True)
class Direction:
    """Direction of the target, as the model matched it.

    Attributes:
        angle: from straight ahead [rad], + = left.
        x: where that is in the picture: 0 = left edge, 1 = right edge.
        inside: the camera can see it; else ``x`` is at the nearer edge.
    """

    angle: float
    x: float
    inside: bool


@dataclass(frozen=True)
class Snapshot:
    """All that a page shows."""

    answer: Answer = field(default_factory=Answer)
    words: tuple[Word, ...] = ()
    reading: Reading | None = None
    recall: Recall | None = None
    remembers: bool = False
    """Questions about the robot's documents can be asked."""
    reads: bool = False
    """Questions about any documents can be asked."""
    stages: Stages | None = None
    action: Action | None = None
    done: float = 0.0
    """Share of the action that is done, by odometry: 0 to 1."""
    direction: Direction | None = None
    link: Link = field(default_factory=Link)
    goal: Goal = field(default_factory=Goal)
    pending: str = ""
    """The instruction that waits for somebody to confirm it."""
    pose: Pose2D | None = None
    """None before the first, and while odometry is silent."""
    pose_age: float | None = None
    """[s] since the last pose came; None before the first."""
    path: tuple[tuple[float, float], ...] = ()
    answers: tuple[Answer, ...] = ()
    rtts: tuple[float, ...] = ()
    """[s] one per second, the newest last; nan while the link is not up."""
    sampled_at: float = 0.0
    """Time at which the newest of ``rtts`` was taken [s]."""
    health: tuple[Health, ...] = ()
    frame_age: float | None = None
    """[s] since the picture came; None before the first."""


def words(
    text: str, ends: Sequence[int], sources: Sequence[int], span: tuple[int, int] = (0, 0)
) -> tuple[Word, ...]:
    """Split ``text`` by token and at the ends of the matched ``span``; nothing is lost.

    ``ends`` and ``sources`` [tokens] come from a message; uncovered text has no source.
    """
    cuts = {min(max(0, cut), len(text)) for cut in (*ends, *span, len(text))} - {0}
    pieces, begin, token = [], 0, 0
    for cut in sorted(cuts):
        while token < len(ends) and ends[token] < cut:
            token += 1
        known = token < len(ends) and token < len(sources) and sources[token] in _SOURCES
        source = Source(sources[token]) if known else None
        matched = span[0] <= begin and cut <= span[1]
        pieces.append(Word(text[begin:cut], source, matched))
        begin = cut
    return tuple(pieces)


_SOURCES = frozenset(Source)


def wrapped(angle: float) -> float:
    """``angle`` [rad] within -pi to pi."""
    return math.remainder(angle, 2 * math.pi)


def direction(angle: float, fov: float) -> Direction:
    """Return where ``angle`` [rad, + = left] is in the picture.

    The camera looks straight ahead and sees ``fov`` [rad] from left to right (pinhole model).
    """
    angle = wrapped(angle)
    if abs(angle) >= fov / 2:
        return Direction(angle, 0.0 if angle > 0 else 1.0, False)
    return Direction(angle, 0.5 - 0.5 * math.tan(angle) / math.tan(fov / 2), True)


class Path:
    """Path of the robot: at most ``PATH_POINTS`` points, however far it goes.

    When it is full every other point goes, and from then on they are twice as far apart.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._spacing = 0.05  # m

    def add(self, x: float, y: float) -> None:
        """Note a position [m]; a leap of more than a metre begins a new path."""
        moved = math.dist(self.points[-1], (x, y)) if self.points else math.inf
        if self.points and moved > max(1.0, 4 * self._spacing):
            self.points, self._spacing = [], 0.05
        if moved < self._spacing:
            return
        self.points.append((x, y))
        if len(self.points) > PATH_POINTS:
            self.points, self._spacing = self.points[::2], 2 * self._spacing


class View:
    """State of the page from the messages so far."""

    def __init__(self, camera_fov: float) -> None:
        """``camera_fov``: horizontal field of view [rad]."""
        self.camera_fov = camera_fov
        self._answer = Answer()
        self._answers: deque[Answer] = deque(maxlen=ANSWERS)
        self._reading: Reading | None = None
        self._recall: Recall | None = None
        self._found: dict[str, tuple[Found, ...]] = {}  # of the latest sessions
        self.remembers = self.reads = False
        self._stages: Stages | None = None
        self._action: Action | None = None
        self._action_from = Pose2D()
        self._pose: Pose2D | None = None
        self._pose_at = 0.0
        self._path = Path()
        self._link: tuple[Link, float] | None = None
        self._rtts: deque[float] = deque(maxlen=SAMPLES)
        self._sampled_at = -math.inf
        self._statuses: dict[str, _Status] = {}
        self._frame_at: float | None = None
        self._modes: dict[str, str] = {}  # of the latest sessions
        self.goal = Goal()
        self.pending = ""

    # Messages of the graph.

    def on_frame(self, now: float) -> None:
        """Note the arrival of a picture."""
        self._frame_at = now

    def on_draft(self, session: str, tokens: int, *, solo: bool, ahead: bool) -> None:
        """Derive the decoding mode of a session from a draft of ``tokens`` tokens."""
        mode = self._modes.pop(session, "")
        if solo:
            mode = "cloud alone"
        elif ahead or "push-ahead" in mode:
            mode = "draft and verify, push-ahead"
        elif tokens or not mode:
            mode = "draft and verify" if tokens else "cloud alone"
        self._modes[session] = mode
        while len(self._modes) > 8:
            del self._modes[next(iter(self._modes))]

    def on_answer(self, answer: Answer) -> None:
        """Set the newest state of an answer."""
        mode = self._modes.get(answer.session, "")
        if Source.UNVERIFIED in answer.sources:
            mode = "robot alone" if set(answer.sources) == {Source.UNVERIFIED} else "robot ends it"
        self._answer = replace(
            answer,
            mode=mode,
            prompt=answer.prompt[:TEXT],
            text=answer.text[:TEXT],
            error=answer.error[:TEXT],
            figures=answer.figures.usable,
        )
        if answer.final:
            self._answers.append(replace(self._answer, text="", ends=(), sources=()))
            self._modes.pop(answer.session, None)

    def on_reading(self, reading: Reading) -> None:
        """Set the newest state of a question about documents; ``rounds`` are derived here."""
        asked = self._reading if self._reading is not None else Reading()
        figures = {name: n for name, n in reading.figures.items() if usable(n)}
        self._reading = replace(
            reading,
            question=reading.question[:TEXT],
            text=reading.text[:TEXT],
            stage=reading.stage[:40],
            error=reading.error[:TEXT],
            figures={name: n for name, n in figures.items() if "." not in name},
            rounds=tuple(by_round(figures).items())[-ROUNDS:],
            documents=asked.documents if asked.question == reading.question[:TEXT] else (),
        )

    def on_documents_asked(self, question: str, documents: Sequence[str]) -> None:
        """Show a question about documents that a page asks."""
        self._reading = Reading(question=question[:TEXT], stage="asked", documents=(*documents,))

    def on_reading_error(self, question: str, error: str) -> None:
        """Show why a question about documents has no answer."""
        if self._reading is None or self._reading.question != question[:TEXT]:
            self._reading = Reading(question=question[:TEXT])
        self._reading = replace(self._reading, final=True, error=error[:TEXT])

    def on_found(self, session: str, question: str, found: Sequence[Found]) -> None:
        """Note the pieces found for a question; an answer follows."""
        self._found[session] = tuple(
            replace(piece, name=piece.name[:120], text=piece.text[:400])
            for piece in found[:FOUND]
            if usable(piece.weight)
        )
        while len(self._found) > FOUND:
            del self._found[next(iter(self._found))]
        if self._recall is None or self._recall.session != session:
            self._recall = Recall(session, question[:TEXT])

    def looked_up(self, session: str) -> bool:
        """Return True if the pieces for this session were found: it is DRAGON's."""
        return session in self._found

    def on_recall(self, recall: Recall) -> None:
        """Set the newest state of a question about the robot's documents."""
        self._recall = replace(
            recall,
            question=recall.question[:TEXT],
            text=recall.text[:TEXT],
            stage=recall.stage[:40],
            error=recall.error[:TEXT],
        )

    def on_recall_error(self, question: str, error: str) -> None:
        """Show why a question about the robot's documents has no answer."""
        if self._recall is None or self._recall.question != question[:TEXT]:
            self._recall = Recall(question=question[:TEXT])
        self._recall = replace(self._recall, final=True, error=error[:TEXT])

    def on_stages(self, stages: Stages | None) -> None:
        """Set the state of the workers; None if there is no server."""
        self._stages = stages

    def on_action(self, action: Action) -> None:
        """Set the action; it begins at the current pose."""
        reason = action.reason if usable(action.value) else "a distance or angle that is no number"
        value = action.value if usable(action.value) else 0.0
        self._action = replace(action, value=value, reason=reason[:TEXT])
        self._action_from = self._pose or Pose2D()

    def on_pose(self, pose: Pose2D, now: float) -> None:
        """Add a pose to the path."""
        if not usable(pose.x, pose.y, pose.yaw):
            return
        self._pose, self._pose_at = pose, now
        self._path.add(pose.x, pose.y)

    def on_link(self, link: Link, now: float) -> None:
        """Set the state of the link."""
        up = link.state == "UP" and usable(link.rtt_s)
        rtt_s = link.rtt_s if up else 0.0  # a value from before the break is stale
        self._link = replace(link, error=link.error[:TEXT], rtt_s=rtt_s), now
        self.sample(now)

    def sample(self, now: float) -> None:
        """Sample the round-trip time once a second; call it at least as often."""
        if self._link is not None and now - self._sampled_at >= 1.0:
            self._sampled_at = now
            self._rtts.append(self._fresh_link(now).rtt_s or math.nan)

    def on_health(self, name: str, level: int, message: str, now: float) -> None:
        """Set one entry of the diagnostics, named "node: part"."""
        name = name[:120]
        before = self._statuses.get(name)
        if before is None and len(self._statuses) >= STATUSES:
            return
        known = Level(level) if level in set(Level) else Level.ERROR
        pause = now - before.at if before is not None else 0.0
        self._statuses[name] = _Status(known, message[:400], now, pause)

    # Content for the pages.

    def snapshot(self, now: float) -> Snapshot:
        """Return the content at ``now`` [s]."""
        action = self._action
        matched = action if action is not None and action.session == self._answer.session else None
        pose_age = None if self._pose is None else now - self._pose_at
        located = pose_age is not None and pose_age <= SILENT_S
        return Snapshot(
            answer=self._answer,
            words=words(
                self._answer.text,
                self._answer.ends,
                self._answer.sources,
                matched.span if matched else (0, 0),
            ),
            reading=self._reading,
            recall=self._recall
            and replace(self._recall, found=self._found.get(self._recall.session)),
            remembers=self.remembers,
            reads=self.reads,
            stages=self._stages,
            action=action,
            done=self._done(),
            direction=self._direction(),
            link=self._fresh_link(now),
            goal=self.goal,
            pending=self.pending,
            pose=self._pose if located else None,
            pose_age=pose_age,
            path=tuple(self._path.points),
            answers=tuple(self._answers),
            rtts=tuple(self._rtts),
            sampled_at=self._sampled_at,
            health=self._all_health(now),
            frame_age=None if self._frame_at is None else now - self._frame_at,
        )

    def _travelled(self) -> float:
        """Return the motion since the action began, along its kind: [m] or [rad]."""
        start, here, action = self._action_from, self._pose or self._action_from, self._action
        if action is not None and action.kind == "turn":
            return wrapped(here.yaw - start.yaw)
        return math.dist((here.x, here.y), (start.x, start.y))

    def _done(self) -> float:
        action = self._action
        if action is None or action.kind not in ("forward", "turn") or not action.value:
            return 0.0
        return min(1.0, max(0.0, self._travelled() / action.value))

    def _direction(self) -> Direction | None:
        """Return straight ahead for a drive, the remaining angle for a turn."""
        action = self._action
        if action is None or action.reason or action.kind in ("none", "give up", "reply"):
            return None
        left = action.value - self._travelled() if action.kind == "turn" else 0.0
        return direction(left, self.camera_fov)

    def _fresh_link(self, now: float) -> Link:
        if self._link is None:
            return Link()
        link, at = self._link
        if now - at <= SILENT_S:
            return link
        silent = "cloud_verifier_bridge is silent"
        return replace(link, state="UNKNOWN", rtt_s=0.0, sessions=0, error=silent)

    def _all_health(self, now: float) -> tuple[Health, ...]:
        """Return the health by node, the worst first; silent nodes are stale."""
        nodes: dict[str, list[tuple[str, Level, str]]] = {}
        for name, status in self._statuses.items():
            silent = now - status.at > max(SILENT_S, 3 * status.pause)
            current = (Level.STALE, "silent") if silent else (status.level, status.message)
            node, _, part = name.partition(": ")
            nodes.setdefault(node, []).append((part, *current))
        shown = []
        for node, parts in nodes.items():
            part, level, message = max(parts, key=lambda each: each[1])  # the first of the worst
            text = f"{part}: {message}" if part and level > Level.OK else message
            shown.append(Health(node, level, text, tuple(parts)))
        return tuple(sorted(shown, key=lambda each: (-each.level, each.name)))
