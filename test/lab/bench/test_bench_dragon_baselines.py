"""The live baselines write what their contexts say, and wait for what they fetch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from dragon_bed import config_of, engine_of, row_of

from collab_llm_lab.bench.dragon.baselines import CRCG, KV, SEQUENCE, SEQUENCE_FULL, TEXT
from collab_llm_lab.bench.dragon.sites import Sites, sites
from collab_llm_nodes.decoding.aggregation import (
    AggregationConfig,
    AggregationLaw,
    Party,
    SideDraft,
)
from collab_llm_nodes.engine.engine import Engine

LAW = AggregationConfig()
TOKENS = 5


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def asked(engine: Engine) -> Iterator[tuple[Sites, str]]:
    with sites(engine, config_of(documents=2, temperature=0.1), 1) as (both, questions):
        both.set((0.0, 0.0), 0.0)
        yield both, questions[0]


def plain(engine: Engine, both: Sites, context: Sequence[int], seed: int) -> tuple[int, ...]:
    """The tokens behind a context, by the model's forward alone."""
    law = AggregationLaw(LAW, engine.vocab_size, 1.0, seed)
    found: list[int] = []
    while len(found) < TOKENS and not (found and found[-1] in engine.eos):
        row = row_of(engine, [*context, *found])
        found.append(law.propose(row, 0.0, len(found), Party.DEVICE).token)
    return tuple(found)


def texts(both: Sites, query: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    own, public = (
        tuple(hit.chunk.text for hit in paced.side.retrieve(query).hits)
        for paced in (both.device, both.cloud)
    )
    assert len(own) == len(public) == 2
    assert not set(own) & set(public)
    return own, public


@pytest.mark.parametrize("seed", [0, 7])
def test_one_context_with_the_documents_of_one_side_or_of_both(
    engine: Engine, asked: tuple[Sites, str], seed: int
) -> None:
    both, query = asked
    own, public = texts(both, query)
    layout = both.device.side.layout
    for method, documents in ((CRCG, own), (TEXT, (*public, *own)), (KV, (*public, *own))):
        context = (*layout.documents(documents), *layout.after(query))
        written = both.baselines.ask(method, query, LAW, tokens=TOKENS, seed=seed)
        assert written.tokens == plain(engine, both, context, seed), method


def test_sequences_are_judged_position_by_position(
    engine: Engine, asked: tuple[Sites, str]
) -> None:
    both, query = asked
    law = AggregationLaw(LAW, engine.vocab_size, 1.0, 3)
    drafts: list[list[SideDraft]] = []
    for party, paced in zip(Party, (both.device, both.cloud), strict=True):
        decoder = paced.side.decoder(query, TOKENS)
        drafts.append([])
        for position in range(TOKENS):
            draft = law.propose(*decoder.next(), position, party)
            drafts[-1].append(draft)
            decoder.push(draft.token)
        decoder.close()
    wanted = tuple(
        law.judge((mine, theirs), position).token
        for position, (mine, theirs) in enumerate(zip(*drafts, strict=True))
    )
    compact, full = (
        both.baselines.ask(method, query, LAW, tokens=TOKENS, seed=3)
        for method in (SEQUENCE, SEQUENCE_FULL)
    )
    assert compact.tokens == full.tokens == wanted[: len(compact.tokens)]
    assert full.bytes_down - compact.bytes_down == len(wanted) * 2 * 50_272


def test_caches_that_travel_are_those_of_the_clouds_documents(
    asked: tuple[Sites, str], tmp_path: Path
) -> None:
    both, query = asked
    _, public = texts(both, query)
    file = tmp_path / "kv"
    file.write_bytes(both.baselines._cloud.cache(public))
    session = both.baselines._engine.restore(file)
    assert session.prompt.ids == both.device.side.layout.documents(public)
    session.close()
