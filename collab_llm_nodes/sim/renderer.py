"""Camera pictures of rooms: one compiled MuJoCo model whose parts are moved into each room.

A new model per room would be slow; a room is a few poses, sizes and colours, and only kinematics,
camera and light are recomputed per picture.
"""

from __future__ import annotations

import math
import os

os.environ.setdefault("MUJOCO_GL", "egl")  # must be set before mujoco is imported

import mujoco
import numpy as np

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import COLOURS, FURNITURE, NAMED_FURNITURE, SHAPES, Room, Thing
from collab_llm_nodes.sim.scenery import (
    MATERIALS,
    PAINTED,
    PERSON_XML,
    RGB,
    TROUSERS,
    boxes,
    meshes_xml,
    textures,
    thing_xml,
)
from collab_llm_nodes.sim.view import ASPECT, Scene, axes, camera_of

WIDTH, HEIGHT_PX = 224, 112
"""Camera picture in pixels: 16 x 8 patches of 14, 8 x 4 image tokens."""
CELL = 4
"""Side [pixel] of a block of ``footprint``."""
ENLARGED = 4
"""Times that the picture for people is larger."""

_BOXES = 160  # of walls and furniture
_PEOPLE = 6
_HIDDEN = 5  # group of geoms that are not drawn
_SWAY = np.radians((1.0, 2.0, 2.0))  # yaw, pitch, roll
_SUNK = "0 0 -5"


def _scene_xml() -> str:
    things = "".join(
        f'<body name="{shape}{slot}" mocap="true" pos="{_SUNK}">{thing_xml(shape)}</body>'
        for shape in SHAPES
        for slot in range(len(COLOURS))
    )
    people = "".join(
        f'<body name="person{slot}" mocap="true" pos="{_SUNK}">{PERSON_XML}</body>'
        for slot in range(_PEOPLE)
    )
    pool = "".join(
        f'<geom name="box{k}" type="box" size="0.1 0.1 0.1" pos="{_SUNK}" material="matt"/>'
        for k in range(_BOXES)
    )
    repeat = {"wood": 2.0, "tiles": 2.2, "carpet": 2.5, "stripes": 2.0}
    materials = "".join(
        f'<texture name="{name}" type="2d" file="{name}.png"/>'
        f'<material name="{name}" texture="{name}" texuniform="true"'
        f' texrepeat="{times} {times}" specular="0" shininess="0"/>'
        for name, times in repeat.items()
    )
    return f"""
<mujoco>
  <visual>
    <quality offsamples="0" shadowsize="0"/>
    <map znear="0.005" zfar="5"/>
    <global offwidth="{WIDTH * ENLARGED}" offheight="{HEIGHT_PX * ENLARGED}"/>
    <headlight specular="0 0 0"/>
  </visual>
  <statistic extent="5"/>
  <default><geom group="{PAINTED}" contype="0" conaffinity="0"/></default>
  <asset>
    {meshes_xml()}{materials}
    <material name="matt" specular="0" shininess="0"/>
  </asset>
  <worldbody>
    <light name="lamp" directional="true" pos="0 0 4" dir="0 0 -1" castshadow="false"
     specular="0 0 0"/>
    <geom name="floor" type="plane" size="15 15 1" material="matt"/>
    {pool}
    <body name="robot" mocap="true"><camera name="robot" fovy="45"/></body>
    {things}{people}
  </worldbody>
</mujoco>"""


class Renderer:
    """Renderer of the room given to ``enter``; pictures are uint8 RGB arrays."""

    def __init__(self) -> None:
        try:
            self._model = mujoco.MjModel.from_xml_string(_scene_xml(), textures())
            self._data = mujoco.MjData(self._model)
            self._camera = mujoco.Renderer(self._model, HEIGHT_PX, WIDTH, max_geom=1000)
        except (RuntimeError, ImportError, AttributeError, mujoco.FatalError) as error:
            raise CollabError(
                f"MuJoCo cannot render: {error}",
                field="MUJOCO_GL",
                remedy="install libegl1 libgl1 libgl1-mesa-dri and set MUJOCO_GL=egl"
                " (or libosmesa6 and MUJOCO_GL=osmesa)",
            ) from error
        model = self._model
        self._options = mujoco.MjvOption()
        self._options.geomgroup[:] = 1
        self._options.geomgroup[_HIDDEN] = 0
        self._groups = model.geom_group.copy()
        self._floor = int(model.geom("floor").id)
        first = int(model.geom("box0").id)
        self._pool = slice(first, first + _BOXES)
        model.geom_sameframe[self._pool] = 0  # their place is not that of their body
        self._materials = {name: int(model.mat(name).id) for name in MATERIALS}
        self._room: Room | None = None
        self._large: mujoco.Renderer | None = None

    def enter(self, room: Room) -> None:
        """Arrange the scene as ``room``; a thing's shade follows from its seed too.

        Raises ``CollabError`` if the room has more parts than the scene.
        """
        model, looks = self._model, room.looks
        rng = np.random.default_rng([room.seed, 0x10015])
        model.geom_group[:] = _HIDDEN
        model.geom_group[self._floor] = PAINTED
        model.geom_matid[self._floor] = self._materials.get(looks.floor, self._materials["matt"])
        model.geom_rgba[self._floor, :3] = looks.floor_colour
        self._build(room)
        used = dict.fromkeys((*SHAPES, *FURNITURE), 0)
        for part in room.parts:
            kind = part.shape if isinstance(part, Thing) else part.kind
            if kind in NAMED_FURNITURE:
                continue  # is made of boxes
            geoms = self._place(f"{kind}{used[kind]}", part.x, part.y, part.yaw)
            used[kind] += 1
            if isinstance(part, Thing):
                paint = np.array(RGB[part.colour])
                noise = looks.noise * (0.3 + 0.7 * paint.max())  # black stays grey
                self._paint(geoms, PAINTED, paint + rng.uniform(-noise, noise, 3))
            else:
                self._paint(geoms, PAINTED, rng.uniform(0.3, 0.7) + rng.uniform(-0.07, 0.07, 3))
                self._paint(geoms, TROUSERS, rng.uniform(0.12, 0.3) + rng.uniform(-0.06, 0.06, 3))
        yaw = looks.light_yaw
        model.light("lamp").dir[:] = (0.55 * math.cos(yaw), 0.55 * math.sin(yaw), -0.8)
        model.light("lamp").diffuse[:] = 0.45 * looks.light
        model.vis.headlight.ambient[:] = 0.45 * looks.light
        model.vis.headlight.diffuse[:] = 0.35 * looks.light
        fovy = 2 * math.atan(math.tan(room.camera.half_fov) / ASPECT)
        model.cam_fovy[model.cam("robot").id] = math.degrees(fovy)
        self._room = room

    def _build(self, room: Room) -> None:
        """Give the boxes of the pool their place, size and paint."""
        model, built = self._model, boxes(room)
        if len(built) > _BOXES:
            raise CollabError(
                f"a room of {len(built)} boxes; the scene has {_BOXES}",
                field="room",
                remedy="use less furniture",
            )
        part = slice(self._pool.start, self._pool.start + len(built))
        numbers = np.array([box[:7] for box in built])
        half_yaw = numbers[:, 6] / 2
        model.geom_pos[part], model.geom_size[part] = numbers[:, :3], numbers[:, 3:6]
        model.geom_quat[part] = 0.0
        model.geom_quat[part, 0], model.geom_quat[part, 3] = np.cos(half_yaw), np.sin(half_yaw)
        model.geom_rgba[part] = [(*box.colour, box.alpha) for box in built]
        model.geom_matid[part] = [self._materials[box.material] for box in built]
        model.geom_group[part] = PAINTED

    def _place(self, name: str, x: float, y: float, yaw: float) -> slice:
        """Put a body on the floor; return its geoms."""
        try:
            body = self._model.body(name)
        except KeyError as error:
            raise CollabError(
                f"too many things of one kind: no {name!r} in the scene",
                field="room",
                remedy="use at most one thing of each colour and shape, and few people",
            ) from error
        index = int(body.mocapid[0])
        self._data.mocap_pos[index] = (x, y, 0.0)
        self._data.mocap_quat[index] = (math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2))
        first = int(body.geomadr[0])
        geoms = slice(first, first + int(body.geomnum[0]))
        self._model.geom_group[geoms] = self._groups[geoms]
        return geoms

    def _paint(self, geoms: slice, group: int, colour: np.ndarray) -> None:
        chosen = np.flatnonzero(self._groups[geoms] == group) + geoms.start
        self._model.geom_rgba[chosen, :3] = np.clip(colour, 0.0, 1.0)

    def picture(self, base: Pose, picture: int = 0) -> np.ndarray:
        """Return the picture of the robot's camera at ``base``: uint8 [112, 224, 3].

        ``picture`` is a number from which the sway of this picture is drawn.
        """
        return self._rendered(self._camera, base, picture)

    def large_picture(self, base: Pose, picture: int = 0) -> np.ndarray:
        """Return the same view for people: uint8 [448, 896, 3]."""
        if self._large is None:
            size = (HEIGHT_PX * ENLARGED, WIDTH * ENLARGED)
            self._large = mujoco.Renderer(self._model, *size, max_geom=1000)
        return self._rendered(self._large, base, picture)

    def _rendered(self, renderer: mujoco.Renderer, base: Pose, picture: int) -> np.ndarray:
        room = self._room
        if room is None:
            raise CollabError("no room entered", field="room", remedy="call enter(room) first")
        eye, turn = camera_of(base), sway(room, picture)
        right, up, forward = axes(room.camera, (eye.yaw + turn[0], turn[1], turn[2]))
        index = int(self._model.body("robot").mocapid[0])
        self._data.mocap_pos[index] = (eye.x, eye.y, room.camera.height)
        matrix = np.stack([right, up, -forward], axis=1)  # MuJoCo's cameras look along -z
        mujoco.mju_mat2Quat(self._data.mocap_quat[index], matrix.flatten())
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        renderer.update_scene(self._data, camera="robot", scene_option=self._options)
        return renderer.render()

    def close(self) -> None:
        """Free the graphics contexts."""
        self._camera.close()
        if self._large is not None:
            self._large.close()


def sway(room: Room, picture: int) -> tuple[float, float, float]:
    """Return yaw, pitch and roll [rad] by which the camera is off in one picture."""
    rng = np.random.default_rng([room.seed, picture, 0x5A])
    yaw, pitch, roll = room.camera.sway * _SWAY * rng.uniform(-1.0, 1.0, 3)
    return float(yaw), float(pitch), float(roll)


def footprint(room: Room, base: Pose, picture: int = 0) -> np.ndarray:
    """Return what each block of ``CELL`` x ``CELL`` pixels shows: int8 [28, 56].

    The number of a thing, or that of furniture counted after all things, or -1. By geometry, as a
    stand-in for a segmentation render, which would double the cost of a picture.
    """
    rows, columns = HEIGHT_PX // CELL, WIDTH // CELL
    focal = WIDTH / 2 / math.tan(room.camera.half_fov)
    down = (np.arange(rows) + 0.5) * CELL - HEIGHT_PX / 2
    right = (np.arange(columns) + 0.5) * CELL - WIDTH / 2
    rays = np.empty((rows, columns, 3))
    rays[..., 0], rays[..., 1], rays[..., 2] = right, -down[:, None], focal
    x, y, z = np.moveaxis(rays.reshape(-1, 3) @ axes(room.camera, sway(room, picture)), -1, 0)
    met = Scene(room, base).meet(np.arctan2(y, x), z / np.hypot(x, y))
    if not met.shape[1]:
        return np.full((rows, columns), -1, np.int8)
    nearest = met.argmin(1)
    shown = np.isfinite(met.min(1)) & (nearest < len(room.footprints))
    return np.where(shown, nearest, -1).astype(np.int8).reshape(rows, columns)
