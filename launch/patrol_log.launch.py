"""Tell a robot's bags in words and answer a question about what it saw.

    ros2 launch collab_llm patrol_log.launch.py bags:=bags days:=7 place:="kitchen=0,0,3.5,4" \
        question:="what did you see in the kitchen this week?" params_file:=minions_openai.yaml
    ros2 launch collab_llm patrol_log.launch.py bags:=bags

The embedded models of the default params_file cannot plan such a question: name models of your own.
Without a question the node minions_server is started, which may read the folder of the document:
its actions and services take the document's name (docs/minions.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackagePrefix, FindPackageShare

ARGUMENTS = {
    "bags": ("bags", "A bag, or the folder with the recorder's bags (docs/replay.md)."),
    "log": ("logs/patrol.md", "The document that is made of them."),
    "days": ("0", "Tell of so many days until now; 0: of all."),
    "place": ("", "NAME=X1,Y1,X2,Y2: a part of the map with a name [m]. Empty: none."),
    "question": ("", "Asked about the document; empty: serve questions."),
    "protocol": ("minions", "How it is answered: minion, minions, rag, local-only, remote-only."),
    "params_file": ("minions.yaml", "The models: a file, or a name in the config folder."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, and start one process after the other."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_processes)])


def _processes(context: LaunchContext) -> list[ExecuteProcess]:
    value = {name: str(LaunchConfiguration(name).perform(context)) for name in ARGUMENTS}
    share = Path(FindPackageShare("collab_llm").perform(context)) / "config"
    config = Path(value["params_file"])
    config = config if config.is_file() else share / config
    if not config.is_file():
        raise FileNotFoundError(f"params_file:={value['params_file']} is no file, nor in {share}")
    program = Path(FindPackagePrefix("collab_llm").perform(context)) / "lib/collab_llm/collab-llm"
    log = Path(value["log"]).resolve()
    place = ["--place", value["place"]] if value["place"] else []
    ask = ["ask", str(log), value["question"], "--protocol", value["protocol"]]
    answer = ExecuteProcess(
        cmd=[str(program), *ask, "--config", str(config)],
        name="ask",
        output="screen",
        on_exit=Shutdown(reason="the question was answered"),
    )
    server = Node(
        package="collab_llm",
        executable="protocol_server",
        arguments=["minions"],
        name="minions_server",
        parameters=[str(config), {"library.folders": [str(log.parent)]}],
        output="screen",
        sigterm_timeout="20",  # s; results are delivered and models freed first
        on_exit=Shutdown(reason="the server ended"),
    )

    def told(event: Any, context: LaunchContext) -> list[Any]:
        if event.returncode:
            return [Shutdown(reason="the bags could not be told")]
        return [answer if value["question"] else server]

    tell = ["bag", "log", value["bags"], "--out", str(log), "--days", value["days"], *place]
    return [ExecuteProcess(cmd=[str(program), *tell], name="tell", output="screen", on_exit=told)]
