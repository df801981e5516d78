"""Small bags of made-up drives for the tests."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from rclpy.serialization import serialize_message
from std_msgs.msg import String

from collab_llm.msg import GeneratedText, NavigationAction, Observation
from collab_llm_nodes.replay.bag import BagWriter
from collab_llm_nodes.robot.grammar import GrammarConfig, parse

TEXTS = ("the next action is turn left 45 degree.", "the next action is move forward 75 cm.")


def type_of(message: Any) -> str:
    """``std_msgs/msg/String`` of such a message."""
    return "/".join((type(message).__module__.split(".")[0], "msg", type(message).__name__))


def drive(steps: int = 4, **changes: Any) -> list[tuple[str, Any]]:
    """Topic and message of a drive whose n-th answer is about the picture of second n.

    Args:
        changes: fields of the second answer's text that are otherwise.
    """
    messages: list[tuple[str, Any]] = [("instruction", String(data="find the red ball"))]
    for n in range(1, steps + 1):
        observation = Observation(sequence=n)
        observation.header.stamp.sec = n
        observation.image.data = array("B", bytes([n]) * 50)
        text = GeneratedText(
            header=observation.header,
            session_id=f"session-{n}",
            prompt=f"find the red ball. history: {n}.",
            text=TEXTS[n % len(TEXTS)],
            tokens=array("i", [n, n + 1]),
            final=True,
            for_motion=True,
            verified=True,
        )
        if n == 2:
            for name, value in changes.items():
                setattr(text, name, value)
        read = parse(text.text, GrammarConfig())
        action = NavigationAction(
            header=observation.header, session_id=text.session_id, kind=read.kind, code=read.code
        )
        action.angle, action.distance = (read.value, 0.0) if read.kind == 3 else (0.0, read.value)
        messages += [("observation", observation), ("generated_text", text)]
        messages += [("navigation_action", action)]
    return [*messages, ("instruction", String())]


def write_bag(
    folder: Path, messages: list[tuple[str, Any]], storage: str = "mcap", namespace: str = ""
) -> Path:
    """One bag in ``folder`` with these messages, a millisecond apart."""
    named = [(f"{namespace}/{topic}", message) for topic, message in messages]
    return write_runs(folder, named, storage=storage, apart_ns=10**6)


def write_runs(
    folder: Path,
    *runs: list[tuple[str, Any]],
    storage: str = "mcap",
    apart_ns: int = 10**9,
    chunk: int = 0,
) -> Path:
    """One bag in ``folder`` in which the clock begins at zero with each run.

    Args:
        chunk: write so many messages together; 0: as many as the storage likes.
    """
    writer = BagWriter(folder, "made", storage)
    for run in runs:
        for n, (topic, message) in enumerate(run):
            writer.write(topic, type_of(message), n * apart_ns, serialize_message(message))
            if chunk and writer.messages % chunk == 0:
                writer.flush()
    path = writer.path
    assert path is not None
    writer.close()
    return path
