"""The film of a drive: the robot's camera, the map, the answer with coloured tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from collab_llm_lab.demo.floor_plan import GOAL, WAY, code_of, draw_plan
from collab_llm_lab.demo.tasks import Task
from collab_llm_nodes.protocols.edge_cloud.client import Source
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.scenery import RGB

WIDTH, HEIGHT = 840, 424
CAMERA = (12, 44, 520, 260)  # x, y, width, height in pixels
PLAN = (548, 44, 280, 260)
_FRAME_MS, _END_MS = 700, 2500
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
    """Render one frame as RGB [424, 840]."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(18), ImageFont.load_default(13)
    pen.text((12, 12), frame.title, fill="black", font=font)
    x, y, w, h = CAMERA
    with Image.open(io.BytesIO(frame.camera)) as seen:
        image.paste(seen.convert("RGB").resize((w, h), Image.Resampling.LANCZOS), (x, y))
    x, y, w, h = PLAN
    plan = draw_plan(frame.task, frame.path, (w, h))
    image.paste(plan, (x + (w - plan.width) // 2, y))
    _draw_words(pen, frame.words, (12, 314), font)
    pen.text((12, HEIGHT - 24), frame.status, fill="#495057", font=small)
    _draw_legend(pen, small)
    return image


def save(frames: Sequence[Frame], file: Path) -> None:
    """Write an animated GIF with one palette for all frames; each drive's end is shown longer."""
    images = [draw(f) for f in frames]
    # The palette must hold every colour that has a meaning, whichever frame it is in.
    strip = Image.new("RGB", (WIDTH, HEIGHT + 40 * len(images)))
    pen = ImageDraw.Draw(strip)
    colours = [*map(code_of, RGB.values()), *COLOUR_OF_SOURCE.values(), GOAL, WAY, "black", "white"]
    for number, colour in enumerate(colours):
        pen.rectangle((0, 40 * number, WIDTH, 40 * number + 40), fill=colour)
    for number, image in enumerate(images):
        strip.paste(image.resize((WIDTH, 40)), (0, HEIGHT + 40 * number))
    palette = strip.quantize(256, dither=Image.Dither.NONE)
    pictures = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    ends = [a.task is not b.task for a, b in pairwise(frames)] + [True]
    pictures[0].save(
        file,
        save_all=True,
        append_images=pictures[1:],
        duration=[_END_MS if end else _FRAME_MS for end in ends],
        loop=0,
        optimize=False,  # it would give each frame a palette of its own
    )


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
