"""Quality-of-service profiles, one for each kind of topic."""

from __future__ import annotations

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

CAMERA = QoSProfile(
    depth=1, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.BEST_EFFORT
)
"""Frames and odometry: the newest only, never wait for a lost one."""

BUTTON = QoSProfile(
    depth=50, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.BEST_EFFORT
)
"""Buttons: a newer message (released) must not replace an unread one (pressed)."""

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
