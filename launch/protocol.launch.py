"""The server of one protocol, without a robot: on a workstation, or in the cloud.

    ros2 launch collab_llm protocol.launch.py
    ros2 launch collab_llm protocol.launch.py protocol:=collective params_file:=mine.yaml

On the robot, `protocols:=NAME` of go2.launch.py and sim.launch.py starts the same server.
"""

from pathlib import Path

import yaml
from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "protocol": ("collective", "The protocol; its node is NAME_server."),
    "params_file": (
        "",
        "Parameters: a file, or a name in the config folder. Empty: its NAME.yaml, if there.",
    ),
    "parameters": ("{}", "Parameters that count over those of the file: YAML, {NAME: VALUE}."),
    "namespace": ("", "Namespace of the node and its interfaces."),
}
CHOICES = {
    "autostart": (
        "true",
        "Configure and activate at the start; else by a lifecycle manager.",
        ["true", "false"],
    ),
    "log_level": (
        "info",
        "What is logged: this and worse.",
        ["debug", "info", "warn", "error", "fatal"],
    ),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    declared += [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, (default, text, choices) in CHOICES.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_node)])


def _node(context: LaunchContext) -> list[Node]:
    value = {n: str(LaunchConfiguration(n).perform(context)) for n in (*ARGUMENTS, *CHOICES)}
    name = f"{value['protocol']}_server"
    config = Path(FindPackageShare("collab_llm").perform(context)) / "config"
    own = config / f"{value['protocol']}.yaml"
    files = [str(own)] if own.is_file() else []
    if value["params_file"]:
        files = [_file(value["params_file"], config)]
    own_values = yaml.safe_load(value["parameters"])
    if not isinstance(own_values, dict):
        raise ValueError(f"parameters:={value['parameters']} is no mapping {{NAME: VALUE}}")
    logger = ".".join([*filter(None, value["namespace"].split("/")), name])
    return [
        Node(
            package="collab_llm",
            executable="protocol_server",
            arguments=[value["protocol"]],
            name=name,
            namespace=value["namespace"],
            parameters=[*files, *([own_values] if own_values else [])],
            ros_arguments=[
                *("-p", f"autostart:={value['autostart']}"),
                *("--log-level", f"{logger}:={value['log_level']}"),
            ],
            output="screen",
            sigterm_timeout="20",  # s; results are delivered and models freed first
            on_exit=Shutdown(reason="the server ended"),
        )
    ]


def _file(value: str, config: Path) -> str:
    """Return the file at ``value``, or of that name in ``config``."""
    for file in (Path(value), config / value):
        if file.is_file():
            return str(file)
    known = ", ".join(sorted(f.name for f in config.glob("*.yaml")))
    raise FileNotFoundError(f"params_file:={value} is no file, nor one of {config}: {known}")
