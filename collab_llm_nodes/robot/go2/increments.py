"""Steps as increments of position, executed by the Go2's own obstacle avoidance. No I/O.

The robot's service ``obstacles_avoid`` takes "0.75 m ahead" (Move, mode 1), walks it, and stops
before obstacles ahead. It must be switched on, and switched from the remote control to programs (in
the vendor's order, ``sport.Avoidance``); afterwards the remote control gets it back. It does not
report its arrival, so odometry decides (``DelegatedSteps``).
"""

from __future__ import annotations

from collab_llm_nodes.robot.executor import Outcome
from collab_llm_nodes.robot.go2.sport import NO_ANSWER, Answer, Api, Avoidance, Call, Requests
from collab_llm_nodes.robot.grammar import Kind, ParsedAction

ARM_S = 3.0
"""Longest wait for the obstacle avoidance to come on."""
REQUEST_S = 0.5
"""Longest wait for an answer."""
STOP_S = 2.0
"""Time for which an unanswered or refused stop is repeated."""


class Increments:
    """State machine of one step at a time. Report every event, and send the calls returned.

    Attributes:
        outcome, message: as of ``steps.StepOutput``.
    """

    def __init__(self) -> None:
        self.outcome, self.message = Outcome.IDLE, ""
        self.requests = Requests(REQUEST_S)
        self._avoidance = Avoidance()
        self._step: dict[str, float] = {}
        self._sent: Call | None = None
        self._began = 0.0
        self._stop: Call | None = None  # not answered yet
        self._stop_began = 0.0

    def start(self, action: ParsedAction, now: float) -> list[Call]:
        """Begin ``action``; the increment goes out once the robot is ready for it."""
        self._step = {"x": 0.0, "y": 0.0, "yaw": 0.0, "mode": 1}
        self._step["x" if action.kind is Kind.FORWARD else "yaw"] = action.value
        self._sent, self._stop, self._began = None, None, now
        self._avoidance = Avoidance()
        self.outcome, self.message = Outcome.RUNNING, ""
        return self.tick(now)

    def cancel(self, now: float) -> list[Call]:
        """Stop by the service that moves the robot, and by StopMove."""
        if self.outcome is Outcome.RUNNING:
            self.outcome = Outcome.CANCELLED
        self._stop_began = now
        return self._send_stop(now)

    def _send_stop(self, now: float) -> list[Call]:
        rest = {"x": 0.0, "y": 0.0, "yaw": 0.0, "mode": 0}
        back = {"is_remote_commands_from_api": False}
        self._stop = self.requests.make(Api.STOP_MOVE, {}, now)
        return [
            self.requests.make(Api.AVOID_MOVE, rest, now, reply=False),
            self._stop,
            self.requests.make(Api.AVOID_REMOTE, back, now, reply=False),
        ]

    def on_answer(self, answer: Answer, now: float) -> list[Call]:
        """Take the robot's answer to one of our calls, or its absence.

        The answer to the increment itself may be missing, since the vendor's own client wants none.
        """
        self._avoidance.on_answer(answer, now)
        if answer.call == self._stop:
            self._stop = None
            again = answer.code and now - self._stop_began < STOP_S
            return self._send_stop(now) if again else []
        refused = answer.call == self._sent and answer.code not in (0, NO_ANSWER)
        if refused and self.outcome is Outcome.RUNNING:
            return self._fail(str(answer), now)
        return []

    def tick(self, now: float) -> list[Call]:
        """Return the calls that are due; call it some 20 times a second."""
        calls: list[Call] = []
        for answer in self.requests.overdue(now):
            calls += self.on_answer(answer, now)
        if self.outcome is not Outcome.RUNNING or self._sent is not None:
            return calls
        if self._avoidance.armed:
            self._sent = self.requests.make(Api.AVOID_MOVE, self._step, now)
            return [*calls, self._sent]
        if now - self._began > ARM_S:
            return calls + self._fail("its obstacle avoidance does not come on", now)
        return calls + self._avoidance.arm(self.requests, now)

    def _fail(self, message: str, now: float) -> list[Call]:
        self.outcome, self.message = Outcome.FAILED, f"Go2: {message}"
        return self.cancel(now)
