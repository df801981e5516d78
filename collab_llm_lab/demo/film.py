"""The film of a drive: the robot's camera, the map, the answer with coloured tokens."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from collab_llm_lab.demo.tasks import Task
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.sim import rooms as home
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.scenery import RGB

WIDTH, HEIGHT = 760, 400
CAMERA = (12, 44, 504, 252)  # x, y, width, height in pixels
MAP = (528, 44, 220, 252)
_COLOUR_OF_THING = {
    name: "#" + "".join(f"{round(255 * part):02x}" for part in rgb) for name, rgb in RGB.items()
}
_FURNITURE = {"table": "#d8c3a5", "sofa": "#b9c0b3", "shelf": "#a98f78", "partition": "#8d99ae"}
_PERSON = "#dee2e6"
_INNER = {"bottle": 0.05, "mug": 0.06, "bucket": 0.1, "lamp": 0.03}
"""Radius [m] of a white circle on things that look alike from above."""
COLOUR_OF_SOURCE = {
    Source.ACCEPTED: "#157f3b",
    Source.RECOVERED: "#d9480f",
    Source.BONUS: "#1864ab",
    Source.UNVERIFIED: "#868e96",
}


Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Frame:
    """One picture of the film.

    Attributes:
        camera: JPEG bytes of the robot's view.
        path: the robot's true poses so far, the newest last.
        words: the answer as (text of a token, its source).
        title, status: the line above and the line below.
    """

    task: Task
    camera: bytes
    path: Sequence[Pose]
    words: Sequence[tuple[str, Source]]
    title: str
    status: str


def draw(frame: Frame) -> Image.Image:
    """Render one frame as RGB [400, 760]."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(18), ImageFont.load_default(13)
    pen.text((12, 12), frame.title, fill="black", font=font)
    x, y, w, h = CAMERA
    with Image.open(io.BytesIO(frame.camera)) as seen:
        image.paste(seen.convert("RGB").resize((w, h), Image.Resampling.NEAREST), (x, y))
    _draw_map(pen, frame)
    _draw_words(pen, frame.words, (12, 306), font)
    pen.text((12, HEIGHT - 24), frame.status, fill="#495057", font=small)
    _draw_legend(pen, small)
    return image


def save(frames: Sequence[Frame], file: Path, seconds_per_frame: float = 0.7) -> None:
    """Write an animated GIF with one palette for all frames."""
    images = [draw(f) for f in frames]
    # The palette must hold every colour that has a meaning, whichever frame it is in.
    strip = Image.new("RGB", (WIDTH, HEIGHT + 40 * len(images)))
    pen = ImageDraw.Draw(strip)
    colours = [*_COLOUR_OF_THING.values(), *COLOUR_OF_SOURCE.values(), *_FURNITURE.values()]
    colours += ["black", "white"]
    for number, colour in enumerate(colours):
        pen.rectangle((0, 40 * number, WIDTH, 40 * number + 40), fill=colour)
    for number, image in enumerate(images):
        strip.paste(image.resize((WIDTH, 40)), (0, HEIGHT + 40 * number))
    palette = strip.quantize(200, dither=Image.Dither.NONE)
    pictures = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    pictures[0].save(
        file,
        save_all=True,
        append_images=pictures[1:],
        duration=int(1000 * seconds_per_frame),
        loop=0,
        optimize=False,  # it would give each frame a palette of its own
    )


def _draw_map(pen: ImageDraw.ImageDraw, frame: Frame) -> None:
    corner, top, width, height = MAP
    room = frame.task.room
    scale = min(width / room.width, height / room.depth)
    left = corner + (width - scale * room.width) / 2

    def at(px: float, py: float) -> tuple[float, float]:
        return left + scale * px, top + scale * (room.depth - py)

    def disc(px: float, py: float, radius: float, **style: object) -> None:
        cx, cy = at(px, py)
        r = radius * scale
        pen.ellipse((cx - r, cy - r, cx + r, cy + r), **style)  # type: ignore[arg-type]

    def outline(points: Iterable[Sequence[float]], **style: object) -> None:
        pen.polygon([at(u, v) for u, v in points], **style)  # type: ignore[arg-type]

    pen.rectangle((*at(0, room.depth), *at(room.width, 0)), fill="#f1f3f5", outline="black")
    if isinstance(room, home.Room) and room.notch is not None:
        pen.rectangle(
            (*at(room.notch[0], room.depth), *at(room.width, room.notch[1])),
            fill="white",
            outline="black",
        )
    for goal in frame.task.goals:  # a stop in here is a success
        outline(goal.inflated(frame.task.within, arc=8), outline="#adb5bd")
    for part in reversed(room.parts):
        if isinstance(part, home.Furniture):
            colour = _FURNITURE.get(part.kind, _PERSON)
            outline(part.footprint.inflated(0.0, arc=1), fill=colour, outline="#495057")
            continue
        colour = _COLOUR_OF_THING[part.colour]
        cx, cy = at(part.x, part.y)
        r = part.radius * scale
        if part.shape == "box":
            pen.rectangle((cx - r, cy - r, cx + r, cy + r), fill=colour, outline="black")
        elif part.shape == "cone":
            pen.polygon((cx - r, cy + r, cx + r, cy + r, cx, cy - r), fill=colour, outline="black")
        else:
            disc(part.x, part.y, part.radius, fill=colour, outline="black")
        if part.shape in _INNER:
            disc(part.x, part.y, _INNER[part.shape], fill="white")
    if len(frame.path) > 1:
        pen.line([at(p.x, p.y) for p in frame.path], fill="#343a40", width=2)
    robot = frame.path[-1]
    disc(robot.x, robot.y, 0.3, outline="black", fill="#ced4da")
    nose = at(robot.x + 0.5 * math.cos(robot.yaw), robot.y + 0.5 * math.sin(robot.yaw))
    pen.line((*at(robot.x, robot.y), *nose), fill="black", width=3)


def _draw_words(
    pen: ImageDraw.ImageDraw,
    words: Sequence[tuple[str, Source]],
    origin: tuple[int, int],
    font: Font,
) -> None:
    x, y = float(origin[0]), float(origin[1])
    for text, source in words:
        width = pen.textlength(text, font=font)
        if x + width > WIDTH - 12:
            x, y = float(origin[0]), y + 24
            text = text.lstrip()
            width = pen.textlength(text, font=font)
        pen.text((x, y), text, fill=COLOUR_OF_SOURCE[source], font=font)
        x += width


def _draw_legend(pen: ImageDraw.ImageDraw, font: Font) -> None:
    x = float(WIDTH - 262)
    for source, label in (
        (Source.ACCEPTED, "accepted draft"),
        (Source.RECOVERED, "recovered"),
        (Source.BONUS, "bonus"),
    ):
        pen.text((x, HEIGHT - 24), label, fill=COLOUR_OF_SOURCE[source], font=font)
        x += pen.textlength(label + "   ", font=font)
