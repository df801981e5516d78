"""The guards and drivers of one robot: whether there is one of each, and a stop that reaches all.

Each has a topic of its own, ``emergency_stop/_<kind>_<place>_<process>_<number>``, on which it says
whether it is stopped. So the graph's list of topics says who is there. When a guard says that it is
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
from collab_llm_nodes.ros.managed_node import ManagedNode
from collab_llm_nodes.ros.qos import STATE

CONFIRM_S = 1.0
"""Longest wait for the confirmations of a stop."""
_LOOK_S = 0.5
_WAIT_S = 0.05

GUARD, DRIVER = "motion_guard", "go2_driver"
"""Kinds. A robot has one of each."""

_NAME = re.compile(r".*/_([a-z0-9_]+)_([0-9a-f]{8})_([1-9][0-9]{0,6})_[0-9]+")
_numbers = itertools.count(1)
_NO_PARAMETERS: dict[str, Any] = {"qos_overriding_options": None}
"""Their names would hold the topic's, which is another one in each process."""


@dataclass(frozen=True)
class Peer:
    """A guard or driver, as its topic's name says.

    Attributes:
        topic: where it says whether it is stopped.
        kind: ``GUARD`` or ``DRIVER``.
        process: its number, where ``here``.
        here: it runs where we see each other's processes; else on another machine, or in another
            container.
    """

    topic: str
    kind: str
    process: int
    here: bool

    @property
    def dead(self) -> bool:
        """The process has ended; the graph forgets one that was killed only after 10 to 20 s."""
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


class Peers:
    """One guard or driver among those of its robot; everything happens in the node's thread.

    Args:
        node: the guard or driver.
        kind: ``GUARD`` or ``DRIVER``.
        stop: called when another guard says that it is stopped, in any lifecycle state.
        on_change: called when ``trouble`` or ``unconfirmed`` has changed.
        elsewhere: names others of the kind that move this robot from another namespace.

    Attributes:
        trouble: why the robot must not move, in words: another of a kind is there; or "".
    """

    def __init__(
        self,
        node: ManagedNode[Any],
        kind: str,
        stop: Callable[[], None],
        on_change: Callable[[], None],
        elsewhere: Callable[[], list[str]] = list,
    ) -> None:
        self._node, self._kind = node, kind
        self._stop, self._on_change, self._elsewhere = stop, on_change, elsewhere
        self.trouble = ""
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
        self._told = ("", "")
        self._looks = node.create_timer(_LOOK_S, self.look, clock=STEADY)
        self._waits = node.create_timer(_WAIT_S, self._settle, clock=STEADY)
        self._waits.cancel()

    @property
    def unconfirmed(self) -> str:
        """Return the peers that may go on while this one is stopped, in words."""
        if self._closed or not self._is_stopped:
            return ""
        missing = sorted(map(str, self._heard.keys() - self._stopped))
        if self._locked and all(peer.kind != self._kind for peer in self._heard):
            missing.append(self._locked)  # the graph does not show who did
        return "; ".join(missing)

    def tell(self, stopped: bool, *, again: bool = False) -> None:
        """Tell the others whether this one is stopped; if it is a guard, they stop as well.

        ``again``: even if it was said before, since somebody may have been reset meanwhile.
        """
        changed = stopped != self._is_stopped
        if self._closed or not (changed or again):
            return
        self._is_stopped = stopped
        self._publisher.publish(Bool(data=stopped))
        if changed:
            self.look()

    async def confirmation(self) -> str:
        """Wait until all are stopped, ``CONFIRM_S`` at most; return who is not, in words."""
        self.look()
        if self.unconfirmed:
            over = Future()
            self._waiting.append((over, wall() + CONFIRM_S))
            self._waits.reset()
            await over
        return self.unconfirmed

    def look(self) -> None:
        """See who is there now."""
        if self._closed:
            return
        try:
            others = self._others()
            for peer in self._heard.keys() - others:
                self._node.destroy_subscription(self._heard.pop(peer))
                self._stopped.discard(peer)
            for peer in others - self._heard.keys():
                self._heard[peer] = self._node.create_subscription(
                    Bool, peer.topic, partial(self._on_peer, peer), STATE, **_NO_PARAMETERS
                )
            trouble = self._doubled()
        except Exception as error:  # noqa: BLE001 who cannot see others must not move the robot
            self._node.note_fault(error, "peers")
            trouble = f"the graph cannot be read: {type(error).__name__}: {error}"
        if trouble and not self.trouble:
            self._node.get_logger().error(
                f"the robot does not move, its nodes were started twice: {trouble}",
                throttle_duration_sec=1.0,
            )
        elif self.trouble and not trouble:
            self._node.get_logger().info(
                "one guard and one driver at most again", throttle_duration_sec=1.0
            )
        self.trouble = trouble
        self._settle()

    def close(self) -> None:
        """Be no guard or driver any more; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._lock.release()
        for timer in (self._looks, self._waits):
            self._node.destroy_timer(timer)
        self._node.destroy_publisher(self._publisher)
        for subscription in self._heard.values():
            self._node.destroy_subscription(subscription)
        self._heard.clear()
        for over, _ in self._waiting:
            over.set_result(None)
        self._waiting.clear()

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
        """Return the kind that is there twice, in words."""
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
        """Report what has changed; end the waiting that is over."""
        told = (self.trouble, self.unconfirmed)
        if told != self._told:
            self._told = told
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
    """Name those processes that see each other's numbers: of one boot and one PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        place = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        place = uuid.uuid4().hex  # then nobody is known to be dead
    return hashlib.sha256(place.encode()).hexdigest()[:8]
