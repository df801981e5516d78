"""The command line: what people see before anything heavy starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collab_llm_nodes.cli import app
from collab_llm_nodes.demo.domain import DOMAINS, own_domain

COMMANDS = [
    ["demo"],
    ["verifier"],
    ["train", "nav"],
    ["eval", "nav"],
    ["bench", "edge-cloud"],
    ["check", "lossless"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("no folder")
    result = CliRunner().invoke(app, [*command, "--json", str(blocker / "results.json")])
    assert result.exit_code == 2
    assert "--json" in result.output


def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verifier", "--model", "nonsense"])
    assert type(result.exception).__name__ == "ModelError"
    assert "nav-target" in str(result.exception)


def test_the_shipped_pair_s_figures_pass_the_gates() -> None:
    """docs/benchmarks/nav_eval.json, as `collab-llm eval nav` wrote it for these checkpoints."""
    root = Path(__file__).parent.parent
    figures = json.loads((root / "docs/benchmarks/nav_eval.json").read_text(encoding="utf-8"))
    assert figures["target"]["rooms"] >= 200
    assert figures["target"]["success_rate"] >= 0.80
    assert figures["target"]["success_rate"] - figures["draft"]["success_rate"] >= 0.10
    assert figures["in_view_direction"] >= 0.85
    assert figures["not_in_view"] >= 0.95
    assert figures["invalid_actions"] == figures["action_mismatches"] == 0


def test_two_graphs_on_one_machine_have_two_domains() -> None:
    with own_domain(7) as first, own_domain(7) as second:
        assert first != second
        assert {first, second} <= set(DOMAINS)
        with pytest.raises(KeyError), own_domain(7):
            raise KeyError("whatever happens inside")
