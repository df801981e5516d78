"""DRAGON as a protocol: two real sides, each with a model and documents of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dragon_bed import QUESTION, TEXTS, config_of, engine_of, side_with
from dragon_timeline import plain_answer

from collab_llm_nodes.decoding.aggregation import AggregationConfig, AggregationLaw, Party
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, InvalidInput, NotFound, Unavailable
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols import options, registry
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Source
from collab_llm_nodes.protocols.dragon import sides
from collab_llm_nodes.protocols.dragon.client import CloudConfig, DragonClient
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN, measure_passes
from collab_llm_nodes.protocols.dragon.running import Dragon, check
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.protocols.dragon.settings import (
    DragonCloudConfig,
    DragonConfig,
    load_cloud_config,
)
from collab_llm_nodes.protocols.dragon.sides import measured
from collab_llm_nodes.transport.server import ServerHandle

PRIVATE = {name: TEXTS[name] for name in ("ball", "key")}
PUBLIC = {name: TEXTS[name] for name in ("lamp", "pump")}
SIDE = config_of(documents=2)
CONFIG = DragonConfig(side=SIDE, patience=PatienceConfig(patience_s=60.0, silence_s=30.0))
MOST = 12
SAMPLED = SamplingConfig(temperature=1.0, seed=3)


def request_of(config: DragonConfig, sampling: SamplingConfig, tokens: int = MOST) -> Request:
    turn = Turn("user", QUESTION)
    return Request("one", config, (turn,), sampling=sampling, max_tokens=tokens)


def expected(sides: tuple[ModelSide, ModelSide], sampling: SamplingConfig) -> tuple[int, ...]:
    """The answer of a loop that asks both sides anew for each token."""

    def model(party: Party, prefix: tuple[int, ...]) -> tuple[np.ndarray, float]:
        decoder = sides[party].decoder(QUESTION, MOST)
        for token in prefix:
            decoder.push(token)
        found = decoder.next()
        decoder.close()
        return found

    info = sides[0].info
    law = AggregationLaw(AggregationConfig(), info.vocab_size, sampling.temperature, sampling.seed)
    return plain_answer(law, model, info.eos, MOST)


class World:
    """A device with private and a cloud with public documents, around one tiny model."""

    def __init__(self) -> None:
        engine = engine_of()
        self.sides = side_with(PRIVATE, engine, SIDE), side_with(PUBLIC, engine_of(), SIDE)
        config = CloudServiceConfig(address="127.0.0.1:0")
        self.cloud = ServerHandle(DragonService(config, self.sides[1], "tiny", "1.0"))
        client = DragonClient(CloudConfig(address=f"127.0.0.1:{self.cloud.port}"))
        self.dragon = Dragon(self.sides[0], client, CONFIG)

    def ask(
        self,
        sampling: SamplingConfig = SAMPLED,
        config: DragonConfig = CONFIG,
        emit: Callable[[Progress], None] = lambda progress: None,
        tokens: int = MOST,
    ) -> Answer:
        return self.dragon.run(request_of(config, sampling, tokens), emit, Control())

    def close(self) -> None:
        self.dragon.close()
        self.cloud.stop()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["device", "cloud", "auto"])
@pytest.mark.parametrize("sampling", [SAMPLED, SamplingConfig()], ids=["sampled", "greedy"])
def test_two_models_write_the_answer_of_a_plain_loop(
    world: World, policy: str, sampling: SamplingConfig
) -> None:
    config = replace(CONFIG, schedule=ScheduleConfig(aggregate_on=policy))
    heard: list[Progress] = []
    answer = world.ask(sampling, config, heard.append)
    assert answer.tokens == expected(world.sides, sampling)
    assert answer.verified
    assert answer.error is None
    assert answer.text == world.sides[0].decode(answer.tokens)
    assert len(answer.ends) == len(answer.tokens)
    assert all(answer.text.startswith(part.text) for part in heard[:-1])
    assert answer.metrics.figures()["acceptance_cloud"] <= 1


def test_acceptance_is_remembered_for_the_next_answer(world: World) -> None:
    made = Dragon(world.sides[0], world.dragon._client, CONFIG)
    assert made._acceptance == UNKNOWN
    made.run(request_of(CONFIG, SAMPLED), lambda progress: None, Control())
    after = made._acceptance
    assert after != UNKNOWN
    assert all(0 <= share <= 1 for share in after)
    alone = replace(CONFIG, use_cloud=False)  # nothing is learned of the cloud
    made.run(request_of(alone, SAMPLED), lambda progress: None, Control())
    assert made._acceptance == after


def test_both_sides_documents_count(world: World) -> None:
    """With the cloud, the answer is another one than the device's own."""
    together = [world.ask(replace(SAMPLED, seed=seed)).tokens for seed in range(4)]
    config = replace(CONFIG, use_cloud=False)
    alone = [world.ask(replace(SAMPLED, seed=seed), config) for seed in range(4)]
    assert [answer.tokens for answer in alone] != together
    assert not any(answer.verified for answer in alone)
    assert set(alone[0].sources) == {int(Source.UNVERIFIED)}


def test_a_request_may_weigh_documents_otherwise_only_if_the_cloud_does(world: World) -> None:
    config = replace(CONFIG, side=config_of(documents=2, temperature=0.9))
    with pytest.raises(ConfigError, match="scorer"):
        world.ask(config=config)


def test_a_question_that_leaves_no_room_is_told(world: World) -> None:
    with pytest.raises(InvalidInput) as caught:
        world.ask(tokens=1000)
    assert caught.value.field == "max_tokens"


def test_what_was_written_stays_when_the_cloud_is_lost_for_good() -> None:
    own = World()
    patience = PatienceConfig(patience_s=3.0, silence_s=3.0, without_cloud="fail")
    seen: list[int] = []

    def stop(progress: Progress) -> None:
        if len(progress.tokens) >= 2 and not seen:
            seen.append(len(progress.tokens))
            own.cloud.stop()

    try:
        config = replace(CONFIG, patience=patience, schedule=ScheduleConfig(aggregate_on="device"))
        answer = own.ask(config=config, emit=stop)
        assert len(answer.tokens) >= seen[0]
        assert (answer.error is None) == (len(answer.tokens) == len(expected(own.sides, SAMPLED)))
        with pytest.raises(Unavailable):  # the next answer finds no cloud at all
            own.ask(config=config)
    finally:
        own.close()


class Quoting(World):
    """Both sides only quote."""

    def __init__(self) -> None:
        quote = replace(SIDE, answers="quote")
        self.sides = (
            side_with(PRIVATE, engine_of(), quote),
            side_with(PUBLIC, engine_of(), quote),
        )
        service = DragonService(
            CloudServiceConfig(address="127.0.0.1:0"), self.sides[1], "tiny", "1.0"
        )
        self.cloud = ServerHandle(service)
        client = DragonClient(CloudConfig(address=f"127.0.0.1:{self.cloud.port}"))
        self.config = replace(CONFIG, side=quote)
        self.dragon = Dragon(self.sides[0], client, self.config)

    def about(self, question: str, **options: object) -> Answer:
        config = replace(self.config, **options)  # type: ignore[arg-type]
        request = Request("one", config, (Turn("user", question),), max_tokens=60)
        return self.dragon.run(request, lambda progress: None, Control())


@pytest.fixture(scope="module")
def quoting() -> Iterator[Quoting]:
    made = Quoting()
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["device", "cloud", "auto", "follow"])
def test_the_side_with_the_evidence_answers(quoting: Quoting, policy: str) -> None:
    schedule = ScheduleConfig(aggregate_on=policy)
    for question, text, writer, found in (
        ("Where is the red ball?", TEXTS["ball"], Source.DEVICE, 1),
        ("What does the pump need?", TEXTS["pump"], Source.CLOUD, 0),
    ):
        answer = quoting.about(question, schedule=schedule)
        assert (answer.text.strip(), answer.error, answer.verified) == (text, None, True)
        assert set(answer.sources) == {int(writer)}
        assert answer.metrics.figures()["device_documents"] == found


@pytest.mark.parametrize("policy", ["device", "cloud", "auto"])
def test_what_no_document_says_is_not_found(quoting: Quoting, policy: str) -> None:
    answer = quoting.about(
        "Where did I last see the green umbrella?", schedule=ScheduleConfig(aggregate_on=policy)
    )
    assert isinstance(answer.error, NotFound)
    assert "no sentence answers this" in str(answer.error)
    assert "cloud" not in str(answer.error)
    assert (answer.text, answer.verified) == ("", True)
    alone = quoting.about("Where is the pump?", use_cloud=False)
    assert isinstance(alone.error, NotFound)
    assert "no sentence on the robot answers this, and the cloud took no part" in str(alone.error)
    assert (alone.text, alone.verified) == ("", False)


def test_passes_are_measured_before_the_first_question(world: World) -> None:
    assert measured(world.sides[0])[1] > 0


def test_passes_are_measured_at_the_batch_of_the_runtime_until_the_context_is_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, bool]]()

    def noted(decoder: DocumentsDecoder, lengths: list[int], *args: Any, **more: Any) -> object:
        seen.append((len(decoder.found.hits), lengths[-1] == decoder.room))
        return measure_passes(decoder, lengths, *args, **more)

    monkeypatch.setattr(sides, "measure_passes", noted)
    assert measured(world.sides[0])[1] > 0
    assert seen == [(SIDE.retrieval.chunks, True)]


def test_a_node_takes_as_many_answers_as_it_is_told(world: World) -> None:
    side = world.sides[0]
    for count in (1, 3):
        assert Dragon(side, None, replace(CONFIG, max_answers=count)).parallel == count


def test_the_host_is_told_about_the_link(world: World) -> None:
    world.ask()
    health = world.dragon.health()
    assert str(health["cloud"]).startswith(("UP", "CONNECTING"))
    assert health["document_kv_refused"] == 0


@pytest.mark.parametrize("prompt", ["", "   ", 9000 * "x"])
def test_a_question_of_no_use_is_refused_without_the_model(prompt: str) -> None:
    request = Request("one", CONFIG, (Turn("user", prompt),))
    with pytest.raises(InvalidInput, match="prompt"):
        check(request)


def test_the_request_may_truncate_more() -> None:
    rules = CONFIG.rules(SamplingConfig(temperature=1.0, top_p=0.5, top_k=7))
    assert (rules.aggregation.top_p, rules.aggregation.max_support) == (0.5, 7)
    rules = CONFIG.rules(SamplingConfig(temperature=1.0))
    assert (rules.aggregation.top_p, rules.aggregation.max_support) == (0.8, 1024)


def test_the_registry_knows_it_and_its_options() -> None:
    entry = registry.find("dragon")
    assert entry.config is DragonConfig
    names = options.names(entry.config())
    assert {"aggregation.law", "schedule.aggregate_on", "ahead.max_ahead", "use_cloud"} <= set(
        names
    )
    assert not any("address" in name or "path" in name or "store" in name for name in names)


def test_the_shipped_configuration_of_the_cloud_is_read(tmp_path: Path) -> None:
    config = load_cloud_config("dragon_cloud.yaml", store=str(tmp_path), address="127.0.0.1:0")
    assert isinstance(config, DragonCloudConfig)
    assert config.side.store == str(tmp_path)
    with pytest.raises(ConfigError, match="no model"):
        load_cloud_config()
