"""Shortest paths of the robot around known obstacles: A* over a visibility graph.

Corners of the inflated obstacles are the nodes. Edges are tested when their first node is
expanded, so a path costs a few expansions, not a graph. Lengths in m, angles in rad.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from collab_llm_nodes.sim.footprints import Footprint, distances
from collab_llm_nodes.sim.rooms import ROBOT_RADIUS

MARGIN = 0.38
"""m from the base's centre to obstacles on a path."""
_TIGHT = ROBOT_RADIUS + 0.02
_AT_THING = 0.5
"""m from the base's centre to the footprint of the thing at the end of a path."""
_SLACK = 0.01

Point = tuple[float, float]


def crossed(
    obstacles: Sequence[Footprint], start: Point, ends: np.ndarray, margin: np.ndarray | float
) -> np.ndarray:
    """Return which ways from ``start`` to ``ends`` [n, 2] come closer to an obstacle than a margin.

    Args:
        margin: in m, one for each obstacle or for all; a negative one lets ways pass.
    """
    if not obstacles:
        return np.zeros(len(ends), bool)
    x, y, yaw, half_length, half_width, radius = np.asarray(obstacles, float).T
    keep = radius + margin
    c, s = np.cos(yaw), np.sin(yaw)

    def local(px: np.ndarray, py: np.ndarray) -> np.ndarray:
        dx, dy = px[:, None] - x, py[:, None] - y
        return np.stack([c * dx + s * dy, c * dy - s * dx])

    first = local(np.array([start[0]]), np.array([start[1]]))
    way = local(*ends.T) - first  # [2, ends, obstacles]
    way = np.where(np.abs(way) < 1e-9, 1e-9, way)
    half = np.stack([half_length, half_width])[:, None]
    near = np.zeros(way.shape[1:], bool)
    for more in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):
        box = half + np.maximum(keep, 0.0) * more[:, None, None]
        enter, leave = np.sort(np.stack([(-box - first) / way, (box - first) / way]), 0)
        near |= np.maximum(enter.max(0), 0.0) < np.minimum(leave.min(0), 1.0)
    for i, j in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        corner = np.stack([i * half_length, j * half_width])[:, None]
        along = ((corner - first) * way).sum(0) / (way**2).sum(0)
        away = first + np.clip(along, 0.0, 1.0) * way - corner
        near |= (away**2).sum(0) < np.maximum(keep, 0.0) ** 2
    result: np.ndarray = (near & (keep >= 0.0)).any(1)
    return result


def straight(obstacles: Sequence[Footprint], start: Point, to: Footprint) -> bool:
    """Return True if the robot can go straight at ``to``, which is none of the obstacles."""
    end = _before(start, to)
    margin = _start_margins(obstacles, start, MARGIN)
    return not crossed(obstacles, start, np.array([end]), margin)[0]


def _before(start: Point, to: Footprint) -> Point:
    """Return where the robot ends that goes from ``start`` to the middle of ``to``."""
    share = np.linspace(0.0, 1.0, 40)
    x, y = start[0] + share * (to.x - start[0]), start[1] + share * (to.y - start[1])
    i = int((distances([to], x, y)[:, 0] < _AT_THING).argmax())
    return float(x[i]), float(y[i])


def _start_margins(obstacles: Sequence[Footprint], start: Point, margin: float) -> np.ndarray:
    """Return margins that let a robot leave which is closer to an obstacle than the margin."""
    return np.minimum(margin, distances(obstacles, *start) - _SLACK)


def path(
    obstacles: Sequence[Footprint],
    start: Point,
    to: Footprint,
    penalty: Callable[[Point], float] = lambda point: 0.0,
) -> list[Point]:
    """Return the corners of the shortest path from ``start`` to beside ``to``; [] if there is none.

    Args:
        obstacles: walls among them, ``to`` not.
        penalty: m added to a path that goes to this corner first.
    """
    for margin in (MARGIN, _TIGHT):
        found = _search(obstacles, start, to, penalty, margin)
        if found:
            return found
    return []


def _search(
    obstacles: Sequence[Footprint],
    start: Point,
    to: Footprint,
    penalty: Callable[[Point], float],
    margin: float,
) -> list[Point]:
    around = [part.inflated(margin + _SLACK) for part in obstacles]
    goals = _beside(obstacles, to, margin)
    corners = np.concatenate([*around, to.inflated(margin + _SLACK)])
    corners = corners[distances([*obstacles, to], *corners.T).min(1) > margin]
    nodes = np.concatenate([[start], corners, goals])
    solid, first_goal = [*obstacles, to], 1 + len(corners)
    left = np.maximum(distances([to], *nodes.T)[:, 0] - _AT_THING, 0.0)
    cost, before, done = np.full(len(nodes), np.inf), np.zeros(len(nodes), int), set[int]()
    cost[0] = 0.0
    queue = [(left[0], 0)]
    while queue:
        _, node = heapq.heappop(queue)
        if node >= first_goal:
            return _walk_back(nodes, before, node)
        if node in done:
            continue
        done.add(node)
        at = (float(nodes[node, 0]), float(nodes[node, 1]))
        keep = _start_margins(solid, at, margin) if node == 0 else margin
        ahead = cost[node] + np.hypot(*(nodes - at).T)
        if node == 0:
            ahead += [penalty((float(x), float(y))) for x, y in nodes]
        better = np.flatnonzero(ahead < cost - 1e-9)
        better = better[~crossed(solid, at, nodes[better], keep)]
        cost[better], before[better] = ahead[better], node
        for i in better:
            heapq.heappush(queue, (ahead[i] + left[i], int(i)))
    return []


def _beside(obstacles: Sequence[Footprint], to: Footprint, margin: float) -> np.ndarray:
    """Return the free places beside ``to`` from which nothing hides it, [places, 2]."""
    ring = to.inflated(_AT_THING, arc=3)
    ring = np.concatenate([ring, (ring + np.roll(ring, -1, 0)) / 2])
    ring = ring[distances(obstacles, *ring.T).min(1) > margin]
    hidden = crossed(obstacles, (to.x, to.y), ring, 0.0)
    return ring[~hidden]


def _walk_back(nodes: np.ndarray, before: np.ndarray, node: int) -> list[Point]:
    found = []
    while node:
        found.append((float(nodes[node, 0]), float(nodes[node, 1])))
        node = int(before[node])
    return found[::-1]


def bearing(x: float, y: float, yaw: float, to: Point) -> float:
    """Return the bearing of a point from a pose, + = left."""
    return math.remainder(math.atan2(to[1] - y, to[0] - x) - yaw, math.tau)
