"""The machine's monotonic clock, as ROS timers and deadlines use it."""

from __future__ import annotations

from rclpy.clock import Clock, ClockType

STEADY = Clock(clock_type=ClockType.STEADY_TIME)
"""Clock for deadlines of the machine (network, models), which simulated time must not stretch."""


def wall() -> float:
    """Return the machine's monotonic time [s]; only differences mean anything."""
    return float(STEADY.now().nanoseconds) * 1e-9
