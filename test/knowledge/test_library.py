"""Documents and stores that a request names, and the commands that fill a store."""

from __future__ import annotations

import json
from pathlib import Path

import pdf_files
import pytest
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.cli.output import fail
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.library import Library, LibraryConfig
from collab_llm_nodes.knowledge.store import Store


@pytest.fixture
def library(tmp_path: Path) -> Library:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "note.md").write_text("# Pump\nIt stands in hall 7.\n")
    with Store(tmp_path / "stores" / "manuals") as store:
        document = Document("pump", "The pump stands in hall 7.")
        store.add(document, chunks(document, ChunkPlan()))
    (tmp_path / "secret").write_text("secret")
    config = {
        "folders": [str(tmp_path / "files")],
        "stores": str(tmp_path / "stores"),
        "documents": {"characters": 100},
    }
    return Library(from_mapping(LibraryConfig, config))


def test_content_comes_before_a_file_of_the_same_name(library: Library) -> None:
    assert library.document("note.md", "sent").content == "sent"
    assert library.document("note.md").content.startswith("# Pump")
    with pytest.raises(InvalidInput, match="101 characters"):
        library.document("note.md", "x" * 101)
    for name in ("../secret", "absent.md", ""):
        with pytest.raises(InvalidInput):
            library.document(name)


def test_a_store_is_opened_once_by_its_name(library: Library, tmp_path: Path) -> None:
    store = library.store("manuals")
    assert store.search("pump", 1)[0].name == "pump"
    assert library.store("manuals") is store
    for name in ("", "absent", "../stores/manuals", "manuals/", ".", "m" * 65, "manuals\n"):
        with pytest.raises(InvalidInput, match="store"):
            library.store(name)
    assert [p.name for p in (tmp_path / "stores").iterdir()] == ["manuals"]
    library.close()
    assert library.store("manuals").documents()
    library.close()


def test_nothing_may_be_named_unless_configured(tmp_path: Path) -> None:
    library = Library(LibraryConfig())
    for use in (lambda: library.document(str(tmp_path)), lambda: library.store("manuals")):
        with pytest.raises(InvalidInput):
            use()
    with pytest.raises(ConfigError, match="no folder"):
        Library(LibraryConfig(folders=(str(tmp_path / "absent"),)))


# --- Commands ------------------------------------------------------------------------------------


def run(*arguments: object, json_file: Path) -> dict:
    words = ["knowledge", *map(str, arguments), "--json", str(json_file)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content: dict = json.loads(json_file.read_text())
    return content


def test_from_files_to_answers_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    Path("manual.pdf").write_bytes(pdf_files.pdf("start the pump", "stop the pump at 80 degrees"))
    Path("arm.md").write_text("# Arm\nSix joints.\n# Gripper\nIt opens 80 mm.\n")
    added = run("add", "store", "manual.pdf", "--by", "page", json_file=out)
    assert [(entry["name"], entry["chunks"]) for entry in added["documents"]] == [("manual.pdf", 2)]
    run("add", "store", "arm.md", "--by", "section", "--encoder", "words", json_file=out)
    found = run("search", "store", "degrees to stop", "--chunks", "1", json_file=out)["chunks"]
    assert [(hit["document"], hit["page"], hit["weight"]) for hit in found] == [
        ("manual.pdf", 2, 1)
    ]
    dense = ("--method", "dense", "--encoder", "words")
    found = run("search", "store", "how far it opens", *dense, json_file=out)["chunks"]
    assert (found[0]["document"], found[0]["section"]) == ("arm.md", "Gripper")
    assert len(found) == 4
    run("remove", "store", "manual.pdf", json_file=out)
    assert [entry["name"] for entry in run("list", "store", json_file=out)["documents"]] == [
        "arm.md"
    ]
    assert b"degrees" not in (tmp_path / "store" / "store.db").read_bytes()


def test_the_command_that_the_error_names_replaces_the_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arm.md").write_text("Six joints.")
    run("add", "store", "arm.md", json_file=tmp_path / "out.json")
    with Store("store") as store:
        store.embed(WordHashes(64))
    dense = ["search", "store", "joints", "--method", "dense", "--encoder", "words"]
    with pytest.raises(ConfigError, match="collab-llm knowledge embed"):
        CliRunner().invoke(app, ["knowledge", *dense], catch_exceptions=False)
    assert run("embed", "store", json_file=tmp_path / "out.json")["encoder"]
    assert run(*dense, json_file=tmp_path / "out.json")["chunks"]


def test_a_file_that_is_refused_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    Path("bad.txt").write_bytes(b"\xff\xfeabc")
    Path("empty.txt").write_text(" ")
    Path("good.txt").write_text("The pump is in the cellar.")
    words = ["knowledge", "add", "store", "bad.txt", "empty.txt", "good.txt", "--json", str(out)]
    with pytest.raises(InvalidInput, match="bad.txt"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert [entry["name"] for entry in json.loads(out.read_text())["documents"]] == ["good.txt"]


def test_a_store_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    for words in (["list"], ["search", "pump"], ["remove", "pump"], ["embed"]):
        with pytest.raises(CollabError, match="no store"):
            CliRunner().invoke(
                app,
                ["knowledge", words[0], str(tmp_path / "absent"), *words[1:]],
                catch_exceptions=False,
            )
    assert list(tmp_path.iterdir()) == []


def test_names_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither markup nor codes of emojis: a folder of a website is full of both."""
    monkeypatch.chdir(tmp_path)
    names = ["[/red]arm.md", "[id].md", ":bug:.txt"]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("The pump.")
    for words in (["add", "store", *names], ["list", "store"], ["search", "store", "pump"]):
        shown = CliRunner().invoke(app, ["knowledge", *words], catch_exceptions=False).output
        assert [name for name in names if name not in shown] == []
    with pytest.raises(SystemExit):
        fail(InvalidInput("no [/red] :bug:"))
