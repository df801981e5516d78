"""What moves the robot, in a process of its own: ``motion_guard`` and a driver.

    motion --driver go2 [--ros-args ...]

The models are in another process (``nodes/graph.py``): whatever happens to that one, this one stops
the robot.
"""

from __future__ import annotations

import sys
from importlib import import_module

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.nodes.ros import own_arguments, run

DRIVERS = {"go2": "go2_driver.Go2Driver", "sim": "sim_go2.SimGo2", "none": ""}
"""Nodes that carry ``cmd_vel`` out; none: one of somebody else's."""


def main() -> int:
    """Run the guard and the driver that ``--driver`` names."""
    try:
        arguments = own_arguments()
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    if len(arguments) != 2 or arguments[0] != "--driver" or arguments[1] not in DRIVERS:
        print(f"usage: motion --driver {'|'.join(DRIVERS)} [--ros-args ...]", file=sys.stderr)
        return 2
    nodes: list[type] = [MotionGuard]
    if driver := DRIVERS[arguments[1]]:
        module, name = driver.split(".")  # what is not wanted need not be installed
        nodes.insert(0, getattr(import_module(f"collab_llm_nodes.nodes.{module}"), name))
    return run(*nodes)


if __name__ == "__main__":
    raise SystemExit(main())
