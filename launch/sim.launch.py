"""Everything on one machine: the simulated Go2, the robot's nodes, and a local verifier.

    ros2 launch collab_llm sim.launch.py dashboard:=true
    ros2 launch collab_llm sim.launch.py instruction:="find the red ball"

The instruction must name what is in the room: `ros2 topic echo --once /ground_truth/room` tells.

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
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "robot_file": ("sim.yaml", "Simulator, camera and motion: a file, or a name in config."),
    "params_file": ("embedded.yaml", "Models: a file, or a name in the config folder."),
    "config": ("verifier_embedded.yaml", "The verifier's settings: a file, or a name in config."),
    "verifier": ("127.0.0.1:50551", "Where the verifier listens, host:port."),
    "model": ("", "Draft model: folder or hub id. Empty: as in params_file, or the embedded."),
    "target_model": ("", "Target model: folder or hub id. Empty: as in config, or the embedded."),
    "instruction": ("", "Followed once everything is up. Empty: send goals to `navigate`."),
    "namespace": ("", "Namespace of the nodes and their topics."),
    "log_level": ("info", "debug, info, warn, error or fatal."),
    "bags": ("bags", "Where record:=true puts its bags, each named by date and time."),
    "composed": ("true", "Two processes: what thinks, what moves; else one for each node."),
    "dashboard": ("false", "Start the dashboard, a web page for people (docs/dashboard.md)."),
    "record": ("false", "Record the drive as a bag (docs/replay.md)."),
    "markers": ("false", "Publish markers for RViz and Foxglove (docs/diagnostics.md)."),
}


def generate_launch_description() -> LaunchDescription:
    """The verifier and the robot side, with the simulator in place of the robot."""
    launch = PathJoinSubstitution([FindPackageShare("collab_llm"), "launch"])
    passed = {name: LaunchConfiguration(name) for name in ARGUMENTS}
    verifier = IncludeLaunchDescription(
        PathJoinSubstitution([launch, "verifier.launch.py"]),
        launch_arguments={
            name: passed[name] for name in ("config", "target_model", "verifier")
        }.items(),
    )
    robot = IncludeLaunchDescription(
        PathJoinSubstitution([launch, "go2.launch.py"]),
        launch_arguments={
            **{k: v for k, v in passed.items() if k not in ("config", "target_model")},
            "driver": "sim",
        }.items(),
    )
    discovery = DeclareLaunchArgument(
        "discovery",
        default_value="LOCALHOST",
        description="Whom the nodes find: LOCALHOST, or SUBNET for other machines as well.",
        choices=["LOCALHOST", "SUBNET", "SYSTEM_DEFAULT"],
    )
    confine = SetEnvironmentVariable(
        "ROS_AUTOMATIC_DISCOVERY_RANGE", LaunchConfiguration("discovery")
    )
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    # The robot first: what is wrong with its files is said before a verifier is started.
    return LaunchDescription([*declared, discovery, GroupAction([confine, robot, verifier])])
