"""The robot side: camera, draft model, bridge to the verifier, action parser, navigator; the guard
over motion and the robot's driver, in a process of their own.

    ros2 launch collab_llm go2.launch.py verifier:=cloud:50551 instruction:="find the red ball"
    ros2 run collab_llm instruct --go       # when it says that it is ready: now the robot moves

Parameters come from `robot_file` (camera, motion), then `params_file` (models), then the other
arguments.
"""

import atexit
import tempfile
from collections.abc import Callable
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
    "generate_router",
    "navigation_action_parser",
    "navigator",
)
EXTRAS = {"record": "recorder", "dashboard": "dashboard", "markers": "markers"}
DRIVERS = {"go2": ["go2_driver"], "sim": ["sim_go2"], "none": []}
WATCHDOGS = {"go2": ["motion_watchdog"], "sim": [], "none": []}
RESPAWN_DELAY_S = 2.0

ARGUMENTS = {
    "robot_file": ("go2.yaml", "Camera and motion: a file, or a name in the config folder."),
    "params_file": ("qwen2_vl_2b_7b.yaml", "Models: a file, or a name in the config folder."),
    "model": ("", "Draft model: folder or hub id. Empty: as in params_file, or the embedded."),
    "verifier": ("", "Verifier, host:port. Empty: as in params_file."),
    "instruction": ("", "Followed once all is up, see confirm. Empty: send goals to `navigate`."),
    "protocols": ("", "Further protocols to serve, by name: each by a node NAME_server."),
    "namespace": ("", "Namespace of the nodes and their topics."),
    "clock": ("/clock", "Simulated time. A relative name lies in the namespace."),
    "seed": ("", "Room of driver:=sim. Empty: as in robot_file."),
    "dashboard_port": ("", "Port of dashboard:=true. Empty: as in params_file, or 8080."),
    "bags": ("bags", "Where record:=true puts its bags, each named by date and time."),
}
FLAGS = {
    "composed": ("true", "Two processes, graph and motion; else one for each node."),
    "dry_run": (
        "false",
        "Show what the robot would do; it is never moved (docs/safety.md, A dry run).",
    ),
    "autostart": ("true", "Configure and activate at the start; else by a lifecycle manager."),
    "dashboard": ("false", "Start the dashboard, a web page for people (docs/dashboard.md)."),
    "record": ("false", "Record the drive as a bag (docs/replay.md)."),
    "markers": ("false", "Publish markers for RViz and Foxglove (docs/diagnostics.md)."),
    "memory": (
        "false",
        "Serve DRAGON, and have the robot write what it sees and does into its documents.",
    ),
    "confirm": (
        "true",
        "Follow `instruction` only once it is confirmed: by instruct --go, or the dashboard.",
    ),
}
CHOICES = {
    "driver": (
        "go2",
        "Driver that executes cmd_vel: go2_driver, sim_go2 (see sim.launch.py), or none: of another"
        " package.",
        list(DRIVERS),
    ),
    "on_exit": (
        "shutdown",
        "When a process of the robot ends: end all others, or start it again after 2 s.",
        ["shutdown", "respawn"],
    ),
    "log_level": (
        "info",
        "What is logged: this and worse.",
        ["debug", "info", "warn", "error", "fatal"],
    ),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the nodes."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    chosen = {name: (*flag, ["true", "false"]) for name, flag in FLAGS.items()} | CHOICES
    declared += [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, (default, text, choices) in chosen.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_nodes)])


def _nodes(context: LaunchContext) -> list[Node]:
    """Return the nodes; file names and overrides need the arguments' values."""

    def value(name: str) -> str:
        return str(LaunchConfiguration(name).perform(context))

    config = Path(FindPackageShare("collab_llm").perform(context)) / "config"
    files = [_file(name, value(name), config) for name in ("robot_file", "params_file")]
    overrides = _overrides(value, config.parent, files)
    common: dict[str, Any] = {
        "package": "collab_llm",
        "namespace": value("namespace"),
        "parameters": [*files, overrides],
        "remappings": [("/clock", value("clock"))] if value("clock") != "/clock" else [],
        "ros_arguments": _log_levels(value),
        "output": "screen",
        "sigterm_timeout": "20",  # s; results are delivered and models freed first
    }

    def node(executable: str, enclave: str = "", **more: Any) -> Node:
        # Its rights where SROS 2 is on (config/sros2_policy.xml); without it a mere name.
        rights = ["--enclave", f"/collab_llm/{enclave or executable}"]
        ros_arguments = [*common["ros_arguments"], *rights]
        return Node(executable=executable, **{**common, "ros_arguments": ros_arguments, **more})

    # Guard and driver are never in the process of the models: a crash there must not keep the robot
    # moving. A robot without one of its processes does not go on by itself.
    respawn = {"respawn": True, "respawn_delay": RESPAWN_DELAY_S}
    restarted: dict[str, Any] = respawn if value("on_exit") == "respawn" else {}
    needed = restarted or {"on_exit": Shutdown(reason="a process of the robot ended")}
    if value("composed") == "true":
        driver = ["--driver", value("driver")]
        started = [
            node("motion", arguments=driver, **needed),
            node("graph", **needed),
        ]
        alone = []
    else:
        started = []
        alone = [*DRIVERS[value("driver")], "motion_guard", *NODES]
    started += [  # a watchdog must outlive what it watches
        node(name, name=name, **needed) for name in (*alone, *WATCHDOGS[value("driver")])
    ]
    for protocol in _protocols(value):
        name = f"{protocol}_server"
        server: dict[str, Any] = {"enclave": name, "arguments": [protocol]}
        own = config / f"{protocol}.yaml"  # first, so that the files of the arguments win
        if own.is_file():
            server["parameters"] = [str(own), *common["parameters"]]
        started.append(node("protocol_server", name=name, **server, **restarted))
    for flag, executable in EXTRAS.items():
        if value(flag) == "true":
            started.append(node(executable, name=executable, **restarted))
    if value("instruction"):
        instruct = {k: common[k] for k in ("package", "namespace", "output")}
        # After `--` an instruction is none of its options, even if it looks like one.
        words = ["--confirm"] * (value("confirm") == "true") + ["--", value("instruction")]
        started.append(Node(executable="instruct", arguments=words, **instruct))
    return started


def _protocols(value: Callable[[str], str]) -> list[str]:
    """Return the further protocols that are served."""
    wanted = value("protocols").split()
    return list(dict.fromkeys([*wanted, *(["dragon"] if value("memory") == "true" else [])]))


def _names(value: Callable[[str], str]) -> list[str]:
    """Return the names of all nodes that may be started."""
    servers = [f"{protocol}_server" for protocol in _protocols(value)]
    moving = ("motion_guard", "go2_driver", "motion_watchdog", "sim_go2")
    return [*NODES, *servers, *moving, *EXTRAS.values()]


def _log_levels(value: Callable[[str], str]) -> list[str]:
    """Return the ROS arguments that set the level of our own nodes' loggers.

    None for the default level, since launch prints all arguments when a process ends.
    """
    if value("log_level") == CHOICES["log_level"][0]:
        return []
    space = "".join(f"{part}." for part in value("namespace").split("/") if part)
    levels = [f"{space}{name}:={value('log_level')}" for name in _names(value)]
    return [word for level in levels for word in ("--log-level", level)]


def _file(argument: str, value: str, config: Path) -> str:
    """Return the file at ``value``, or of that name in ``config``."""
    for file in (Path(value), config / value):
        if file.is_file():
            return str(file)
    known = ", ".join(sorted(f.name for f in config.glob("*.yaml")))
    raise FileNotFoundError(f"{argument}:={value} is no file, nor one of {config}: {known}")


def _room(value: Callable[[str], str], files: list[str]) -> str:
    """Return the simulator's room, by ``seed`` or the parameter files."""
    seed = value("seed")
    for file in files:
        for name, node in (yaml.safe_load(Path(file).read_text()) or {}).items():
            if name.rpartition("/")[2] == "sim_go2" and not seed:
                seed = node["ros__parameters"].get("seed", "")
    return f"room-{seed or 0}"


def _overrides(value: Callable[[str], str], share: Path, files: list[str]) -> str:
    """Write the arguments into a parameter file, deleted at the end; return its path.

    Names are complete because they win over the wildcards of the other files, as a later wildcard
    would not; on the command line (``-p node:name:=value``) a namespace is impossible.
    """
    space = f"/{value('namespace').strip('/')}".rstrip("/")
    nodes: dict[str, dict[str, Any]] = {
        f"{space}/{name}": {"autostart": value("autostart") == "true"} for name in _names(value)
    }
    model = value("model")
    if not model and Path(value("params_file")).name == "embedded.yaml":
        model = str(share / "models" / "nav-draft")
    if model:
        nodes[f"{space}/draft_vlm"]["model.path"] = model
    if value("verifier"):
        nodes[f"{space}/cloud_verifier_bridge"]["verifier.address"] = value("verifier")
    if value("seed"):
        nodes[f"{space}/sim_go2"]["seed"] = yaml.safe_load(value("seed"))
    if value("dashboard_port"):
        nodes[f"{space}/dashboard"]["port"] = yaml.safe_load(value("dashboard_port"))
    if value("memory") == "true":
        nodes[f"{space}/dragon_server"]["memory.fill"] = True
    if value("driver") == "sim" and "dragon" in _protocols(value):
        nodes[f"{space}/dragon_server"]["memory.world"] = _room(value, files)
    if value("dry_run") == "true":
        nodes[f"{space}/motion_guard"]["dry_run"] = nodes[f"{space}/go2_driver"]["dry_run"] = True
        nodes[f"{space}/navigator"]["output"] = "none"
    nodes[f"{space}/recorder"]["folder"] = value("bags")
    content = {name: {"ros__parameters": values} for name, values in nodes.items()}
    with tempfile.NamedTemporaryFile("w", prefix="collab_llm_", suffix=".yaml", delete=False) as f:
        yaml.safe_dump(content, f)
    atexit.register(Path(f.name).unlink, missing_ok=True)
    return f.name
