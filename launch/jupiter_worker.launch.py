r"""A worker that holds some layers of a model: one for each host of Jupiter (docs/jupiter.md).

    ros2 launch collab_llm jupiter_worker.launch.py model:=/models/qwen address:=0.0.0.0:50561 \
        config:=worker.yaml

The worker needs no ROS; where there is none, `collab-llm jupiter-worker` does the same. It holds no
layers until jupiter_server tells it which ones.
"""

from pathlib import Path

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.substitutions import FindPackagePrefix

ARGUMENTS = {
    "address": ("127.0.0.1:50561", "Listen here, host:port."),
    "model": ("text-target", "Model: folder, hub id or shipped name; the same on every host."),
    "config": ("", "Settings, YAML, such as token and TLS; whoever reaches the port needs them."),
    "cores": ("", "Run on these processor cores only, such as 0 or 0,1."),
}
ON_EXIT = ("respawn", "When the worker ends: start it again after 2 s, or end the launch.")


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the process."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    default, text = ON_EXIT
    declared.append(
        DeclareLaunchArgument(
            "on_exit", default_value=default, description=text, choices=["respawn", "shutdown"]
        )
    )
    return LaunchDescription([*declared, OpaqueFunction(function=_process)])


def _process(context: LaunchContext) -> list[ExecuteProcess]:
    value = {name: str(LaunchConfiguration(name).perform(context)) for name in ARGUMENTS}
    if value["config"] and not Path(value["config"]).expanduser().is_file():
        raise FileNotFoundError(f"config:={value['config']} is no file")
    program = Path(FindPackagePrefix("collab_llm").perform(context)) / "lib/collab_llm/collab-llm"
    command = [str(program), "jupiter-worker", "--address", value["address"]]
    command += ["--model", value["model"]]
    command += ["--config", str(Path(value["config"]).expanduser())] if value["config"] else []
    command += ["--cores", value["cores"]] if value["cores"] else []
    respawn = LaunchConfiguration("on_exit").perform(context) == "respawn"
    return [
        ExecuteProcess(
            cmd=command,
            name="jupiter_worker",
            output="screen",
            respawn=respawn,
            respawn_delay=2.0,
            on_exit=None if respawn else Shutdown(reason="the worker ended"),
        )
    ]
