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
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import CollabError, ConfigError

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

CAMERA = QoSProfile(
    depth=1, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.BEST_EFFORT
)
"""Frames and odometry: the newest only, never wait for a lost one."""

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
    for name, field, default in _flatten(config_type, ""):
        try:
            node.declare_parameter(name, default, _descriptor(field, default))
        except (
            rclpy.exceptions.InvalidParameterValueException,
            rclpy.exceptions.InvalidParameterTypeException,
        ) as error:
            raise ConfigError(
                str(error), field=name, remedy=field.metadata.get("doc", "")
            ) from None
    return _read(node, config_type, {})


def _flatten(config_type: Any, prefix: str) -> list[tuple[str, dataclasses.Field[Any], Any]]:
    flat = []
    defaults = config_type()
    for field in dataclasses.fields(config_type):
        if field.metadata.get("secret"):
            continue  # parameters can be read by everybody in the graph
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(default):
            flat += _flatten(type(default), f"{prefix}{field.name}.")
        else:
            value = list(default) if isinstance(default, tuple) else default
            flat.append((prefix + field.name, field, value))
    return flat


def _descriptor(field: dataclasses.Field[Any], default: Any) -> ParameterDescriptor:
    facts = field.metadata
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
    for name, _, _ in _flatten(config_type, ""):
        value = changes[name] if name in changes else node.get_parameter(name).value
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
            self.callback_errors += 1
            self.get_logger().error(
                f"{callback.__name__}: {type(error).__name__}: {error}", throttle_duration_sec=1.0
            )
            return None

    return call  # type: ignore[return-value]


class ManagedNode(LifecycleNode, Generic[C]):  # type: ignore[misc]
    """A lifecycle node with a typed configuration and diagnostics.

    A subclass overrides ``configure`` (load, connect, create publishers), ``activate``,
    ``deactivate`` and ``cleanup``; they raise on failure, and the transition then fails with the
    message logged. ``diagnose`` says how the node is; it is published on ``/diagnostics`` at 1 Hz
    and, through ``report_health``, on change.

    Attributes:
        config: the current parameters; replaced as a whole when a dynamic one is set.
        active: the lifecycle state is ``active``.
        callback_errors: exceptions stopped by :func:`guarded`.
    """

    def __init__(self, name: str, config_type: type[C], **node_arguments: Any) -> None:
        super().__init__(name, **node_arguments)
        self.active = False
        self.callback_errors = 0
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._config_type = config_type
        self.config: C = declare(self, config_type)
        autostart = ParameterDescriptor(
            description="Configure and activate at the start, without a lifecycle manager.",
            read_only=True,
        )
        self._autostart = self.declare_parameter("autostart", True, autostart).value
        self.add_on_set_parameters_callback(self._validate)
        self._told_afterwards = hasattr(self, "add_post_set_parameters_callback")  # not on Humble
        if self._told_afterwards:
            self.add_post_set_parameters_callback(self._apply)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", RESULT)
        self.create_timer(1.0, self.report_health, clock=STEADY)

    # What a subclass fills in.

    def configure(self) -> None:
        """Unconfigured to inactive: read ``self.config``, load models, create interfaces."""

    def activate(self) -> None:
        """Inactive to active."""

    def deactivate(self) -> None:
        """Active to inactive: stop motion, end work under way. Called before ``active`` falls."""

    def cleanup(self) -> None:
        """Inactive to unconfigured: free what ``configure`` took."""

    def diagnose(self) -> tuple[bytes, str, dict[str, Any]]:
        """Level (``DiagnosticStatus.OK`` ...), a sentence, and values worth seeing."""
        return DiagnosticStatus.OK, "active" if self.active else "inactive", {}

    # What a subclass uses.

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
            self.callback_errors += 1
            self.get_logger().error(f"{type(error).__name__}: {error}", throttle_duration_sec=1.0)

    def seconds(self) -> float:
        """The node's clock [s]; simulated when ``use_sim_time`` is set."""
        return float(self.get_clock().now().nanoseconds) * 1e-9

    def report_health(self) -> None:
        """Publish the diagnostics now."""
        level, message, values = self.diagnose()
        values = {
            **values,
            "callback_errors": self.callback_errors,
            # What must not grow. The name is rclpy's own (Jazzy); others may not have it.
            "executor_tasks": len(getattr(self.executor, "_tasks", ())),
        }
        status = DiagnosticStatus(
            level=level,
            name=self.get_fully_qualified_name().lstrip("/"),
            hardware_id=self.get_name(),
            message=message,
            values=[KeyValue(key=k, value=str(v)) for k, v in values.items()],
        )
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)

    def start(self) -> None:
        """Configure and activate, unless the parameter ``autostart`` is false.

        Raises:
            ConfigError: a transition failed; the log has the cause.
        """
        if not self._autostart:
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
        return self._transition(self.configure, super().on_configure, state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = self._transition(self.activate, super().on_activate, state)
        self.active = result == TransitionCallbackReturn.SUCCESS
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = self._transition(self.deactivate, super().on_deactivate, state)
        self.active = False
        return result

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self.cleanup, super().on_cleanup, state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self.active:
            self.on_deactivate(state)
        if state.label == "unconfigured":  # nothing was taken that could be freed
            return super().on_shutdown(state)
        return self._transition(self.cleanup, super().on_shutdown, state)

    def _transition(
        self,
        hook: Callable[[], None],
        managed_entities: Callable[[LifecycleState], TransitionCallbackReturn],
        state: LifecycleState,
    ) -> TransitionCallbackReturn:
        try:
            hook()
        except CollabError as error:
            self.get_logger().error(f"{hook.__name__}: {error.code}: {error}")
            return TransitionCallbackReturn.FAILURE
        except Exception as error:  # noqa: BLE001 rclpy would hide it, so it is said here
            self.get_logger().error(f"{hook.__name__}: {type(error).__name__}: {error}")
            return TransitionCallbackReturn.FAILURE
        return managed_entities(state)

    # Dynamic parameters: validate without side effects, then replace the configuration.

    def _validate(self, parameters: list[Parameter]) -> SetParametersResult:
        try:
            _read(self, self._config_type, {p.name: p.value for p in parameters})
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if not self._told_afterwards:
            self.post(self._apply, parameters)  # runs when this call has set them
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        self.config = _read(self, self._config_type, {})


def run(*factories: Callable[[], Node], args: list[str] | None = None) -> int:
    """``main()`` of every executable: one node, or several composed in one process.

    Spins in a second thread so that a signal is served at once and the nodes can still publish
    (zero velocity, closing sessions) before the context goes down; rclpy's own handler would shut
    it down first. The nodes are stopped in the thread that ran their callbacks.

    Returns:
        The exit status: 0 after a signal or a shutdown, 1 when a node failed to start or a
        callback failed that nothing guards.
    """
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    executor = SingleThreadedExecutor()
    nodes: list[Node] = []
    try:
        for factory in factories:
            nodes.append(factory())
            executor.add_node(nodes[-1])
        for node in nodes:
            if isinstance(node, ManagedNode):
                node.start()
    except CollabError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        _stop(executor, nodes)
        return 1
    # What is there by now stays to the end. Left to itself the collector would go through all of it
    # each time: seldom, therefore, with the leftovers of thousands of answers, and for long.
    gc.freeze()
    gc.collect()  # which also makes the collector forget how much there was
    failures: list[Exception] = []
    spinner = threading.Thread(
        target=_spin, args=(executor, nodes, ended, failures), name="ros-spin"
    )
    spinner.start()
    ended.wait()
    executor.create_task(lambda: None)  # wakes it; shutdown() from here would race with it
    spinner.join()
    return 1 if failures else 0


def _spin(
    executor: SingleThreadedExecutor,
    nodes: list[Node],
    ended: threading.Event,
    failures: list[Exception],
) -> None:
    try:
        while not ended.is_set():
            executor.spin_once()
    except ExternalShutdownException:
        pass
    except Exception as error:  # noqa: BLE001 a robot must not be left to nodes that spin no more
        failures.append(error)
        nodes[0].get_logger().fatal(
            f"a callback failed, so the process ends:\n{traceback.format_exc()}"
        )
    finally:
        ended.set()
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
