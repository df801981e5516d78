"""The guards and drivers of one robot: detection of a second one, and a stop that reaches all.

Each publishes on a topic of its own, ``emergency_stop/_<kind>_<place>_<process>_<number>``, whether
it is stopped. So the graph's list of topics names all of them. When a guard publishes that it is
stopped, all others stop as well, and their topics confirm it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rclpy.subscription import Subscription
from rclpy.task import Future
from std_msgs.msg import Bool

from collab_llm_nodes.robot.host_lock import HostLock
from collab_llm_nodes.ros.clock import STEADY, wall
from collab_llm_nodes.ros.graph_watch import GraphWatch
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.qos import STATE

CONFIRM_S = 1.0
"""Longest wait for the confirmations of a stop."""
_WAIT_S = 0.05
"""Period at which waiting for confirmations is checked."""

GUARD, DRIVER = "motion_guard", "go2_driver"
"""Kinds of peers. A robot has one of each."""

_NAME = re.compile(r".*/_([a-z0-9_]+)_([0-9a-f]{8})_([1-9][0-9]{0,6})_[0-9]+")
_numbers = itertools.count(1)
_NO_PARAMETERS: dict[str, Any] = {"qos_overriding_options": None}
"""QoS overrides would be parameters named after the topic, which differs in each process."""


@dataclass(frozen=True)
class Peer:
    """A guard or driver, read from the name of its topic.

    Attributes:
        topic: where it publishes whether it is stopped.
        kind: ``GUARD`` or ``DRIVER``.
        process: id of its process, where ``here``.
        here: it shares our process ids; else it is on another machine, or in another container.
    """

    topic: str
    kind: str
    process: int
    here: bool

    @property
    def dead(self) -> bool:
        """Return True if the process has ended.

        The graph forgets a killed process only after 10 to 20 s.
        """
        if not self.here:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            return False
        return False

    def __str__(self) -> str:
        return f"{self.kind} of process {self.process}{'' if self.here else ' elsewhere'}"


class Peers(GraphWatch):
    """The other guards and drivers of a robot, as one of them sees them.

    There is trouble if there are two of a kind.

    Args:
        node: the guard or driver.
        kind: ``GUARD`` or ``DRIVER``.
        stop: called when another guard is stopped, in any lifecycle state.
        on_change: called when ``trouble`` or ``unconfirmed`` has changed.
        elsewhere: returns peers of this kind that move the robot from another namespace.
    """

    source = "peers"

    def __init__(
        self,
        node: ManagedNode[Any],
        kind: str,
        stop: Callable[[], None],
        on_change: Callable[[], None],
        elsewhere: Callable[[], list[str]] = list,
    ) -> None:
        super().__init__(node)
        self._kind = kind
        self._stop, self._on_change, self._elsewhere = stop, on_change, elsewhere
        self._place = _place()
        own = f"emergency_stop/_{kind}_{self._place}_{os.getpid()}_{next(_numbers)}"
        self._publisher = node.create_publisher(Bool, own, STATE, **_NO_PARAMETERS)
        self._own = self._publisher.topic_name
        self._prefix = self._own.rpartition("/")[0] + "/_"
        space = node.get_namespace().strip("/").replace("/", ".")
        domain = node.context.get_domain_id()
        self._lock = HostLock(".".join(filter(None, (kind, str(domain), space))))
        self._locked = ""  # by another process, in words
        self._heard: dict[Peer, Subscription] = {}
        self._stopped: set[Peer] = set()
        self._is_stopped = self._closed = False
        self._publisher.publish(Bool(data=False))
        self._waiting: list[tuple[Future, float]] = []
        self._reported = ("", "")
        self._waits = node.create_timer(_WAIT_S, self._settle, clock=STEADY)
        self._waits.cancel()

    @property
    def unconfirmed(self) -> str:
        """Return the peers that have not confirmed our stop, in words."""
        if self._closed or not self._is_stopped:
            return ""
        missing = sorted(map(str, self._heard.keys() - self._stopped))
        if self._locked and all(peer.kind != self._kind for peer in self._heard):
            missing.append(self._locked)  # the graph does not show its holder
        return "; ".join(missing)

    def publish(self, stopped: bool, *, again: bool = False) -> None:
        """Publish whether this one is stopped; a guard's stop makes the others stop as well.

        ``again``: even if nothing has changed, since another peer may have been reset meanwhile.
        """
        changed = stopped != self._is_stopped
        if self._closed or not (changed or again):
            return
        self._is_stopped = stopped
        self._publisher.publish(Bool(data=stopped))
        if changed:
            self.look()

    async def confirmation(self) -> str:
        """Return the peers that have not stopped within ``CONFIRM_S``, in words."""
        self.look()
        if self.unconfirmed:
            over = Future()
            self._waiting.append((over, wall() + CONFIRM_S))
            self._waits.reset()
            await over
        return self.unconfirmed

    def look(self) -> None:
        """Read which peers there are now."""
        if not self._closed:
            super().look()
            self._settle()

    def close(self) -> None:
        """Stop being a peer; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        super().close()
        self._lock.release()
        self._node.destroy_timer(self._waits)
        self._node.destroy_publisher(self._publisher)
        for subscription in self._heard.values():
            self._node.destroy_subscription(subscription)
        self._heard.clear()
        for over, _ in self._waiting:
            over.set_result(None)
        self._waiting.clear()

    def _read(self) -> str:
        others = self._others()
        for peer in self._heard.keys() - others:
            self._node.destroy_subscription(self._heard.pop(peer))
            self._stopped.discard(peer)
        for peer in others - self._heard.keys():
            self._heard[peer] = self._node.create_subscription(
                Bool, peer.topic, partial(self._on_peer, peer), STATE, **_NO_PARAMETERS
            )
        return self._doubled()

    def _report(self) -> None:
        log = self._node.get_logger()
        if self.trouble:
            log.error(
                f"the robot does not move, its nodes were started twice: {self.trouble}",
                throttle_duration_sec=1.0,
            )
        else:
            log.info("one guard and one driver at most again", throttle_duration_sec=1.0)

    def _others(self) -> set[Peer]:
        others = set()
        for topic, _ in self._node.get_topic_names_and_types():
            name = _NAME.fullmatch(topic) if topic.startswith(self._prefix) else None
            if name is not None and topic != self._own:
                kind, place, process = name.groups()
                peer = Peer(topic, kind, int(process), place == self._place)
                if self._node.count_publishers(topic) and not peer.dead:
                    others.add(peer)
        return others

    def _doubled(self) -> str:
        """Return the peers of a kind of which there are two, in words."""
        count = Counter([self._kind, *(peer.kind for peer in self._heard)])
        found = sorted(str(peer) for peer in self._heard if count[peer.kind] > 1)
        self._locked = self._lock.take()
        return "; ".join(filter(None, (*found, *self._elsewhere(), self._locked)))

    def _on_peer(self, peer: Peer, message: Bool) -> None:
        if peer not in self._heard:
            return  # gone meanwhile
        if message.data:
            self._stopped.add(peer)
            if peer.kind == GUARD:
                self._stop()
        else:
            self._stopped.discard(peer)
        self._settle()

    def _settle(self) -> None:
        """Report changes; end the waits that are over."""
        found = (self.trouble, self.unconfirmed)
        if found != self._reported:
            self._reported = found
            self._on_change()
            self._node.report_health()
        now = wall()
        for waiting in [*self._waiting]:
            over, due = waiting
            if not self.unconfirmed or now >= due:
                self._waiting.remove(waiting)
                over.set_result(None)
        if not self._waiting:
            self._waits.cancel()


def _place() -> str:
    """Return a name for the processes that share ids: those of one boot and one PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        place = uuid.uuid4().hex  # then no process is known to be dead
    return hashlib.sha256(place.encode()).hexdigest()[:8]
