"""A process that runs nodes: command line, start, spin, end."""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from collab_llm_nodes.ending import EndRequest
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.processes import freeze_startup_objects
from collab_llm_nodes.ros.logs import pass_on_logging
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.parameters import warn_of_misspelt_nodes


def run(*nodes_of: Callable[[], Node] | str, args: list[str] | None = None) -> int:
    """Run one node, or several composed in one process, until a signal ends it.

    Without ``args`` the command line is read, which may hold nothing but ROS's own arguments.
    A node that takes seconds to import can be named as ``"module:Class"``: ``--help`` and a wrong
    argument are then answered without importing it.

    Spins in a second thread so that a signal is served at once and the nodes can still publish
    (zero velocity, closing sessions) before the context goes down; rclpy's own handler would shut
    it down first. The nodes are stopped in the thread that ran their callbacks.

    Returns:
        The exit status: 0 after a signal or a shutdown, 1 when a node failed to start or an
        unguarded callback failed.
    """
    try:
        if args is None:
            read_arguments(argument_parser(nodes_of))
        factories = [_imported(each) if isinstance(each, str) else each for each in nodes_of]
        if not all(getattr(factory, "shares_memory", True) for factory in factories):
            # A value set by the user counts.
            os.environ.setdefault("FASTDDS_BUILTIN_TRANSPORTS", "UDPv4")
        end = EndRequest()  # after the imports, which Ctrl-C may cut short (programs.py)
        init_rclpy(args)
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    executor = SingleThreadedExecutor()
    nodes: list[Node] = []
    try:
        for factory in factories:
            nodes.append(factory())
            executor.add_node(nodes[-1])
        pass_on_logging(nodes[0].get_logger())
        _refuse_one_name_for_all(nodes)
        warn_of_misspelt_nodes(nodes, sys.argv if args is None else args)
        managed = [node for node in nodes if isinstance(node, ManagedNode)]
        for node in managed:
            node.enter_process()
        for node in managed:
            if not end.asked:
                node.start()
    except CollabError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        _stop(executor, nodes)
        return 1
    freeze_startup_objects()
    failures: list[Exception] = []
    spinner = threading.Thread(target=_spin, args=(executor, nodes, end, failures), name="ros-spin")
    spinner.start()
    end.wait()
    executor.create_task(lambda: None)  # wakes it; shutdown() from here would race with it
    spinner.join()
    return 1 if failures else 0


def _imported(reference: str) -> Callable[[], Node]:
    """Return the node class that ``"module:Class"`` names."""
    module, name = reference.split(":")
    kind: Callable[[], Node] = getattr(import_module(module), name)
    return kind


def _module_doc(node: Callable[[], Node] | str) -> str:
    """Return the docstring of a node's module; one that is not imported is only parsed."""
    if not isinstance(node, str):
        module = sys.modules[node.__module__]
        return module.__doc__ or module.__name__
    name = node.split(":")[0]
    spec = find_spec(name)
    source = Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    return ast.get_docstring(ast.parse(source)) or name


def argument_parser(about: Iterable[Callable[[], Node] | str] | str) -> argparse.ArgumentParser:
    """Return the parser of an executable's command line; ``--help`` describes its nodes.

    Args:
        about: the nodes, as ``run`` takes them, or the text that ``--help`` shows.
    """
    if not isinstance(about, str):
        about = "\n\n".join(_module_doc(node).split("\n\n")[0] for node in about)
    return argparse.ArgumentParser(
        description=about,
        epilog="ROS's own arguments: --ros-args -p NODE:NAME:=VALUE, --params-file FILE,"
        " -r FROM:=TO, --log-level LEVEL. docs/parameters.md lists the parameters.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments of the command line besides ROS's own; ends the process on --help.

    Raises:
        ConfigError: ROS's arguments cannot be read.
    """
    with _ros_arguments():
        own: list[str] = remove_ros_args(sys.argv)[1:]
    return parser.parse_args(own)


def command_for(node: Node, command: str) -> str:
    """Return ``command`` with the arguments by which it reaches the namespace of ``node``."""
    space = node.get_namespace()
    return command if space == "/" else f"{command} --ros-args -r __ns:={space}"


def init_rclpy(args: list[str] | None) -> None:
    """Start rclpy.

    Raises:
        ConfigError: an argument, or a file it names, cannot be read.
    """
    with _ros_arguments():
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)


@contextlib.contextmanager
def _ros_arguments() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the base of rcl's own errors, which rclpy does not export
        cause = str(error).removeprefix("failed to initialize rcl: ")
        raise ConfigError(
            " ".join(re.sub(r",? at /\S+:\d+", "", cause).split()),  # lines of rcl's source
            field="--ros-args",
            remedy="correct the argument, or the file that it names",
        ) from error


def _refuse_one_name_for_all(nodes: list[Node]) -> None:
    """Refuse ``-r __node:=NAME`` for several nodes, whose parameters and logs would be mixed up.

    Raises:
        ConfigError: nodes of this process have the same name.
    """
    names = [node.get_fully_qualified_name() for node in nodes]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{len(names)} nodes share this process; they cannot all be {names[-1]}",
            field="-r __node:=",
            remedy="rename one by -r NODE:__node:=NAME, or all by a namespace: -r __ns:=/NAME",
        )


def _spin(
    executor: SingleThreadedExecutor,
    nodes: list[Node],
    end: EndRequest,
    failures: list[Exception],
) -> None:
    try:
        while not end.asked:
            executor.spin_once()
    except ExternalShutdownException:
        pass
    except Exception as error:  # noqa: BLE001 nodes that do not spin must not hold a robot
        failures.append(error)
        nodes[0].get_logger().fatal(
            f"a callback failed, so the process ends:\n{traceback.format_exc()}"
        )
    finally:
        end.ask()
        _stop(executor, nodes)


_GRACE_S = 0.3
"""Grace period in which pending results are delivered."""


def _stop(executor: SingleThreadedExecutor, nodes: list[Node]) -> None:
    managed = [n for n in reversed(nodes) if isinstance(n, ManagedNode)]
    if rclpy.ok():
        for node in managed:
            if node.active:
                node.trigger_deactivate()
        until = time.monotonic() + _GRACE_S
        while nodes and time.monotonic() < until:
            # A failure now must not keep the other nodes from ending.
            with contextlib.suppress(Exception):
                executor.spin_once(timeout_sec=_GRACE_S / 10)
        for node in managed:
            node.stop()
    executor.shutdown()
    for each in nodes:
        each.destroy_node()
    rclpy.try_shutdown()
