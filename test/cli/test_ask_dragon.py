"""``collab-llm ask --protocol dragon``: a terminal as the device, with a cloud in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from dragon_bed import engine_of, side_with
from tiny_models import tiny_folder
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.dragon import sides
from collab_llm_nodes.protocols.dragon.service import CloudServiceConfig, DragonService
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig
from collab_llm_nodes.transport.server import ServerHandle

PRIVATE = "Tighten the wheel nuts to 210 Nm."
PUBLIC = "The pump stops at a pressure of 6 bar."
SIDE = SideConfig(
    answers="quote",
    retrieval=RetrievalConfig(method="rescored", chunks=2, candidates=16, temperature=0.1),
)


@dataclass
class Terminal:
    """The command with its store, and the parameter file that leads to the cloud."""

    folder: Path

    def ask(self, *arguments: str) -> Any:
        words = ("ask", "--protocol", "dragon", "--config", str(self.folder / "mine.yaml"))
        report = ("--json", str(self.folder / "report.json"), "--store", str(self.folder / "own"))
        return CliRunner().invoke(app, (*words, *report, *arguments), env={"COLUMNS": "200"})

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return found


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("terminal")
    document = Document("truck.md", PRIVATE)
    with Store(folder / "own") as store:
        store.add(document, chunks(document, ChunkPlan(by="sentence", characters=240)))
    cloud = side_with({"plant": PUBLIC}, engine_of(), SIDE)
    service = DragonService(CloudServiceConfig(address="127.0.0.1:0"), cloud, "tiny", "1.0")
    server = ServerHandle(service)
    parameters = {
        "model": {"path": str(tiny_folder("llama"))},
        "side": {
            "answers": "quote",
            "retrieval": {"method": "rescored", "chunks": 2, "candidates": 16, "temperature": 0.1},
        },
        "cloud.address": f"127.0.0.1:{server.port}",
        "schedule.aggregate_on": "device",
        "memory": {"fill": False},
        "deadline_s": 9.0,
    }
    content = {"/**/dragon_server": {"ros__parameters": parameters}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    yield Terminal(folder)
    server.stop()
    cloud.close()


@pytest.mark.parametrize(
    ("question", "answer", "writer", "found"),
    [
        ("To what torque is the wheel nut tightened?", PRIVATE, "this side's documents", 1),
        ("At what pressure does the pump stop?", PUBLIC, "the cloud's documents", 0),
    ],
)
def test_the_answer_comes_with_its_side_and_its_costs(
    terminal: Terminal, question: str, answer: str, writer: str, found: int
) -> None:
    result = terminal.ask(question)
    assert result.exit_code == 0, result.output
    assert answer in [line.strip() for line in result.output.splitlines()]
    assert f"by {writer}" in result.output
    report = terminal.report
    assert (report["answer"], report["verified"], report["not_found"]) == (answer, True, False)
    assert list(report["written_by"]) == [writer]
    assert [piece["name"] for piece in report["found"]] == ["truck.md"] * found
    assert report["wire"]["bytes_up"] > len(question)
    assert report["wire"]["bytes_down"] > 0
    assert report["wire"]["target_tokens"] == report["written_by"][writer]


def test_what_no_document_says_has_a_status_of_its_own(terminal: Terminal) -> None:
    result = terminal.ask("Which vaccine protects against measles?")
    assert result.exit_code == 3, result.output
    assert isinstance(result.exception, SystemExit)
    report = terminal.report
    assert (report["answer"], report["not_found"]) == ("", True)
    assert report["error"].startswith("prompt: no sentence answers this"), report["error"]


def test_a_store_without_documents_says_how_to_add_some(terminal: Terminal, tmp_path: Path) -> None:
    with Store(tmp_path / "empty"):
        pass
    store = str(tmp_path / "empty")
    result = terminal.ask("Which port?", "--store", store, "--set", "use_cloud=false")
    assert result.exit_code == 3, result.output
    error = terminal.report["error"]
    assert f"the store {store} holds no documents" in error
    assert f"collab-llm knowledge add {store} FILES" in error


def test_vectors_of_another_encoder_are_refused_before_a_model_is_loaded(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "other") as store:
        document = Document("truck.md", PRIVATE)
        store.add(document, chunks(document, ChunkPlan(by="sentence", characters=240)))
        store.embed(WordHashes(8))
    monkeypatch.setattr(sides, "load", lambda model: pytest.fail("a model was loaded"))
    error = terminal.ask("Where?", "--store", str(tmp_path / "other")).exception
    assert isinstance(error, ConfigError)
    assert f"knowledge embed {tmp_path / 'other'} --encoder words" in error.remedy


def test_without_the_cloud_nothing_crosses_the_wire(terminal: Terminal) -> None:
    result = terminal.ask("To what torque is the wheel nut tightened?", "--set", "use_cloud=false")
    assert result.exit_code == 0, result.output
    assert terminal.report["wire"] == {"bytes_up": 0, "bytes_down": 0, "target_tokens": 0}
    assert list(terminal.report["written_by"]) == ["this side, without the cloud"]
    assert not terminal.report["verified"]


def test_files_and_stores_that_cannot_be_used_are_named(terminal: Terminal) -> None:
    for words, field in ((("a.md", "Where?"), "FILE"), (("Where?", "--store", "none"), "--store")):
        error = terminal.ask(*words).exception
        assert isinstance(error, InvalidInput)
        assert error.field == field
