"""A mean of what is measured again and again."""

from __future__ import annotations

import pytest

from collab_llm_nodes.protocols.means import Mean


def test_it_begins_as_a_plain_mean_and_forgets() -> None:
    mean = Mean(0.5, weight=4)
    assert mean.value == 0.5
    mean.add(1.0)
    mean.add(0.0)
    assert mean.value == pytest.approx(0.5)
    for _ in range(40):
        mean.add(0.8)
    assert mean.value == pytest.approx(0.8, abs=1e-4)
