"""Data files: sections, lines and tables, and what a malformed line says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import collab_llm_lab
from collab_llm_lab.phrasebook import Section, read
from collab_llm_lab.phrases import Grammar
from collab_llm_lab.training.text.tasks import parts_of
from collab_llm_nodes.errors import InvalidInput

BOOK = """\
# a comment
= where
== questions
Where is the {thing}?

## Text\\n[Please ]name it.
== rooms
dining-room hall
lobby
= dirt
dust | water | cloth
mud | a brush | sand
"""


def book(tmp_path: Path, content: str) -> Section:
    (tmp_path / "book.txt").write_text(content, encoding="utf-8")
    return read(tmp_path / "book.txt")


def test_a_book_has_sections_lines_words_and_tables(tmp_path: Path) -> None:
    found = book(tmp_path, BOOK)
    assert list(found.sections) == ["where", "dirt"]
    where, grammar = found["where"], Grammar()
    assert where["questions"].texts == ("Where is the {thing}?", "## Text\n[Please ]name it.")
    assert [p.text for p in where["questions"].phrases(grammar)] == [*where["questions"].texts]
    assert {"where", "please"} <= grammar.words
    assert where["rooms"].words == ("dining-room", "hall", "lobby")
    assert list(where.phrases_by_name()) == ["questions", "rooms"]
    assert found["dirt"].table == {"dust": ("water", "cloth"), "mud": ("a brush", "sand")}


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("Hello.\n= where", 1, "before the first heading"),
        ("= where\n=", 2, "not a heading"),
        ("= where\n=questions", 2, "not a heading"),
        ("= where\n=== questions", 2, "skips a level"),
        ("= where\n\n= where", 3, "second section"),
    ],
)
def test_a_malformed_line_is_named(content: str, line: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        book(tmp_path, content)
    assert error.value.field == f"book.txt:{line}"
    assert error.value.remedy


def test_a_line_that_its_section_cannot_hold_is_named(tmp_path: Path) -> None:
    found = book(tmp_path, BOOK + "rust | oil\n= broken\n(a|b\n= parts\n== Ask / (Tell\nNow.")
    for use, place in (
        (lambda: found["dirt"].table, "book.txt:13"),
        (found["broken"].phrases, "book.txt:15"),
        (lambda: found["where"]["answers"], "book.txt:2"),
        (lambda: parts_of(found["parts"], Grammar()), "book.txt:17"),
    ):
        with pytest.raises(InvalidInput) as error:
            use()
        assert error.value.field == place


def test_every_data_file_is_installed(tmp_path: Path) -> None:
    package = Path(collab_llm_lab.__file__).parent
    copy = tmp_path / "copy"  # a build writes beside its sources
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "build"))
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    subprocess.run(command, cwd=copy, check=True, timeout=60, capture_output=True)
    built = {file.name for file in (tmp_path / "build").rglob("*.txt")}
    assert built == {file.name for file in package.rglob("*.txt")}
    assert "facts.txt" in built
