"""The managed base of every node.

The rules every node of this package keeps, and that this file makes easy:

- **One thread, no locks.** Nodes run on a single-threaded executor, alone or composed in one
  process. No callback blocks. Slow work (a model, a socket, a camera) runs in a thread of its
  own and hands its result back with :meth:`ManagedNode.post`. A long-running action's execute
  callback is ``async def`` and awaits an ``rclpy.task.Future``.
- **Nothing happens while inactive.** rclpy stops only lifecycle publishers, so every callback is
  decorated with :func:`guarded`, which also keeps an exception from ending the process.
- **Names.** ``rclpy.node.Node`` keeps private attributes such as ``_timers``, ``_services``,
  ``_clock`` and ``_parameters``; a subclass that assigns them breaks the executor.
- **Parameters are a frozen dataclass** whose fields are made with ``config.setting``.
- **Abilities of every node** (docs/diagnostics.md): QoS overriding and reports of incompatible QoS,
  rates and ages of each topic on ``/diagnostics``, service introspection. A log call that can
  repeat has a ``throttle_duration_sec``.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rcl_interfaces.msg import SetParametersResult
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rclpy.service import Service
from rclpy.subscription import Subscription

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput
from collab_llm_nodes.ros.clock import STEADY, set_period
from collab_llm_nodes.ros.diagnostics import Diagnostics
from collab_llm_nodes.ros.endpoints import SILENT_PUBLISHER, SILENT_SUBSCRIPTION, Endpoints
from collab_llm_nodes.ros.health import DiagnosticsConfig, Level, Status, TopicLimits
from collab_llm_nodes.ros.logger import Logger
from collab_llm_nodes.ros.logs import Repeats
from collab_llm_nodes.ros.parameters import declare, of_qos, read, refuse_unknown
from collab_llm_nodes.ros.qos import COMMAND

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


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
        "Service introspection: the part of each call of the node's services that is published on"
        " <service>/_service_event; contents include pictures.",
        choices=("off", "metadata", "contents"),
    )
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)

    def __post_init__(self) -> None:
        check_ranges(self)


class ManagedNode(LifecycleNode, Generic[C]):  # type: ignore[misc]
    """A lifecycle node with a typed configuration, diagnostics and configurable QoS.

    A subclass overrides ``configure`` (load, connect, create publishers), ``activate``,
    ``deactivate`` and ``cleanup``; they raise on failure, and the transition then fails with the
    message logged. ``diagnose`` returns the state of the node, ``details`` that of its parts,
    ``expected`` the limits of its topics. They are published on ``/diagnostics`` with the rates and
    ages of all topics, at ``diagnostics.period`` and, through ``report_health``, on change.

    Attributes:
        config: the current parameters; replaced as a whole when a dynamic one is set.
        common: the parameters that every node has.
        active: the lifecycle state is ``active``.
        shares_memory: whether its process may use shared memory for messages, which is faster; but
            a process killed during a transfer leaves locks there for which all others wait, for
            seconds (docs/safety.md). False is obeyed by Fast DDS >= 2.11, except with LOCALHOST.
    """

    shares_memory = True
    _endpoints: Endpoints | None = None  # rclpy's constructor makes topics and services of its own

    def __init__(self, name: str, config_type: type[C], **node_arguments: Any) -> None:
        super().__init__(name, **node_arguments)
        self._logger = Logger(self.get_logger().name)
        self.active = False
        self._posted: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._config_type = config_type
        self.config: C = declare(self, config_type)
        self.common = declare(self, CommonConfig)
        self.add_on_set_parameters_callback(self._validate)
        self._has_post_set = hasattr(self, "add_post_set_parameters_callback")  # not on Humble
        if self._has_post_set:
            self.add_post_set_parameters_callback(self._apply)
        self._diagnostics = Diagnostics(self)
        self._endpoints = Endpoints(self, COMMAND)
        self._warned = Repeats()
        self._reporter = self.create_timer(
            self.common.diagnostics.period, self.report_health, clock=STEADY
        )

    # For subclasses to override.

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
        """Return the state of the node as a whole: level (``Level.OK`` ...), sentence, values."""
        return Level.OK, "active" if self.active else "inactive", {}

    def details(self, now: float) -> list[Status]:
        """Return the states of the node's parts while it is active, at ``now`` (monotonic)."""
        return []

    def expected(self) -> dict[str, TopicLimits]:
        """Return the limits of topics that should not be silent while the node is active."""
        return {}

    # For subclasses to call.

    def warn_of(self, what: str, error: CollabError) -> None:
        """Log a request that failed by its caller's fault; the same words once a second."""
        line = f"{what}: {error.code}: {str(error)[:300]}"
        if self._warned.admit(line, time.monotonic()):
            self.get_logger().warning(line)

    def fault_of(self, what: str, error: Exception) -> CollabError:
        """Log a fault of the program with its traceback; return the error for the caller."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        self.get_logger().error(f"{what}: {trace}", throttle_duration_sec=1.0)
        return CollabError(f"{type(error).__name__}: {error}")

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
        """Return the number of exceptions caught by :func:`guarded` or in a post."""
        return sum(self._diagnostics.faults.counts.values())

    def note_fault(self, error: Exception, where: str) -> None:
        """Report an exception that was caught on ``/diagnostics``."""
        self._diagnostics.add_fault(error, where)

    def report_health(self) -> None:
        """Check the topics' other ends; publish the diagnostics now if they have a subscriber."""
        now = time.monotonic()
        try:
            if self._endpoints is not None:
                self._endpoints.look(now)
            if not self._diagnostics.wanted:
                return
            statuses = [self._diagnostics.whole(self.diagnose(), self.common.diagnostics, now)]
            if self.active and self._endpoints is not None:
                statuses += self.details(now)
                statuses += self._endpoints.statuses(self.expected(), now)
        except Exception as error:  # noqa: BLE001 a robot must not stop because of its diagnostics
            statuses = [
                Status("node", Level.ERROR, f"diagnostics: {type(error).__name__}: {error}")
            ]
        self._diagnostics.publish(statuses, self.common.diagnostics.hardware_id)

    # Topics and services as rclpy makes them, with what ``endpoints.py`` adds to each.

    def create_publisher(
        self, msg_type: type, topic: str, qos_profile: QoSProfile | int, **options: Any
    ) -> Publisher:
        make = super().create_publisher
        options.setdefault("event_callbacks", SILENT_PUBLISHER)
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
        options.setdefault("event_callbacks", SILENT_SUBSCRIPTION)
        if topic == "/clock":  # rclpy's own, of simulated time
            callback = self._refusing_negative_time(callback)
        if self._endpoints is None:
            return make(msg_type, topic, callback, qos_profile, **options)
        return self._endpoints.subscription(make, msg_type, topic, callback, qos_profile, options)

    def _refusing_negative_time(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``callback`` of ``/clock`` without the times that would end the process."""

        def call(message: Any) -> None:
            if message.clock.sec >= 0:
                callback(message)
                return
            error = InvalidInput(
                f"{message.clock.sec} s",
                field="/clock",
                remedy="simulated time begins at 0: check who publishes it",
            )
            self.note_fault(error, "clock")
            self.get_logger().error(str(error), throttle_duration_sec=1.0)

        return call

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
        """Deactivate and clean up from any state; safe to call twice."""
        if self.active:
            self.trigger_deactivate()
        if self._state_machine.current_state[1] == "inactive":
            self.trigger_cleanup()

    # Lifecycle transitions: rclpy swallows their exceptions, so they are logged here.

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        def configure() -> None:
            refuse_unknown(self)
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

    # Dynamic parameters: validate without side effects, then replace the configuration.

    def _validate(self, parameters: list[Parameter]) -> SetParametersResult:
        changes = {p.name: p.value for p in parameters}
        if of_qos(changes):
            return SetParametersResult(successful=True)
        try:
            read(self, self._config_type, changes)
            read(self, CommonConfig, changes)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if not self._has_post_set:
            self.post(self._apply, parameters)  # runs when this call has set them
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        if of_qos(p.name for p in parameters):
            return
        self.config = read(self, self._config_type, {})
        before, self.common = self.common, read(self, CommonConfig, {})
        if self._endpoints is not None and self.common.introspection != before.introspection:
            self._endpoints.introspect(self.common.introspection)
        if self.common.diagnostics.period != before.diagnostics.period:
            set_period(self._reporter, self.common.diagnostics.period)
