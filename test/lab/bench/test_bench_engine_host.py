"""The cost of a round with a large vocabulary, in numbers handled instead of milliseconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from collab_llm_lab.bench.engine_host import LAWS, VOCABULARY, rounds, table_of


@pytest.mark.parametrize("law", ["greedy", "temperature 0.7, top-p 0.9"])
def test_a_round_sorts_and_exponentiates_few_of_a_large_vocabulary(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of 151,936 numbers that is partitioned costs a millisecond, one sorted ten."""
    handled: Counter[str] = Counter()
    for name in ("partition", "argpartition", "sort", "argsort", "exp", "log", "flatnonzero"):
        plain = getattr(np, name)

        def counted(
            x: Any, *args: Any, name: str = name, plain: Any = plain, **options: Any
        ) -> Any:
            handled[name] += np.size(x)
            return plain(x, *args, **options)

        monkeypatch.setattr(np, name, counted)
    logits = table_of(peaks=64)
    handled.clear()
    rounds(logits, LAWS[law], repeats=1)
    assert handled["partition"] > 0, "nothing was counted"
    assert sum(handled.values()) < VOCABULARY, f"more than one row: {handled}"
