"""The oldest and the newest transformers that docs/dependencies.md allows run the models that see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = """
import sys, pytest, transformers
assert transformers.__file__.startswith(sys.argv[1]), transformers.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_models_that_see_run_with(version: str) -> None:
    """Feeds, exits, rollbacks and trees with pictures equal that version's own forward pass."""
    packages = Path(sys.prefix) / "transformers" / version
    if not packages.is_dir():
        pytest.skip("`scripts/setup.sh tests` installs it")
    environment = os.environ | {"PYTHONPATH": f"{packages}:{os.environ.get('PYTHONPATH', '')}"}
    tests = [str(HERE / name) for name in ("test_engine.py", "test_engine_operations.py")]
    seeing = "(qwen2_vl or qwen2_5_vl) and not (unrelated or noisy)"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            str(packages),
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            seeing,
            *tests,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
