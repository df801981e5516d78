"""A sandbox for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from minions_world import PATIENT

from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    running = Sandbox(PATIENT)
    yield running
    running.close()
