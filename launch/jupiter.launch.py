r"""One model over several workers, and the server that asks them (docs/jupiter.md).

All on one machine:

    ros2 launch collab_llm jupiter.launch.py workers:=2

On several hosts: jupiter_worker.launch.py on each of them, then the server, here with one worker of
its own:

    ros2 launch collab_llm jupiter.launch.py workers:=1 hosts:=laptop:50561,rover:50561 \
        model:=/models/qwen worker_config:=worker.yaml params_file:=jupiter_lab.yaml

A worker that ends is started again after 2 s; the server goes on with the others meanwhile.
"""

import json
from pathlib import Path

from launch import Action, LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "workers": ("2", "Workers on this machine; 0: all are elsewhere."),
    "port": ("50561", "Port of the first worker on this machine; the next ones follow."),
    "hosts": ("", "Workers elsewhere, host:port, with commas; they come behind those of here."),
    "model": ("text-target", "Model: folder, hub id or shipped name; the same on every host."),
    "worker_config": ("", "Settings of the workers of here, YAML, such as token and TLS."),
    "devices": ("", "Names of all workers in profile and plan, in their order, with commas."),
    "profile": ("", "Profile of the devices (collab-llm jupiter profile)."),
    "plan": ("", "Stored plan (collab-llm jupiter plan)."),
    "params_file": ("jupiter.yaml", "The server's parameters: a file, or a name in config."),
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
PASSED_ON = ("params_file", "namespace", *CHOICES)
_THIS_MACHINE = "127.0.0.1"


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; start workers and server."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text)
        for name, (default, text) in ARGUMENTS.items()
    ]
    declared += [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, (default, text, choices) in CHOICES.items()
    ]
    return LaunchDescription([*declared, OpaqueFunction(function=_start)])


def _start(context: LaunchContext) -> list[Action]:
    value = {n: str(LaunchConfiguration(n).perform(context)) for n in (*ARGUMENTS, *CHOICES)}
    launch = PathJoinSubstitution([FindPackageShare("collab_llm"), "launch"])
    here = _addresses(value["workers"], value["port"])
    workers = [
        IncludeLaunchDescription(
            PathJoinSubstitution([launch, "jupiter_worker.launch.py"]),
            launch_arguments={
                "address": address,
                "model": value["model"],
                "config": value["worker_config"],
            }.items(),
        )
        for address in here
    ]
    everywhere = [*here, *_names(value["hosts"])]
    if not everywhere:
        raise ValueError("workers:=0 and no hosts: give the addresses of workers, hosts:=host:port")
    parameters = {"pipeline.workers": everywhere, "model.path": value["model"]}
    if value["devices"]:
        parameters["planning.devices"] = _names(value["devices"])
    for name in ("profile", "plan"):
        if value[name]:
            parameters[f"planning.{name}"] = str(Path(value[name]).expanduser().resolve())
    server = IncludeLaunchDescription(
        PathJoinSubstitution([launch, "protocol.launch.py"]),
        launch_arguments={
            "protocol": "jupiter",
            "parameters": json.dumps(parameters),
            **{name: value[name] for name in PASSED_ON},
        }.items(),
    )
    return [*workers, server]


def _addresses(workers: str, port: str) -> list[str]:
    if not (workers.isdecimal() and port.isdecimal()):
        raise ValueError(f"workers:={workers} port:={port}: give two numbers")
    return [f"{_THIS_MACHINE}:{int(port) + i}" for i in range(int(workers))]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
