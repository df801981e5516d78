"""The plumbing of every protocol's server.

A :class:`GenerationHost` offers the action ``<protocol>/generate``, and its service twin if the
protocol names one. It queues, refuses, watches deadlines, cancels, publishes the answer so far
(feedback and the topic ``generated_text``) and reports health. The protocol runs in threads of the
host's; ROS callbacks only start and end answers, so they return at once in any state of the node.

Answers for motion have a queue, places and a thread of their own, so that other questions do not
delay them; the protocol sees the flag, and serves them first.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from rclpy.action import CancelResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.task import Future
from std_msgs.msg import Header

from collab_llm import srv
from collab_llm.action import Generate
from collab_llm.msg import GeneratedText
from collab_llm.msg import Status as StatusMsg
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    DeadlineExceeded,
    Inactive,
    InvalidInput,
    NotFound,
    quoted,
)
from collab_llm_nodes.models.detokenising import REPLACEMENT
from collab_llm_nodes.models.turns import ROLES, Turn
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import (
    Answer,
    Control,
    Document,
    Entry,
    Progress,
    Request,
    Running,
    Source,
)
from collab_llm_nodes.protocols.options import with_options
from collab_llm_nodes.ros.clock import STEADY
from collab_llm_nodes.ros.convert import (
    deadline_from,
    images_from,
    metrics_to_msg,
    of_a_request,
    sampling_from,
    status_of,
)
from collab_llm_nodes.ros.goals import action_server, drop_contents, end_goal
from collab_llm_nodes.ros.health import AnswerLimits, Answers, Level, Status
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.qos import REQUESTS, RESULT

P = TypeVar("P", bound=Progress)

_WATCH_S = 0.05
"""Period at which the deadlines of waiting requests are checked."""
_NO_FAULTS = (Cancelled.code, Inactive.code, NotFound.code)
"""Ends of an answer that were asked for here, or that answer the question."""
_BUSY_S = 0.5
"""Delay of BUSY: a caller that retries at once would occupy the node."""
_FAREWELL_S = 1.0
"""Grace period in which callers get their results when the node is cleaned up."""


@dataclass(frozen=True)
class HostConfig:
    """Parameters of every server of a protocol, beside the protocol's own."""

    health: AnswerLimits = field(default_factory=AnswerLimits)
    deadline_s: float = setting(
        10.0, "Deadline of an answer whose request names none [s].", low=0.05, high=3600.0
    )
    max_waiting: int = setting(
        4,
        "Most answers in progress or waiting, those for motion and all others counted apart; more"
        " are refused as BUSY.",
        low=1,
        high=256,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


class _Job:
    """One answer, from the request to its end.

    Attributes:
        question: the caller's field that holds the turn to be answered.
        given_up: why it was cancelled; the first reason counts.
    """

    def __init__(self, request: Request, header: Header, question: str, due: float) -> None:
        self.request = request
        self.header = header
        self.question = question
        self.control = Control(due)
        self.given_up: CollabError | None = None
        self.begun = False  # it runs, or was cancelled before
        self.published: Progress = Progress()
        self.answer: Answer | None = None
        self.feedback: Callable[[GeneratedText, int, Progress], None] = lambda *progress: None
        self.over = Future()
        self._lock = Lock()

    def claim(self) -> bool:
        """Return True for the first caller only: a thread that runs the job, or a cancellation."""
        with self._lock:
            first, self.begun = not self.begun, True
            return first

    def ended(self, error: CollabError) -> Answer:
        """Return the answer so far, ended by ``error``."""
        return Answer(**{**vars(self.published), "verified": False}, error=error)

    def rename_field(self, error: CollabError) -> None:
        """Name the caller's field in an error of the question."""
        alone = len(self.request.turns) == 1 and error.field.startswith("turns")
        if alone or error.field in ("prompt", "question", "text"):
            error.field = self.question


class _Line:
    """A queue of answers, and the threads that make them."""

    def __init__(self, threads: int, name: str) -> None:
        self.waiting: deque[_Job] = deque()
        self.workers = ThreadPoolExecutor(threads, thread_name_prefix=name)


class GenerationHost:
    """Serves a running protocol in ``node``.

    Args:
        node: its configuration is both ``HostConfig`` and the protocol's; read for every request.
        entry, running: the protocol; ``running`` is the host's to close.
    """

    def __init__(self, node: ManagedNode[Any], entry: Entry, running: Running) -> None:
        self._node = node
        self._entry = entry
        self.running = running
        self._jobs: list[_Job] = []  # in progress or waiting
        self._goals: dict[bytes, _Job] = {}
        self._refused: dict[Future, float] = {}  # delayed refusals, with their due times
        self._health = Answers()
        self.answered = self.failed = 0
        self._questions = _Line(running.parallel, entry.name)
        self._motion = _Line(1, f"{entry.name}-motion")
        self._texts = node.create_publisher(GeneratedText, "generated_text", RESULT)
        self._watching = node.create_timer(_WATCH_S, self._watch, clock=STEADY)
        self.action = f"{entry.name}/generate"
        self._action = action_server(node, Generate, self.action, self._execute, self._on_cancel)
        # An awaiting service callback occupies its callback group: in the node's exclusive one it
        # would block the responses that its answer may wait for.
        self.group = ReentrantCallbackGroup()
        self._service = entry.service and node.create_service(
            getattr(srv, entry.service),
            f"{entry.name}_generate",
            self._serve,
            qos_profile=REQUESTS,
            callback_group=self.group,
        )

    def cancel_all(self) -> None:
        """End all answers, in progress or waiting: the node does not serve any more."""
        for job in list(self._jobs):
            self._give_up(
                job, Inactive(f"{self._node.get_name()} was deactivated", remedy="activate it")
            )
        self._release_refused(math.inf)

    def close(self, on_quiet: Callable[[], None] = lambda: None) -> None:
        """End all answers and free the protocol.

        ``on_quiet`` is called when every caller has its result, or after a second, to destroy the
        topics and clients of the answers.
        """
        self.cancel_all()
        for line in (self._questions, self._motion):
            line.workers.shutdown(wait=True)  # at most one pass: cancelled above
        self.running.close()
        node = self._node
        node.destroy_publisher(self._texts)
        node.destroy_timer(self._watching)
        due = time.monotonic() + _FAREWELL_S

        def retire() -> None:
            if self._jobs and time.monotonic() < due:
                return
            node.destroy_timer(timer)
            self._action.destroy()
            if self._service:
                node.destroy_service(self._service)
            on_quiet()

        timer = node.create_timer(0.02, retire, clock=STEADY)

    def diagnose(self) -> dict[str, Any]:
        """Return counters for the node's own diagnostics."""
        return {
            "protocol": self._entry.name,
            "in_progress": len(self._jobs),
            "answered": self.answered,
            "failed": self.failed,
        }

    def details(self, now: float) -> list[Status]:
        """Return the state of the last answers, and the protocol's own figures."""
        recent = self._node.common.diagnostics.recent
        decoding = self._health.status("decoding", self._node.config.health, now, recent)
        health = dict(self.running.health())
        failure = str(health.get("failure", ""))
        level = Level.ERROR if failure else Level.OK
        return [decoding, Status("model", level, failure or "loaded", health)]

    async def answer_all(
        self, goals: Sequence[Generate.Goal], questions: str
    ) -> list[Generate.Result]:
        """Answer several goals side by side, for a service of the node's own.

        Each result has a status of its own; one that is refused does not disturb the others.

        Args:
            questions: field of the service's request that holds the prompts of all goals.
        """
        executor = self._node.executor
        assert executor is not None  # it has called the service
        tasks = [
            executor.create_task(self._answer_goal, goal, f"{questions}[{i}]")
            for i, goal in enumerate(goals)
        ]
        for task in tasks:
            await task
        return [task.result() for task in tasks]

    async def _answer_goal(self, goal: Generate.Goal, question: str) -> Generate.Result:
        result = Generate.Result(header=goal.header)
        try:
            await self._answer(self._read(goal, question), result)
        except Exception as error:  # noqa: BLE001 - each of several answers ends by itself
            result = Generate.Result(header=goal.header, status=self._status_of(error))
        return result

    # Callbacks of actions and services, which must answer in any state of the node.

    async def _execute(self, goal: ServerGoalHandle) -> Generate.Result:
        """Answer a goal. All are accepted, because a refusal carries no reason."""
        result = Generate.Result(header=goal.request.header)
        goal_id = bytes(goal.goal_id.uuid)

        def feedback(msg: GeneratedText, new: int, progress: Progress) -> None:
            update = Generate.Feedback(header=msg.header, session_id=msg.session_id)
            update.text, update.delta, update.metrics = msg.text, msg.delta, msg.metrics
            begin = len(msg.tokens) - new
            update.tokens, update.sources = msg.tokens[begin:], msg.sources[begin:]
            update.stage, update.share_done = progress.stage, float(progress.share_done)
            goal.publish_feedback(update)

        try:
            job = self._read(goal.request)
            job.feedback = feedback
            self._goals[goal_id] = job
            if goal.is_cancel_requested:  # before this coroutine began
                self._give_up(job)
            try:
                await self._answer(job, result)
            finally:
                del self._goals[goal_id]
        except Exception as error:  # noqa: BLE001 - rclpy would end the goal with the status OK
            result = Generate.Result(header=goal.request.header, status=self._status_of(error))
            drop_contents(goal.request)
            await self._hold_back(error)
        drop_contents(goal.request)
        end_goal(goal, succeeded=result.status.code == result.status.OK)
        return result

    def _on_cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        job = self._goals.get(bytes(goal.goal_id.uuid))
        if job is not None:
            self._give_up(job)
        return CancelResponse.ACCEPT

    async def _serve(self, request: Any, response: Any) -> Any:
        response.header = request.header
        try:
            await self._answer(self._read(request), response)
        except Exception as error:  # noqa: BLE001 - rclpy would not answer at all
            response = type(response)(header=request.header, status=self._status_of(error))
            await self._hold_back(error)
        return response

    async def _hold_back(self, error: Exception) -> None:
        """Delay BUSY by ``_BUSY_S``."""
        if isinstance(error, Busy):
            released = Future()
            self._refused[released] = time.monotonic() + _BUSY_S
            self._watching.reset()
            await released

    def _release_refused(self, now: float) -> None:
        for released in [each for each, due in self._refused.items() if now >= due]:
            del self._refused[released]
            released.set_result(None)

    def _status_of(self, error: Exception) -> StatusMsg:
        """Log why a request ends without an answer; return it for the caller."""
        if isinstance(error, CollabError):
            self._node.warn_of(self.action, error)
        else:
            error = self._node.fault_of(self.action, error)
        return status_of(error)

    def _read(self, msg: Any, question: str = "") -> _Job:
        """Check a goal, or a service's request, which may lack fields.

        Args:
            question: the caller's name of the turn to be answered, if ``msg`` was made here.

        Raises:
            CollabError: ``field`` is the caller's.
        """
        node, config = self._node, self._node.config
        if not node.active:
            raise Inactive(f"{node.get_name()} is not active", remedy="activate it (lifecycle)")
        for_motion = getattr(msg, "for_motion", False)
        rivals = sum(job.request.for_motion == for_motion for job in self._jobs)
        if rivals >= config.max_waiting:
            raise Busy(f"{rivals} answers are in progress", remedy="retry, or raise max_waiting")
        allowed_s = deadline_from(msg, config.deadline_s)
        protocol = getattr(msg, "protocol", "")
        if protocol not in ("", self._entry.name):
            raise registry.unknown(protocol, [self._entry.name])
        names, values = getattr(msg, "option_names", ()), getattr(msg, "option_values", ())
        images = getattr(msg, "images", ())
        if getattr(msg, "raw", False) and (getattr(msg, "turn_roles", ()) or images):
            raise InvalidInput(
                "the model reads the prompt as it is, without turns and images",
                field="raw",
                remedy="send the prompt alone, or do not ask for raw",
            )
        stamp, now = msg.header.stamp, time.monotonic()
        request = Request(
            id=uuid.uuid4().hex,
            config=with_options(config, names, values),
            turns=self._turns(msg),
            raw=getattr(msg, "raw", False),
            images=images_from(msg) if self._takes("images", images) else (),
            documents=self._documents(msg),
            sampling=sampling_from(msg),
            max_tokens=getattr(msg, "max_tokens", 0),
            stamp_ns=stamp.sec * 10**9 + stamp.nanosec,
            frame_id=msg.header.frame_id,
            asked_at=now,
            for_motion=for_motion,
            options=frozenset(names),
        )
        chat = getattr(msg, "turn_contents", ())
        question = question or (f"turn_contents[{len(chat) - 1}]" if chat else "prompt")
        due = now + allowed_s
        job = _Job(request, msg.header, question, due)
        try:
            with of_a_request():
                self._entry.check(request)
        except CollabError as error:
            job.rename_field(error)
            raise
        return job

    def _turns(self, msg: Any) -> tuple[Turn, ...]:
        roles, contents = getattr(msg, "turn_roles", ()), getattr(msg, "turn_contents", ())
        pairs = _pairs(roles, contents, "turn_contents")
        if not pairs:
            return (Turn("user", msg.prompt),)
        if msg.prompt:
            raise InvalidInput(
                "given beside chat turns", field="prompt", remedy="make it the last turn"
            )
        for i, role in enumerate(roles):
            if role not in ROLES or (i == len(roles) - 1 and role != "user"):
                raise InvalidInput(
                    quoted(role),
                    field=f"turn_roles[{i}]",
                    remedy=f"one of {', '.join(ROLES)}; the last is user",
                )
        self._takes("chat", pairs[1:], "turn_roles")
        return tuple(Turn(*pair) for pair in pairs)

    def _documents(self, msg: Any) -> tuple[Document, ...]:
        names, contents = getattr(msg, "document_names", ()), getattr(msg, "document_contents", ())
        self._takes(
            "documents", [*names, *contents], "document_names" if names else "document_contents"
        )
        pairs = _pairs(names, contents, "document_contents")
        return tuple(Document(*pair) for pair in pairs)

    def _takes(self, kind: str, given: Sequence[Any], name: str = "") -> bool:
        """Return whether anything of this kind is given; raises InvalidInput if it must not be."""
        if given and kind not in self._entry.takes:
            raise InvalidInput(
                f"{self._entry.name} takes no {kind}",
                field=name or kind,
                remedy="leave it out, or ask another protocol",
            )
        return bool(given)

    # Answers.

    async def _answer(self, job: _Job, result: Any) -> None:
        """Queue ``job``; return when it is over, however it ends, with ``result`` set."""
        self._node.get_logger().debug(f"answer {job.request.id[:8]}: asked for")
        self._jobs.append(job)
        self._watching.reset()
        line = self._line(job)
        line.waiting.append(job)
        line.workers.submit(
            self._run_next, line
        )  # not with the job: cancelled, it leaves the queue
        try:
            await job.over
        finally:
            self._jobs.remove(job)
        self._fill(result, job)

    def _line(self, job: _Job) -> _Line:
        return self._motion if job.request.for_motion else self._questions

    def _give_up(self, job: _Job, why: CollabError | None = None) -> None:
        """Cancel ``job``: at once before it runs, else between two passes."""
        why = why or Cancelled("the caller gave the answer up")
        job.given_up = job.given_up or why
        job.control.cancel()
        self._abandon(job, job.given_up)

    def _abandon(self, job: _Job, error: CollabError) -> None:
        """End ``job`` with ``error`` if it does not run yet."""
        if job.claim():
            with contextlib.suppress(ValueError):  # a thread has just taken it
                self._line(job).waiting.remove(job)
            job.answer = job.ended(error)
            self._node.post(job.over.set_result, None)

    def _watch(self) -> None:
        """End waiting requests whose deadline has passed; running ones check their own.

        One timer for all, since rclpy leaks memory with each.
        """
        if not (self._jobs or self._refused):
            self._watching.cancel()  # until the next one
        now = time.monotonic()
        self._release_refused(now)
        for job in list(self._jobs):
            if now >= job.control.due:
                late = DeadlineExceeded(
                    "other answers were in progress", field="deadline_s", remedy="raise it"
                )
                self._abandon(job, late)

    def _fill(self, result: Any, job: _Job) -> None:
        """Set the fields that the action's result and the service's response share."""
        answer, log = job.answer, self._node.get_logger()
        assert answer is not None
        name = f"answer {job.request.id[:8]}"
        if answer.error is not None:
            self.failed += 1
            result.status = status_of(answer.error)
            if answer.error.code not in _NO_FAULTS:
                self._health.faults.add(answer.error.code, str(answer.error), time.monotonic())
        else:
            self.answered += 1
            self._health.on_answer(answer.metrics)
        metrics = answer.metrics
        log.debug(
            f"{name}: {answer.error or 'complete'}; {len(answer.tokens)} tokens,"
            f" {metrics.rounds} rounds, {metrics.total_s:.2f} s, {dict(metrics.figures())}"
        )
        result.session_id, result.text = job.request.id, answer.text
        if hasattr(result, "tokens"):  # protocols of texts alone have none
            result.tokens, result.sources = list(answer.tokens), list(answer.sources)
        result.verified = answer.verified
        result.metrics = metrics_to_msg(metrics)

    # In a thread of the host's.

    def _run_next(self, line: _Line) -> None:
        """Run the next job in the queue; there is none for each that was cancelled."""
        try:
            job = line.waiting.popleft()
        except IndexError:
            return
        self._run(job)

    def _run(self, job: _Job) -> None:
        """Answer ``job``; always publish a final text, and end the wait for it."""
        if not job.claim():
            return  # cancelled while it waited
        try:
            job.control.check()
            answer = self.running.run(job.request, partial(self._emit, job), job.control)
            answer = _checked(answer, Answer, self._entry.name)
        except CollabError as error:
            answer = job.ended(error)
        except Exception as error:  # noqa: BLE001 - any error of a model must reach the caller
            answer = job.ended(self._node.fault_of(self.action, error))
        try:
            if isinstance(answer.error, Cancelled) and job.given_up is not None:
                answer = replace(answer, error=job.given_up)  # the protocol cannot know why
            if answer.error is not None:
                job.rename_field(answer.error)
            job.answer = answer
            self._publish(job, answer, answer)
        except Exception as error:  # noqa: BLE001 - the caller waits for ``over`` in any case
            self._node.fault_of(self.action, error)
        finally:
            self._node.post(job.over.set_result, None)

    def _emit(self, job: _Job, progress: Progress) -> None:
        """Publish the protocol's progress."""
        self._publish(job, _checked(progress, Progress, self._entry.name))

    def _publish(self, job: _Job, progress: Progress, final: Answer | None = None) -> None:
        """Publish the answer so far, or its end, and its new part as feedback."""
        before, text = job.published, progress.text
        job.published = progress
        msg = GeneratedText(
            header=job.header,
            session_id=job.request.id,
            prompt=job.request.prompt,
            text=text,
            delta=text[len(before.text) :],
            tokens=array("i", progress.tokens),
            sources=array("B", progress.sources),
            ends=array("I", progress.ends),
            stage=progress.stage,
            final=final is not None,
            for_motion=job.request.for_motion,
            verified=progress.verified,
            metrics=metrics_to_msg(progress.metrics),
        )
        if final is not None and final.error is not None:
            msg.status = status_of(final.error)
        self._texts.publish(msg)
        new = len(progress.tokens) - len(before.tokens)
        if final is None or msg.delta or new:
            job.feedback(msg, new, progress)


def _checked(report: P, kind: type[P], protocol: str) -> P:
    """Return a protocol's report with values that messages can carry.

    rclpy's C code ends the process for a value of another type, such as a NumPy integer.

    Raises:
        CollabError: the report is of another type than ``kind``, or a value is out of its range.
    """
    try:
        if not isinstance(report, kind):
            raise TypeError(f"{type(report).__name__}, expected {kind.__name__}")
        error = report.error if isinstance(report, Answer) else None
        if error is not None and not isinstance(error, CollabError):
            raise TypeError(f"the error is {type(error).__name__}, expected CollabError")
        if max(report.sources, default=0) > max(Source):
            raise ValueError(f"source {max(report.sources)}, expected 0 to {max(Source)}")
        metrics_to_msg(report.metrics)
        return replace(
            report,
            text=_sendable(report.text),
            tokens=tuple(array("i", report.tokens)),
            sources=tuple(array("B", report.sources)),
            ends=tuple(array("I", report.ends)),
            verified=bool(report.verified),
            stage=_sendable(report.stage),
            share_done=float(report.share_done),
        )
    except (TypeError, ValueError, OverflowError, AttributeError) as fault:
        raise CollabError(f"the protocol {protocol} returned no usable answer: {fault}") from fault


def _sendable(text: str) -> str:
    """Return ``text`` with the characters replaced that a ROS string cannot hold.

    Byte-level vocabularies can produce NUL, which ends a string, and surrogates, which UTF-8 lacks.
    """
    return re.sub("[\0\ud800-\udfff]", REPLACEMENT, text)


def _pairs(first: Sequence[str], second: Sequence[str], field_name: str) -> list[tuple[str, str]]:
    if len(first) != len(second):
        raise InvalidInput(
            f"{len(second)}, expected {len(first)}", field=field_name, remedy="give one for each"
        )
    return list(zip(first, second, strict=True))
