"""Questions about simulated drives to the memory as it ships: the answer is the last place of the
thing, and there is none for a thing that was never seen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from collab_llm_lab.demo.memory import PUBLIC
from collab_llm_lab.home import expert
from collab_llm_lab.home.requests import About, Kind, Request
from collab_llm_lab.home.wording import plain
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.aggregation import AggregationLaw, Party
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.settings import DragonCloudConfig, DragonConfig
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig
from collab_llm_nodes.robot.diary import Diary
from collab_llm_nodes.robot.episodes import EpisodeConfig, remember
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import parse
from collab_llm_nodes.sim.rooms import NAMES, Style, make_room
from collab_llm_nodes.sim.view import look

NOON = 1_795_600_800.0
QUESTIONS = (
    "Where was the {thing} last seen?",
    "Where did you last see the {thing}?",
    "Where did I last see the {thing}?",
    "When was the {thing} last seen?",
)


def drive(seed: int, diary: Diary, thing: str, now: float, *, whole: bool) -> dict[str, str]:
    """Look for a thing as the expert does; return where each thing was last seen from.

    Args:
        whole: to its end, else until half of the pictures with the thing are taken.
    """
    room = make_room(seed, Style(first=thing))
    request = Request(Kind.GO, plain(Kind.GO, About(thing)), About(thing))
    last = dict[str, str]()
    diary.on_instruction(request.text, now)
    steps = expert.drive(room, request).steps
    shown = [i for i, step in enumerate(steps) if look(room, step.pose).things[0].in_view]
    last_step = len(steps) if whole else shown[len(shown) // 2] + 1
    for number, step in enumerate(steps[:last_step]):
        pose = step.pose
        diary.on_pose(Pose2D(pose.x, pose.y, pose.yaw))
        diary.on_action(f"{now} {number}", parse(step.answer), now + number)
        seen = [name for name, _ in step.decision.scene]
        if number in shown:
            seen.append(thing)
        last |= dict.fromkeys(seen, f"({pose.x:.1f}, {pose.y:.1f})")
    diary.on_instruction("", now + 100)
    return last


def side_config(file: str, kind: Any) -> SideConfig:
    settings = yaml.safe_load(config_file(file).read_text(encoding="utf-8"))
    settings = settings.get("/**/dragon_server", {}).get("ros__parameters", settings)
    settings.pop("memory", None)
    found: SideConfig = from_mapping(kind, settings).side
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load(ModelConfig(path="text-target")))


@pytest.fixture
def cloud(engine: Engine, tmp_path: Path) -> Iterator[ModelSide]:
    config = side_config("dragon_cloud.yaml", DragonCloudConfig)
    with Store(tmp_path / "public") as store:
        side = ModelSide(engine, store, config)
        index = Index(store, side.layout, side.encoder, config)
        for name, text in PUBLIC.items():
            index.add(name, text)
        yield side


def answered(engine: Engine, sides: tuple[ModelSide, ModelSide], question: str) -> str:
    """Return the greedy answer of two sides."""
    law = AggregationLaw(DragonConfig().aggregation, engine.vocab_size, temperature=0.0)
    decoders = [side.decoder(question, 100) for side in sides]
    tokens: list[int] = []
    while len(tokens) < 100 and not (tokens and tokens[-1] in engine.eos):
        device, cloud = (
            law.propose(*decoder.next(), len(tokens), party)
            for decoder, party in zip(decoders, Party, strict=True)
        )
        tokens.append(law.judge((device, cloud), len(tokens)).token)
        for decoder in decoders:
            decoder.push(tokens[-1])
    for decoder in decoders:
        decoder.close()
    return engine.decode([token for token in tokens if token not in engine.eos])


@pytest.mark.parametrize(("seed", "whole"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_answer_is_the_last_place_of_each_thing(
    engine: Engine, cloud: ModelSide, tmp_path: Path, seed: int, whole: bool
) -> None:
    config = side_config("dragon.yaml", DragonConfig)
    diary, last, written = Diary(EpisodeConfig()), dict[str, str](), ""
    things = random.Random(seed).sample(NAMES, 4)
    with Store(tmp_path / "private") as store:
        device = ModelSide(engine, store, config)
        index = Index(store, device.layout, device.encoder, config)
        for number, thing in enumerate([*things, things[0]]):  # one is looked for twice
            now = NOON + 200.0 * number
            last |= drive(10 * seed + number, diary, thing, now, whole=whole)
            episode = diary.take(now + 150.0)
            for document in (*diary.take_sightings(), episode):
                assert document is not None
                remember(index, document, 1000)
                written += document.content
        for number, thing in enumerate(things):
            question = QUESTIONS[number].format(thing=thing)
            said = answered(engine, (device, cloud), question)
            assert f"the {thing} was last seen from {last[thing]}: " in said, question
            assert said.endswith(".")
        unseen = [name for name in NAMES if name not in written]
        assert len(unseen) > len(NAMES) // 2
        for number, thing in enumerate([*unseen, "umbrella", "green umbrella", "ball pen"]):
            question = QUESTIONS[number % len(QUESTIONS)].format(thing=thing)
            assert not answered(engine, (device, cloud), question), question
