"""Passes of a dishonest sender: a stage runs them, or refuses them by type."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from jupiter_bed import folder
from tiny_models import tiny_folder

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.stage import Stage
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.protocols.jupiter import codec
from collab_llm_nodes.protocols.jupiter.messages import Pass, Step, Want
from collab_llm_nodes.protocols.jupiter.stage_lanes import StageLanes

LANES = 3
PASSES = 9


class Stranger:
    """Makes passes that are nearly right: each field is sometimes a little off."""

    def __init__(self, seed: int, stage: Stage) -> None:
        self._drawn = random.Random(seed)
        self._vocabulary = stage.vocab_size
        self._placeholder = stage.placeholder
        self._held: dict[int, int] = {}  # tokens of each lane

    def passes(self) -> Pass:
        """Return the next pass."""
        lanes = self._drawn.sample(range(LANES), self._drawn.randint(1, LANES))
        return Pass(0, tuple(self._step(lane) for lane in lanes))

    def _step(self, lane: int) -> Step:
        drawn, held = self._drawn, self._held.get(lane, 0)
        new = drawn.choice([1, 1, 2, 3, 6])
        top = self._vocabulary + (drawn.random() < 0.05)
        ids = tuple(drawn.randrange(top) for _ in range(new))
        fork_of = drawn.choice([None, None, *self._held]) if lane not in self._held else None
        before = held if fork_of is None else self._held[fork_of]
        start = drawn.choice([before] * 12 + [max(0, before - 1), max(0, before - 3), before + 1])
        parents: tuple[int, ...] = ()
        if new > 1 and start and drawn.random() < 0.4:
            parents = tuple(drawn.randrange(i + 1) for i in range(new - 1))
        close = drawn.random() < 0.05
        if close:
            self._held.pop(lane, None)
            return Step(lane, close=True)
        want = drawn.choice(list(Want))
        rows = drawn.choice([new, new, drawn.randint(1, new)]) if want is not Want.NOTHING else 0
        retain = drawn.choice([None] * 40 + [max(0, held - 1), held, held + 1])
        self._held[lane] = start + (1 if parents else new)
        features = 0
        if self._placeholder is not None and drawn.random() < 0.3:
            features = drawn.randint(1, new)
            ids = (*ids[:-features], *[self._placeholder] * features)
            features += drawn.random() < 0.05
        return Step(
            lane,
            start,
            ids,
            parents,
            retain,
            fork_of,
            want,
            rows,
            drawn.randrange(5),
            SamplingConfig(temperature=float(drawn.randrange(2)), top_k=3, seed=4),
            drawn.choice([0, 1, codec.MAX_GUESSES]),
            positions=self._positions(start, new)[: 1 if parents else None],
            features=features,
        )

    def _positions(self, start: int, new: int) -> tuple[int, ...]:
        drawn = self._drawn
        first = drawn.choice([start + 1, 1 << 20]) if drawn.random() < 0.03 else start
        three = () if self._placeholder is None else (first,) * 3 * new
        return drawn.choice([(), (first,), three])


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 4), (0, 2), (2, 4)])
def test_a_pass_runs_or_is_refused_by_type(first: int, last: int, sees: bool) -> None:
    config = ModelConfig(str(tiny_folder("qwen2_vl") if sees else folder()))
    stage = Stage(config, first, last)
    heads = None
    if stage.gives_logits and not sees:
        heads = MedusaHeads.load(folder(), stage.parts)
    ended: Counter[str] = Counter()
    for seed in range(150):
        lanes = StageLanes(stage, LANES, read_facts(config).eos, heads)
        stranger = Stranger(seed, stage)
        for _ in range(PASSES):
            try:
                order = codec.decode_order(codec.encode_order(stranger.passes()))
                assert isinstance(order, Pass)
                rows = sum(len(s.ids) if first else s.features for s in order.steps)
                lanes.run(order.steps, torch.randn(rows, stage.width))
            except CollabError as error:
                ended[type(error).__name__] += 1
                break  # so a worker ends the chain
            ended["run"] += 1
        lanes.close()
    assert ended["run"] > 200, ended
    assert ended["InvalidInput"] + ended["ProtocolError"] > 50, ended
    assert CollabError.__name__ not in ended


def test_a_tree_is_judged_as_a_whole_or_not_at_all() -> None:
    step = Step(0, 3, (1, 2, 3), parents=(0, 0), want=Want.VERDICT, rows=3)
    assert codec.decode_order(codec.encode_order(Pass(0, (step,)))) == Pass(0, (step,))
    with pytest.raises(InvalidInput, match="as a whole"):
        codec.decode_order(codec.encode_order(Pass(0, (replace(step, rows=2),))))
