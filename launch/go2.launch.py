"""The robot side: camera, draft model, bridge to the verifier, action parser, navigator; the guard
over motion and the robot's driver, in a process of their own.

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
from launch.substitutions import LaunchConfiguration
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
EXTRAS = {"record": "recorder", "dashboard": "dashboard", "markers": "markers"}
LOG_LEVELS = ["debug", "info", "warn", "error", "fatal"]
DRIVERS = {"go2": ["go2_driver"], "sim": ["sim_go2"], "none": []}

ARGUMENTS = {
    "robot_file": ("go2.yaml", "Camera and motion: a file, or a name in the config folder."),
    "params_file": ("qwen2_vl_2b_7b.yaml", "Models: a file, or a name in the config folder."),
    "model": ("", "Draft model: folder or hub id. Empty: as in params_file, or the embedded."),
    "verifier": ("", "Verifier, host:port. Empty: as in params_file."),
    "instruction": ("", "Followed once everything is up. Empty: send goals to `navigate`."),
    "namespace": ("", "Namespace of the nodes and their topics."),
    "bags": ("bags", "Where record:=true puts its bags, each named by date and time."),
}
FLAGS = {
    "composed": ("true", "Two processes: what thinks, what moves; else one for each node."),
    "autostart": ("true", "Configure and activate at the start; else by a lifecycle manager."),
    "dashboard": ("false", "Start the dashboard, a web page for people (docs/dashboard.md)."),
    "record": ("false", "Record the drive as a bag (docs/replay.md)."),
    "markers": ("false", "Publish markers for RViz and Foxglove (docs/diagnostics.md)."),
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
    driver = DeclareLaunchArgument(
        "driver",
        default_value="go2",
        description="Who carries cmd_vel out: go2_driver, sim_go2 (see sim.launch.py), or a node"
        " of somebody else's.",
        choices=list(DRIVERS),
    )
    log_level = DeclareLaunchArgument(
        "log_level",
        default_value="info",
        description="What is logged: this and worse.",
        choices=LOG_LEVELS,
    )
    return LaunchDescription([*declared, driver, log_level, OpaqueFunction(function=_nodes)])


def _nodes(context: LaunchContext) -> list[Node]:
    """The nodes; a function, because file names and overrides need the arguments' values."""

    def value(name: str) -> str:
        return str(LaunchConfiguration(name).perform(context))

    config = Path(FindPackageShare("collab_llm").perform(context)) / "config"
    files = [_file(name, value(name), config) for name in ("robot_file", "params_file")]
    overrides = _overrides(value, config.parent)
    common: dict[str, Any] = {
        "package": "collab_llm",
        "namespace": value("namespace"),
        "parameters": [*files, overrides],
        "ros_arguments": _log_levels(value("namespace"), value("log_level")),
        "output": "screen",
        "sigterm_timeout": "20",  # s; results are delivered and models freed first
    }
    # Either way the guard and the driver are not in the process of the models: a crash there must
    # not keep the robot moving. The end of either ends everything.
    processes = {
        "motion": ["--driver", value("driver")],
        "graph": [],
    }
    composed = [
        Node(
            executable=name,
            arguments=arguments,
            on_exit=Shutdown(reason="the robot's nodes ended"),
            **common,
        )
        for name, arguments in processes.items()
    ]
    apart = [
        Node(executable=name, name=name, **common)
        for name in (*DRIVERS[value("driver")], "motion_guard", *NODES)
    ]
    started = composed if value("composed") == "true" else apart
    for flag, executable in EXTRAS.items():
        if value(flag) == "true":
            started.append(Node(executable=executable, name=executable, **common))
    if value("instruction"):
        instruct = {k: common[k] for k in ("package", "namespace", "output")}
        started.append(Node(executable="instruct", arguments=[value("instruction")], **instruct))
    return started


def _log_levels(namespace: str, level: str) -> list[str]:
    """ROS arguments that set the level of our own nodes' loggers; rcl and DDS have theirs."""
    space = "".join(f"{part}." for part in namespace.split("/") if part)
    names = (*NODES, "motion_guard", "go2_driver", "sim_go2", *EXTRAS.values())
    return [word for name in names for word in ("--log-level", f"{space}{name}:={level}")]


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
        for name in (*NODES, "motion_guard", "go2_driver", "sim_go2", *EXTRAS.values())
    }
    model = value("model")
    if not model and Path(value("params_file")).name == "embedded.yaml":
        model = str(share / "models" / "nav-draft")
    if model:
        nodes[f"{space}/draft_vlm"]["model.path"] = model
    if value("verifier"):
        nodes[f"{space}/cloud_verifier_bridge"]["verifier.address"] = value("verifier")
    nodes[f"{space}/recorder"]["folder"] = value("bags")
    content = {name: {"ros__parameters": values} for name, values in nodes.items()}
    with tempfile.NamedTemporaryFile("w", prefix="collab_llm_", suffix=".yaml", delete=False) as f:
        yaml.safe_dump(content, f)
    atexit.register(Path(f.name).unlink, missing_ok=True)
    return f.name
