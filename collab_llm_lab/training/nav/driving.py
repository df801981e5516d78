"""Episodes of a model in simulated rooms, many in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from collab_llm_lab.home.answers import GIVE_UP, REPLY, STOP, read
from collab_llm_lab.home.expert import reached
from collab_llm_lab.home.requests import Request
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import SearchMemory
from collab_llm_nodes.ros.images import Form, read_compressed, zoom_between
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room

Answer = Callable[[np.ndarray, Sequence[str]], list[str]]
"""Pictures uint8 [B, 112, 224, 3] and prompts to answers."""
FIELD_OF_VIEW = 90.0
"""To which pictures are brought [deg]: ``field_of_view`` of config/embedded.yaml."""
MAX_STEPS = 100
"""Steps of an episode at most, as of the robot's navigator."""


@dataclass
class Episode:
    """One request in one room, driven by a model."""

    room: Room
    request: Request
    base: Base
    history: list[str] = field(default_factory=list)
    memory: SearchMemory = SearchMemory()
    seen_from: Pose | None = None
    """Place of the next picture, if it is not that of the base."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Prompts and answers so far."""
    outcome: str = ""
    """reached | wrong place | given up | replied | invalid | step limit; empty on the way."""

    @property
    def prompt(self) -> str:
        return user_text(self.request.text, self.history, SEARCH_TEMPLATE, search=self.memory.text)

    @property
    def viewpoint(self) -> Pose:
        return self.seen_from or self.base.pose

    def advance(self, said: str) -> None:
        """Carry out the action of an answer, and settle the outcome if the episode is over."""
        self.asked.append((self.prompt, said))
        decision = read(said)
        if decision is None:
            self.outcome = "invalid"
        elif decision.action == STOP:
            self.outcome = "reached" if self._at_target() else "wrong place"
        elif decision.action == GIVE_UP:
            self.outcome = "given up"
        elif decision.action == REPLY:
            self.outcome = "replied"
        else:
            before = self.base.pose
            done = self.base.execute(decision.action)
            self.memory = self.memory.after(decision.action, said, done)
            self.history.append(decision.action)
            self.seen_from = before if self.room.camera.late else None
            if len(self.history) >= MAX_STEPS:
                self.outcome = "step limit"

    def _at_target(self) -> bool:
        """Return True if the base is at something that the request may mean."""
        about, pose = self.request.about, self.base.pose
        parts = enumerate(self.room.parts)
        return any(reached(self.room, i, pose) for i, part in parts if about.matches(part.name))


def begin(room: Room, request: Request) -> Episode:
    """Return a fresh episode."""
    return Episode(room, request, Base(room, seed=2))


def drive(
    answer: Answer,
    episodes: Iterable[Episode],
    visit: Callable[[Episode, Renderer], bytes] | None = None,
    together: int = 64,
    report: Callable[[int], None] = lambda done: None,
) -> list[Episode]:
    """Drive all episodes to their ends, ``together`` at a time in lockstep.

    Args:
        visit: takes the picture of each state (the JPEG that the robot sends) in its entered
            room; none: the plain one.
        report: called with the number of episodes that are over.
    """
    renderer = Renderer()
    waiting, running, done = iter(episodes), list[Episode](), list[Episode]()
    while True:
        while len(running) < together and (episode := next(waiting, None)) is not None:
            running.append(episode)
        if not running:
            break
        jpegs = []
        for episode in running:
            renderer.enter(episode.room)
            jpegs.append((visit or take_picture)(episode, renderer))
        said = answer(np.stack([from_jpeg(j) for j in jpegs]), [e.prompt for e in running])
        for episode, text in zip(running, said, strict=True):
            episode.advance(text)
        done += [e for e in running if e.outcome]
        running = [e for e in running if not e.outcome]
        report(len(done))
    renderer.close()
    return done


def take_picture(episode: Episode, renderer: Renderer) -> bytes:
    """Return the picture of an episode's next step as a JPEG, as models are shown it."""
    return picture_for_model(renderer, episode.room, episode.viewpoint, len(episode.history))


def as_shown(room: Room) -> Room:
    """Return the room with the field of view that is left in the models' pictures."""
    if _zoom(room) <= 1.0:
        return room
    half = math.radians(FIELD_OF_VIEW / 2)
    return replace(room, camera=replace(room.camera, half_fov=half))


def picture_for_model(renderer: Renderer, room: Room, pose: Pose, number: int) -> bytes:
    """Return the robot's picture in the entered room, as ``camera_ingest`` passes it on."""
    jpeg = to_jpeg(renderer.picture(pose, number), room.camera.jpeg_quality)
    return read_compressed(jpeg, Form(zoom=_zoom(room))).data


def _zoom(room: Room) -> float:
    return zoom_between(math.degrees(2.0 * room.camera.half_fov), FIELD_OF_VIEW)
