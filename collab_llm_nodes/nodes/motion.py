"""The nodes that move the robot, in a process of their own: ``motion_guard`` and a driver.

    motion --driver go2 [--ros-args ...]

The models are in another process (``nodes/graph.py``), whose faults do not keep this one from
stopping the robot.
"""

from __future__ import annotations

import sys
from importlib import import_module

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.nodes.motion_guard import MotionGuard
from collab_llm_nodes.ros.program import argument_parser, read_arguments, run

DRIVERS = {"go2": "go2_driver.Go2Driver", "sim": "sim_go2.SimGo2", "none": ""}
"""Nodes that execute ``cmd_vel``; none: a driver of another package."""


def main() -> int:
    """Run the guard and the driver that ``--driver`` names."""
    parser = argument_parser(__doc__ or "")
    help_ = "node that executes cmd_vel; none: of another package"
    parser.add_argument("--driver", choices=DRIVERS, required=True, help=help_)
    try:
        driver = DRIVERS[read_arguments(parser).driver]
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    nodes: list[type] = [MotionGuard]
    if driver:
        module, name = driver.split(".")  # other drivers need not be installed
        nodes.insert(0, getattr(import_module(f"collab_llm_nodes.nodes.{module}"), name))
    return run(*nodes, args=sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
