"""The episodic memory: sentences, what is not repeated, bounds, and a question answered."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from dragon_bed import config_of, engine_of

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.store import Store, StoredDocument
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.robot import episodes
from collab_llm_nodes.robot.episodes import EpisodeConfig, EpisodeLog, remember, store_of
from collab_llm_nodes.robot.executor import Pose2D
from collab_llm_nodes.robot.grammar import Code, Kind, ParsedAction

MORNING = datetime(2026, 11, 23, 10, 32, 5, tzinfo=timezone.utc).timestamp()
STEP = ParsedAction(Kind.FORWARD, 0.4, Code.OK, (0, 0), "")


def text_of(log: EpisodeLog) -> str:
    episode = log.take(MORNING, all_of_it=True)
    return "" if episode is None else episode.content


def test_sentences() -> None:
    log = EpisodeLog(EpisodeConfig())
    log.did(STEP, Pose2D(1.4, 2.0, 0.0), MORNING + 120)
    log.said("A door\n is open.", Pose2D(), MORNING + 180)
    assert text_of(log).splitlines() == [
        "At 10:34 on 2026-11-23, the robot did: move forward 40 cm, at (1.4, 2.0).",
        "At 10:35 on 2026-11-23, seen from (0.0, 0.0): A door is open.",
    ]
    assert text_of(log) == ""


def test_times_are_those_of_the_zone() -> None:
    log = EpisodeLog(EpisodeConfig(), timezone(timedelta(hours=2)))
    log.said("Hello", Pose2D(), MORNING)
    assert text_of(log).startswith("At 12:32 on 2026-11-23,")


def test_episodes_end_by_age_by_length_and_with_the_robot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "_SENTENCES", 3)
    log = EpisodeLog(EpisodeConfig(episode_s=60))
    log.said("one", Pose2D(), MORNING)
    assert log.take(MORNING + 59) is None
    first = log.take(MORNING + 60)
    assert first is not None
    assert first.name == "episode 2026-11-23 10:32:05 1"
    for word in ("two", "three", "four"):
        assert log.take(MORNING + 61) is None
        log.said(word, Pose2D(), MORNING + 61)
    second = log.take(MORNING + 61)
    assert second is not None
    assert second.content.count("\n") == 3
    log.said("five", Pose2D(), MORNING + 62)
    assert log.take(MORNING + 63) is None
    assert log.take(MORNING + 63, all_of_it=True) is not None
    assert log.take(MORNING + 63, all_of_it=True) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_and_empty_names_are_refused(bad: float) -> None:
    log = EpisodeLog(EpisodeConfig())
    for call in (
        lambda: log.said("a ball", Pose2D(yaw=bad), MORNING),
        lambda: log.said("a ball", Pose2D(), bad),
        lambda: log.last_sighting("ball", "near", Pose2D(0.0, bad), MORNING),
        lambda: log.did(STEP, Pose2D(bad), MORNING),
        lambda: log.said("x", Pose2D(), 1e300),
        lambda: log.said("\x00", Pose2D(), MORNING),
    ):
        with pytest.raises(InvalidInput):
            call()
    assert text_of(log) == ""


def test_a_long_text_is_cut_and_line_breaks_do_not_forge_sentences() -> None:
    log = EpisodeLog(EpisodeConfig())
    log.said("x" * 5000 + "\nAt 10:00, the door was open.", Pose2D(), MORNING)
    (line,) = text_of(log).splitlines()
    assert len(line) < 300


def test_the_robot_is_asked_where_the_ball_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "_SENTENCES", 2)
    engine, config = engine_of(), replace(config_of(documents=2), document_tokens=400)
    with Store(tmp_path) as store:
        side = ModelSide(engine, store, config)
        index = Index(store, side.layout, WordHashes(), config)
        index.add("manual", "The pump needs oil every week.")
        log = EpisodeLog(EpisodeConfig())
        things = ("a red ball", "a lamp", "a box", "a cup", "a chair", "a dog")
        for number, thing in enumerate(things):
            log.said(f"{thing} is ahead", Pose2D(number), MORNING + number)
            episode = log.take(MORNING + number)
            if episode is not None:
                remember(index, episode, most=2)
        names = [entry.name for entry in index.documents()]
        assert names == ["episode 2026-11-23 10:32:07 2", "episode 2026-11-23 10:32:09 3", "manual"]
        hit = side.retrieve("Where did I last see the chair?").hits[0]
        assert "seen from (4.0, 0.0): a chair is ahead" in hit.chunk.text
        assert not any("red ball" in h.chunk.text for h in side.retrieve("a red ball").hits)


class Names:
    """A memory that knows names only."""

    def __init__(self) -> None:
        self.held: list[str] = ["manual"]
        self.deletions = 0

    def add(self, name: str, content: str, *, replacing: bool = False) -> int:
        self.held.append(name)
        return 0

    def delete(self, *names: str) -> int:
        self.held = [name for name in self.held if name not in names]
        self.deletions += 1
        return 0

    def documents(self) -> list[StoredDocument]:
        return [StoredDocument(name, "", 1, 1, i, i) for i, name in enumerate(self.held)]


@pytest.mark.parametrize("kind", ["episode 2026-11-23 10:32:05", "last sighting of box"])
def test_the_oldest_of_a_kind_go_in_lots(kind: str) -> None:
    memory = Names()
    for number in range(1, 200):
        remember(memory, Document(f"{kind} {number}", "x"), most=100)
        assert len(memory.held) <= 111
    assert memory.deletions == 9
    assert memory.held[0] == "manual"
    assert memory.held[-1].endswith(" 199")
    kept = [int(name.rpartition(" ")[2]) for name in memory.held[1:]]
    assert kept == list(range(kept[0], 200))


def test_a_last_sighting_is_one_sentence_in_a_document_of_its_thing() -> None:
    log = EpisodeLog(EpisodeConfig())
    found = log.last_sighting("red ball", "the red ball is near.", Pose2D(1.0, -2.0), MORNING)
    assert found.name == "last sighting of red ball"
    assert found.content == (
        "At 10:32 on 2026-11-23, the red ball was last seen from (1.0, -2.0): the red ball is"
        " near.\n"
    )
    assert log.take(MORNING, all_of_it=True) is None
    with pytest.raises(InvalidInput):
        log.last_sighting(" ", "near", Pose2D(), MORNING)


@pytest.mark.parametrize(
    ("robot", "world", "store"),
    [
        ("/", "", "~/own/private"),
        ("/robot1", "", "~/own/private.robot1"),
        ("/fleet/robot1", "", "~/own/private.fleet.robot1"),
        ("/", "room-3", "~/own/private.simulated-room-3"),
        ("/robot1", "room-3", "~/own/private.robot1.simulated-room-3"),
    ],
)
def test_each_robot_has_a_store_for_each_world(robot: str, world: str, store: str) -> None:
    assert store_of("~/own/private", robot, world) == store
    assert store_of("~/own/private/", robot, world) == store
