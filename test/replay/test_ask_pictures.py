"""An instruction asked about the pictures of a camera's bag: topics, samples, answers, actions."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import ROOM
from PIL import Image as Pil
from typer.testing import CliRunner

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from bag_content import write_runs
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import String

from collab_llm.msg import Observation
from collab_llm_nodes.cli import app
from collab_llm_nodes.replay import asking
from collab_llm_nodes.replay.compare import Reply
from collab_llm_nodes.replay.recording import Action, Recording, Step
from collab_llm_nodes.replay.replayers import Models
from collab_llm_nodes.robot.grammar import parse

GO = "The ball is ahead. The next action is move forward 50 cm."


def compressed(colour: tuple[int, int, int] = (200, 0, 0)) -> CompressedImage:
    file = io.BytesIO()
    Pil.new("RGB", (32, 16), colour).save(file, "JPEG")
    return CompressedImage(format="jpeg", data=file.getvalue())


def raw() -> Image:
    pixels = bytes([0, 0, 200]) * 32 * 16
    return Image(encoding="bgr8", width=32, height=16, step=96, data=pixels)


class Asked:
    """The models' place: it keeps what it is asked, and says what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = GO
        self.steps: list[Step] = []
        self.settings: list[Recording] = []
        self.models: list[Models] = []
        monkeypatch.setattr(asking, "in_process", self.start)

    @contextmanager
    def start(self, settings: Recording, models: Models) -> Iterator[Any]:
        self.settings.append(settings)
        self.models.append(models)
        yield self.reply

    def reply(self, step: Step) -> Reply:
        self.steps.append(step)
        read = parse(self.answer)
        return Reply((1,), self.answer, Action(read.kind, read.value, read.code), 1.0, 0.1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def ask(bag: Path, *arguments: object, instruction: str = "Find the red ball.") -> Any:
    words = ["replay", str(bag), "--ask", instruction, *map(str, arguments)]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("message", [raw(), compressed()], ids=["raw", "compressed"])
def test_pictures_of_a_camera_alone_are_asked_about(
    tmp_path: Path, asked: Asked, message: Any
) -> None:
    others = [("/chatter", String(data="hello"))]
    bag = write_runs(tmp_path, [*others, *[("/front/image", message)] * 5])
    report = tmp_path / "report.json"
    ran = ask(bag, "--every", 2, "--json", report)
    assert ran.exit_code == 0, ran.output
    told = [line for line in ran.output.splitlines() if " s: " in line]
    assert told == [f'{t:.1f} s: "{GO}" -> move forward 50 cm' for t in (0, 2, 4)]
    assert "3 of 3 sampled pictures of /front/image answered, 3 with an action" in ran.output
    answers = json.loads(report.read_text(encoding="utf-8"))["answers"]
    assert [(a["time_s"], a["action"]) for a in answers] == [
        (t, "move forward 50 cm") for t in (0.0, 2.0, 4.0)
    ]
    for step in asked.steps:
        assert step.prompt == "find the red ball. history: none. search: place 1, turned 0."
        assert step.picture is not None
        red, _, blue = np.asarray(Pil.open(io.BytesIO(step.picture)))[5, 5]
        assert red > 150 > blue
    assert (asked.models[0].draft, asked.models[0].target) == ("nav-draft", "nav-target")


@pytest.mark.parametrize("given", [("--image", "/image"), ("--every", "1"), ("--every", "0")])
def test_options_of_ask_are_refused_without_it(given: tuple[str, str]) -> None:
    refused = CliRunner().invoke(app, ["replay", str(ROOM), *given])
    assert refused.exit_code == 2
    assert f"{given[0][2:]}: has no effect here" in refused.output
    assert "--ask" in refused.output


@pytest.mark.parametrize("given", [("--texts",), ("--speed", "2")])
def test_options_of_a_comparison_are_refused_with_ask(asked: Asked, given: tuple[str, ...]) -> None:
    refused = ask(ROOM, *given)
    assert refused.exit_code == 2
    assert f"{given[0][2:]}: has no effect here" in refused.output
    assert not asked.settings


def test_of_several_cameras_one_must_be_named(tmp_path: Path, asked: Asked) -> None:
    bag = write_runs(tmp_path, [("/left/image", raw()), ("/right/image", compressed())])
    refused = ask(bag)
    assert refused.exit_code == 2
    for name in ("--image", "/left/image", "/right/image"):
        assert name in refused.output
    assert "pictures of /right/image" in ask(bag, "--image", "right/image").output
    assert "pictures of /left/image" in ask(bag, "--namespace", "left").output
    assert ask(bag, "--image", "/up/image").exit_code == 2


def test_a_bag_without_pictures_is_refused(tmp_path: Path, asked: Asked) -> None:
    refused = ask(write_runs(tmp_path, [("/chatter", String(data="hello"))]))
    assert refused.exit_code == 2
    assert "no topic with pictures" in " ".join(refused.output.split())


@pytest.mark.parametrize("recorded", [True, False])
def test_pictures_are_brought_to_the_field_of_view_of_the_models(
    tmp_path: Path, asked: Asked, recorded: bool
) -> None:
    info = CameraInfo(width=32, height=16)
    info.k[0], info.k[2] = 16 / math.tan(math.radians(30)), 16.0
    picture = Pil.new("RGB", (32, 16))
    picture.paste("white", (2, 0, 30, 16))
    file = io.BytesIO()
    picture.save(file, "JPEG")
    message = CompressedImage(format="jpeg", data=file.getvalue())
    camera = [("/front/camera_info", CameraInfo()), ("/front/camera_info", info)] * recorded
    ran = ask(write_runs(tmp_path, [*camera, ("/front/image/compressed", message)]))
    assert ran.exit_code == 0, ran.output
    assert ("field of view is unknown" in " ".join(ran.output.split())) is not recorded
    (step,) = asked.steps
    assert step.picture is not None
    bright = int((np.asarray(Pil.open(io.BytesIO(step.picture)))[8, :, 0] > 127).sum())
    assert bright == pytest.approx(16 if recorded else 28, abs=2)


def test_pictures_of_camera_ingest_are_asked_about_as_they_were(
    tmp_path: Path, asked: Asked
) -> None:
    observation = Observation(image=compressed())
    ran = ask(write_runs(tmp_path, [("/observation", observation)]))
    assert "keep the field of view in which camera_ingest recorded them" in " ".join(
        ran.output.split()
    )
    assert asked.steps[0].picture == bytes(observation.image.data)


@pytest.mark.parametrize("value", ["180.0", "ninety", "", "5"])
def test_a_field_of_view_out_of_range_is_refused(tmp_path: Path, asked: Asked, value: str) -> None:
    file = tmp_path / "mine.yaml"
    values = f"{{field_of_view: {value}, camera_fov: 60.0}}"
    file.write_text(f"/**/camera_ingest: {{ros__parameters: {values}}}", encoding="utf-8")
    refused = ask(write_runs(tmp_path / "bags", [("/image", raw())]), "--config", file)
    assert refused.exit_code == 2
    assert "field_of_view" in refused.output
    assert not asked.steps


def test_a_picture_that_cannot_be_read_is_left_out_and_told(tmp_path: Path, asked: Asked) -> None:
    broken = CompressedImage(format="jpeg", data=b"no picture")
    bag = write_runs(tmp_path / "some", [("/image", compressed()), ("/image", broken)])
    ran = ask(bag)
    assert ran.exit_code == 0
    assert "1.0 s: left out: data: " in ran.output
    assert "1 of 2 sampled pictures of /image answered, 1 with an action" in ran.output
    none = write_runs(tmp_path / "none", [("/image", broken)])
    assert ask(none).exit_code == 2


def test_the_reason_for_no_action_is_told(tmp_path: Path, asked: Asked) -> None:
    asked.answer = "I see a wall."
    ran = ask(write_runs(tmp_path, [("/image", raw())]))
    assert "-> no action: UNREADABLE, " in ran.output
    assert "1 sampled pictures of /image answered, 0 with an action" in ran.output


def test_an_answer_stays_on_its_line(tmp_path: Path, asked: Asked) -> None:
    asked.answer = "wall\n9.0 s: forged\x1b[2J\u202e"
    ran = ask(write_runs(tmp_path, [("/image", raw())]))
    assert "\x1b" not in ran.output
    assert not [line for line in ran.output.splitlines() if line.startswith("9.0 s")]


def test_a_clock_that_was_set_back_is_told_once(tmp_path: Path, asked: Asked) -> None:
    run = [("/image", raw())] * 3
    ran = ask(write_runs(tmp_path, run, run), "--every", 2)
    assert ran.output.count("the clock was set back") == 1
    times = [line.split()[0] for line in ran.output.splitlines() if " s: " in line]
    assert times == ["0.0", "2.0", "0.0", "2.0"]


def test_a_file_of_parameters_shapes_prompt_picture_and_models(
    tmp_path: Path, asked: Asked
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "/**: {ros__parameters: {quality: 50}}\n"
        "robot:\n  draft_vlm: {ros__parameters: {model: {path: mine}, client.max_tokens: 9}}\n"
        "/**/navigator: {ros__parameters: {answer: {prompt: 'Task: {instruction}', seed: 3}}}\n"
        "/**/camera_ingest: {ros__parameters: {max_width: 16}}\n",
        encoding="utf-8",
    )
    bag = write_runs(tmp_path / "bags", [("/image", raw())])
    assert ask(bag, "--config", file).exit_code == 0
    (step,) = asked.steps
    assert step.prompt == "Task: find the red ball"
    assert step.picture is not None
    assert Pil.open(io.BytesIO(step.picture)).size == (16, 8)
    (settings,) = asked.settings
    assert settings.max_tokens == 9
    assert settings.sampling(step).seed == 4
    assert asked.models[0].draft == "mine"
    assert ask(bag, "--config", "qwen2_vl_2b_7b.yaml").exit_code == 0, "a shipped one by its name"
    assert "The next action is ACTION" in asked.steps[-1].prompt


@pytest.mark.parametrize("text", ["a: 1", "- a", "draft_vlm: {ros__parameters: 3}", ":"])
def test_another_file_is_refused(tmp_path: Path, asked: Asked, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text, encoding="utf-8")
    bag = write_runs(tmp_path / "bags", [("/image", raw())])
    refused = ask(bag, "--config", file)
    assert refused.exit_code == 2
    assert "INVALID_CONFIG" in refused.output


@pytest.mark.parametrize("instruction", ["", " ", "go\x1b[2J", "a" * 5000])
def test_what_the_navigator_would_refuse_is_refused(
    tmp_path: Path, asked: Asked, instruction: str
) -> None:
    bag = write_runs(tmp_path, [("/image", raw())])
    refused = ask(bag, instruction=instruction)
    assert refused.exit_code == 2
    assert "instruction: " in refused.output
    assert not asked.steps


CONE = "I see the red cone straight ahead. The next action is move forward 75 cm."


def with_navigator(tmp_path: Path, parameters: str) -> Path:
    file = tmp_path / "navigator.yaml"
    file.write_text(f"/**/navigator: {{ros__parameters: {parameters}}}\n", encoding="utf-8")
    return file


def test_another_thing_than_asked_is_no_action(tmp_path: Path, asked: Asked) -> None:
    """The default configuration checks it, as the robot's does."""
    bag, report = write_runs(tmp_path, [("/image", raw())]), tmp_path / "report.json"
    asked.answer = CONE
    ran = ask(bag, "--json", report, instruction="find the red chair")
    assert (
        "-> no action: NOT_FOUND, asked for the red chair, the answer names the red" in ran.output
    )
    assert "1 sampled pictures of /image answered, 0 with an action" in ran.output
    assert json.loads(report.read_text(encoding="utf-8"))["answers"][0]["action"] == ""
    assert "-> move forward 75 cm" in ask(bag, instruction="find the red cone").output
    unchecked = with_navigator(tmp_path, "{mission: {check_thing: false}}")
    ran = ask(bag, "--config", unchecked, instruction="find the red chair")
    assert "-> move forward 75 cm" in ran.output


@pytest.mark.parametrize(
    ("limit", "action"),
    [("max_distance: 0.25", "move forward 50 cm"), ("max_angle: 15.0", "turn left 30 degree")],
)
def test_a_step_beyond_the_limits_of_the_mission_is_no_action(
    tmp_path: Path, asked: Asked, limit: str, action: str
) -> None:
    bag = write_runs(tmp_path / "bags", [("/image", raw())])
    asked.answer = f"The ball is on the left. The next action is {action}."
    assert f"-> {action}" in ask(bag).output
    limited = with_navigator(tmp_path, f"{{mission: {{{limit}}}}}")
    assert "-> no action: UNREADABLE, " in ask(bag, "--config", limited).output


@pytest.mark.parametrize("instruction", ["stop", "Halt, please!", "don't move"])
def test_an_instruction_to_stop_asks_no_model(
    tmp_path: Path, asked: Asked, instruction: str
) -> None:
    bag, report = write_runs(tmp_path, [("/image", raw())]), tmp_path / "report.json"
    ran = ask(bag, "--json", report, instruction=instruction)
    assert ran.exit_code == 0
    assert "asks to stop" in ran.output
    assert json.loads(report.read_text(encoding="utf-8"))["answers"] == []
    assert not asked.settings
    own = with_navigator(tmp_path, "{stop_words: [basta]}")
    assert ask(bag, "--config", own, instruction="basta").exit_code == 0
    assert not asked.settings
    none = with_navigator(tmp_path, "{stop_words: []}")
    refused = ask(bag, "--config", none, instruction="basta")
    assert (refused.exit_code, "stop_words" in refused.output) == (2, True)


@pytest.mark.parametrize(
    "instruction", ["find the red chair", "stay away from the red cone and find the chair"]
)
def test_the_embedded_pair_goes_nowhere_for_a_thing_that_it_does_not_know(
    instruction: str,
) -> None:
    """It replies, or is held where it names another thing."""
    ran = ask(ROOM, "--every", 15, instruction=instruction)
    assert ran.exit_code == 0, ran.output
    answers = [line for line in ran.output.splitlines() if " s: " in line]
    assert len(answers) >= 3
    assert all("-> reply" in line or "NOT_FOUND, asked for" in line for line in answers)


def test_the_embedded_pair_answers_about_a_recorded_room(tmp_path: Path) -> None:
    thing = "black lamp"  # as in the recorded instruction
    ran = ask(ROOM, "--every", 15, instruction=f"walk to the {thing}")
    assert ran.exit_code == 0, ran.output
    answers = [line for line in ran.output.splitlines() if " s: " in line]
    assert len(answers) >= 3
    assert any(thing in line for line in answers)
    assert all("-> " in line for line in answers)
