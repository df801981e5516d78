"""The node of Jupiter: answers, plans, stages, cancel, deadline, and workers that come and go."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from action_msgs.msg import GoalStatus
from jupiter_bed import PATIENT, WAIT_S, alone, folder, workers
from PIL import Image
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage
from served_jupiter import profile
from std_msgs.msg import Header
from tiny_models import tiny_folder, tiny_model, tiny_prompt

from collab_llm.action import Generate
from collab_llm.msg import JupiterStages, Status
from collab_llm.srv import JupiterGenerate, JupiterPlan
from collab_llm_lab.reference import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.nodes.jupiter_server import JupiterServer
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.profiler import model_facts
from collab_llm_nodes.ros.convert import figures_from
from collab_llm_nodes.ros.health import Level
from collab_llm_nodes.ros.qos import STATE

pytestmark = pytest.mark.ros

QUESTION = "Explain how a robot finds its way home."
TOKENS = 16


def right(text: str = QUESTION, tokens: int = TOKENS) -> list[int]:
    """Return the answer of the whole model on one device."""
    loaded = read_facts(ModelConfig(str(folder()))).without_weights()
    return alone(encode(Prompt(text), loaded).ids, tokens)


class Site:
    """Three workers, of which the server knows two; the server, started; and clients of it."""

    def __init__(self, graph: Any, addresses: list[str], lab: Path, **changed: Any) -> None:
        self.graph = graph
        model = changed.setdefault("model.path", str(folder()))
        profile(1.0, 1.0, 2.0, model=model).save(lab)
        parameters: dict[str, Any] = {
            "pipeline.workers": addresses,
            "pipeline.lanes": 4,
            "pipeline.link.silence_s": PATIENT.silence_s,
            "pipeline.link.connect_s": PATIENT.connect_s,
            "planning.profile": str(lab),
            "planning.devices": ["robot", "laptop"],
            "planning.prompt_tokens": 64,
            "planning.answer_tokens": 0,
            "outline": "never",
            "max_tokens": TOKENS,
            "deadline_s": WAIT_S,
            **changed,
        }
        overrides = [Parameter(name, value=value) for name, value in parameters.items()]
        self.server = JupiterServer(context=graph.context, parameter_overrides=overrides)
        graph.add(self.server)
        user = graph.node("user")
        self.action = ActionClient(user, Generate, "jupiter/generate")
        self.answers = user.create_client(JupiterGenerate, "jupiter_generate")
        self.plans = user.create_client(JupiterPlan, "jupiter_plan")
        self.stages = graph.collect(user, JupiterStages, "jupiter_stages", STATE)

    def start(self) -> None:
        self.graph.do(self.server.start)
        for client in (self.answers, self.plans):
            self.graph.wait_for(client.service_is_ready)
        self.graph.wait_for(self.action.server_is_ready)

    def ask(self, **fields: Any) -> JupiterGenerate.Response:
        request = JupiterGenerate.Request(**{"prompt": QUESTION, **fields})
        return self.graph.ask(self.answers.call_async, request, timeout=WAIT_S)

    def plan(self, **fields: Any) -> JupiterPlan.Response:
        request = JupiterPlan.Request(**{"deadline_s": WAIT_S, **fields})
        return self.graph.ask(self.plans.call_async, request, timeout=WAIT_S)

    def send(self, told: list[Generate.Feedback], **fields: Any) -> Any:
        goal = Generate.Goal(**{"prompt": QUESTION, **fields})
        return self.graph.ask(
            self.action.send_goal_async, goal, lambda message: told.append(message.feedback)
        )


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[Any], list[str]]]:
    with workers(2) as (handles, addresses):
        yield handles, addresses


@pytest.fixture
def site(ros_graph: Any, two: tuple[list[Any], list[str]], tmp_path: Path) -> Iterator[Site]:
    made = Site(ros_graph, two[1], tmp_path / "lab.json")
    made.start()
    yield made
    ros_graph.do(made.server.stop)


def test_an_answer_by_service_is_the_single_device_s(site: Site) -> None:
    header = Header(frame_id="here")
    answer = site.ask(header=header)
    assert (answer.status.code, answer.status.message) == (Status.OK, "")
    assert (list(answer.tokens), answer.header, answer.verified) == (right(), header, True)
    assert len(answer.sources) == len(answer.tokens)
    figures = figures_from(answer.metrics)
    assert figures["tau"] == answer.metrics.tokens / answer.metrics.rounds
    assert figures["stages"] == 2


def test_an_action_streams_and_is_cancelled(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Generate.Feedback] = []
    ended = site.graph.ask(site.send(told).get_result_async, timeout=WAIT_S)
    assert ended.status == GoalStatus.STATUS_SUCCEEDED
    assert list(ended.result.tokens) == right()
    site.graph.wait_for(lambda: told)
    assert {each.stage for each in told} == {"answer"}
    told.clear()
    cancel, check, cancelled = Control.cancel, Control.check, threading.Event()

    def noted(self: Control) -> None:
        cancel(self)
        cancelled.set()

    def held_back(self: Control) -> None:
        if told:
            cancelled.wait(WAIT_S)
        check(self)

    monkeypatch.setattr(Control, "cancel", noted)
    monkeypatch.setattr(Control, "check", held_back)
    slow = {"option_names": ["drafter"], "option_values": ["none"]}
    handle = site.send(told, max_tokens=150, **slow)
    site.graph.wait_for(lambda: told, timeout=WAIT_S)
    site.graph.ask(handle.cancel_goal_async)
    ended = site.graph.ask(handle.get_result_async, timeout=WAIT_S)
    assert ended.status == GoalStatus.STATUS_CANCELED
    assert ended.result.status.code == Status.CANCELLED
    assert site.server.jupiter.pipeline.lanes_in_use == 0


def test_a_goal_shows_pictures_and_plans_leave_room_for_their_encoder(
    ros_graph: Any, tmp_path: Path
) -> None:
    model = ModelConfig(str(tiny_folder("qwen2_vl")))
    prompt, whole = tiny_prompt("qwen2_vl"), tiny_model("qwen2_vl")
    settings = {"model.path": model.path, "planning.coordinator": "robot"}
    with workers(2, model=model) as (_, addresses):
        site = Site(ros_graph, addresses, tmp_path / "lab.json", **settings)
        site.start()
        shown = [CompressedImage(format="jpeg", data=image) for image in prompt.images]
        sent = site.send([], prompt=prompt.text, images=shown)
        ended = ros_graph.ask(sent.get_result_async, timeout=WAIT_S)
        wrong = site.send([], images=[CompressedImage(format="jpeg", data=b"no picture")])
        refused = ros_graph.ask(wrong.get_result_async, timeout=WAIT_S)
        planned = site.plan()
        ros_graph.do(site.server.stop)
    eos = read_facts(model).eos
    right = generate(whole, encode(prompt, whole), SamplingConfig(), TOKENS, eos)
    assert list(ended.result.tokens) == right
    assert refused.result.status.code == Status.INVALID_INPUT
    assert refused.result.status.message.startswith("images[0]: ")
    assert planned.status.code == Status.OK
    held = dict(zip(planned.devices, planned.memory_bytes, strict=True))
    assert held["robot"] > model_facts(model).vision_bytes


def test_two_requests_at_once_are_both_answered(site: Site) -> None:
    texts = ["Where is the red ball?", "Where is the box?", "What is behind the door?"]
    asked = [
        site.graph.do(site.answers.call_async, JupiterGenerate.Request(prompt=text))
        for text in texts
    ]
    for text, future in zip(texts, asked, strict=True):
        answer = site.graph.result(future, timeout=WAIT_S)
        assert list(answer.tokens) == right(text)


def test_a_deadline_leaves_what_there_is(site: Site) -> None:
    answer = site.ask(deadline_s=1e-3)
    assert answer.status.code == Status.DEADLINE_EXCEEDED
    assert not answer.verified


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "word " * 2000}, "prompt"),
        ({"option_names": ["drafter"], "option_values": ["oracle"]}, "drafter"),
        ({"option_names": ["planning.profile"], "option_values": ["/"]}, "planning.profile"),
        ({"raw": True, "option_names": ["outline"], "option_values": ["always"]}, "outline"),
    ],
)
def test_bad_input_is_named(site: Site, fields: dict[str, Any], field: str) -> None:
    answer = site.ask(**fields)
    assert answer.status.code == Status.INVALID_INPUT
    assert answer.status.message.startswith(f"{field}: ")


def test_a_plan_names_stages_times_and_draws_them(site: Site) -> None:
    site.ask()
    answer = site.plan(prompt_tokens=100, answer_tokens=20, lanes=2, draw=True)
    assert (answer.status.code, answer.status.message) == (Status.OK, "")
    assert {*answer.devices} <= {"robot", "laptop"}
    assert answer.first_layers[0] == 0
    assert answer.last_layers[-1] == 3
    assert len(answer.memory_bytes) == len(answer.devices)
    assert sum(answer.lengths) == 100
    assert answer.prefill_s > 0
    assert answer.decode_s > 0
    assert "to the first token" in answer.text
    line = answer.timeline
    assert len(line.row) == len(line.number) == len(line.begin) == len(line.end)
    assert max(line.row) == len(line.rows) - 1
    assert max(line.end) <= answer.prefill_s
    assert answer.picture.format == "png"
    with Image.open(io.BytesIO(bytes(answer.picture.data))) as both:
        tall = both.height
    small = site.plan(prompt_tokens=100, devices=["rover"])
    assert list(small.devices) == ["rover"]
    assert not small.picture.data
    site.server.jupiter.pipeline.close()
    with Image.open(io.BytesIO(bytes(site.plan(draw=True).picture.data))) as plan_only:
        assert plan_only.height < tall, "nothing was measured since"


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({"devices": ["robt"]}, Status.INVALID_INPUT, "devices: no device 'robt'"),
        ({"lanes": 5000}, Status.INVALID_INPUT, "lanes: 5000 is out of range"),
        ({"deadline_s": -1.0}, Status.INVALID_INPUT, "deadline_s: "),
        ({"deadline_s": 1e-6}, Status.DEADLINE_EXCEEDED, "deadline_s: "),
    ],
)
def test_plans_that_cannot_be_made(
    site: Site, fields: dict[str, Any], code: int, told: str
) -> None:
    answer = site.plan(**fields)
    assert answer.status.code == code
    assert answer.status.message.startswith(told)


def test_the_stages_and_their_timelines_are_published(site: Site) -> None:
    site.graph.wait_for(lambda: site.stages and site.stages[-1].devices, timeout=WAIT_S)
    first = site.stages[-1]
    assert {*first.devices} == {"robot", "laptop"}
    assert not first.missing
    assert len(first.tensor_bytes) == len(first.devices)
    assert min(first.tensor_bytes) > 0
    assert len(first.planned.rows) == 3, "two stages, and the link between them"
    assert not first.measured.rows
    site.ask()
    site.graph.wait_for(lambda: site.stages[-1].measured.rows, timeout=WAIT_S)
    line = site.stages[-1].measured
    assert len(line.rows) == len(first.devices)
    assert all(b <= e for b, e in zip(line.begin, line.end, strict=True))
    site.graph.wait_for(lambda: site.stages[-1].lanes_in_use == 0, timeout=WAIT_S)


def test_a_worker_that_is_lost_is_told_and_the_others_answer(
    site: Site, two: tuple[list[Any], list[str]]
) -> None:
    handles, addresses = two
    assert list(site.ask().tokens) == right()
    assert site.graph.do(site.server.details, 0.0)[-1].level == Level.OK
    handles[0].stop()
    answer = site.ask()
    assert (answer.status.code, list(answer.tokens)) == (Status.OK, right())
    workers_now = site.graph.do(site.server.details, 0.0)[-1]
    assert (workers_now.name, workers_now.level) == ("workers", Level.WARN)
    assert addresses[0] in workers_now.message
    site.graph.wait_for(
        lambda: site.stages and list(site.stages[-1].missing) == ["robot"], timeout=WAIT_S
    )


def test_an_inactive_node_says_so_and_serves_again(site: Site) -> None:
    site.graph.do(site.server.trigger_deactivate)
    assert site.ask().status.code == Status.INACTIVE
    assert site.plan().status.code == Status.INACTIVE
    site.graph.do(site.server.trigger_activate)
    assert site.ask().status.code == Status.OK
    site.graph.do(site.server.stop)
    site.start()
    assert list(site.ask().tokens) == right()


def test_workers_with_other_weights_end_the_start(
    ros_graph: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = ModelConfig(str(folder(1)))
    with ExitStack() as stack:
        _, first = stack.enter_context(workers(1))
        _, second = stack.enter_context(workers(1, model=other))
        made = Site(ros_graph, [*first, *second], tmp_path / "lab.json")
        with pytest.raises(ConfigError, match="did not start"):
            made.server.start()
    assert "MODEL_ERROR: workers: " in (told := capfd.readouterr().err)
    assert "different weights" in told
