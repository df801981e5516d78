"""Everything on one machine: the simulated Go2, the robot's nodes, and a local verifier.

    ros2 launch collab_llm sim.launch.py dashboard:=true
    ros2 launch collab_llm sim.launch.py instruction:="find the blue bucket"
    ros2 launch collab_llm sim.launch.py start_verifier:=false verifier:=cloud:50551

The instruction must name a thing in the room: `ros2 topic echo --once /ground_truth/room`.

A simulated robot's velocities must not reach a real one: what is started here talks to nodes on
this machine only (ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST), unless `discovery:=SUBNET` says
otherwise. Where a real robot's driver runs on this very machine, set another ROS_DOMAIN_ID too.
"""

from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    GroupAction,
    IncludeLaunchDescription,
    SetEnvironmentVariable,
)
from launch.conditions import IfCondition
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

BOOLEAN = ["true", "false"]
ROBOT = {
    "robot_file": ("sim.yaml", "Simulator, camera and motion: a file, or a name in config."),
    "params_file": ("embedded.yaml", "Models: a file, or a name in the config folder."),
    "model": ("", "Draft model: folder or hub id. Empty: as in params_file, or the embedded."),
    "verifier": ("127.0.0.1:50551", "The verifier, host:port; one is started there."),
    "instruction": ("", "Followed once everything is up. Empty: send goals to `navigate`."),
    "protocols": ("", "Further protocols to serve, by name: each by a node NAME_server."),
    "namespace": ("", "Namespace of the nodes and their topics, the clock among them."),
    "clock": ("clock", "Simulated time. A relative name lies in the namespace."),
    "seed": ("", "The room. Empty: as in robot_file."),
    "driver": ("sim", "The simulator; go2.launch.py knows others.", ["sim"]),
    "log_level": (
        "info",
        "What is logged: this and worse.",
        ["debug", "info", "warn", "error", "fatal"],
    ),
    "composed": (
        "true",
        "Two processes, graph and motion; else one for each node.",
        BOOLEAN,
    ),
    "on_exit": (
        "shutdown",
        "When a process of the robot ends: end all others, or start it again after 2 s.",
        ["shutdown", "respawn"],
    ),
    "dry_run": ("false", "Show what the robot would do; it is never moved.", BOOLEAN),
    "autostart": (
        "true",
        "Configure and activate at the start; else by a lifecycle manager.",
        BOOLEAN,
    ),
    "dashboard": (
        "false",
        "Start the dashboard, a web page for people (docs/dashboard.md).",
        BOOLEAN,
    ),
    "dashboard_port": ("", "Port of dashboard:=true. Empty: as in params_file, or 8080."),
    "record": ("false", "Record the drive as a bag (docs/replay.md).", BOOLEAN),
    "bags": ("bags", "Where record:=true puts its bags, each named by date and time."),
    "markers": ("false", "Publish markers for RViz and Foxglove (docs/diagnostics.md).", BOOLEAN),
    "memory": (
        "false",
        "Serve DRAGON, and have the robot write what it sees and does into its documents.",
        BOOLEAN,
    ),
    "confirm": (
        "false",
        "Follow `instruction` only once it is confirmed: by instruct --go, or the dashboard.",
        BOOLEAN,
    ),
}
VERIFIER = {
    "config": ("verifier_embedded.yaml", "The verifier's settings: a file, or a name in config."),
    "target_model": ("", "Target model: folder or hub id. Empty: as in config, or the embedded."),
}
OTHERS = {
    "start_verifier": ("true", "Start one; false: use one that runs elsewhere.", BOOLEAN),
    "discovery": (
        "LOCALHOST",
        "Range of discovery: LOCALHOST, or SUBNET for other machines as well.",
        ["LOCALHOST", "SUBNET", "SYSTEM_DEFAULT"],
    ),
}


def generate_launch_description() -> LaunchDescription:
    """Launch the verifier and the robot side, with the simulator in place of the robot."""
    launch = PathJoinSubstitution([FindPackageShare("collab_llm"), "launch"])
    verifier = IncludeLaunchDescription(
        PathJoinSubstitution([launch, "verifier.launch.py"]),
        launch_arguments=[(n, LaunchConfiguration(n)) for n in (*VERIFIER, "verifier")],
        condition=IfCondition(LaunchConfiguration("start_verifier")),
    )
    robot = IncludeLaunchDescription(
        PathJoinSubstitution([launch, "go2.launch.py"]),
        launch_arguments=[(n, LaunchConfiguration(n)) for n in ROBOT],
    )
    confine = SetEnvironmentVariable(
        "ROS_AUTOMATIC_DISCOVERY_RANGE", LaunchConfiguration("discovery")
    )
    declared = [
        DeclareLaunchArgument(
            name, default_value=default, description=text, choices=choices[0] if choices else None
        )
        for name, (default, text, *choices) in (ROBOT | VERIFIER | OTHERS).items()
    ]
    # The robot first: faults of its files are reported before a verifier is started.
    return LaunchDescription([*declared, GroupAction([confine, robot, verifier])])
