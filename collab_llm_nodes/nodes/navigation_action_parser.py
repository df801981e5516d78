"""Parses a model's text into one safe action, once the answer is complete.

``generated_text`` in, ``navigation_action`` out. Only texts for motion are read (``for_motion``).
Nothing is executed here: the navigator decides whether it waits for the action. Text that is too
old, unverified (by policy), failed or unreadable becomes an action of kind NONE with a code.

With ``streaming`` a motion is published as soon as its sentence is complete, one round of
verification sooner. If the rest of the answer contradicts it, it is taken back, but the robot has
moved meanwhile.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from collab_llm.msg import GeneratedText, NavigationAction
from collab_llm.msg import Status as StatusMsg
from collab_llm_nodes.config import check_ranges, fixed
from collab_llm_nodes.robot.grammar import (
    REASONS,
    Code,
    GrammarConfig,
    Kind,
    ParsedAction,
    StreamingParser,
)
from collab_llm_nodes.ros.health import ActionLimits, Actions, Status
from collab_llm_nodes.ros.managed_node import ManagedNode, guarded
from collab_llm_nodes.ros.motion_inputs import seconds_of
from collab_llm_nodes.ros.program import run
from collab_llm_nodes.ros.qos import RESULT

_SESSIONS = 16
"""Answers remembered at a time; older ones can no longer be about a fresh frame."""
_AHEAD_S = 1.0
"""Tolerance for clocks that differ: a frame may be stamped so much later than now."""


@dataclass(frozen=True)
class ParserConfig:
    """Parameters of the node."""

    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    health: ActionLimits = field(default_factory=ActionLimits)
    max_age: float = fixed(
        10.0, "Oldest camera frame to act on, from its capture [s].", low=0.05, high=600.0
    )
    unverified: str = fixed(
        "refuse",
        "Text that the target has not verified: refuse, or slow = the navigator acts on it slowly"
        " and in part (mission.unverified).",
        choices=("refuse", "slow"),
    )
    streaming: bool = fixed(
        False,
        "Report a motion before the answer's last token: a round sooner, but the robot moves for"
        " that round on words that a later sentence may take back ('... actually no, stop').",
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class _Reading:
    """One answer being read."""

    parser: StreamingParser
    reported: ParsedAction | None = None


class NavigationActionParser(ManagedNode[ParserConfig]):
    """See the module docstring."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("navigation_action_parser", ParserConfig, **node_arguments)
        self._readings: OrderedDict[str, _Reading] = OrderedDict()
        self._health = Actions()

    def configure(self) -> None:
        self._actions = self.create_publisher(NavigationAction, "navigation_action", RESULT)
        self._texts = self.create_subscription(
            GeneratedText, "generated_text", self._on_text, RESULT
        )

    def deactivate(self) -> None:
        self._readings.clear()

    def cleanup(self) -> None:
        self.destroy_subscription(self._texts)
        self.destroy_publisher(self._actions)

    def details(self, now: float) -> list[Status]:
        """Return how the texts were read."""
        return [self._health.status(self.config.health)]

    @guarded
    def _on_text(self, msg: GeneratedText) -> None:
        if not msg.for_motion:
            return
        reading = self._readings.setdefault(
            msg.session_id, _Reading(StreamingParser(self.config.grammar))
        )
        while len(self._readings) > _SESSIONS:
            self._readings.popitem(last=False)
        parser = reading.parser
        if not msg.text.startswith(parser.text):  # a message was lost: read from the start
            parser = reading.parser = StreamingParser(self.config.grammar)
        parsed = parser.push(msg.text[len(parser.text) :])
        if msg.final:
            del self._readings[msg.session_id]
            final = self._judge(parser.finish(), msg)
            if reading.reported is None or final.code is not Code.OK:
                self._publish(final, msg)  # the second time: it takes the first back
        elif parsed is not None and reading.reported is None and self._may_act_early(parsed, msg):
            reading.reported = parsed
            self._publish(parsed, msg)

    def _may_act_early(self, parsed: ParsedAction, msg: GeneratedText) -> bool:
        """Return True for a motion under ``streaming``; an early end gains nothing."""
        early = self.config.streaming and parsed.kind.moves
        return early and self._judge(parsed, msg).code is Code.OK

    def _judge(self, parsed: ParsedAction, msg: GeneratedText) -> ParsedAction:
        """Return ``parsed``, or no motion because of the text's status, verification or age."""
        age = self._age_of(msg)
        reason = ""
        if msg.status.code != StatusMsg.OK:
            code, reason = Code.FAILED, f"{REASONS[Code.FAILED]}: {msg.status.message}"
        elif not msg.verified and self.config.unverified == "refuse":
            code = Code.UNVERIFIED
        elif age < -_AHEAD_S:
            code = Code.STALE
            reason = f"the camera frame is stamped {-age:.1f} s in the future (check the clocks)"
        elif age > self.config.max_age:
            code = Code.STALE
        else:
            return parsed
        return replace(parsed, kind=Kind.NONE, value=0.0, code=code, reason=reason, words="")

    def _age_of(self, msg: GeneratedText) -> float:
        """Return the age of the frame that the text is about [s]."""
        return self.seconds() - seconds_of(msg.header.stamp, "generated_text.header.stamp")

    def _publish(self, parsed: ParsedAction, msg: GeneratedText) -> None:
        reason = parsed.reason or REASONS[parsed.code]
        self._health.on_action(parsed.code.name, reason, self._age_of(msg), time.monotonic())
        action = NavigationAction(
            header=msg.header,
            session_id=msg.session_id,
            kind=parsed.kind,
            distance=parsed.value if parsed.kind is Kind.FORWARD else 0.0,
            angle=parsed.value if parsed.kind is Kind.TURN else 0.0,
            code=parsed.code,
            reason=reason,
            text=parsed.text,
            words=parsed.words,
            span_begin=parsed.span[0],
            span_end=parsed.span[1],
            verified=msg.verified,
        )
        self._actions.publish(action)
        self.get_logger().debug(f"answer {msg.session_id[:8]}: read as {parsed.code.name}")
        # The client of draft_vlm logs failed answers.
        if parsed.code not in (Code.OK, Code.FAILED):
            self.get_logger().warning(
                f"no motion ({parsed.code.name}): {reason}; text {parsed.text[:120]!r}",
                throttle_duration_sec=1.0,
            )


def main() -> int:
    """Run the node."""
    return run(NavigationActionParser)


if __name__ == "__main__":
    raise SystemExit(main())
