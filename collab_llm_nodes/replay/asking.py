"""``collab-llm replay --ask``: an instruction, asked about the pictures of any bag.

Each picture is asked about by itself, without a history of actions. Nothing moves; actions that the
navigator would refuse by the same configuration are shown as refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError, InvalidInput, printable
from collab_llm_nodes.replay.bag import Bag, goes_back, open_bag
from collab_llm_nodes.replay.compare import Reply
from collab_llm_nodes.replay.recording import Recording, Step, as_expected
from collab_llm_nodes.replay.replayers import Models, in_process, through_nodes
from collab_llm_nodes.robot.asked_thing import AskedThing
from collab_llm_nodes.robot.grammar import REASONS, Code, GrammarConfig, parse
from collab_llm_nodes.robot.mission import (
    MissionConfig,
    asked_thing,
    check_instruction,
    refusal,
)
from collab_llm_nodes.robot.prompt import DEFAULT_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.robot.stop_words import STOP_WORDS, asks_to_stop, check_stop_words
from collab_llm_nodes.ros.cameras import CameraConfig
from collab_llm_nodes.ros.images import (
    Form,
    encode_jpeg,
    read_compressed,
    to_rgb,
    view_of,
    zoom_between,
)

_RAW = "sensor_msgs/msg/Image"
_COMPRESSED = "sensor_msgs/msg/CompressedImage"
_OBSERVATION = "collab_llm/msg/Observation"
_INFO = "sensor_msgs/msg/CameraInfo"
_NODES = ("camera_ingest", "draft_vlm", "navigation_action_parser", "navigator")
"""Nodes whose parameters shape pictures, prompts, answers and actions."""


@dataclass(frozen=True)
class Question:
    """The question, and the pictures it is about.

    Attributes:
        instruction: the robot's.
        topic: of the pictures; empty: the bag's only one.
        every_s: least time between two pictures [s].
        config: ROS parameter file.
        namespace: of the robot, where the bag holds several; None: any.
    """

    instruction: str
    topic: str
    every_s: float
    config: Path
    namespace: str | None = None


@dataclass(frozen=True)
class _Picture:
    """A picture of the bag.

    Attributes:
        epoch: times that the recorder's clock had been set back before.
        stamp: time of reception [ns].
        time_s: time since the first picture of its epoch.
        message: as it was recorded.
    """

    epoch: int
    stamp: int
    time_s: float
    message: Any


def run_ask(
    bag: Path, question: Question, models: Models, *, nodes: bool, console: Console
) -> dict[str, Any]:
    """Ask ``question`` about pictures of ``bag``, and print each answer with its action.

    Args:
        nodes: through the real nodes; else in this process.

    Returns:
        The report for JSON.

    Raises:
        CollabError: bag, configuration or a model cannot be used, or no picture can be asked about.
    """
    settings = Recording(bag, (), _parameters(question.config), "")
    mission = settings.settings(MissionConfig, "navigator", "mission")
    check_instruction(question.instruction)
    asked = asked_thing(question.instruction, mission)
    models = models.named(settings)
    answers: list[dict[str, Any]] = []
    left_out: list[InvalidInput] = []
    with open_bag(bag) as opened:
        topic = _picture_topic(opened, question)
        report = {
            "bag": bag.name,
            "topic": topic,
            "instruction": question.instruction,
            "models": asdict(models),
            "nodes": nodes,
            "answers": answers,
        }
        if asks_to_stop(question.instruction, _stop_words(settings)):
            console.print("the instruction asks to stop: the robot stops, and asks no model")
            return report
        answered = (
            through_nodes(settings, models, base=question.config)
            if nodes
            else in_process(settings, models)
        )
        form = _form(opened, topic, settings.parameters.get("camera_ingest", {}), console)
        with answered as replayer:
            epoch = 0
            for picture in _sampled(opened, topic, question.every_s):
                if picture.epoch != epoch:
                    epoch = picture.epoch
                    console.print("the clock was set back here: another run")
                answer: dict[str, Any]
                try:
                    step = _step(picture, opened.types[topic], form, question, settings)
                    reply = replayer(step)
                except InvalidInput as error:
                    left_out.append(error)
                    answer = {"left_out": str(error)}
                    words = f"left out: {error}"
                else:
                    answer = _answer(reply, settings, mission, asked)
                    text = printable(" ".join(reply.text.split()))
                    words = f'"{text}" -> {answer["action"] or "no action: " + answer["reason"]}'
                answers.append({**_when(picture), **answer})
                line = f"{picture.time_s:.1f} s: {words}"
                console.print(line, highlight=False, soft_wrap=True)
    if not answers:
        raise InvalidInput(f"{topic} is empty", field="image", remedy="name another topic")
    if len(left_out) == len(answers):
        raise left_out[-1]
    actions = sum(bool(answer.get("action")) for answer in answers)
    sampled = len(answers)
    console.print(
        f"{sampled - len(left_out)} of {sampled} sampled pictures of {printable(topic)} answered,"
        f" {actions} with an action",
        highlight=False,
        soft_wrap=True,
    )
    return report


def _when(picture: _Picture) -> dict[str, Any]:
    return {"epoch": picture.epoch, "stamp_ns": picture.stamp, "time_s": picture.time_s}


def _answer(
    reply: Reply, settings: Recording, mission: MissionConfig, asked: AskedThing | None
) -> dict[str, Any]:
    """Return an answer for the report, with its action or why there is none."""
    read = parse(
        reply.text, settings.settings(GrammarConfig, "navigation_action_parser", "grammar")
    )
    if reply.action.code is not Code.OK:
        refused, why = reply.action.code.name, read.reason or REASONS[reply.action.code]
    else:
        refused, why = refusal(read, mission, asked)
    action = "" if refused else str(reply.action)
    return {
        "text": reply.text,
        "action": action,
        "reason": f"{refused}, {printable(why)}" if refused else "",
    }


def _stop_words(settings: Recording) -> tuple[str, ...]:
    """Return the navigator's words for a stop.

    Raises:
        ConfigError: they are none.
    """
    words = settings.parameters.get("navigator", {}).get("stop_words", STOP_WORDS)
    known = tuple(map(str, words)) if isinstance(words, list | tuple) else ()
    check_stop_words(known)
    return known


def _step(
    picture: _Picture, kind: str, form: Form, question: Question, settings: Recording
) -> Step:
    """Return the picture as a step of a drive that was never recorded.

    Raises:
        InvalidInput: the picture cannot be read.
    """
    with as_expected(kind):
        jpeg = _jpeg(picture.message, kind, form)
    template = settings.parameters.get("navigator", {}).get("answer.prompt", DEFAULT_TEMPLATE)
    prompt = user_text(question.instruction, (), str(template), search=SearchMemory().text)
    return Step(
        number=0,
        epoch=picture.epoch,
        stamp=picture.stamp,
        instruction=question.instruction,
        prompt=prompt,
        picture=jpeg,
        turn=1,
        tokens=(),
        text="",
        action=None,
        circumstance="",
        tau=0.0,
        seconds=0.0,
    )


def _form(bag: Bag, topic: str, camera: Mapping[str, Any], console: Console) -> Form:
    """Return the form in which ``camera_ingest`` would pass the topic's pictures on.

    Raises:
        ConfigError: a parameter of it is out of its range.
    """
    names = ("quality", "max_width", "field_of_view", "camera_fov")
    config = from_mapping(CameraConfig, {name: camera[name] for name in names if name in camera})
    wanted, known = config.field_of_view, config.camera_fov
    told = ""
    if wanted and bag.types[topic] == _OBSERVATION:
        known = 0.0
        told = "these pictures keep the field of view in which camera_ingest recorded them"
    elif wanted and not known:
        known = _recorded_view(bag, topic)
        if not known:
            told = (
                "the camera's field of view is unknown, directions may be wrong: record its"
                " camera_info, or set camera_ingest's camera_fov in --config"
            )
    if told:
        console.print(told, soft_wrap=True)
    return Form(config.quality, config.max_width, zoom_between(known, wanted))


def _recorded_view(bag: Bag, topic: str) -> float:
    """Return the field of view [deg] by the ``camera_info`` beside a topic; 0.0: there is none."""
    place = topic.removesuffix("/compressed").rpartition("/")[0]
    info = f"{place}/camera_info"
    if bag.types.get(info) != _INFO:
        return 0.0
    with as_expected(info):
        views = (view_of(message) for _, _, message in bag.messages([info]))
        return next(filter(None, views), 0.0)


def _jpeg(message: Any, kind: str, form: Form) -> bytes:
    """Return the picture as ``camera_ingest`` would pass it on."""
    if kind == _RAW:
        rgb = to_rgb(
            message.encoding,
            message.width,
            message.height,
            message.step,
            message.data,
            bool(message.is_bigendian),
        )
        return encode_jpeg(rgb, form).data
    image = message.image if kind == _OBSERVATION else message
    return read_compressed(bytes(image.data), form).data


def _picture_topic(bag: Bag, question: Question) -> str:
    """Return the topic whose pictures are asked about.

    Raises:
        InvalidInput: there is none, or several and none is named.
    """
    space = "" if question.namespace is None else f"/{question.namespace.strip('/')}".rstrip("/")
    kinds = (_RAW, _COMPRESSED, _OBSERVATION)
    found = sorted(
        topic
        for topic, kind in bag.types.items()
        if kind in kinds and topic.startswith(f"{space}/")
    )
    wanted = f"/{question.topic.strip('/')}" if question.topic else ""
    if wanted in found:
        return wanted
    if not wanted and len(found) == 1:
        return found[0]
    if not found:
        raise InvalidInput(
            f"{bag.path} has no topic with pictures",
            field="image",
            remedy="record an Image or a CompressedImage; other types are not read",
        )
    what = f"{wanted} holds no pictures" if wanted else "several topics hold pictures"
    raise InvalidInput(what, field="image", remedy=f"--image with one of {', '.join(found)}")


def _sampled(bag: Bag, topic: str, every_s: float) -> Iterator[_Picture]:
    """Yield pictures at least ``every_s`` apart."""
    epoch, before, first, due = 0, None, 0, 0
    for _, stamp, message in bag.messages([topic]):
        if before is None or goes_back(before, stamp):
            epoch += before is not None
            first = due = stamp
        before = stamp
        if stamp >= due:
            due = stamp + int(every_s * 1e9)
            yield _Picture(epoch, stamp, (stamp - first) * 1e-9, message)


def _parameters(file: Path) -> dict[str, dict[str, Any]]:
    """Read the parameters of ``_NODES`` from a ROS 2 parameter file, by their dotted names.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        found = dict(_nodes_in(content))
    except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{file} is no file of ROS 2 parameters",
            field="config",
            remedy="see config/embedded.yaml",
        ) from error
    common = {**found.get("**", {}), **found.get("*", {})}
    return {node: {**common, **found.get(node, {})} for node in _NODES}


def _nodes_in(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each node's name, without its namespace, and its parameters."""
    for key, value in content.items():
        if "ros__parameters" in value:
            yield key.rpartition("/")[2], dict(_flat(value["ros__parameters"]))
        else:
            yield from _nodes_in(value)


def _flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
