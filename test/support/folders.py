"""Places in the source tree."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "collab_llm_nodes"
SUPPORT = ROOT / "test" / "support"
ROOM = ROOT / "test" / "bags" / "room"
"""A recorded room; see ``scripts/record_test_bag.sh``."""
OLD_ROOM = ROOM.with_name("room_v1")
"""A room as it was recorded before ``Status`` and the figures by name; never recorded again."""


def environment(*folders: Path) -> dict[str, str]:
    """Return the environment of a child that imports the helpers and modules in ``folders``."""
    paths = [*map(str, (SUPPORT, *folders)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
