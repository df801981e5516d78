"""Launch files under the real launch system: what they start, and one start of everything."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import ROOT

from collab_llm_lab.training.text.samples import SUB_DOMAINS
from collab_llm_nodes.config import from_mapping

if find_spec("launch_ros") is None and "ROS_DISTRO" not in os.environ:  # with it the run fails
    pytest.skip("launch files need ROS 2's launch (no wheel has it)", allow_module_level=True)

NODES = [
    "camera_ingest",
    "cloud_verifier_bridge",
    "draft_vlm",
    "predraft_cache",
    "generate_router",
    "navigation_action_parser",
    "navigator",
    "motion_guard",
]
COMPOSED = ["graph", "motion"]
GO2 = [*COMPOSED, "motion_watchdog"]
EXTRAS = ["recorder", "dashboard", "markers", "instruct", "protocol_server", "collab-llm"]

pytestmark = [pytest.mark.ros, pytest.mark.launch_files]

# What `ros2 launch FILE NAME:=VALUE ...` does, until each `instruct` has ended if there are some.
LAUNCH = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription, RegisterEventHandler, Shutdown
from launch.event_handlers import OnProcessExit
from launch.launch_description_sources import PythonLaunchDescriptionSource

busy = sum(a.startswith("instruction") for a in sys.argv[2:])

def on_exit(event, context):
    global busy
    if event.process_name.startswith("instruct"):
        busy -= 1
        return [Shutdown(reason=f"instruct returned {event.returncode}")] if not busy else []

service = LaunchService()
service.include_launch_description(LaunchDescription([
    RegisterEventHandler(OnProcessExit(on_exit=on_exit)),
    IncludeLaunchDescription(
        PythonLaunchDescriptionSource(sys.argv[1]),
        launch_arguments=[tuple(a.split(":=", 1)) for a in sys.argv[2:]],
    ),
]))
sys.exit(service.run())
"""


def launch(
    file: str, arguments: dict[str, str], timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a launch file to its end."""
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(ROOT / "launch" / file)]
        + [f"{name}:={value}" for name, value in arguments.items()],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


# Says how it was called, under its namespace and name, and keeps what will be gone afterwards.
# The end of one may end the others, so all wait for those that are expected.
RECORD = """#!/bin/sh
who={name}
for argument in "$@"; do
    case "$argument" in __ns:=/?*) who="$(echo "${{argument#__ns:=/}}" | tr / .).{name}" ;; esac
    case "$1 $argument" in jupiter-worker*:5056?) who="jupiter-worker.${{argument##*:}}" ;; esac
done
[ ! -e "{calls}/$who" ] || who="$who.again"
echo "$ROS_AUTOMATIC_DISCOVERY_RANGE" > "{seen}/$who"
for argument in "$@"; do
    case "$argument" in */collab_llm_*.yaml) cp "$argument" "{seen}/$who.yaml" ;; esac
done
printf "%s\\n" "$@" > "{calls}/$who.new"
mv "{calls}/$who.new" "{calls}/$who"
for each in $EXPECTED; do while [ ! -e "{calls}/$each" ]; do sleep 0.05; done; done
"""


class Package:
    """An installed ``collab_llm`` whose executables only write down how they were called."""

    def __init__(self, prefix: Path) -> None:
        self.prefix, self.calls, self.seen = prefix, prefix / "calls", prefix / "seen"
        (prefix / "share/ament_index/resource_index/packages").mkdir(parents=True)
        (prefix / "share/ament_index/resource_index/packages/collab_llm").touch()
        (prefix / "share/collab_llm").mkdir()
        for folder in ("launch", "config", "models"):
            (prefix / "share/collab_llm" / folder).symlink_to(ROOT / folder)
        (prefix / "lib/collab_llm").mkdir(parents=True)
        self.calls.mkdir()
        self.seen.mkdir()
        for name in [*NODES, "sim_go2", "go2_driver", *GO2, *EXTRAS]:
            script = prefix / "lib/collab_llm" / name
            script.write_text(RECORD.format(name=name, calls=self.calls, seen=self.seen))
            script.chmod(0o755)

    def launch(self, file: str, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a launch file of this package to its end."""
        path = f"{self.prefix}:{os.environ.get('AMENT_PREFIX_PATH', '')}"
        return launch(file, arguments, 100.0, AMENT_PREFIX_PATH=path)

    def started(self, expected: list[str], file: str, **arguments: str) -> dict[str, list[str]]:
        """The arguments of the executables that a launch file starts: these, and no others."""
        os.environ["EXPECTED"] = " ".join(expected)
        done = self.launch(file, **arguments)
        calls = {f.name: f.read_text().splitlines() for f in self.calls.iterdir()}
        assert set(calls) == set(expected), done.stdout + done.stderr
        for call in calls.values():  # what was written for them is gone with the launch
            written = [f for f in parameter_files(call) if f.name.startswith("collab_llm_")]
            assert not any(f.is_file() for f in written)
        return calls

    def override(self, executable: str, node: str) -> dict[str, Any]:
        """Return the values that the launch arguments gave a node's parameters."""
        content = yaml.safe_load((self.seen / f"{executable}.yaml").read_text())
        return dict(content[node]["ros__parameters"])

    def discovery(self, executable: str) -> str:
        """Return the discovery range of ``executable``."""
        return (self.seen / executable).read_text().strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setenv("EXPECTED", "")
    return Package(tmp_path / "prefix")


def parameter_files(arguments: list[str]) -> list[Path]:
    return [Path(b) for a, b in zip(arguments, arguments[1:], strict=False) if a == "--params-file"]


def test_what_thinks_and_what_moves_are_processes_of_their_own(package: Package) -> None:
    started = package.started(GO2, "go2.launch.py", verifier="cloud:50551")
    for arguments in started.values():
        files = parameter_files(arguments)
        assert [f.name for f in files[:2]] == ["go2.yaml", "qwen2_vl_2b_7b.yaml"]
        assert all(f.is_file() for f in files[:2])
        assert len(files) == 3
    assert started["motion"][:2] == ["--driver", "go2"]
    for name, call in started.items():
        assert call[call.index("--enclave") + 1] == f"/collab_llm/{name}"
    bridge = package.override("graph", "/cloud_verifier_bridge")
    assert bridge == {"autostart": True, "verifier.address": "cloud:50551"}
    assert "model.path" not in package.override("graph", "/draft_vlm")


def test_what_launch_repeats_at_the_end_of_a_process_is_short(package: Package) -> None:
    """It logs the whole command, which one level per logger would make a kilobyte long."""
    started = package.started(GO2, "go2.launch.py", verifier="cloud:50551")
    for arguments in started.values():
        files = {str(file) for file in parameter_files(arguments)}
        assert len(" ".join(a for a in arguments if a not in files)) < 200, arguments


@pytest.mark.parametrize(
    ("driver", "node"),
    [("go2", ["go2_driver", "motion_watchdog"]), ("none", []), ("sim", ["sim_go2"])],
)
def test_one_process_each_in_a_namespace_with_an_instruction(
    package: Package, driver: str, node: list[str]
) -> None:
    instruction = 'it\'s "here"; find it'
    started = package.started(
        [f"robot1.{name}" for name in (*NODES, *node, "instruct")],
        "go2.launch.py",
        composed="false",
        namespace="robot1",
        model="/models/draft",
        autostart="false",
        instruction=instruction,
        driver=driver,
    )
    assert started["robot1.instruct"][:3] == ["--confirm", "--", instruction]
    draft = package.override("robot1.draft_vlm", "/robot1/draft_vlm")
    assert draft == {"autostart": False, "model.path": "/models/draft"}


def test_the_simulation_has_everything(package: Package) -> None:
    started = package.started(
        [*COMPOSED, "collab-llm"], "sim.launch.py", verifier="127.0.0.1:50999"
    )
    assert started["collab-llm"][:2] == ["verifier", "--config"]
    assert started["collab-llm"][2].endswith("config/verifier_embedded.yaml")
    assert started["collab-llm"][3:6] == ["--address", "127.0.0.1:50999", "--model"]
    assert started["collab-llm"][6].endswith("models/nav-target")
    assert started["motion"][:2] == ["--driver", "sim"]
    for name in COMPOSED:
        names = [f.name for f in parameter_files(started[name])[:2]]
        assert names == ["sim.yaml", "embedded.yaml"]
    draft = package.override("graph", "/draft_vlm")
    assert draft["model.path"].endswith("models/nav-draft")
    bridge = package.override("graph", "/cloud_verifier_bridge")
    assert bridge["verifier.address"] == "127.0.0.1:50999"


def test_a_simulation_can_use_a_verifier_that_runs_elsewhere(package: Package) -> None:
    arguments = {"start_verifier": "false", "verifier": "cloud:50551", "seed": "7"}
    package.started(COMPOSED, "sim.launch.py", **arguments)
    bridge = package.override("graph", "/cloud_verifier_bridge")
    assert bridge["verifier.address"] == "cloud:50551"
    assert package.override("motion", "/sim_go2")["seed"] == 7


@pytest.mark.parametrize("file", ["go2.launch.py", "sim.launch.py"])
@pytest.mark.parametrize("space", ["", "robot1"])
def test_in_a_dry_run_each_of_those_who_move_the_robot_is_told(
    package: Package, file: str, space: str
) -> None:
    robot = GO2 if file == "go2.launch.py" else COMPOSED
    before = f"{space}." if space else ""
    verifier = ["collab-llm"] if file == "sim.launch.py" else []
    expected = [*(before + name for name in robot), *verifier]
    package.started(expected, file, dry_run="true", namespace=space)
    node = f"/{space}/" if space else "/"
    told = {
        n: package.override(f"{before}motion", node + n) for n in ("motion_guard", "go2_driver")
    }
    assert all(each["dry_run"] is True for each in told.values())
    assert package.override(f"{before}graph", f"{node}navigator")["output"] == "none"


def test_two_robots_share_the_verifier_and_nothing_else(package: Package) -> None:
    processes = [*COMPOSED, "dashboard", "recorder"]
    robots = {n: [f"robot{n}.{name}" for name in processes] for n in (1, 2)}
    expected = [*robots[1], *robots[2], "collab-llm"]
    asked = {"dashboard": "true", "record": "true", "verifier": "127.0.0.1:50999"}
    started = package.started(expected, "two_robots.launch.py", **asked)
    for number, names in robots.items():
        space = f"/robot{number}"
        assert all("/clock:=clock" in started[name] for name in names)
        graph, motion, dashboard, recorder = names
        assert package.override(motion, f"{space}/sim_go2")["seed"] == number
        assert package.override(dashboard, f"{space}/dashboard")["port"] == 8080 + number
        assert package.override(recorder, f"{space}/recorder")["folder"] == f"bags/robot{number}"
        bridge = package.override(graph, f"{space}/cloud_verifier_bridge")
        assert bridge["verifier.address"] == "127.0.0.1:50999"


@pytest.mark.parametrize("file", ["sim.launch.py", "go2.launch.py"])
def test_dashboard_recording_and_markers_are_asked_for(package: Package, file: str) -> None:
    verifier = ["collab-llm"] if file == "sim.launch.py" else []
    robot = COMPOSED if verifier else GO2
    expected = [*robot, *verifier, "dashboard", "recorder", "markers"]
    asked = {"dashboard": "true", "record": "true", "markers": "true"}
    package.started(expected, file, bags="/tmp/drives", **asked)
    recorder = package.override("recorder", "/recorder")
    assert recorder == {"autostart": True, "folder": "/tmp/drives"}
    assert package.discovery("dashboard") == package.discovery("motion")


@pytest.mark.parametrize("file", ["sim.launch.py", "go2.launch.py"])
def test_further_protocols_are_served(package: Package, file: str) -> None:
    verifier = ["collab-llm"] if file == "sim.launch.py" else []
    expected = [*(COMPOSED if verifier else GO2), *verifier, "protocol_server"]
    asked = {"protocols": "echo", "log_level": "debug"}
    arguments = package.started(expected, file, **asked)["protocol_server"]
    assert arguments[0] == "echo"
    assert "__node:=echo_server" in arguments
    assert "echo_server:=debug" in arguments
    assert package.override("protocol_server", "/echo_server") == {"autostart": True}


@pytest.mark.parametrize("protocols", ["", "dragon"])
def test_a_memory_is_dragon_that_listens_to_the_robot(package: Package, protocols: str) -> None:
    expected = [*GO2, "protocol_server"]
    asked = {"memory": "true", "protocols": protocols}
    started = package.started(expected, "go2.launch.py", **asked)
    assert started["protocol_server"][0] == "dragon"
    assert parameter_files(started["protocol_server"])[0].name == "dragon.yaml"
    told = package.override("protocol_server", "/dragon_server")
    assert told == {"autostart": True, "memory.fill": True}


@pytest.mark.parametrize(("seed", "name"), [("", "room-0"), ("3", "room-3")])
def test_the_memory_of_a_simulated_robot_is_that_of_its_room(
    package: Package, seed: str, name: str
) -> None:
    expected = [*COMPOSED, "collab-llm", "protocol_server"]
    package.started(expected, "sim.launch.py", memory="true", seed=seed)
    told = package.override("protocol_server", "/dragon_server")
    assert told == {"autostart": True, "memory.fill": True, "memory.world": name}


@pytest.mark.parametrize(
    ("file", "arguments", "words"),
    [
        ("go2.launch.py", {}, ["--confirm", "--", "find it"]),
        ("go2.launch.py", {"confirm": "false"}, ["--", "find it"]),
        ("sim.launch.py", {}, ["--", "find it"]),
        ("sim.launch.py", {"confirm": "true"}, ["--confirm", "--", "find it"]),
    ],
)
def test_a_real_robot_moves_only_once_its_instruction_is_confirmed(
    package: Package, file: str, arguments: dict[str, str], words: list[str]
) -> None:
    verifier = ["collab-llm"] if file == "sim.launch.py" else []
    expected = [*(COMPOSED if verifier else GO2), *verifier, "instruct"]
    started = package.started(expected, file, instruction="find it", **arguments)
    assert started["instruct"][: len(words)] == words


def test_a_further_protocol_on_the_robot_has_its_own_file_and_the_robots(package: Package) -> None:
    """The robot's files come later, so that they can overrule the protocol's own."""
    expected = [*GO2, "protocol_server"]
    started = package.started(expected, "go2.launch.py", protocols="collective")
    names = [f.name for f in parameter_files(started["protocol_server"])[:3]]
    assert names == ["collective.yaml", "go2.yaml", "qwen2_vl_2b_7b.yaml"]


def test_a_protocol_is_served_without_a_robot(package: Package) -> None:
    asked = {"namespace": "cloud", "autostart": "false", "log_level": "debug"}
    started = package.started(["cloud.protocol_server"], "protocol.launch.py", **asked)
    (call,) = started.values()
    assert call[0] == "collective"
    told = {"__node:=collective_server", "cloud.collective_server:=debug", "autostart:=false"}
    assert told <= set(call)
    files = parameter_files(call)
    assert files[0] == package.prefix / "share/collab_llm/config/collective.yaml"
    assert files[0].is_file()


def test_another_protocol_is_served_with_a_file_of_ones_own(
    package: Package, tmp_path: Path
) -> None:
    (own := tmp_path / "own.yaml").write_text("{}")
    asked = {"protocol": "echo", "params_file": str(own)}
    started = package.started(["protocol_server"], "protocol.launch.py", **asked)
    assert started["protocol_server"][0] == "echo"
    assert parameter_files(started["protocol_server"])[0] == own


def test_a_model_over_workers_of_one_machine(package: Package) -> None:
    workers = [f"jupiter-worker.{port}" for port in (50561, 50562, 50563)]
    started = package.started([*workers, "protocol_server"], "jupiter.launch.py", workers="3")
    for name in workers:
        address = f"127.0.0.1:{name.rpartition('.')[2]}"
        command = ["jupiter-worker", "--address", address, "--model", "text-target"]
        assert started[name] == command
    server = started["protocol_server"]
    assert server[0] == "jupiter"
    assert {"__node:=jupiter_server", "jupiter_server:=info"} <= set(server)
    own, given = parameter_files(server)
    assert own == package.prefix / "share/collab_llm/config/jupiter.yaml"
    assert given.name.startswith("launch_params_")


def test_a_model_over_workers_of_several_hosts(package: Package, tmp_path: Path) -> None:
    """Read what the server is told while it runs: the launch removes the file."""
    (config := tmp_path / "worker.yaml").write_text("{}")
    (package.prefix / "lib/collab_llm/protocol_server").write_text(
        RECORD.format(name="protocol_server", calls=package.calls, seen=package.seen).replace(
            "*/collab_llm_*.yaml", "*/launch_params_*"
        )
    )
    expected = ["jupiter-worker.50561", "lab.protocol_server"]
    started = package.started(
        expected,
        "jupiter.launch.py",
        workers="1",
        hosts="laptop:50561, rover:50570",
        devices="robot,laptop,rover",
        profile="lab.json",
        model="/models/qwen",
        worker_config=str(config),
        namespace="lab",
    )
    worker = started["jupiter-worker.50561"]
    assert worker[3:] == ["--model", "/models/qwen", "--config", str(config)]
    text = (package.seen / "lab.protocol_server.yaml").read_text()
    ((_, content),) = yaml.safe_load(text.replace("!!python/tuple", "")).items()
    told = content["ros__parameters"]
    assert told["pipeline.workers"] == ["127.0.0.1:50561", "laptop:50561", "rover:50570"]
    assert told["planning.devices"] == ["robot", "laptop", "rover"]
    assert told["planning.profile"] == str(Path("lab.json").resolve())
    assert told["model.path"] == "/models/qwen"
    assert "planning.plan" not in told


def test_a_worker_of_another_host(package: Package) -> None:
    asked = {"address": "0.0.0.0:50569", "model": "/models/qwen", "cores": "0,1"}
    asked["on_exit"] = "shutdown"
    started = package.started(["jupiter-worker.50569"], "jupiter_worker.launch.py", **asked)
    (call,) = started.values()
    assert call[1:] == ["--address", "0.0.0.0:50569", "--model", "/models/qwen", "--cores", "0,1"]


def test_a_worker_that_ended_is_started_again(package: Package) -> None:
    """The server's end, which ends the launch, waits for the worker's second start."""
    again = package.calls / "jupiter-worker.50561.again"
    waits = f"#!/bin/sh\nwhile [ ! -e {again} ]; do sleep 0.05; done\n"
    (package.prefix / "lib/collab_llm/protocol_server").write_text(waits)
    package.launch("jupiter.launch.py", workers="1")
    assert again.exists()


@pytest.mark.parametrize(
    ("file", "arguments", "told"),
    [
        ("jupiter.launch.py", {"workers": "0"}, "give the addresses of workers"),
        ("jupiter.launch.py", {"workers": "two"}, "give two numbers"),
        ("jupiter_worker.launch.py", {"config": "nowhere.yaml"}, "is no file"),
        ("protocol.launch.py", {"parameters": "[1]"}, "is no mapping"),
    ],
)
def test_arguments_that_cannot_be_are_told(
    package: Package, file: str, arguments: dict[str, str], told: str
) -> None:
    done = package.launch(file, **arguments)
    assert done.returncode != 0
    assert told in done.stdout + done.stderr
    assert not list(package.calls.iterdir())


@pytest.mark.parametrize("question", ["", "what did you see?"])
def test_bags_are_told_before_questions_are_answered(
    package: Package, tmp_path: Path, question: str
) -> None:
    log = tmp_path / "logs" / "patrol.md"
    asked = {"bags": "/bags", "log": str(log), "place": "kitchen=0,0,1,1", "question": question}
    done = package.launch("patrol_log.launch.py", **asked)
    calls = {f.name: f.read_text().splitlines() for f in package.calls.iterdir()}
    tell = ["bag", "log", "/bags", "--out", str(log), "--days", "0", "--place", "kitchen=0,0,1,1"]
    assert calls.pop("collab-llm") == tell, done.stdout + done.stderr
    (later,) = calls.values()
    config = str(package.prefix / "share/collab_llm/config/minions.yaml")
    if question:
        ask = ["ask", str(log), question, "--protocol", "minions", "--config", config]
        assert later == ask
    else:
        assert later[0] == "minions"
        assert str(parameter_files(later)[0]) == config


def test_the_file_of_collective_speculation_names_the_text_models() -> None:
    from collab_llm_nodes.nodes.collective_server import CollectiveServerConfig  # rclpy

    content = yaml.safe_load((ROOT / "config" / "collective.yaml").read_text())
    parameters = content["/**/collective_server"]["ros__parameters"]
    config = from_mapping(CollectiveServerConfig, parameters)
    assert config.target.path == "text-target"
    assert {*config.drafts.paths} == {f"ssm-{name}" for name in SUB_DOMAINS}


@pytest.mark.parametrize(
    ("file", "argument"),
    [
        ("go2.launch.py", "params_file"),
        ("go2.launch.py", "robot_file"),
        ("verifier.launch.py", "config"),
        ("protocol.launch.py", "params_file"),
    ],
)
def test_a_file_that_does_not_exist_is_named(package: Package, file: str, argument: str) -> None:
    done = package.launch(file, **{argument: "nowhere.yaml"})
    assert done.returncode != 0
    assert f"{argument}:=nowhere.yaml is no file" in done.stdout + done.stderr
    assert ".yaml" in (done.stdout + done.stderr).partition("nor one of")[2]  # what there is
    assert not list(package.calls.iterdir())


@pytest.mark.parametrize("file", ["go2.launch.py", "sim.launch.py"])
def test_a_log_level_that_is_none_is_one_clear_line(package: Package, file: str) -> None:
    done = package.launch(file, log_level="loud")
    told = done.stdout + done.stderr
    assert done.returncode == 1
    assert 'Argument "log_level" provided value "loud" is not valid' in told
    assert "Traceback" not in told
    assert not list(package.calls.iterdir())


def test_the_log_level_is_that_of_our_own_loggers(package: Package) -> None:
    """The level of rcl's is another matter: hundreds of thousands of lines."""
    expected = [f"fleet.one.{name}" for name in GO2]
    arguments = {"namespace": "/fleet/one", "log_level": "debug"}
    started = package.started(expected, "go2.launch.py", **arguments)
    for call in started.values():
        levels = [b for a, b in zip(call, call[1:], strict=False) if a == "--log-level"]
        assert {"fleet.one.navigator:=debug", "fleet.one.motion_guard:=debug"} <= set(levels)
        assert all(level.endswith(":=debug") for level in levels)


@pytest.mark.parametrize(
    ("composed", "name"), [("true", "graph"), ("true", "motion"), ("false", "motion_guard")]
)
def test_the_end_of_a_process_ends_the_launch(package: Package, composed: str, name: str) -> None:
    for other in {*NODES, "go2_driver", *GO2, "instruct"} - {name}:
        (package.prefix / "lib/collab_llm" / other).write_text("#!/bin/sh\nexec sleep 300\n")
    done = package.launch("go2.launch.py", instruction="find it", composed=composed)
    assert re.search(rf"process\[{name}-\d\] was required", done.stdout + done.stderr)


def test_a_node_that_ended_is_started_again(package: Package) -> None:
    """The second start of the guard ends the launch, through `instruct`."""
    again = package.calls / "motion_guard.again"
    waits = f"#!/bin/sh\nwhile [ ! -e {again} ]; do sleep 0.05; done\n"
    (package.prefix / "lib/collab_llm/instruct").write_text(waits)
    for other in {*NODES, "go2_driver", "motion_watchdog"} - {"motion_guard"}:
        (package.prefix / "lib/collab_llm" / other).write_text("#!/bin/sh\nexec sleep 300\n")
    arguments = {"instruction": "find it", "composed": "false", "on_exit": "respawn"}
    package.launch("go2.launch.py", **arguments)
    assert again.exists()


@pytest.fixture
def description(file: str) -> Iterator[Any]:
    """The description in a launch file. Importing `launch` changes all loggers that follow."""
    kind, level = logging.getLoggerClass(), logging.root.level
    from launch.launch_context import LaunchContext
    from launch.launch_description_sources import PythonLaunchDescriptionSource

    source = PythonLaunchDescriptionSource(str(ROOT / "launch" / file))
    yield source.get_launch_description(LaunchContext())
    logging.setLoggerClass(kind)
    logging.root.setLevel(level)


@pytest.mark.parametrize("file", ["sim.launch.py", "two_robots.launch.py"])
def test_no_argument_is_shown_that_has_no_effect(description: Any, file: str) -> None:
    """``--show-args`` lists choices where there are some, and no robot's driver."""
    shown = {argument.name: argument for argument in description.get_launch_arguments()}
    if "driver" in shown:
        assert shown["driver"].choices == ["sim"]
    flags = {"composed", "dashboard", "record", "markers", "start_verifier", "autostart", "confirm"}
    for name in flags & set(shown):
        assert shown[name].choices == ["true", "false"]
    assert {"log_level", "on_exit"} <= {name for name in shown if shown[name].choices}
    overridden = {"namespace", "seed", "instruction", "start_verifier", "bags", "driver"}
    assert not (file == "two_robots.launch.py" and overridden & set(shown))


@pytest.mark.parametrize(
    ("file", "arguments", "discovery"),
    [
        ("sim.launch.py", {}, "LOCALHOST"),
        ("sim.launch.py", {"discovery": "SUBNET"}, "SUBNET"),
        ("go2.launch.py", {}, "SYSTEM_DEFAULT"),
    ],
)
def test_a_simulated_robot_is_heard_on_this_machine_only(
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    arguments: dict[str, str],
    discovery: str,
) -> None:
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "SYSTEM_DEFAULT")
    expected = [*COMPOSED, "collab-llm"] if file == "sim.launch.py" else GO2
    for executable in package.started(expected, file, **arguments):
        assert package.discovery(executable) == discovery


@pytest.mark.parametrize("file", sorted(f.name for f in (ROOT / "launch").glob("*.launch.py")))
def test_every_argument_is_described(description: Any) -> None:
    from launch.actions import DeclareLaunchArgument

    declared = [e for e in description.entities if isinstance(e, DeclareLaunchArgument)]
    assert declared
    assert all(len(argument.description) > 10 for argument in declared)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_starts_answers_and_ends(ros_context: Any, tmp_path: Path) -> None:
    """Random models say nothing readable: the mission ends with that status, standing still."""
    from tiny_models import tiny_folder

    config = tmp_path / "verifier.yaml"
    config.write_text("address: 127.0.0.1:50551\n")
    arguments = {
        "config": str(config),
        "verifier": f"127.0.0.1:{51000 + ros_context.get_domain_id()}",
        "model": str(tiny_folder("qwen2_vl", 0)),
        "target_model": str(tiny_folder("qwen2_vl", 1)),
        "instruction": "find the red ball",
    }
    done = launch("sim.launch.py", arguments, 540.0)
    said = done.stdout + done.stderr
    assert re.search(r"ended: (the text holds no action|no text|more than one)", said), said
    assert "(0 steps, 0.00 m)" in said, said
    assert "process has finished cleanly" in said, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_robots_in_one_domain_both_finish_a_mission(ros_context: Any) -> None:
    """The robots use the shipped models; what each is to find is in its view at the start."""
    arguments = {"verifier": f"127.0.0.1:{51000 + ros_context.get_domain_id()}"}
    arguments |= {"instruction1": "find the orange stool", "instruction2": "find the sofa"}
    done = launch("two_robots.launch.py", arguments, 840.0)
    said = done.stdout + done.stderr
    assert len(re.findall(r"\[instruct-\d+\] arrived \(\d+ steps", said)) == 2, said
    assert "InvalidInput: odom" not in said, said  # odometry by another clock
