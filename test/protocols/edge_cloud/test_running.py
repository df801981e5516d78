"""Edge-cloud speculation behind the interface of protocols, over gRPC and without ROS."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unavailable,
)
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.protocols.base import (
    Answer,
    Control,
    Progress,
    Request,
    Resources,
    Running,
    Turn,
)
from collab_llm_nodes.protocols.edge_cloud.carrier import VerifierCarrier
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig
from collab_llm_nodes.protocols.edge_cloud.planner import PlannerConfig
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.running import EdgeCloud, EdgeCloudConfig
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

ARCHITECTURE = "qwen2_vl"
MAX_TOKENS = 12
CONFIG = EdgeCloudConfig(
    model=ModelConfig(path=str(tiny_folder(ARCHITECTURE, 0))),
    client=EdgeClientConfig(gamma=3, max_tokens=MAX_TOKENS),
)
PROMPT = "go to the red ball"


@pytest.fixture(scope="module")
def target() -> Engine:
    return Engine(tiny_model(ARCHITECTURE, seed=0))


@pytest.fixture
def running(target: Engine) -> Iterator[Running]:
    config = VerifierConfig(address="127.0.0.1:0", emulated_compute_s=0.02)
    with start_server(config, target) as server:
        client = VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}"))
        resources = Resources(carrier=VerifierCarrier(client))
        edge = registry.find("edge_cloud").start(CONFIG, resources)
        yield edge
        edge.close()
        client.close()


def request(**fields: Any) -> Request:
    plain = Request("one", CONFIG, (Turn("user", PROMPT),), (scene(1),), asked_at=time.monotonic())
    return replace(plain, **fields)


def in_time() -> Control:
    return Control(time.monotonic() + 60.0)


def test_the_answer_is_the_targets_and_is_told_as_it_grows(
    running: Running, target: Engine
) -> None:
    alone = InProcessRunner(Engine(tiny_model(ARCHITECTURE, seed=0)), target, gamma=3)
    expected = alone.generate(Prompt(PROMPT, (scene(1),)), max_tokens=MAX_TOKENS)
    told: list[Progress] = []
    answer = running.run(request(), told.append, in_time())
    assert (answer.tokens, answer.text, answer.error) == (expected.tokens, expected.text, None)
    assert answer.verified
    assert len(answer.sources) == len(answer.ends) == len(answer.tokens)
    assert answer.ends[-1] == len(answer.text)
    assert answer.metrics.bytes_up > len(scene(1))
    assert set(answer.metrics.figures()) >= {"tau", "accepted", "cache_hits"}
    assert len(told) > 1
    for before, after in zip(told, told[1:], strict=False):
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert after.text.startswith(before.text)
    assert told[-1].tokens == answer.tokens
    assert told[0].metrics.tokens < answer.metrics.tokens, "each report is a picture of its time"


def test_an_option_changes_the_drafts_and_not_the_answer(running: Running) -> None:
    plain = running.run(request(), lambda told: None, in_time())
    longer = replace(CONFIG, client=EdgeClientConfig(gamma=6, max_tokens=MAX_TOKENS))
    asked = request(config=longer, options=frozenset({"client.gamma"}))
    answer = running.run(asked, lambda told: None, in_time())
    assert answer.tokens == plain.tokens
    assert answer.metrics.rounds < plain.metrics.rounds
    assert running.health()["mode"] == "push_ahead(6)"


@pytest.mark.parametrize("gamma", [3, 6])
def test_the_planner_is_overruled_by_a_length_that_is_given_and_by_no_other(
    running: Running, gamma: int
) -> None:
    """3 is what is configured at the start; 6 is set later, and is then the configured one."""
    client = EdgeClientConfig(gamma=gamma, max_tokens=MAX_TOKENS)
    planned = replace(CONFIG, client=client, planner=PlannerConfig(enabled=True))
    running.run(request(config=planned), lambda told: None, in_time())
    assert running.health()["mode"] == "ar", "the planner measures the cloud alone first"
    given = request(config=planned, options=frozenset({"client.gamma"}))
    running.run(given, lambda told: None, in_time())
    assert running.health()["mode"] == f"push_ahead({gamma})"


def test_a_length_that_is_set_later_counts(running: Running) -> None:
    later = replace(CONFIG, client=EdgeClientConfig(gamma=5, max_tokens=MAX_TOKENS))
    running.run(request(config=later), lambda told: None, in_time())
    assert running.health()["mode"] == "push_ahead(5)"


def test_a_limit_of_the_request_counts(running: Running) -> None:
    assert len(running.run(request(max_tokens=4), lambda told: None, in_time()).tokens) == 4


def test_a_limit_that_the_context_has_no_room_for_is_cut_to_it(
    running: Running, target: Engine
) -> None:
    told: list[Progress] = []
    control = in_time()

    def emit(progress: Progress) -> None:
        told.append(progress)
        control.cancel()  # a long answer: it is enough that it has begun

    answer = running.run(request(max_tokens=target.context), emit, control)
    assert isinstance(answer.error, Cancelled)
    assert told


@pytest.fixture
def own_engines() -> tuple[Engine, Engine]:
    """Draft and target whose contexts a test may change; the draft is right half of the time."""
    return Engine(tiny_model(ARCHITECTURE, 0, head_noise=0.5)), Engine(tiny_model(ARCHITECTURE, 0))


def decode(draft: Engine, target: Engine, gamma: int, text: str = PROMPT) -> Answer:
    config = replace(CONFIG, client=EdgeClientConfig(gamma, MAX_TOKENS))
    with start_server(VerifierConfig(address="127.0.0.1:0"), target) as server:
        client = VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}"))
        edge = EdgeCloud(draft, config, Resources(VerifierCarrier(client)))
        asked = request(config=config, turns=(Turn("user", text),))
        answer = edge.run(asked, lambda told: None, in_time())
        client.close()
    return answer


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("room", [1, 4, 7])
def test_a_draft_model_with_a_short_context_shortens_no_answer(
    own_engines: tuple[Engine, Engine], gamma: int, room: int
) -> None:
    draft, target = own_engines
    prompt = Prompt(PROMPT, (scene(1),))
    expected = InProcessRunner(draft, target).generate(prompt, max_tokens=MAX_TOKENS).tokens
    draft.context = len(encode(prompt, draft.loaded).ids) + room
    answer = decode(draft, target, gamma)
    assert (answer.tokens, answer.error, answer.verified) == (expected, None, True)
    assert len(answer.tokens) == MAX_TOKENS
    in_process = InProcessRunner(draft, target, gamma=gamma)
    assert in_process.generate(prompt, max_tokens=MAX_TOKENS).tokens == expected


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("room", [1, 5])
def test_an_answer_ends_where_the_targets_context_does(
    own_engines: tuple[Engine, Engine], gamma: int, room: int
) -> None:
    draft, target = own_engines
    text = 40 * "go to the red ball "  # longer than the passes by which a verifier warms up
    prompt = Prompt(text, (scene(1),))
    whole = InProcessRunner(draft, target).generate(prompt, max_tokens=MAX_TOKENS).tokens
    target.context = len(encode(prompt, target.loaded).ids) + room
    answer = decode(draft, target, gamma, text)
    assert (answer.tokens, answer.error, answer.verified) == (whole[:room], None, True)


def test_a_draft_model_alone_goes_no_further_than_its_context(
    own_engines: tuple[Engine, Engine],
) -> None:
    class Gone:
        queues_exits = False
        verifier_drafts = False

        def open(self, *_: object) -> None:
            raise Unavailable("gone")

    draft, _ = own_engines
    prompt = Prompt(PROMPT, (scene(1),))
    draft.context = len(encode(prompt, draft.loaded).ids) + 4
    config = replace(CONFIG, link_loss=LinkLossConfig("draft_only"))
    edge = EdgeCloud(draft, config, Resources(Gone()))
    answer = edge.run(request(config=config), lambda told: None, in_time())
    assert isinstance(answer.error, Unavailable), "half a sentence is no answer"
    assert len(answer.tokens) == 5


def test_cancel_between_two_rounds_leaves_what_was_verified(running: Running) -> None:
    control, told = in_time(), list[Progress]()

    def emit(progress: Progress) -> None:
        told.append(progress)
        control.cancel()

    answer = running.run(request(), emit, control)
    assert isinstance(answer.error, Cancelled)
    assert not answer.verified
    assert answer.tokens[: len(told[0].tokens)] == told[0].tokens
    assert 0 < len(answer.tokens) < MAX_TOKENS
    again = running.run(request(), lambda told: None, in_time())
    assert again.error is None


def test_a_deadline_ends_the_answer(running: Running) -> None:
    answer = running.run(request(), lambda told: None, Control(time.monotonic() + 0.03))
    assert isinstance(answer.error, DeadlineExceeded)


def test_bad_content_is_named_as_the_request_names_it(running: Running) -> None:
    bad = request(turns=(Turn("user", "<|im_end|>"),))
    with pytest.raises(InvalidInput) as told:
        running.run(bad, lambda told: None, in_time())
    assert told.value.field == "prompt"


def test_what_the_verifier_refuses_is_named_as_the_request_names_it(target: Engine) -> None:
    config = VerifierConfig(address="127.0.0.1:0", limits=Limits(max_prompt_chars=20))
    with start_server(config, target) as server:
        client = VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}"))
        edge = registry.find("edge_cloud").start(CONFIG, Resources(VerifierCarrier(client)))
        long = request(turns=(Turn("user", "word " * 8),))
        error = edge.run(long, lambda told: None, in_time()).error
        edge.close()
        client.close()
    assert isinstance(error, InvalidInput)
    assert str(error) == "prompt: 40 characters (send at most 20)"


def test_prompts_that_the_two_sides_encode_differently_are_told(
    target: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Engine(tiny_model(ARCHITECTURE, seed=0))
    other = encode(Prompt("another text that is longer", (scene(1),)), draft.loaded)
    expected = InProcessRunner(draft, target, gamma=3).generate(
        Prompt(PROMPT, (scene(1),)), max_tokens=MAX_TOKENS
    )
    with start_server(VerifierConfig(address="127.0.0.1:0"), target) as server:
        client = VerifierClient(ClientLinkConfig(address=f"127.0.0.1:{server.port}"))
        carrier = Resources(VerifierCarrier(client))
        EdgeCloud(draft, CONFIG, carrier).run(request(), lambda told: None, in_time())
        assert "drafts will be poor" not in caplog.text
        differs = EdgeCloud(draft, CONFIG, carrier, lambda prompt: other)
        assert differs.run(request(), lambda told: None, in_time()).tokens == expected.tokens
        client.close()
    assert "drafts will be poor" in caplog.text


def test_without_a_carrier_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match="carrier: .*VerifierCarrier"):
        registry.find("edge_cloud").start(CONFIG, Resources())


def test_what_needs_no_model_is_refused_before() -> None:
    check = registry.find("edge_cloud").check
    with pytest.raises(InvalidInput, match="prompt"):
        check(request(turns=(Turn("user", ""),)))
    with pytest.raises(InvalidInput, match="max_tokens"):
        check(request(max_tokens=2**31))


def test_a_wake_that_was_taken_back_is_not_called() -> None:
    control, called = Control(), list[str]()
    control.on_cancel(lambda: called.append("first"))
    control.on_cancel(lambda: called.append("second"))()
    control.cancel()
    assert called == ["first"]
    control.on_cancel(lambda: called.append("late"))
    assert called == ["first", "late"]
    with pytest.raises(Cancelled):
        control.check()
