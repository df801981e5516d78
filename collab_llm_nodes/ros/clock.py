"""The machine's monotonic clock, as ROS timers and deadlines use it."""

from __future__ import annotations

from rclpy.clock import Clock, ClockType
from rclpy.timer import Timer

STEADY = Clock(clock_type=ClockType.STEADY_TIME)
"""Clock for deadlines of the machine (network, models), which simulated time must not stretch."""


def set_period(timer: Timer, seconds: float) -> None:
    """Set the period of ``timer``, from now on, unless it has that period."""
    period = int(seconds * 1e9)
    if timer.timer_period_ns != period:
        timer.timer_period_ns = period
        timer.reset()  # else the old period ends first


def wall() -> float:
    """Return the machine's monotonic time [s]; only differences mean anything."""
    return float(STEADY.now().nanoseconds) * 1e-9
