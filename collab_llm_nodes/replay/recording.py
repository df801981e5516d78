"""A recorded drive: the model's answers, each with its picture and its action."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.replay.bag import Bag, goes_back, open_bag
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction

C = TypeVar("C")

REQUIRED = {
    "observation": "collab_llm/msg/Observation",
    "generated_text": "collab_llm/msg/GeneratedText",
    "navigation_action": "collab_llm/msg/NavigationAction",
}
OPTIONAL = {
    "instruction": "std_msgs/msg/String",
    "recording": "std_msgs/msg/String",
    "link_state": "collab_llm/msg/LinkState",
}
_OK = 0  # of Status.code
_CIRCUMSTANCES = {Code.UNVERIFIED, Code.STALE, Code.FAILED}
"""Codes caused by the link and the clock at that time, not by the text."""


@dataclass(frozen=True)
class Action:
    """An action for the robot; ``value`` in m or rad, + = left."""

    kind: Kind
    value: float
    code: Code

    def __str__(self) -> str:
        if self.code is not Code.OK:
            return self.code.name
        return ParsedAction(self.kind, self.value, self.code, (0, 0), "").phrase

    def same(self, other: Action) -> bool:
        """Return True if the two are equal but for rounding."""
        value = math.isclose(self.value, other.value, rel_tol=1e-9, abs_tol=1e-9)
        return self.kind is other.kind and self.code is other.code and value


@dataclass(frozen=True)
class Step:
    """One answer that was recorded.

    Attributes:
        number: from 1, in the bag.
        epoch: times that the recorder's clock had been set back before.
        stamp: capture time of the picture [ns].
        instruction: that was followed; empty if not recorded.
        prompt: exactly as the model was asked.
        picture: JPEG; None if the bag does not hold it.
        turn: 1 for the first answer of an instruction, and so on (the navigator's seeds).
        tokens, text: the answer.
        action: read from it; None if none was recorded.
        circumstance: why this answer cannot be compared: it was cut off, or not acted on because
            of the link; or empty.
        tau: tokens per verification.
        seconds: duration of the answer.
    """

    number: int
    epoch: int
    stamp: int
    instruction: str
    prompt: str
    picture: bytes | None
    turn: int
    tokens: tuple[int, ...]
    text: str
    action: Action | None
    circumstance: str
    tau: float
    seconds: float

    @property
    def unusable(self) -> str:
        """Return the reason why the step cannot be compared; empty if it can."""
        if self.picture is None:
            return "its picture is not in the bag"
        if self.action is None and not self.circumstance:
            return "no action was recorded"
        return self.circumstance


@dataclass(frozen=True)
class Recording:
    """A drive.

    Attributes:
        bag: where it was read from.
        steps: the answers in the order in which they ended.
        parameters: of the nodes, by name, as far as they were recorded.
        target: the verifier's model, as it named itself; empty if unknown.
    """

    bag: Path
    steps: tuple[Step, ...]
    parameters: dict[str, dict[str, Any]]
    target: str

    def settings(self, config: type[C], node: str, prefix: str) -> C:
        """Return ``config`` with the recorded parameters ``prefix.*`` of ``node``.

        Parameters that this version does not know are left out.
        """
        recorded = self.parameters.get(node, {})
        known = {f.name: f"{prefix}.{f.name}" for f in fields(config)}  # type: ignore[arg-type]
        return from_mapping(config, {k: recorded[p] for k, p in known.items() if p in recorded})

    def sampling(self, step: Step) -> SamplingConfig:
        """Return the sampling that the navigator asked for in ``step``."""
        base = self.settings(SamplingConfig, "navigator", "answer")
        return replace(base, seed=base.seed + step.turn)

    @property
    def epochs(self) -> int:
        """Return the number of runs: one more than the times that the clock was set back."""
        return len({step.epoch for step in self.steps})

    @property
    def max_tokens(self) -> int:
        """Return the longest answer [tokens]; by default that of ``draft_vlm``."""
        asked = self.parameters.get("navigator", {}).get("answer.max_tokens", 0)
        return int(asked or self.parameters.get("draft_vlm", {}).get("client.max_tokens", 48))


def read_recording(path: Path, namespace: str | None = None) -> Recording:
    """Read the drive in a bag.

    Args:
        namespace: of the robot, where the bag holds several.

    Raises:
        InvalidInput: no bag, a damaged one, topics or fields that are missing, other types.
    """
    with open_bag(path) as bag:
        topics = _topics(bag, namespace)
        steps, parameters, target = _answers(bag, topics)
        if not steps:
            raise InvalidInput(
                f"{path} holds no complete answer", field="generated_text", remedy="record longer"
            )
        wanted = {(s.epoch, s.stamp) for s in steps}
        pictures: dict[tuple[int, int], bytes] = {}
        for epoch, topic, message in _by_epoch(bag, topics):
            if topic == topics["observation"]:
                with as_expected(topic):
                    if (key := (epoch, _stamp(message))) in wanted:
                        pictures[key] = bytes(message.image.data)
    found = tuple(replace(s, picture=pictures.get((s.epoch, s.stamp))) for s in steps)
    return Recording(path, found, parameters, target)


def _topics(bag: Bag, namespace: str | None) -> dict[str, str]:
    """Return the full names of the required topics, and of the optional ones in the bag."""
    spaces = {t.removesuffix("/generated_text") for t in bag.types if t.endswith("/generated_text")}
    if namespace is None and len(spaces) > 1:
        raise InvalidInput(
            f"several robots are in {bag.path}: {', '.join(sorted(s or '/' for s in spaces))}",
            field="namespace",
            remedy="name one with --namespace",
        )
    space = next(iter(spaces), "") if namespace is None else f"/{namespace.strip('/')}".rstrip("/")
    topics = {}
    for name, type_name in (REQUIRED | OPTIONAL).items():
        topic = f"{space}/{name}"
        if topic not in bag.types:
            if name in OPTIONAL:
                continue
            raise InvalidInput(
                f"{bag.path} lacks the topic {topic}; it has {', '.join(sorted(bag.types))}",
                field=name,
                remedy="record it: collab-llm record, or ros2 bag record --all",
            )
        if bag.types[topic] != type_name:
            raise InvalidInput(
                f"{topic} is {bag.types[topic]} in {bag.path}, not {type_name}",
                field=name,
                remedy="is it a bag of this system?",
            )
        topics[name] = topic
    return topics


def _by_epoch(bag: Bag, topics: dict[str, str]) -> Iterator[tuple[int, str, Any]]:
    """Yield epoch, topic and content of all messages; a new epoch begins where the clock goes back.

    Only the same topics find the same epochs.
    """
    epoch, before = 0, 0
    for topic, stamp, message in bag.messages(topics.values()):
        epoch += goes_back(before, stamp)
        before = stamp
        yield epoch, topic, message


def _answers(bag: Bag, topics: dict[str, str]) -> tuple[list[Step], dict[str, dict[str, Any]], str]:
    """Return the answers without their pictures, the nodes' parameters, the verifier's model."""
    name_of = {topic: name for name, topic in topics.items()}
    finals: dict[str, tuple[int, Any, str, int]] = {}
    actions: dict[str, Any] = {}
    parameters: dict[str, dict[str, Any]] = {}
    instruction, turn, target, begun = "", 0, "", 0
    for epoch, topic, message in _by_epoch(bag, topics):
        if epoch != begun:
            instruction, turn, begun = "", 0, epoch
        with as_expected(topic):
            match name_of[topic]:
                case "generated_text" if message.final and for_motion(message):
                    turn += 1
                    finals[message.session_id] = epoch, message, instruction, turn
                case "navigation_action":  # the last counts: it may take an early one back
                    actions[message.session_id] = message
                case "instruction" if message.data != instruction:
                    instruction, turn = message.data, 0
                case "recording":
                    parameters = _parameters(message.data, topic)
                case "link_state" if message.model:
                    target = message.model
    steps = []
    for number, (session, (epoch, text, wish, nth)) in enumerate(finals.items(), 1):
        with as_expected(topics["generated_text"]):
            steps.append(_step(number, epoch, text, actions.get(session), wish, nth))
    return steps, parameters, target


def for_motion(text: Any) -> bool:
    """Return True if the robot was to move by ``text``; older recordings hold no others."""
    return bool(getattr(text, "for_motion", True))


def status_in(text: Any) -> tuple[int, str]:
    """Return code and message of ``GeneratedText.status``, which was two fields in older bags."""
    if hasattr(text, "error_msg"):
        return int(text.status), str(text.error_msg)
    return int(text.status.code), str(text.status.message)


def tau_in(metrics: Any) -> float:
    """Return tokens per round, which had a field of its own in older bags; 0 if unknown."""
    if hasattr(metrics, "tau"):
        return float(metrics.tau)
    return float(dict(zip(metrics.names, metrics.values, strict=False)).get("tau", 0.0))


def _step(number: int, epoch: int, text: Any, action: Any, instruction: str, turn: int) -> Step:
    read = None if action is None else read_action(action)
    circumstance = ""
    code, message = status_in(text)
    if code != _OK:
        circumstance = f"the answer was cut off: {message}"
    elif not text.verified:
        circumstance = "the draft model finished the answer alone"
    elif read is not None and read.code in _CIRCUMSTANCES:
        circumstance = f"not acted on: {action.reason}"
    return Step(
        number,
        epoch,
        _stamp(text),
        instruction,
        text.prompt,
        None,
        turn,
        tuple(int(t) for t in text.tokens),
        text.text,
        read,
        circumstance,
        tau_in(text.metrics),
        float(text.metrics.total_s),
    )


def read_action(message: Any) -> Action:
    kind, code = Kind(message.kind), Code(message.code)
    value = message.distance if kind is Kind.FORWARD else message.angle
    return Action(kind, float(value), code)


def _stamp(message: Any) -> int:
    return int(message.header.stamp.sec) * 10**9 + int(message.header.stamp.nanosec)


def _parameters(text: str, topic: str) -> dict[str, dict[str, Any]]:
    try:
        nodes = json.loads(text)["nodes"]
        return {str(node): dict(values) for node, values in nodes.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"no account of parameters: {error!r}", field=topic) from error


@contextmanager
def as_expected(topic: str) -> Iterator[None]:
    """Turn a missing field, or a number without meaning here, into a typed error.

    Raises:
        InvalidInput: the message was recorded by another version.
    """
    try:
        yield
    except (AttributeError, ValueError) as error:
        raise InvalidInput(
            f"recorded by another version of the package: {error}",
            field=topic,
            remedy="replay it with that version",
        ) from error
