r"""The cloud side: one verifier process that serves any number of robots.

    ros2 launch collab_llm verifier.launch.py config:=verifier_qwen2_vl_7b.yaml \
        verifier:=0.0.0.0:50551

The verifier needs no ROS; where there is none, `collab-llm verifier` does the same.
"""

from pathlib import Path

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.substitutions import FindPackagePrefix, FindPackageShare


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the process."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "config",
                default_value="verifier_embedded.yaml",
                description="Settings: a file, or the name of one of the package's config folder.",
            ),
            DeclareLaunchArgument(
                "target_model",
                default_value="",
                description="Target model: folder or hub id. Empty: as in config, or the embedded.",
            ),
            DeclareLaunchArgument(
                "verifier", default_value="127.0.0.1:50551", description="Listen here, host:port."
            ),
            OpaqueFunction(function=_process),
        ]
    )


def _process(context: LaunchContext) -> list[ExecuteProcess]:
    config, model, address = (
        LaunchConfiguration(name).perform(context)
        for name in ("config", "target_model", "verifier")
    )
    share = Path(FindPackageShare("collab_llm").perform(context))
    file = Path(config) if Path(config).is_file() else share / "config" / config
    if not file.is_file():
        known = ", ".join(sorted(f.name for f in file.parent.glob("verifier_*.yaml")))
        raise FileNotFoundError(f"config:={config} is no file, nor one of {file.parent}: {known}")
    if not model and file.name == "verifier_embedded.yaml":
        model = str(share / "models" / "nav-target")
    program = Path(FindPackagePrefix("collab_llm").perform(context)) / "lib/collab_llm/collab-llm"
    command = [str(program), "verifier", "--config", str(file), "--address", address]
    return [
        ExecuteProcess(
            cmd=command + (["--model", model] if model else []),
            name="verifier",
            output="screen",
            sigterm_timeout="20",  # s; it finishes open sessions first (drain_s)
            on_exit=Shutdown(reason="the verifier ended"),
        )
    ]
