"""The robot side: camera, draft model, bridge to the verifier, action parser, navigator.

    ros2 launch collab_llm go2.launch.py verifier:=cloud:50551 instruction:="find the red ball"

Parameters come from `robot_file` (camera, motion), then `params_file` (models), then the other
arguments.
"""

import atexit
import tempfile
from pathlib import Path
from typing import Any

import yaml
from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, Shutdown
from launch.conditions import IfCondition, UnlessCondition
from launch.substitutions import LaunchConfiguration, NotEqualsSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

NODES = (
    "camera_ingest",
    "cloud_verifier_bridge",
    "draft_vlm",
    "predraft_cache",
    "navigation_action_parser",
    "navigator",
)

ARGUMENTS = {
    "robot_file": ("go2.yaml", "Camera and motion: a file, or a name in the config folder."),
    "params_file": ("qwen2_vl_2b_7b.yaml", "Models: a file, or a name in the config folder."),
    "model": ("", "Draft model: folder or hub id. Empty: as in params_file, or the embedded."),
    "verifier": ("", "Verifier, host:port. Empty: as in params_file."),
    "instruction": ("", "Followed once everything is up. Empty: send goals to `navigate`."),
    "namespace": ("", "Namespace of the nodes and their topics."),
    "log_level": ("info", "debug, info, warn or error."),
}
FLAGS = {
    "composed": ("true", "All nodes in one process; else one process each."),
    "autostart": ("true", "Configure and activate at the start; else by a lifecycle manager."),
    "simulator": ("false", "Start sim_go2 in place of a robot; see sim.launch.py."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the nodes."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    declared += [
        DeclareLaunchArgument(
            name, default_value=default, description=text, choices=["true", "false"]
        )
        for name, (default, text) in FLAGS.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_nodes)])


def _nodes(context: LaunchContext) -> list[Node]:
    """The nodes; a function, because file names and overrides need the arguments' values."""

    def value(name: str) -> str:
        return str(LaunchConfiguration(name).perform(context))

    config = Path(FindPackageShare("collab_llm").perform(context)) / "config"
    files = [_file(name, value(name), config) for name in ("robot_file", "params_file")]
    simulated = value("simulator") == "true"
    common: dict[str, Any] = {
        "namespace": value("namespace"),
        "parameters": [*files, _overrides(value, config.parent)],
        "output": "screen",
        "sigterm_timeout": "20",  # s; results are delivered and models freed first
    }
    ros_arguments = ["--log-level", value("log_level")]
    composed = LaunchConfiguration("composed")
    graph = Node(
        package="collab_llm",
        executable="graph",
        arguments=["--sim"] if simulated else [],
        ros_arguments=ros_arguments,
        condition=IfCondition(composed),
        on_exit=Shutdown(reason="the robot's nodes ended"),
        **common,
    )
    apart = [
        Node(
            package="collab_llm",
            executable=name,
            name=name,
            ros_arguments=ros_arguments,
            condition=UnlessCondition(composed),
            **common,
        )
        for name in (("sim_go2",) if simulated else ()) + NODES
    ]
    instruct = Node(
        package="collab_llm",
        executable="instruct",
        arguments=[value("instruction")],
        namespace=value("namespace"),
        output="screen",
        condition=IfCondition(NotEqualsSubstitution(LaunchConfiguration("instruction"), "")),
    )
    return [graph, *apart, instruct]


def _file(argument: str, value: str, config: Path) -> str:
    """The file at ``value``, or of that name in ``config``."""
    for file in (Path(value), config / value):
        if file.is_file():
            return str(file)
    known = ", ".join(sorted(f.name for f in config.glob("*.yaml")))
    raise FileNotFoundError(f"{argument}:={value} is no file, nor one of {config}: {known}")


def _overrides(value: Any, share: Path) -> str:
    """A parameter file with what the arguments say; it goes when this process does.

    Names are spelt out because an exact name wins over the wildcards of the other files, while a
    later wildcard would not; on the command line (``-p node:name:=value``) no namespace can be.
    """
    space = f"/{value('namespace').strip('/')}".rstrip("/")
    nodes: dict[str, dict[str, Any]] = {
        f"{space}/{name}": {"autostart": value("autostart") == "true"}
        for name in (*NODES, "sim_go2")
    }
    model = value("model")
    if not model and Path(value("params_file")).name == "embedded.yaml":
        model = str(share / "models" / "nav-draft")
    if model:
        nodes[f"{space}/draft_vlm"]["model.path"] = model
    if value("verifier"):
        nodes[f"{space}/cloud_verifier_bridge"]["verifier.address"] = value("verifier")
    content = {name: {"ros__parameters": values} for name, values in nodes.items()}
    with tempfile.NamedTemporaryFile("w", prefix="collab_llm_", suffix=".yaml", delete=False) as f:
        yaml.safe_dump(content, f)
    atexit.register(Path(f.name).unlink, missing_ok=True)
    return f.name
