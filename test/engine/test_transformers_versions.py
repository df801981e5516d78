"""Models run with the oldest and the newest transformers of docs/dependencies.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = (
    "engine",
    "engine_operations",
    "engine_recurrent",
    "engine_stages",
    "picture_encoding",
)
FAMILIES = "qwen2_vl or qwen2_5_vl or qwen3 or qwen3_vl or gemma3_text or engine_recurrent"
RUN = """
import sys, pytest, transformers
assert transformers.__file__.startswith(sys.argv[1]), transformers.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.timeout(300)  # a hundred tests in a process of their own
@pytest.mark.parametrize(
    "version", ["oldest", pytest.param("newest", marks=pytest.mark.exhaustive)]
)
def test_models_run_with(version: str) -> None:
    """Feeds, exits, rollbacks, trees and stages equal that version's own forward pass.

    Families are those whose classes differ most: pictures, windows, norms of heads, recurrence.
    """
    packages = Path(sys.prefix) / "transformers" / version
    if not packages.is_dir():
        pytest.skip("`scripts/setup.sh tests` installs it")
    environment = os.environ | {"PYTHONPATH": f"{packages}:{os.environ.get('PYTHONPATH', '')}"}
    tests = [str(HERE / f"test_{name}.py") for name in FILES]
    chosen = f"({FAMILIES}) and not (unrelated or noisy)"
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(packages), *options, *tests],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
