"""Camera pictures of rooms: one compiled MuJoCo model whose bodies are moved into each room.

A new model per room would be slow; a room is a few mocap poses and colours, and only kinematics,
camera and light are recomputed per picture.
"""

from __future__ import annotations

import math
import os

os.environ.setdefault("MUJOCO_GL", "egl")  # must be set before mujoco is imported

import mujoco
import numpy as np

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.sim.expert import (
    CAMERA_HEIGHT,
    CAMERA_PITCH,
    HALF_FOV,
    camera_of,
    look,
)
from collab_llm_nodes.sim.pose import Pose
from collab_llm_nodes.sim.rooms import COLOURS, HEIGHT, RADIUS, SHAPES, Room

WIDTH, HEIGHT_PX = 168, 84
"""Camera picture in pixels: 12 x 6 patches of 14, 6 x 3 image tokens."""
FOCAL = WIDTH / 2 / math.tan(HALF_FOV)
"""Focal length in pixels."""

_SLOTS = 4  # most things of one shape in one room
_RGB = {
    "red": (0.85, 0.10, 0.10),
    "green": (0.10, 0.62, 0.15),
    "blue": (0.12, 0.22, 0.85),
    "yellow": (0.92, 0.80, 0.08),
}


def _thing_xml(shape: str, slot: int) -> str:
    r, h = RADIUS[shape], HEIGHT[shape]
    if shape == "box":
        side = 0.16
        geoms = f'<geom type="box" size="{side} {side} {h / 2}" pos="0 0 {h / 2}"/>'
    elif shape == "ball":
        geoms = f'<geom type="sphere" size="{r}" pos="0 0 {r}"/>'
    elif shape == "cone":
        geoms = '<geom type="mesh" mesh="cone"/>'
    else:
        geoms = (
            f'<geom type="cylinder" size="{r} {0.32 / 2}" pos="0 0 0.16"/>'
            f'<geom type="ellipsoid" size="{r} {r} 0.1" pos="0 0 0.32"/>'
            f'<geom type="cylinder" size="0.05 {(h - 0.32) / 2}" pos="0 0 {(h + 0.32) / 2}"/>'
        )
    return f'<body name="{shape}{slot}" mocap="true" pos="0 0 -5">{geoms}</body>'


def _scene_xml() -> str:
    ring = [
        (RADIUS["cone"] * math.cos(k * math.tau / 24), RADIUS["cone"] * math.sin(k * math.tau / 24))
        for k in range(24)
    ]
    cone = " ".join(f"{x:.4f} {y:.4f} 0" for x, y in ring) + f" 0 0 {HEIGHT['cone']}"
    things = "".join(_thing_xml(shape, slot) for shape in SHAPES for slot in range(_SLOTS))
    walls = "".join(
        f'<body name="wall{k}" mocap="true"><geom type="box" size="8 0.05 0.6" pos="0 0 0.6"'
        f' material="wall"/></body>'
        for k in range(4)
    )
    fovy = math.degrees(2 * math.atan(HEIGHT_PX / 2 / FOCAL))
    return f"""
<mujoco>
  <visual>
    <quality offsamples="0" shadowsize="0"/>
    <map znear="0.005" zfar="4"/>
    <global offwidth="{WIDTH * 4}" offheight="{WIDTH * 4}"/>
    <headlight ambient="0.35 0.35 0.35" diffuse="0.25 0.25 0.25" specular="0 0 0"/>
  </visual>
  <statistic extent="5"/>
  <asset>
    <mesh name="cone" vertex="{cone}"/>
    <material name="floor" rgba="0.6 0.55 0.5 1" specular="0" shininess="0"/>
    <material name="wall" rgba="0.8 0.8 0.75 1" specular="0" shininess="0"/>
  </asset>
  <worldbody>
    <light name="lamp" directional="true" pos="0 0 4" dir="0 0 -1" castshadow="false"
     diffuse="0.45 0.45 0.45" specular="0 0 0"/>
    <geom name="floor" type="plane" size="20 20 1" material="floor"/>
    <body name="robot" mocap="true"><camera name="robot" fovy="{fovy}"/></body>
    <body name="above" mocap="true"><camera name="above" fovy="60"/></body>
    {walls}{things}
  </worldbody>
</mujoco>"""


class Renderer:
    """Renderer of the room given to ``enter``; pictures are uint8 RGB arrays."""

    def __init__(self) -> None:
        try:
            self._model = mujoco.MjModel.from_xml_string(_scene_xml())
            self._data = mujoco.MjData(self._model)
            self._camera = mujoco.Renderer(self._model, HEIGHT_PX, WIDTH)
        except (RuntimeError, ImportError, AttributeError, mujoco.FatalError) as error:
            raise CollabError(
                f"MuJoCo cannot render: {error}",
                field="MUJOCO_GL",
                remedy="install libegl1 libgl1 libgl1-mesa-dri and set MUJOCO_GL=egl"
                " (or libosmesa6 and MUJOCO_GL=osmesa)",
            ) from error
        self._mocap = {
            self._model.body(i).name: int(self._model.body_mocapid[i])
            for i in range(self._model.nbody)
        }
        self._room: Room | None = None
        self._large: mujoco.Renderer | None = None

    def enter(self, room: Room) -> None:
        """Arrange the scene as ``room``; its looks (paint, light) follow from its seed too."""
        rng = np.random.default_rng([room.seed, 0x10015])
        model, data = self._model, self._data
        data.mocap_pos[:] = (0.0, 0.0, -5.0)
        for surface, low, high in (("floor", 0.35, 0.8), ("wall", 0.6, 0.95)):
            grey = rng.uniform(low, high)
            model.mat(surface).rgba[:3] = np.clip(grey + rng.uniform(-0.07, 0.07, 3), 0, 1)
        angle = rng.uniform(0, math.tau)
        model.light("lamp").dir[:] = (0.6 * math.cos(angle), 0.6 * math.sin(angle), -0.8)
        for k, (x, y, turned) in enumerate(
            (
                (room.width / 2, -0.05, False),
                (room.width / 2, room.depth + 0.05, False),
                (-0.05, room.depth / 2, True),
                (room.width + 0.05, room.depth / 2, True),
            )
        ):
            index = self._mocap[f"wall{k}"]
            data.mocap_pos[index] = (x, y, 0.0)
            half = math.pi / 4 if turned else 0.0
            data.mocap_quat[index] = (math.cos(half), 0.0, 0.0, math.sin(half))
        used = dict.fromkeys(SHAPES, 0)
        for thing in room.things:
            name = f"{thing.shape}{used[thing.shape]}"
            used[thing.shape] += 1
            index = self._mocap[name]
            data.mocap_pos[index] = (thing.x, thing.y, 0.0)
            data.mocap_quat[index] = (math.cos(thing.yaw / 2), 0.0, 0.0, math.sin(thing.yaw / 2))
            body = model.body(name)
            colour = np.clip(np.array(_RGB[thing.colour]) + rng.uniform(-0.06, 0.06, 3), 0, 1)
            first = int(body.geomadr[0])
            model.geom_rgba[first : first + int(body.geomnum[0]), :3] = colour
        self._room = room

    def picture(self, base: Pose, picture: int = 0) -> np.ndarray:
        """Return the picture of the robot's camera at ``base``: uint8 [84, 168, 3].

        ``picture`` is for the home's renderer, whose camera sways.
        """
        self._aim(base)
        self._camera.update_scene(self._data, camera="robot")
        return self._camera.render()

    def large_picture(self, base: Pose) -> np.ndarray:
        """Return the same view for people: uint8 [336, 672, 3]."""
        self._aim(base)
        if self._large is None:
            self._large = mujoco.Renderer(self._model, HEIGHT_PX * 4, WIDTH * 4)
        self._large.update_scene(self._data, camera="robot")
        return self._large.render()

    def _aim(self, base: Pose) -> None:
        if self._room is None:
            raise CollabError("no room entered", field="room", remedy="call enter(room) first")
        camera = camera_of(base)
        index = self._mocap["robot"]
        self._data.mocap_pos[index] = (camera.x, camera.y, CAMERA_HEIGHT)
        self._data.mocap_quat[index] = _camera_quaternion(camera.yaw, CAMERA_PITCH)
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)

    def close(self) -> None:
        """Free the graphics context."""
        self._camera.close()
        if self._large is not None:
            self._large.close()


def _camera_quaternion(yaw: float, pitch: float) -> np.ndarray:
    """Return the rotation of a camera that looks along +x of its yaw, pitched down.

    MuJoCo's cameras look along -z with y up.
    """
    forward = np.array(
        [math.cos(yaw) * math.cos(pitch), math.sin(yaw) * math.cos(pitch), -math.sin(pitch)]
    )
    left = np.array([-math.sin(yaw), math.cos(yaw), 0.0])
    up = np.cross(forward, left)
    matrix = np.stack([-left, up, -forward], axis=1)
    quaternion = np.zeros(4)
    mujoco.mju_mat2Quat(quaternion, matrix.flatten())
    return quaternion


def footprint(room: Room, base: Pose, cell: int = 4) -> np.ndarray:
    """Return the thing in each ``cell`` x ``cell`` pixel block: int8 [84/cell, 168/cell], -1: none.

    By geometry (projected outlines, painted far to near), as a stand-in for a segmentation
    render, which would double the cost of a picture.
    """
    rows, columns = HEIGHT_PX // cell, WIDTH // cell
    canvas = np.full((rows, columns), -1, np.int8)
    camera = camera_of(base)
    v = (np.arange(rows) + 0.5) * cell - HEIGHT_PX / 2
    u = (np.arange(columns) + 0.5) * cell - WIDTH / 2
    cos_p, sin_p = math.cos(CAMERA_PITCH), math.sin(CAMERA_PITCH)
    sights = look(room, base)
    for i in sorted(range(len(sights)), key=lambda k: -sights[k].range):
        thing, sight = room.things[i], sights[i]
        ahead = sight.range * math.cos(sight.bearing)
        left = sight.range * math.sin(sight.bearing)
        if ahead < 0.05:
            continue
        # heights along the thing's axis that each picture row sees, at the axis' depth
        slope = v / FOCAL  # downwards
        drop = ahead * (slope * cos_p + sin_p) / (cos_p - slope * sin_p)
        height = CAMERA_HEIGHT - drop
        share = height / HEIGHT[thing.shape]
        half = _outline(thing.shape, np.clip(share, 0, 1), thing.yaw - camera.yaw - sight.bearing)
        # the near side's foot is lower in the picture than the axis' foot
        inside = (share <= 1.0) & (height >= -0.5 * thing.radius * CAMERA_HEIGHT / max(ahead, 0.3))
        depth = ahead * cos_p + drop * sin_p
        centre = -left / depth * FOCAL
        width = half / depth * FOCAL
        mask = inside[:, None] & (np.abs(u[None, :] - centre[:, None]) <= width[:, None] + 0.5)
        canvas[mask] = i
    return canvas


def _outline(shape: str, share: np.ndarray, turned: float) -> np.ndarray:
    """Return the half width in m at each ``share`` of the height (0 = floor)."""
    if shape == "cone":
        return RADIUS[shape] * (1 - share)
    if shape == "ball":
        return RADIUS[shape] * np.sqrt(np.maximum(0.0, 1 - (2 * share - 1) ** 2))
    if shape == "bottle":
        return np.where(share < 0.65, RADIUS[shape], 0.05)
    return np.full_like(share, 0.16 * (abs(math.cos(turned)) + abs(math.sin(turned))))


KINDS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
"""Every colour and shape, in the order of their numbers."""
