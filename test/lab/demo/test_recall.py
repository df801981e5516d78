"""Questions about simulated drives to the memory as it ships: the answer is the last place of the
thing, and there is none for a thing that was never seen."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from collab_llm_lab.demo.memory import PUBLIC
from collab_llm_lab.training.nav.wording import answer, instruction
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
from collab_llm_nodes.robot.grammar import Kind, parse
from collab_llm_nodes.sim.expert import Sight

COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("box", "ball", "cone", "bottle")
NOON = 1_795_600_800.0
QUESTIONS = (
    "Where was the {thing} last seen?",
    "Where did you last see the {thing}?",
    "Where did I last see the {thing}?",
    "When was the {thing} last seen?",
)


def drive(rng: random.Random, diary: Diary, thing: str, now: float) -> str:
    """Look for a thing and go to it as the expert does; return where it was seen last."""
    pose = Pose2D(rng.uniform(-2, 2), rng.uniform(-2, 2), rng.uniform(-3, 3))
    goal = (rng.uniform(-3, 3), rng.uniform(-3, 3))
    history: list[str] = []
    verb, last = rng.randrange(6), ""
    diary.on_instruction(instruction(thing, verb), now)
    for step in range(40):
        diary.on_pose(pose)
        dx, dy = goal[0] - pose.x, goal[1] - pose.y
        bearing = math.remainder(math.atan2(dy, dx) - pose.yaw, math.tau)
        seen = abs(bearing) < math.radians(45)
        sight = Sight(bearing, max(0.05, math.hypot(dx, dy) - 0.3), float(seen))
        action = parse(answer(thing, sight, history, verb))
        diary.on_action(f"{now} {step}", action, now + step)
        if seen:
            last = f"({pose.x:.1f}, {pose.y:.1f})"
        history.append(action.phrase)
        if action.kind is Kind.TURN:
            pose = replace(pose, yaw=pose.yaw + action.value)
        elif action.kind is Kind.FORWARD:
            x, y = math.cos(pose.yaw), math.sin(pose.yaw)
            pose = replace(pose, x=pose.x + action.value * x, y=pose.y + action.value * y)
        else:
            break
    diary.on_instruction("", now + 50)
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


@pytest.mark.parametrize("seed", range(2))
def test_the_answer_is_the_last_place_of_each_thing(
    engine: Engine, cloud: ModelSide, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    config = side_config("dragon.yaml", DragonConfig)
    diary, last = Diary(EpisodeConfig()), {}
    things = rng.sample([f"{colour} {shape}" for colour in COLOURS for shape in SHAPES], 4)
    with Store(tmp_path / "private") as store:
        device = ModelSide(engine, store, config)
        index = Index(store, device.layout, device.encoder, config)
        for number, thing in enumerate([*things, things[0]]):  # one is looked for twice
            now = NOON + 100.0 * number
            last[thing] = drive(rng, diary, thing, now)
            episode = diary.take(now + 60.0)
            for document in (*diary.take_sightings(), episode):
                assert document is not None
                remember(index, document, 1000)
        for number, thing in enumerate(things):
            question = QUESTIONS[number].format(thing=thing)
            said = answered(engine, (device, cloud), question)
            assert f"the {thing} was last seen from {last[thing]}: " in said, question
            assert said.endswith(".")
        kinds = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
        for number, thing in enumerate([*kinds, "umbrella", "green umbrella", "ball pen"]):
            question = QUESTIONS[number % len(QUESTIONS)].format(thing=thing)
            if thing not in things:
                assert not answered(engine, (device, cloud), question), question
