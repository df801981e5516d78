"""``collab-llm ask``: files and a question, two models behind servers, tables and the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_server import ChatServer
from minions_world import final, found
from served_minions import HONEST, KEPT, PAGES, pages
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.minions.command import PROTOCOLS


class Terminal:
    """The command, with two servers as its models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remote_says = lambda prompt: final("7 kg") if "Outputs" in prompt else HONEST
        self.remote = ChatServer(lambda prompt: self.remote_says(prompt))
        self.local = ChatServer(weigh)
        self.document = folder / "log.txt"
        self.document.write_text(pages())

    def __enter__(self) -> Terminal:
        roles: dict[str, Any] = {}
        for role, server in (("remote", self.remote), ("local", self.local)):
            server.__enter__()
            named = {"url": server.url, "model": role}
            roles[f"{role}_model"] = {"at": "server", "server": named}
        limits = {"limits.run_s": 30.0, "limits.wall_s": 60.0, "deadline_s": 9.0}
        paper = {"planner": "program", "check_citations": False}
        content = {"/**/minions_server": {"ros__parameters": {**roles, **limits, **paper}}}
        self.config = self.folder / "mine.yaml"
        self.config.write_text(yaml.safe_dump(content))
        return self

    def __exit__(self, *_: object) -> None:
        self.remote.__exit__()
        self.local.__exit__()

    def ask(self, *arguments: str) -> Any:
        words = ("ask", *arguments, "--config", str(self.config))
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def weigh(prompt: str) -> str:
    if "\n## Text\n" not in prompt:
        return "7 kg"
    chunk = prompt.split("## Text\n", 1)[1].split("\n\n## ", 1)[0]
    return found("7 kg" if chunk.startswith(f"Page {KEPT}.") else None)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with Terminal(tmp_path) as made:
        yield made


def test_a_question_about_a_file_with_jobs_and_ledgers(terminal: Terminal) -> None:
    report = terminal.folder / "report.json"
    result = terminal.ask(str(terminal.document), "How heavy?", "--json", str(report))
    assert result.exit_code == 0, result.output
    rows = [re.findall(r"[^\s┃│]+", line) for line in result.output.splitlines()]
    (head,) = (row for row in rows if row[:1] == ["round"])
    assert head == ["round", "jobs", "done", "kept", "abstained", "bytes", "sent"]
    (counts,) = (row for row in rows if row[:1] == ["1"])
    assert counts[:5] == ["1", str(PAGES), str(PAGES), "1", str(PAGES - 1)]
    assert "Extract the weight." in result.output
    assert "read by the remote" in result.output
    assert "7 kg" in [line.strip() for line in result.output.splitlines()]
    told = json.loads(report.read_text())
    assert (told["answer"], told["verified"], told["error"]) == ("7 kg", True, "")
    assert told["figures"]["sent_bytes"] > 0
    assert "canary-" not in terminal.remote.wire


@pytest.mark.parametrize("protocol", sorted(set(PROTOCOLS) - {"minions"}))
def test_the_other_protocols_answer(terminal: Terminal, protocol: str) -> None:
    terminal.remote_says = lambda prompt: (
        final("7 kg") if "### Answer" in prompt else '{"message": "how heavy?"}'
    )
    if protocol in ("remote-only", "rag"):
        terminal.remote_says = lambda prompt: "7 kg"
    result = terminal.ask(str(terminal.document), "Weight?", "--protocol", protocol)
    assert result.exit_code == 0, result.output
    assert "7 kg" in result.output
    sent = {"remote-only": PAGES, "rag": PAGES}.get(protocol, 0)
    assert terminal.remote.wire.count("canary-") == sent
    assert bool(terminal.remote.bodies) == (protocol != "local-only")


def test_a_file_that_is_not_there_is_named(terminal: Terminal) -> None:
    for file in (terminal.folder / "no.md", terminal.folder / "no" / "no.md"):
        error = terminal.ask(str(file), "How heavy?").exception
        assert isinstance(error, InvalidInput)
        assert error.field == "path"


def test_a_store_is_read(terminal: Terminal) -> None:
    manual = Document("m.md", "Page 7. Weight 7 kg.")
    with Store(terminal.folder / "manuals") as store:
        store.add(manual, chunks(manual, ChunkPlan()))
    result = terminal.ask("How heavy?", "--store", str(terminal.folder / "manuals"))
    assert result.exit_code == 0, result.output
    assert "7 kg" in result.output


HOSTILE = "7 kg\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202egnp"


def test_an_answer_does_not_command_the_terminal(terminal: Terminal) -> None:
    """Neither that of the remote model nor, in the table of jobs, that of the local one."""
    terminal.remote_says = lambda prompt: final(HOSTILE) if "Outputs" in prompt else HONEST
    terminal.local.says = lambda prompt: weigh(prompt).replace("7 kg", json.dumps(HOSTILE)[1:-1])
    result = terminal.ask(str(terminal.document), "How heavy?")
    assert result.exit_code == 0, result.output
    assert not {*"\x1b\x07\u202e"} & {*result.output}
    assert r"7 kg\x1b]52;c;cm0gLXJm" in result.output.splitlines()[-1]


def test_a_document_does_not_command_the_terminal(tmp_path: Path) -> None:
    hostile = Document("m\x1b[2J.md", f"Weight {HOSTILE}\nin all.")
    with Store(tmp_path / "manuals") as store:
        store.add(hostile, chunks(hostile, ChunkPlan()))
    result = CliRunner().invoke(app, ("knowledge", "search", str(tmp_path / "manuals"), "weight"))
    assert result.exit_code == 0, result.output
    assert not {*"\x1b\x07\u202e"} & {*result.output}
    assert r"\x1b[2J" in result.output
    assert "\nin all." in result.output, "a text keeps its lines"


def test_a_remote_that_cannot_plan_is_one_line(terminal: Terminal) -> None:
    terminal.remote_says = lambda prompt: "What a nice question."
    result = terminal.ask(str(terminal.document), "Why?", "--set", "planner=plan")
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert "MODEL_ERROR: prompt: the remote model cannot plan this question" in told


def test_prices_of_another_model_are_called_so(terminal: Terminal) -> None:
    content = yaml.safe_load(terminal.config.read_text())
    content["/**/minions_server"]["ros__parameters"]["cost"] = {"priced_as": "gpt-4o"}
    terminal.config.write_text(yaml.safe_dump(content))
    result = terminal.ask(str(terminal.document), "How heavy?")
    assert re.search(r"as if priced as gpt-4o: 0\.\d{6} US dollars", result.output), result.output


def test_a_dead_remote_has_read_nothing(terminal: Terminal) -> None:
    content = yaml.safe_load(terminal.config.read_text())
    parameters = content["/**/minions_server"]["ros__parameters"]
    retries = {"max_attempts": 2}
    dead = {"url": "http://127.0.0.1:9/v1", "model": "remote", "retries": retries}
    audit = terminal.folder / "audit.jsonl"
    parameters |= {"privacy.audit_file": str(audit)}
    parameters["remote_model"]["server"] = dead
    terminal.config.write_text(yaml.safe_dump(content))
    report = terminal.folder / "report.json"
    result = terminal.ask(str(terminal.document), "How heavy?", "--json", str(report))
    assert result.exit_code == 1
    assert "does not answer" in " ".join(result.output.split())
    figures = json.loads(report.read_text())["figures"]
    assert figures["sent_bytes"] == 0
    assert json.loads(audit.read_text().splitlines()[-1])["times"] == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    [
        (("a question",), InvalidInput, "document_names"),
        (("nowhere.txt", "why?"), InvalidInput, "nowhere.txt"),
        (("why?", "--protocol", "minoin"), InvalidInput, "did you mean minion"),
        (("why?", "--protocol", "foo"), InvalidInput, "rag, dragon"),
        (("why?", "--set", "rouns=3"), InvalidInput, "did you mean rounds"),
        (("why?", "--set", "rounds"), InvalidInput, "'rounds' has no value (write rounds=VALUE)"),
        (("why?", "--set", "library.folders=/"), InvalidInput, "is no option"),
        (("why?", "--config", "nowhere.yaml"), ConfigError, "nowhere.yaml"),
    ],
)
def test_a_wrong_question_is_one_line(
    terminal: Terminal, arguments: tuple[str, ...], kind: type, told: str
) -> None:
    result = CliRunner().invoke(
        app, ("ask", "--config", str(terminal.config), *arguments), env={"COLUMNS": "200"}
    )
    assert isinstance(result.exception, kind)
    assert told in str(result.exception)
    assert not terminal.remote.bodies


@pytest.mark.parametrize(
    ("says", "rounds", "status", "outcome"),
    [
        ("7 kg", 2, 0, "found"),
        ("7 kg", 1, 4, "forced"),
        ("Not mentioned in the outputs.", 2, 3, "unknown"),
        ("Not mentioned in the outputs.", 1, 3, "unknown"),
    ],
)
def test_the_exit_status_tells_what_the_answer_is(
    terminal: Terminal, says: str, rounds: int, status: int, outcome: str
) -> None:
    terminal.remote_says = lambda prompt: final(says) if "Outputs" in prompt else HONEST
    report = terminal.folder / "report.json"
    arguments = ("--json", str(report), "--set", f"rounds={rounds}")
    result = terminal.ask(str(terminal.document), "How heavy?", *arguments)
    assert result.exit_code == status, result.output
    told = json.loads(report.read_text())
    assert (told["outcome"], told["verified"]) == (outcome, outcome == "found")
    assert told["answer"] == ("unknown" if outcome == "unknown" else says)
    assert ("NOT_FOUND" in result.output) == (outcome == "unknown")
    assert ("had to answer in its last round" in result.output) == (outcome == "forced")
