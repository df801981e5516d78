"""From model text to safe motion: grammar, executor, mission, guard. No ROS."""
