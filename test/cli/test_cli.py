"""The command line: what people see before anything heavy starts."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from folders import ROOT
from typer.testing import CliRunner
from waiting import gone

from collab_llm_lab.training.nav import gates
from collab_llm_nodes import programs
from collab_llm_nodes.cli import app
from collab_llm_nodes.cli.options import writable
from collab_llm_nodes.cli.output import write_json
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud import service
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.ros.domain import DOMAINS, own_domain


def commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield every command in ``group`` with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name)), command


ALL = dict(commands(typer.main.get_command(app)))
WITHOUT_RESULTS = {"record", "bench documents"}  # they write bags, and text files
WITH_RESULTS = [name.split() for name in ALL if name not in WITHOUT_RESULTS]


def test_the_documentation_shows_every_command() -> None:
    assert len(ALL) >= 13
    text = (ROOT / "README.md").read_text(encoding="utf-8") + "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")
    )
    assert [name for name in ALL if f"collab-llm {name}" not in " ".join(text.split())] == []


def bare(text: str) -> str:
    """Return ``text`` without spaces, frames, and the backticks that a terminal shows as colour."""
    return re.sub(r"[\s`│]", "", text)


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_help_with_every_word(name: str) -> None:
    """Units in brackets too, which markup takes for styles."""
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    assert f"collab-llm {name} " in result.output
    shown = bare(result.output)
    assert bare(ALL[name].help or "") in shown
    for option in ALL[name].params:
        assert bare(getattr(option, "help", None) or "") in shown, option.name


@pytest.mark.parametrize("name", ALL)
def test_the_help_of_a_command_shows_its_text_as_it_is_written(name: str) -> None:
    """Units in brackets, stars and underscores are no markup; code between backticks is."""
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "1000"})
    shown = " ".join(result.output.split())
    helps = [getattr(each, "help", None) or "" for each in ALL[name].params]
    texts = [" ".join(text.replace("`", "").split()) for text in helps]
    assert [text for text in texts if text not in shown] == []


@pytest.mark.parametrize("command", WITH_RESULTS, ids=" ".join)
def test_every_command_with_results_writes_json(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize("command", WITH_RESULTS, ids=" ".join)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("no folder")
    result = CliRunner().invoke(app, [*command, "--json", str(blocker / "results.json")])
    assert result.exit_code == 2
    assert "--json" in result.output


@pytest.mark.parametrize(
    "option", ["eval text --json /proc/results.json", "bench link --plot /proc/plot.png"]
)
def test_a_folder_that_takes_no_file_is_refused_before_the_work(option: str) -> None:
    """For root as well, who may write to every folder by its permissions."""
    result = CliRunner().invoke(app, option.split(), env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert f"Invalid value for '{option.split()[2]}'" in result.output


def test_a_file_that_can_be_written_is_not_made_before_its_results(tmp_path: Path) -> None:
    """Scripts wait for what ``verifier --json`` writes."""
    kept = tmp_path / "kept.json"
    kept.write_text("earlier results")
    for file in (tmp_path / "new" / "up.json", kept, Path("/dev/null"), None):
        assert writable(file) == file
    assert list((tmp_path / "new").iterdir()) == []
    assert kept.read_text() == "earlier results"


@pytest.mark.parametrize("command", WITH_RESULTS, ids=" ".join)
def test_a_folder_is_no_place_for_results(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, [*command, "--json", str(tmp_path)], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert result.exit_code == 2
    assert "--json" in result.output
    assert "is a folder" in result.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("verifier --emulated-compute-s -1", "--emulated-compute-s"),
        ("demo --emulated-compute-s -1", "--emulated-compute-s"),
        ("demo --config /", "--config"),
        ("bench safety --trials 0", "--trials"),
        ("bench engine --threads 0", "--threads"),
        ("train nav --hours -1", "--hours"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_options_name(command: str, option: str) -> None:
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 2
    assert option in result.output


# A machine without ROS 2, where `pip install .` was all.
WITHOUT_ROS = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root in ("rclpy", "collab_llm") or root.endswith(("_msgs", "_interfaces", "_srvs")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""
NEEDS_ROS = {
    "demo": [],
    "record": [],
    "foxglove": [],
    "mcp": [],
    "replay": [str(ROOT / "test/bags/room"), "--nodes"],
    "bench ros": [],
    "bench safety": [],
}
"""The commands that cannot do without, and their arguments; tests take all others from the CLI."""


def without_ros(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_ROS + script, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "300", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,  # torch and the like are imported, perhaps on a busy machine
        check=False,
    )


@pytest.mark.timeout(520)
@pytest.mark.parametrize(
    "command",
    [
        c if c in ("demo", "bench ros") else pytest.param(c, marks=pytest.mark.exhaustive)
        for c in NEEDS_ROS
    ],
)
def test_without_ros_a_command_that_needs_it_ends_in_one_line(command: str, tmp_path: Path) -> None:
    script = "sys.argv[0] = 'collab-llm'; from collab_llm_nodes.cli import main; main()"
    done = without_ros(script, *command.split(), *NEEDS_ROS[command], folder=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("INVALID_CONFIG: this needs ROS 2")
    assert "make build" in line


@pytest.mark.timeout(520)
def test_without_ros_every_other_command_finds_what_it_imports(tmp_path: Path) -> None:
    modules = set()
    for name, command in ALL.items():
        if name not in NEEDS_ROS:
            source = ast.parse(textwrap.dedent(inspect.getsource(command.callback)))
            nodes = (node for node in ast.walk(source) if isinstance(node, ast.ImportFrom))
            modules |= {node.module for node in nodes if "ray" not in str(node.module)}
    assert len(modules) > 8
    script = "from importlib import import_module\nfor name in sys.argv[1:]: import_module(name)"
    done = without_ros(script, *sorted(map(str, modules)), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_verifier_without_a_model_serves_the_demo_s_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(
        "collab_llm_nodes.protocols.edge_cloud.service.serve", lambda s, _: served.append(s)
    )
    result = CliRunner().invoke(app, ["verifier", "--address", "127.0.0.1:0"])
    assert result.exit_code == 0
    assert (served[0].model.path, served[0].address) == ("nav-target", "127.0.0.1:0")
    (line,) = result.output.splitlines()
    assert "WARNING" in line
    assert "the small model of the demo" in line


@pytest.mark.parametrize("field", ["address", "metrics_address"])
def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[VerifierConfig] = []
    monkeypatch.setattr(service, "load_engine", loaded.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = from_mapping(VerifierConfig, {"address": "127.0.0.1:0", field: address})
        with pytest.raises(ConfigError, match=f"cannot listen on {address}") as refused:
            service.serve(config, lambda port: None)
    assert refused.value.field == field
    assert not loaded


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"collab-llm \S+\n", result.output)


# A command with a child process, which is ended before it has done anything. `setpriv` first asks
# for the signal, then becomes the child: before that nobody would tell it that its parent is gone.
WAITING = """
import os, signal, sys, time
from pathlib import Path
from collab_llm_nodes import cli
from collab_llm_nodes.processes import run_process

@cli.app.command("wait")
def wait():
    with run_process("child", ["sleep", "100"]) as child:
        print(child.pid, flush=True)
        while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\\n":  # python, setpriv
            time.sleep(0.01)
        os.kill(os.getpid(), int(number))
        signal.pause()

number = sys.argv.pop()
sys.argv = ["collab-llm", "wait"]
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_command_that_is_ended_leaves_no_process_behind(number: int, status: int) -> None:
    command = [sys.executable, "-c", WAITING, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert gone(int(done.stdout))


@pytest.mark.parametrize(
    "option",
    [["demo", "--film", "x.mp4"], ["bench", "verifier", "--plot", "x.xyz"]],
    ids=lambda option: option[-1],
)
def test_a_picture_of_no_known_kind_is_refused_before_the_work(option: list[str]) -> None:
    result = CliRunner().invoke(app, option, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "should end in ." in result.output


def test_results_that_cannot_be_written_are_told_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``replay`` exits with 1 if something differs."""
    with pytest.raises(SystemExit) as ended:
        write_json(tmp_path, {})
    assert ended.value.code == 2
    assert "--json" in capsys.readouterr().err


def test_a_file_of_results_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts wait for what ``verifier --json`` writes."""
    file, whole = tmp_path / "up.json", Path.replace

    def look(part: Path, target: Path) -> Path:
        assert json.loads(part.read_text()) == {"port": 1}
        assert not target.exists()
        return whole(part, target)

    monkeypatch.setattr(Path, "replace", look)
    write_json(file, {"port": 1})
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, {"port": 2})
    assert json.loads(file.read_text()) == {"port": 2}
    assert sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize(
    ("inherited", "ending"),
    [("SIG_DFL", (130, "", "")), ("SIG_IGN", (0, "still here\n", ""))],
    ids=["from a terminal", "in a script's background"],
)
def test_interrupted_while_it_imports_a_program_ends_quietly(
    tmp_path: Path, inherited: str, ending: tuple[int, str, str]
) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, threading\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN: threading.Event().wait(30)\n"
        "print('still here')\n"
        "def main(): pass\n"
    )
    start = f"import signal; signal.signal(signal.SIGINT, signal.{inherited});"
    start += "from collab_llm_nodes.programs import _program; _program('slow')()"
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == ending


def console_scripts() -> dict[str, str]:
    """Executables that setup.cfg names, and the function that each starts."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.entry_points"]["console_scripts"].split("\n")[1:]
    return dict(line.split(" = ") for line in lines)


def test_every_console_script_starts_in_that_way() -> None:
    for name, start in console_scripts().items():
        assert start == f"collab_llm_nodes.programs:{name.replace('-', '_')}"
        assert callable(getattr(programs, name.replace("-", "_")))


@pytest.mark.ros
@pytest.mark.parametrize("name", console_scripts())
def test_help_is_printed_and_no_node_is_started(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rclpy = pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    started: list[object] = []
    monkeypatch.setattr(rclpy, "init", lambda **_: started.append(name))
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    module = "cli" if name == "collab-llm" else f"nodes.{name}"
    with pytest.raises(SystemExit) as ended:
        import_module(f"collab_llm_nodes.{module}").main()
    assert ended.value.code in (0, None)
    assert re.search(rf"usage:.*{name}", capsys.readouterr().out, re.IGNORECASE)
    assert not started


@pytest.mark.ros
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["sim_go2", "motion", "instruct"])
def test_a_program_that_tells_its_usage_ends_with_0(name: str) -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    start = f"from collab_llm_nodes.programs import {name}; raise SystemExit({name}())"
    done = subprocess.run(
        [sys.executable, "-c", start, "--help"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage:")


def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verifier", "--model", "nonsense"])
    assert type(result.exception).__name__ == "ModelError"
    assert "nav-target" in str(result.exception)


def test_the_shipped_pair_s_figures_are_as_the_card_shows_them() -> None:
    """docs/benchmarks/nav_eval.json, as `collab-llm eval nav` wrote it for these checkpoints."""
    figures = json.loads((ROOT / "docs/benchmarks/nav_eval.json").read_text(encoding="utf-8"))
    assert figures["rooms"] >= 200
    card = (ROOT / "models/README.md").read_text(encoding="utf-8")
    for key, value in gates.measured(figures).items():
        if key in gates.GOALS and isinstance(value, float) and " over " not in key:
            assert f"{value:.3f}" in card, key
    # The goal, 0.15, is missed: models/README.md says so.
    assert figures["target"]["success_rate"] - figures["draft"]["success_rate"] >= 0.1
    assert figures["invalid_actions"] < 1e-4 * figures["answers"]
    assert figures["action_mismatches"] == 0


def test_two_graphs_on_one_machine_have_two_domains() -> None:
    with own_domain(7) as first, own_domain(7) as second:
        assert first != second
        assert {first, second} <= set(DOMAINS)
        with pytest.raises(KeyError), own_domain(7):
            raise KeyError("whatever happens inside")


def test_the_lock_of_a_domain_touches_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may put links into the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    link, file = (tmp_path / f"collab_llm_domain_{n}" for n in (7, 8))
    victim = tmp_path / "victim"
    for kept in (victim, file):
        kept.write_text("precious")
    link.symlink_to(victim)
    with own_domain(DOMAINS.index(7)) as first, own_domain(DOMAINS.index(7)) as second:
        assert (first, second) == (8, 9)
    assert (victim.read_text(), file.read_text()) == ("precious", "precious")
