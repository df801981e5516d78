"""The laboratory is a distribution of its own, and the product does without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRODUCT_ALONE = """
import importlib.metadata, sys
sys.modules["collab_llm_lab"] = None  # as where it is not installed
installed = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **chosen: [
    found for found in installed(**chosen) if found.group != "collab_llm.commands"
]
from collab_llm_nodes.cli import main
main()
"""


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRODUCT_ALONE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [["bench", "engine", "--quick"], ["demo", "--help"], ["check"]])
def test_a_command_that_is_not_installed_names_the_remedy(words: list[str]) -> None:
    done = _run(*words)
    assert done.returncode == 1
    assert f"{words[0]} is a command of the laboratory" in done.stderr
    assert "collab_llm_lab" in done.stderr


def test_a_broken_laboratory_stops_no_verifier() -> None:
    broken = PRODUCT_ALONE.replace(
        'if found.group != "collab_llm.commands"', 'if found.group == "collab_llm.commands"'
    )
    for words, status in ((["verifier", "--help"], 0), (["bench", "engine"], 1)):
        command = [sys.executable, "-c", broken, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
    assert "cannot be loaded" in " ".join(done.stderr.split())


def test_the_product_s_own_commands_run_without_it() -> None:
    done = _run("--help")
    assert done.returncode == 0, done.stderr
    assert "verifier" in done.stdout
    assert "bench" not in done.stdout
