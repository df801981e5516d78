"""The robot's graph as the tools of agents use it: pictures, questions, instructions, stop.

Nothing here publishes a velocity. An instruction is a goal of the navigator, so the parser, the
navigator's limits and ``motion_guard`` decide about each motion.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rcl_interfaces.srv import GetParameters
from std_msgs.msg import Bool

from collab_llm.action import Generate, Navigate
from collab_llm.msg import MotionState, Observation
from collab_llm_nodes.agents.settings import AgentConfig
from collab_llm_nodes.errors import Cancelled, DeadlineExceeded, Unavailable
from collab_llm_nodes.nodes.instruct import CANCEL_DEADLINE_S, LOST_S, InstructionClient
from collab_llm_nodes.ros.client import GraphClient
from collab_llm_nodes.ros.convert import raise_for
from collab_llm_nodes.ros.goals import ALL_GOALS, SentGoal, action_client, cancel_client
from collab_llm_nodes.ros.qos import CAMERA, COMMAND, STATE

PICTURE_S = 2.0
"""An older picture is not shown; also the wait for one."""
STOP_S = 1.5
"""A navigator that has not confirmed by then is stopped by the emergency stop."""
ANSWER_S = 3.0
"""Longest wait for a node to be discovered, or to answer."""
_POLL_S = 0.05
_CONFIRM_S = 2.0


@dataclass(frozen=True)
class Picture:
    """A camera picture as JPEG, and when it arrived [s, time.monotonic]."""

    jpeg: bytes
    at: float


class AgentGraph(GraphClient):
    """The graph of one robot; the coroutines may run in any event loop.

    Args:
        namespace: of the robot's nodes.

    Attributes:
        stops: calls of ``stop`` so far.
    """

    def __init__(self, config: AgentConfig, namespace: str = "") -> None:
        super().__init__("agents", namespace)
        self._config, self._namespace = config, namespace
        self._picture: Picture | None = None
        self._motion: MotionState | None = None
        self._followed: set[InstructionClient] = set()
        self.stops = 0
        self._presses = self.node.create_publisher(Bool, "emergency_stop", COMMAND)
        self._cancels = cancel_client(self.node, "navigate")
        self._parser = self.node.create_client(
            GetParameters, "navigation_action_parser/get_parameters"
        )
        self._answering = {
            protocol: action_client(self.node, Generate, f"{protocol}/generate")
            for protocol in ("edge_cloud", "dragon")
        }
        self.node.create_subscription(Observation, "observation", self._on_picture, CAMERA)
        self.node.create_subscription(MotionState, "motion_state", self._on_motion, STATE)

    def __exit__(self, *exc: object) -> None:
        """Stop a robot that still follows an instruction; then leave the graph."""
        for client in self._followed:
            self._executor.create_task(client.give_up)
        due = time.monotonic() + CANCEL_DEADLINE_S
        for client in self._followed:
            client.ended.wait(max(0.0, due - time.monotonic()))
        super().__exit__(*exc)

    def motion(self) -> str:
        """Return in words whether ``motion_guard`` allows motion."""
        if self._motion is None:
            return "motion_guard has not said whether the robot may move"
        if self._motion.allowed:
            return "motion_guard allows motion"
        return f"motion_guard allows no motion: {', '.join(self._motion.reasons)}"

    async def picture(self) -> Picture:
        """Return the newest picture.

        Raises:
            Unavailable: the camera is silent.
        """

        def fresh() -> bool:
            picture = self._picture
            return picture is not None and time.monotonic() - picture.at < PICTURE_S

        if not await _becomes(fresh, PICTURE_S) or self._picture is None:
            raise Unavailable(f"no picture for {PICTURE_S:g} s", remedy="see camera_ingest")
        return self._picture

    async def answer(self, goal: Generate.Goal) -> Generate.Result:
        """Return the answer to a question, by the server of its protocol.

        Raises:
            Unavailable: there is no such server, or the target has not verified the answer.
            DeadlineExceeded: no answer in time.
            CollabError: the question was refused, or its answer failed.
        """
        client = self._answering[goal.protocol]
        if not await _becomes(client.server_is_ready, ANSWER_S):
            raise Unavailable(f"no server of {goal.protocol}", remedy="start it on the robot")
        goal.deadline_s = self._config.answer_s
        sent: list[SentGoal] = []
        given_up = threading.Event()

        def send(done: Callable[[Any], None]) -> None:
            if not given_up.is_set():
                sent.append(SentGoal(self.node, client, goal, done))

        def cancel() -> None:
            given_up.set()  # tasks may run in another order
            for each in sent:
                each.cancel()

        try:
            result = await self._outcome(send, goal.deadline_s + LOST_S, "the answer")
        except (DeadlineExceeded, asyncio.CancelledError):
            self._executor.create_task(cancel)
            raise
        if result is None:
            raise Unavailable(f"{goal.protocol}: the server {sent[0].loss}", remedy="see its log")
        raise_for(result.status)
        if not result.verified:
            raise _unverified()
        return result

    async def navigate(
        self, instruction: str, max_steps: int, stops: int, report: Callable[[str], None]
    ) -> Navigate.Result:
        """Follow an instruction, after its approval; return how it ended.

        The robot stops if the caller is cancelled.

        Args:
            stops: value of ``stops`` when the instruction was given.
            report: called with news for people, in the thread of the graph.

        Raises:
            Cancelled: ``stop`` was called since.
            DeadlineExceeded: not approved in time.
            Unavailable: the robot would act on unverified text, or the navigator is gone.
        """
        await self._require_verification(stops)
        goal = Navigate.Goal(
            instruction=instruction, max_steps=max_steps, deadline_s=self._config.motion_s
        )
        unverified = threading.Event()

        def on_step(feedback: Navigate.Feedback) -> None:
            report(f"step {feedback.step}: {feedback.text}")
            if not feedback.action.verified:
                unverified.set()

        client = InstructionClient(
            goal,
            confirm=self._config.approval,
            on_news=report,
            on_step=on_step,
            context=self._context,
            namespace=self._namespace,
        )
        self._executor.add_node(client.node)
        self._followed.add(client)
        try:
            return await self._follow(client, unverified, stops)
        finally:
            # Before any wait, which may be cut short.
            if not client.ended.is_set():
                self._executor.create_task(client.give_up)
            await asyncio.shield(self._release(client))

    async def stop(self) -> str:
        """Cancel every instruction; press the emergency stop if that is not confirmed.

        Returns what was done, in words.
        """
        self.stops += 1
        ours = len(self._followed)  # some may be cancelled before all are
        try:
            response = await self._outcome(self._cancel_all, STOP_S, "the navigator")
        except DeadlineExceeded:
            return await self._press()
        count = max(ours, len(response.goals_canceling))
        return f"cancelled: {count}" if count else "no instruction was being followed"

    def _cancel_all(self, done: Callable[[Any], None]) -> None:
        asked = self._cancels.call_async(ALL_GOALS)
        asked.add_done_callback(lambda future: done(future.result()))

    async def _press(self) -> str:
        """Publish the emergency stop until it is confirmed; a guard may miss the first."""
        due = time.monotonic() + _CONFIRM_S
        while time.monotonic() < due:
            self._presses.publish(Bool(data=True))
            await asyncio.sleep(_POLL_S)
            if self._motion is not None and self._motion.emergency_stop:
                return "the navigator did not answer: EMERGENCY STOP, confirmed by motion_guard"
        return "the navigator did not answer: EMERGENCY STOP SENT, NOT CONFIRMED"

    async def _require_verification(self, stops: int) -> None:
        """Check that the parser refuses text that the target has not verified."""

        def ready() -> bool:
            self._check_stops(stops)
            return bool(self._parser.service_is_ready())

        def ask(done: Callable[[Any], None]) -> None:
            asked = self._parser.call_async(GetParameters.Request(names=["unverified"]))
            asked.add_done_callback(lambda future: done(future.result().values))

        await _becomes(ready, self._config.approval_s)  # models load first
        values = await self._outcome(ask, ANSWER_S, "navigation_action_parser")
        if [value.string_value for value in values] != ["refuse"]:
            raise Unavailable(
                "the robot may move by text that is not verified, which agents must not cause",
                remedy="navigation_action_parser: unverified: refuse",
            )

    async def _follow(
        self, client: InstructionClient, unverified: threading.Event, stops: int
    ) -> Navigate.Result:
        due = time.monotonic() + self._config.approval_s
        while client.goal is None and not client.ended.is_set():
            self._check_stops(stops)
            if time.monotonic() > due:
                raise _not_begun(client, self._config.approval_s)
            await asyncio.sleep(_POLL_S)
        due = time.monotonic() + self._config.motion_s + LOST_S
        while not client.ended.is_set():
            self._check_stops(stops)
            if unverified.is_set():
                raise _unverified()
            if time.monotonic() > min(due, client.seen_at + LOST_S):
                raise Unavailable("the navigator is gone", remedy="see the robot's log")
            await asyncio.sleep(_POLL_S)
        if client.result is None:
            raise Unavailable("the navigator has no result", remedy="see its log")
        return client.result

    def _check_stops(self, stops: int) -> None:
        if self.stops != stops:
            raise Cancelled("stopped")

    async def _release(self, client: InstructionClient) -> None:
        """Destroy the node of a goal once that has ended."""
        await _becomes(client.ended.is_set, CANCEL_DEADLINE_S)
        self._followed.discard(client)
        self._executor.remove_node(client.node)
        self._executor.create_task(client.node.destroy_node)

    async def _outcome(
        self, start: Callable[[Callable[[Any], None]], None], deadline_s: float, what: str
    ) -> Any:
        """Call ``start(done)`` in the executor's thread; return what it gives to ``done``.

        Raises:
            DeadlineExceeded: ``what`` did not arrive in time.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def take(value: Any) -> None:
            if not outcome.done():
                outcome.set_result(value)

        def done(value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, value)

        self._executor.create_task(partial(start, done))
        try:
            return await asyncio.wait_for(outcome, deadline_s)
        except asyncio.TimeoutError:
            message = f"waited {deadline_s:g} s for {what}"
            raise DeadlineExceeded(message, remedy="see the robot's log") from None

    def _on_picture(self, msg: Observation) -> None:
        self._picture = Picture(msg.image.data.tobytes(), time.monotonic())

    def _on_motion(self, msg: MotionState) -> None:
        self._motion = msg


async def _becomes(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until ``condition()`` is true; return False if it is not in time."""
    due = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > due:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _not_begun(client: InstructionClient, waited_s: float) -> DeadlineExceeded:
    if client.announced:
        why = "nobody approved it"
    else:
        why = f"waiting for {', '.join(client.missing) or 'the robot'}"
    remedy = "ask the operator, then call again"
    return DeadlineExceeded(f"not begun after {waited_s:g} s: {why}", remedy=remedy)


def _unverified() -> Unavailable:
    return Unavailable(
        "the text was not verified by the target model", remedy="try again when the link is up"
    )
