"""Where things lie in the source tree."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "collab_llm_nodes"
SUPPORT = ROOT / "test" / "support"
ROOM = ROOT / "test" / "bags" / "room"
"""A recorded room; see ``scripts/record_test_bag.sh``."""
