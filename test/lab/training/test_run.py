"""The folder of a run: one training at a time, and always the one that began it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collab_llm_lab.training.run import BEGUN, hold_folder
from collab_llm_lab.training.text.plans import PLANS
from collab_llm_nodes.errors import ConfigError

OPTIONS = {"plan": "tiny", "seed": 0}
SETTINGS = {"length": 1024, "growing": ((128, 2),)}


def begin(out: Path, **changed: Any) -> None:
    settings = changed.pop("settings", SETTINGS)
    with hold_folder(out, {**OPTIONS, **changed}, settings):
        (out / "target").mkdir(exist_ok=True)


def test_a_run_goes_on_with_equal_values(tmp_path: Path) -> None:
    begin(tmp_path / "new" / "run")
    begin(tmp_path / "new" / "run")


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"seed": 5}, "--seed", "begun with 0, not 5 (give 0 to go on, or name another --out)"),
        ({"plan": "cpu"}, "--plan", "begun with 'tiny', not 'cpu'"),
        ({"settings": {**SETTINGS, "length": 512}}, "--plan", "other settings: length"),
    ],
)
def test_another_one_is_refused(
    changed: dict[str, Any], field: str, message: str, tmp_path: Path
) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError) as refused:
        begin(tmp_path, **changed)
    assert refused.value.field == field
    assert message in str(refused.value)
    begin(tmp_path)


def test_a_call_that_made_nothing_began_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), hold_folder(tmp_path, {"seed": 5}):
        raise KeyError("a mistyped option")
    begin(tmp_path)


def test_a_folder_of_an_older_version_takes_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    begin(tmp_path, seed=3)
    with pytest.raises(ConfigError, match="begun with 3"):
        begin(tmp_path)


def test_a_second_training_in_one_folder_is_refused(tmp_path: Path) -> None:
    with (
        hold_folder(tmp_path, OPTIONS),
        pytest.raises(ConfigError, match="--out: another process writes to"),
        hold_folder(tmp_path, OPTIONS),
    ):
        pass
    begin(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    for out in (file, file / "run", Path("/proc/no-folder")):
        with pytest.raises(ConfigError, match="--out: cannot write to"):
            begin(out)


def test_a_damaged_note_is_reported(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / BEGUN).write_text(text)
        with pytest.raises(ConfigError, match=r"cannot read .*begun.json \(delete it"):
            begin(tmp_path)


def test_a_plan_may_get_other_times_but_no_other_data() -> None:
    plan = PLANS["tiny"]
    assert plan.with_minutes({"target": 1.0, "draft": 2.0}).lasting() == plan.lasting()
    assert {"shards", "rows", "length", "target_size", "target"} <= set(plan.lasting())
    assert plan.lasting() != PLANS["cpu"].lasting()
