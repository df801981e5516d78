"""What the nodes share: a managed base, parameters from dataclasses, QoS profiles, ``main()``.

The rules every node of this package keeps, and that this file makes easy:

- **One thread, no locks.** Nodes run on a single-threaded executor, alone or composed in one
  process. No callback blocks. Slow work (a model, a socket, a camera) runs in a thread of its
  own and hands its result back with :meth:`ManagedNode.post`. A long-running action's execute
  callback is ``async def`` and awaits an ``rclpy.task.Future``.
- **Nothing happens while inactive.** rclpy gates only lifecycle publishers, so every callback is
  decorated with :func:`guarded`, which also keeps an exception from killing the node.
- **Names.** ``rclpy.node.Node`` keeps private attributes such as ``_timers``, ``_services``,
  ``_clock`` and ``_parameters``; a subclass that assigns them breaks the executor.
- **Parameters are a frozen dataclass** whose fields are made with ``config.setting``.
- **What every node can do without a line of its own** (docs/diagnostics.md): QoS overriding and
  incompatible QoS reported for each topic, rates and ages of each topic on ``/diagnostics``,
  service introspection. A log call that can repeat says ``throttle_duration_sec``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import rclpy
import yaml
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.action import GoalResponse
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.service import Service
from rclpy.signals import SignalHandlerOptions
from rclpy.subscription import Subscription
from rclpy.utilities import get_rmw_implementation_identifier, remove_ros_args

from collab_llm_nodes import programs
from collab_llm_nodes.collector import look_at_new_things_only
from collab_llm_nodes.config import check_ranges, from_mapping, setting
from collab_llm_nodes.ending import EndRequest
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.ros.endpoints import Endpoints
from collab_llm_nodes.ros.health import (
    DiagnosticsConfig,
    Faults,
    Level,
    Status,
    TopicLimits,
    read_memory,
)

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

CAMERA = QoSProfile(
    depth=1, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.BEST_EFFORT
)
"""Frames and odometry: the newest only, never wait for a lost one."""

BUTTON = QoSProfile(
    depth=50, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.BEST_EFFORT
)
"""What people press: a newer message (let go) must not take the place of one not yet looked at."""

COMMAND = QoSProfile(
    depth=1, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE
)
"""Velocities: reliable, volatile (a late joiner must not replay motion), the newest only."""

RESULT = QoSProfile(
    depth=50, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE
)
"""Messages that must all arrive: observations, drafts, verdicts, texts, actions."""

REQUESTS = QoSProfile(
    depth=200, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE
)
"""A service's own queue. rclpy's default of 10 silently drops the rest of a burst."""

STATE = QoSProfile(
    depth=1,
    history=HistoryPolicy.KEEP_LAST,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
"""Latched state: a late joiner gets the last one."""

STEADY = Clock(clock_type=ClockType.STEADY_TIME)
"""For deadlines of the machine (network, models), which simulated time must not stretch."""


def on_fast_dds() -> bool:
    """Whether ROS's middleware here is Fast DDS."""
    return str(get_rmw_implementation_identifier()).startswith("rmw_fastrtps")


def wall() -> float:
    """The machine's monotonic clock [s]; only differences mean anything."""
    return float(STEADY.now().nanoseconds) * 1e-9


def declare(node: Node, config_type: type[C]) -> C:
    """Declare one parameter per field of ``config_type`` and return the configured instance.

    A nested dataclass becomes dotted names (``executor.max_speed``). Descriptors carry the field's
    documentation, range and read-only flag.

    Raises:
        ConfigError: a value is out of its range, of the wrong type, or breaks ``__post_init__``.
    """
    for name, facts, default in flatten(config_type(), ""):
        try:
            node.declare_parameter(name, default, _descriptor(facts, default))
        except (
            rclpy.exceptions.InvalidParameterValueException,
            rclpy.exceptions.InvalidParameterTypeException,
        ) as error:
            raise ConfigError(
                str(error), field=name, remedy=facts.metadata.get("doc", "")
            ) from None
    return _read(node, config_type, {})


def flatten(defaults: Any, prefix: str) -> list[tuple[str, dataclasses.Field[Any], Any]]:
    """The parameters of a configuration: name, field and default of each, nested ones dotted."""
    flat = []
    for each in dataclasses.fields(defaults):
        if each.metadata.get("secret"):
            continue  # parameters can be read by everybody in the graph
        default = getattr(defaults, each.name)
        if dataclasses.is_dataclass(default):
            flat += flatten(default, f"{prefix}{each.name}.")
        else:
            value = list(default) if isinstance(default, tuple) else default
            flat.append((prefix + each.name, each, value))
    return flat


def _descriptor(of: dataclasses.Field[Any], default: Any) -> ParameterDescriptor:
    facts = of.metadata
    descriptor = ParameterDescriptor(
        description=facts.get("doc", ""),
        read_only=facts.get("read_only", False),
        # An empty or absent default tells rclpy no type; from_mapping checks the value instead.
        dynamic_typing=default is None or default == [],
    )
    if facts.get("choices"):
        descriptor.additional_constraints = f"one of {', '.join(map(str, facts['choices']))}"
    low, high = facts.get("low"), facts.get("high")
    if low is None and high is None:
        return descriptor
    if isinstance(default, float):
        limits = (
            -sys.float_info.max if low is None else low,
            sys.float_info.max if high is None else high,
        )
        descriptor.floating_point_range = [
            FloatingPointRange(from_value=float(limits[0]), to_value=float(limits[1]))
        ]
    elif isinstance(default, int):
        limits = (-(2**62) if low is None else low, 2**62 if high is None else high)
        descriptor.integer_range = [
            IntegerRange(from_value=int(limits[0]), to_value=int(limits[1]), step=1)
        ]
    return descriptor


def _read(node: Node, config_type: type[C], changes: dict[str, Any]) -> C:
    """The configuration the parameters hold, with ``changes`` applied."""
    tree: dict[str, Any] = {}
    for name, _, default in flatten(config_type(), ""):
        value = changes[name] if name in changes else node.get_parameter(name).value
        if value is None and default == []:
            value = default  # rclpy reads an empty list in a parameter file as nothing
        *parents, leaf = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = list(value) if isinstance(value, (tuple, list)) else value
    return from_mapping(config_type, tree)


def guarded(callback: F) -> F:
    """Decorate a method of a :class:`ManagedNode` that rclpy calls.

    Returns None at once while the node is inactive. An exception is logged and counted instead of
    ending the spin. Not for service callbacks, which must answer: they test ``self.active``.
    """

    @functools.wraps(callback)
    def call(self: ManagedNode[Any], *args: Any) -> Any:
        if not self.active:
            return None
        try:
            return callback(self, *args)
        except Exception as error:  # noqa: BLE001 one bad message must not end the node
            self.note_fault(error, callback.__name__)
            self.get_logger().error(
                f"{callback.__name__}: {type(error).__name__}: {error}", throttle_duration_sec=1.0
            )
            return None

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class CommonConfig:
    """Parameters that every node has."""

    autostart: bool = setting(
        True,
        "Configure and activate at the start, without a lifecycle manager.",
        read_only=True,
    )
    introspection: str = setting(
        "off",
        "Service introspection: what is published of each call of the node's services, on"
        " <service>/_service_event; contents include pictures.",
        choices=("off", "metadata", "contents"),
    )
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)

    def __post_init__(self) -> None:
        check_ranges(self)


class ManagedNode(LifecycleNode, Generic[C]):  # type: ignore[misc]
    """A lifecycle node with a typed configuration, diagnostics and quality of service to be set.

    A subclass overrides ``configure`` (load, connect, create publishers), ``activate``,
    ``deactivate`` and ``cleanup``; they raise on failure, and the transition then fails with the
    message logged. ``diagnose`` says how the node is, ``details`` how its parts are, ``expected``
    what its topics should be like; it is published on ``/diagnostics`` with the rates and ages of
    all topics, at ``diagnostics.period`` and, through ``report_health``, on change.

    Attributes:
        config: the current parameters; replaced as a whole when a dynamic one is set.
        common: those that every node has.
        active: the lifecycle state is ``active``.
        shares_memory: whether its process may exchange messages with others through shared memory,
            which is faster, but a process killed in the midst of a transfer leaves locks there for
            which everybody else waits, for seconds (docs/safety.md). False is obeyed by
            Fast DDS >= 2.11, unless all is confined to LOCALHOST, where it insists on it.
    """

    shares_memory = True
    _endpoints: Endpoints | None = None  # rclpy's constructor makes topics and services of its own

    def __init__(self, name: str, config_type: type[C], **node_arguments: Any) -> None:
        super().__init__(name, **node_arguments)
        self.active = False
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._config_type = config_type
        self.config: C = declare(self, config_type)
        self.common = declare(self, CommonConfig)
        self.add_on_set_parameters_callback(self._validate)
        self._told_afterwards = hasattr(self, "add_post_set_parameters_callback")  # not on Humble
        if self._told_afterwards:
            self.add_post_set_parameters_callback(self._apply)
        self._callback_faults = Faults()
        self._cpu = (time.monotonic(), time.process_time())
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", RESULT)
        self._endpoints = Endpoints(self, COMMAND)
        self._reporter = self.create_timer(
            self.common.diagnostics.period, self.report_health, clock=STEADY
        )

    # What a subclass fills in.

    def enter_process(self) -> None:
        """Set what is process-wide; called by ``run``, before any of its nodes starts."""

    def configure(self) -> None:
        """Unconfigured to inactive: read ``self.config``, load models, create interfaces."""

    def activate(self) -> None:
        """Inactive to active."""

    def deactivate(self) -> None:
        """Active to inactive: stop motion, end work under way. Called before ``active`` falls."""

    def cleanup(self) -> None:
        """Inactive to unconfigured: free what ``configure`` took."""

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        """The node as a whole: level (``Level.OK`` ...), a sentence, and values worth seeing."""
        return Level.OK, "active" if self.active else "inactive", {}

    def details(self, now: float) -> list[Status]:
        """How parts of the node are while it is active; ``now``: ``time.monotonic()``."""
        return []

    def expected(self) -> dict[str, TopicLimits]:
        """The topics, read or written, that should not be silent while the node is active."""
        return {}

    # What a subclass uses.

    def refuse_goal(self, action: str, error: CollabError) -> GoalResponse:
        """Refuse a goal of ``action``; ROS has no words for why, so the log says it."""
        told = f"{action}: goal refused: {error.code}: {str(error)[:300]}"
        self.get_logger().warning(told, throttle_duration_sec=1.0)
        return GoalResponse.REJECT

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run ``callback(*args)`` in the node's own thread, in the order of the posts."""
        executor = self.executor
        if executor is not None:
            self._posted.append((callback, args))
            executor.create_task(self._run_posted)  # rclpy runs waiting tasks newest first

    def _run_posted(self) -> None:
        callback, args = self._posted.popleft()
        try:
            callback(*args)
        except Exception as error:  # noqa: BLE001 as in ``guarded``
            self.note_fault(error, getattr(callback, "__name__", "posted"))
            self.get_logger().error(f"{type(error).__name__}: {error}", throttle_duration_sec=1.0)

    def seconds(self) -> float:
        """The node's clock [s]; simulated when ``use_sim_time`` is set."""
        return float(self.get_clock().now().nanoseconds) * 1e-9

    @property
    def callback_errors(self) -> int:
        """Exceptions stopped by :func:`guarded` or in a post."""
        return sum(self._callback_faults.counts.values())

    def note_fault(self, error: Exception, where: str) -> None:
        """Have the diagnostics tell of an exception that was caught."""
        kind = type(error).__name__
        self._callback_faults.add(kind, f"{where}: {kind}: {error}", time.monotonic())

    def report_health(self) -> None:
        """Publish the diagnostics now, if anybody wants them."""
        if not self._diagnostics.get_subscription_count():
            return
        now = time.monotonic()
        try:
            statuses = [self._whole(now)]
            if self.active and self._endpoints is not None:
                statuses += self.details(now)
                statuses += self._endpoints.statuses(self.expected(), now)
        except Exception as error:  # noqa: BLE001 a robot must not stop because of its diagnostics
            statuses = [
                Status("node", Level.ERROR, f"diagnostics: {type(error).__name__}: {error}")
            ]
        name = self.get_fully_qualified_name().lstrip("/")
        hardware_id = self.common.diagnostics.hardware_id or socket.gethostname()
        array = DiagnosticArray()
        array.header.stamp = self.get_clock().now().to_msg()
        array.status = [
            DiagnosticStatus(
                level=bytes(status.level),
                name=f"{name}: {status.name}",
                hardware_id=hardware_id,
                message=status.message,
                values=[KeyValue(key=k, value=str(v)) for k, v in status.values.items()],
            )
            for status in statuses
        ]
        self._diagnostics.publish(array)

    def _whole(self, now: float) -> Status:
        """The node, and what it shares with the others of its process: memory and time."""
        config = self.common.diagnostics
        level, message, values = self.diagnose()
        failed = self._callback_faults.recent(now, config.recent)
        if failed and level == Level.OK:
            level, message = Level.WARN, f"a callback failed: {failed}"
        (then, used), used_now = self._cpu, time.process_time()
        self._cpu = (now, used_now)
        values = {
            **values,
            "callback_errors": self.callback_errors,
            # What must not grow. The name is rclpy's own (Jazzy); others may not have it.
            "executor_tasks": len(getattr(self.executor, "_tasks", ())),
            "process_cpu_percent": f"{100 * (used_now - used) / max(now - then, 1e-3):.1f}",
        }
        if (memory := read_memory()) is not None:
            values["process_memory_mib"] = memory.resident >> 20
            scarce, told = memory.judge(config)
            if scarce > level:
                level, message = scarce, told
        return Status("node", Level(level), message, values)

    # Topics and services as rclpy makes them, with what ``endpoints.py`` adds to each.

    def create_publisher(
        self, msg_type: type, topic: str, qos_profile: QoSProfile | int, **options: Any
    ) -> Publisher:
        make = super().create_publisher
        if self._endpoints is None:
            return make(msg_type, topic, qos_profile, **options)
        return self._endpoints.publisher(make, msg_type, topic, qos_profile, options)

    def create_subscription(
        self,
        msg_type: type,
        topic: str,
        callback: Callable[..., Any],
        qos_profile: QoSProfile | int,
        **options: Any,
    ) -> Subscription:
        make = super().create_subscription
        if self._endpoints is None:
            return make(msg_type, topic, callback, qos_profile, **options)
        return self._endpoints.subscription(make, msg_type, topic, callback, qos_profile, options)

    def create_service(self, *arguments: Any, **options: Any) -> Service:
        service = super().create_service(*arguments, **options)
        if self._endpoints is None:
            return service
        return self._endpoints.service(service, self.common.introspection)

    def destroy_publisher(self, publisher: Publisher) -> bool:
        if self._endpoints is not None:
            self._endpoints.forget(publisher)
        return bool(super().destroy_publisher(publisher))

    def destroy_subscription(self, subscription: Subscription) -> bool:
        if self._endpoints is not None:
            self._endpoints.forget(subscription)
        return bool(super().destroy_subscription(subscription))

    def start(self) -> None:
        """Configure and activate, unless the parameter ``autostart`` is false.

        Raises:
            ConfigError: a transition failed; the log has the cause.
        """
        if not self.common.autostart:
            return
        for transition in (self.trigger_configure, self.trigger_activate):
            if transition() != TransitionCallbackReturn.SUCCESS:
                raise ConfigError(f"{self.get_name()} did not start", remedy="see the log above")

    def stop(self) -> None:
        """Deactivate and clean up from whatever state; safe to call twice."""
        if self.active:
            self.trigger_deactivate()
        if self._state_machine.current_state[1] == "inactive":
            self.trigger_cleanup()

    # Lifecycle transitions: rclpy swallows their exceptions, so they are logged here.

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        def configure() -> None:
            self._refuse_unknown_parameters()
            self.configure()

        return self._transition(configure, super().on_configure, state, "configured")

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = self._transition(self.activate, super().on_activate, state, "active")
        self.active = result == TransitionCallbackReturn.SUCCESS
        if self._endpoints is not None:
            self._endpoints.restart()
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = self._transition(self.deactivate, super().on_deactivate, state, "inactive")
        self.active = False
        return result

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self.cleanup, super().on_cleanup, state, "unconfigured")

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self.active:
            self.on_deactivate(state)
        if state.label == "unconfigured":  # nothing was taken that could be freed
            return super().on_shutdown(state)
        return self._transition(self.cleanup, super().on_shutdown, state, "finalized")

    def _transition(
        self,
        hook: Callable[[], None],
        managed_entities: Callable[[LifecycleState], TransitionCallbackReturn],
        state: LifecycleState,
        reached: str,
    ) -> TransitionCallbackReturn:
        try:
            hook()
        except CollabError as error:
            self.get_logger().error(f"{hook.__name__}: {error.code}: {error}")
            return TransitionCallbackReturn.FAILURE
        except Exception as error:  # noqa: BLE001 rclpy would hide it, so it is said here
            self.get_logger().error(f"{hook.__name__}: {type(error).__name__}: {error}")
            return TransitionCallbackReturn.FAILURE
        result = managed_entities(state)
        if result == TransitionCallbackReturn.SUCCESS:
            self.get_logger().info(reached)
        return result

    def _refuse_unknown_parameters(self) -> None:
        """rclpy ignores what a file or ``-p`` sets and nobody declares: a misspelt limit.

        Raises:
            ConfigError: naming the first one.
        """
        given = getattr(self, "_parameter_overrides", {})  # the name is rclpy's own
        known = self.get_parameters_by_prefix("")
        for name in given:
            if not self.has_parameter(name) and not name.startswith("qos_overrides."):
                close = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"{self.get_name()} has no such parameter",
                    field=name,
                    remedy=f"did you mean {close[0]}?" if close else "see docs/parameters.md",
                )

    # Dynamic parameters: validate without side effects, then replace the configuration.

    def _validate(self, parameters: list[Parameter]) -> SetParametersResult:
        changes = {p.name: p.value for p in parameters}
        if _of_qos(changes):
            return SetParametersResult(successful=True)
        try:
            _read(self, self._config_type, changes)
            _read(self, CommonConfig, changes)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if not self._told_afterwards:
            self.post(self._apply, parameters)  # runs when this call has set them
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        if _of_qos(p.name for p in parameters):
            return
        self.config = _read(self, self._config_type, {})
        before, self.common = self.common, _read(self, CommonConfig, {})
        if self._endpoints is not None and self.common.introspection != before.introspection:
            self._endpoints.introspect(self.common.introspection)
        if self.common.diagnostics.period != before.diagnostics.period:
            self._reporter.timer_period_ns = int(self.common.diagnostics.period * 1e9)
            self._reporter.reset()  # else the old period ends first


def _of_qos(names: Iterable[str]) -> bool:
    """Whether these are parameters that a topic brings with it; rclpy declares and reads them."""
    return all(name.startswith("qos_overrides.") for name in names)


def run(*factories: Callable[[], Node], args: list[str] | None = None) -> int:
    """``main()`` of every executable: one node, or several composed in one process.

    Without ``args`` the command line is read, which may hold nothing but ROS's own arguments.

    Spins in a second thread so that a signal is served at once and the nodes can still publish
    (zero velocity, closing sessions) before the context goes down; rclpy's own handler would shut
    it down first. The nodes are stopped in the thread that ran their callbacks.

    Returns:
        The exit status: 0 after a signal or a shutdown, 1 when a node failed to start or a
        callback failed that nothing guards.
    """
    if not all(getattr(factory, "shares_memory", True) for factory in factories):
        os.environ.setdefault("FASTDDS_BUILTIN_TRANSPORTS", "UDPv4")  # whoever sets it knows better
    end = EndRequest()
    try:
        if args is None:
            read_arguments(argument_parser(factories))
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
        _refuse_one_name_for_all(nodes)
        _warn_of_misspelt_nodes(nodes, sys.argv if args is None else args)
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
    look_at_new_things_only()
    failures: list[Exception] = []
    spinner = threading.Thread(target=_spin, args=(executor, nodes, end, failures), name="ros-spin")
    spinner.start()
    end.wait()
    executor.create_task(lambda: None)  # wakes it; shutdown() from here would race with it
    spinner.join()
    return 1 if failures else 0


def argument_parser(about: Iterable[Callable[[], Node]] | str) -> argparse.ArgumentParser:
    """Return the parser of an executable's command line; ``--help`` tells of its nodes."""
    if not isinstance(about, str):
        modules = [sys.modules[factory.__module__] for factory in about]
        about = "\n\n".join((m.__doc__ or m.__name__).split("\n\n")[0] for m in modules)
    return argparse.ArgumentParser(
        description=about,
        epilog="ROS's own arguments: --ros-args -p NODE:NAME:=VALUE, --params-file FILE,"
        " -r FROM:=TO, --log-level LEVEL. docs/parameters.md lists the parameters.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what the command line says besides ROS's own arguments; ends the process on --help.

    Raises:
        ConfigError: ROS's arguments cannot be read.
    """
    with _ros_arguments():
        own: list[str] = remove_ros_args(sys.argv)[1:]
    return parser.parse_args(own)


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
        told = str(error).removeprefix("failed to initialize rcl: ")
        raise ConfigError(
            " ".join(re.sub(r",? at /\S+:\d+", "", told).split()),  # lines of rcl's source
            field="--ros-args",
            remedy="correct the argument, or the file that it names",
        ) from error


def _refuse_one_name_for_all(nodes: list[Node]) -> None:
    """``-r __node:=NAME`` renames every node of a process; parameters and logs would be mixed up.

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


def _warn_of_misspelt_nodes(nodes: list[Node], arguments: list[str]) -> None:
    """rclpy reads from a parameter file what is under its node's name; not if that is misspelt.

    A file may serve other processes and other packages, so only what is nearly a name of ours is
    told.
    """
    files = {file.stem for file in Path(__file__).parent.glob("*.py")}
    known = files & set(vars(programs)) - {"graph", "motion"}  # a node has its file's name
    known |= {node.get_name() for node in nodes}
    for option, file in pairwise(arguments):
        if option != "--params-file":
            continue
        content: Any = None
        with contextlib.suppress(yaml.YAMLError):  # rcl has read it, by a parser of its own
            content = yaml.safe_load(Path(file).read_bytes())
        for name in sorted({*_node_names(content)} - known):
            if close := difflib.get_close_matches(name, known, 1):
                nodes[0].get_logger().warning(
                    f"{file}: nobody reads the parameters of {name}; did you mean {close[0]}?"
                )


def _node_names(content: Any) -> Iterator[str]:
    """The names in (a part of) a parameter file, without namespaces and wildcards."""
    for key, value in content.items() if isinstance(content, dict) else ():
        name = str(key).rpartition("/")[2]
        if isinstance(value, dict) and "ros__parameters" in value and "*" not in name:
            yield name
        if key != "ros__parameters":
            yield from _node_names(value)


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
    except Exception as error:  # noqa: BLE001 a robot must not be left to nodes that spin no more
        failures.append(error)
        nodes[0].get_logger().fatal(
            f"a callback failed, so the process ends:\n{traceback.format_exc()}"
        )
    finally:
        end.ask()
        _stop(executor, nodes)


_GRACE_S = 0.3
"""For the results of what was under way to reach those who wait for them."""


def _stop(executor: SingleThreadedExecutor, nodes: list[Node]) -> None:
    managed = [n for n in reversed(nodes) if isinstance(n, ManagedNode)]
    if rclpy.ok():
        for node in managed:
            if node.active:
                node.trigger_deactivate()
        until = time.monotonic() + _GRACE_S
        while nodes and time.monotonic() < until:
            # What fails now, perhaps for the second time, must not keep the others from ending.
            with contextlib.suppress(Exception):
                executor.spin_once(timeout_sec=_GRACE_S / 10)
        for node in managed:
            node.stop()
    executor.shutdown()
    for each in nodes:
        each.destroy_node()
    rclpy.try_shutdown()
