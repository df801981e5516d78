"""Two simulated robots on one machine, each in a room of its own, and one verifier for both.

    ros2 launch collab_llm two_robots.launch.py instruction1:="find the yellow mug" dashboard:=true

Their namespaces are robot1 and robot2. Each has its own clock (`/robot1/clock`), so their simulated
times run apart. Start `ros2` tools that use simulated time with `-r /clock:=/robot1/clock`.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

BOOLEAN = ["true", "false"]
SHARED = {
    "verifier": ("127.0.0.1:50551", "Where the verifier of both listens, host:port."),
    "config": ("verifier_embedded.yaml", "The verifier's settings: a file, or a name in config."),
    "target_model": ("", "Target model: folder or hub id. Empty: as in config, or the embedded."),
    "robot_file": ("sim.yaml", "Simulator, camera and motion: a file, or a name in config."),
    "params_file": ("embedded.yaml", "Models: a file, or a name in the config folder."),
    "dashboard": ("false", "Start a dashboard for each robot (docs/dashboard.md).", BOOLEAN),
    "record": ("false", "Record the drives as bags (docs/replay.md).", BOOLEAN),
    "composed": ("true", "Two processes a robot; else one for each node.", BOOLEAN),
    "on_exit": (
        "shutdown",
        "When a process of a robot ends: end all others, or start it again after 2 s.",
        ["shutdown", "respawn"],
    ),
    "log_level": (
        "info",
        "What is logged: this and worse.",
        ["debug", "info", "warn", "error", "fatal"],
    ),
}
EACH = {
    "seed": ("{number}", "The room of robot{number}."),
    "instruction": ("", "What robot{number} follows. Empty: send goals to `navigate`."),
    "dashboard_port": ("808{number}", "Port of the dashboard of robot{number}."),
    "bags": ("bags/robot{number}", "Where record:=true puts the bags of robot{number}."),
}


def generate_launch_description() -> LaunchDescription:
    """One verifier, started with the first robot, and two robots."""
    declared = [
        DeclareLaunchArgument(
            name, default_value=default, description=text, choices=choices[0] if choices else None
        )
        for name, (default, text, *choices) in SHARED.items()
    ]
    declared += [
        DeclareLaunchArgument(
            f"{name}{number}",
            default_value=default.format(number=number),
            description=text.format(number=number),
        )
        for number in (1, 2)
        for name, (default, text) in EACH.items()
    ]
    return LaunchDescription([*declared, _robot(1, "true"), _robot(2, "false")])


def _robot(number: int, start_verifier: str) -> GroupAction:
    """The robot; nothing but these arguments reaches it, so that the two cannot be confused."""
    simulation = PathJoinSubstitution([FindPackageShare("collab_llm"), "launch", "sim.launch.py"])
    arguments = {name: LaunchConfiguration(name) for name in SHARED}
    arguments |= {name: LaunchConfiguration(f"{name}{number}") for name in EACH}
    arguments |= {"namespace": f"robot{number}", "start_verifier": start_verifier}
    return GroupAction(
        [IncludeLaunchDescription(simulation)], forwarding=False, launch_configurations=arguments
    )
