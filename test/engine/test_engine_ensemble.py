"""Several models of one shape in one pass: each session as if its model ran alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.ensemble import Ensemble, can_share_passes
from collab_llm_nodes.engine.masks import SHORT
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.errors import ProtocolError
from collab_llm_nodes.models.prompt import EncodedPrompt

ENGINES = [Engine(tiny_model("llama", seed)) for seed in range(3)]
V = ENGINES[0].vocab_size
NO_PROMPT = EncodedPrompt(())


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_a_session_gets_the_logits_of_its_model(seed: int) -> None:
    """The others feed prompts, tokens after rollbacks and forks, in any order."""
    rng = random.Random(seed)
    ensemble = Ensemble(ENGINES)
    known: list[tuple[Session, int, list[int]]] = []
    for _ in range(6):
        member = rng.randrange(3)
        known.append((ensemble.open(NO_PROMPT, member=member), member, []))
        if rng.random() < 0.2 and known[0][2]:
            session, member, tokens = known[0]
            known.append((session.fork(), member, list(tokens)))
        asked = rng.sample(known, rng.randrange(1, len(known) + 1))
        feeds = []
        for session, _, tokens in asked:
            if tokens and rng.random() < 0.4:
                session.length = rng.randrange(len(tokens))
                del tokens[session.length :]
            new = [rng.randrange(V) for _ in range(rng.choice((1, 1, 4, SHORT + 3)))]
            tokens += new
            feeds.append(Feed(session, new, last=rng.choice((0, 1, len(new)))))
        for (_, member, tokens), feed, found in zip(asked, feeds, ensemble.run(feeds), strict=True):
            alone = ENGINES[member].open(NO_PROMPT).feed(tokens, last=feed.last)
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found, alone, atol=5e-5, rtol=1e-4)


def test_a_feed_that_cannot_run_fails_alone() -> None:
    ensemble = Ensemble(ENGINES)
    fine, closed = (ensemble.open(NO_PROMPT, member=member) for member in (0, 2))
    closed.close()
    found, refused = ensemble.run([Feed(fine, [1, 2], last=1), Feed(closed, [1], last=1)])
    torch.testing.assert_close(found, ENGINES[0].open(NO_PROMPT).feed([1, 2], last=1))
    assert isinstance(refused, ProtocolError)


def test_only_models_of_one_shape_share_passes() -> None:
    assert can_share_passes(ENGINES)
    assert not can_share_passes([ENGINES[0], Engine(tiny_model("qwen2"))])
    assert not can_share_passes([ENGINES[0], Engine(tiny_model("llama", 1), eager=True)])
    half = Engine(tiny_model("llama", 1))
    half._embedding = half._embedding.half()
    assert not can_share_passes([ENGINES[0], half])


def test_models_with_other_tokens_share_no_passes() -> None:
    other = Engine(tiny_model("llama", 1))
    other.vocabulary = "another"
    assert not can_share_passes([ENGINES[0], other])
    assert not can_share_passes([Engine(tiny_model("qwen2_vl", seed)) for seed in range(2)])


def test_sessions_of_an_ensemble_are_not_saved(tmp_path: Path) -> None:
    """A file names one model."""
    ensemble = Ensemble(ENGINES)
    session = ensemble.open(NO_PROMPT, member=1)
    session.feed([1, 2])
    with pytest.raises(ProtocolError, match="ensemble"):
        session.save(tmp_path / "file")
    own = ENGINES[1].open(NO_PROMPT)
    own.feed([1, 2])
    own.save(tmp_path / "file")
    with pytest.raises(ProtocolError, match="ensemble"):
        ensemble.restore(tmp_path / "file")


class Paced(Engine):
    """An engine that does more than its model's passes."""


def test_an_engine_of_another_kind_makes_its_own_passes() -> None:
    assert not can_share_passes([ENGINES[0], Paced(tiny_model("llama", 1))])


def test_a_pass_that_ends_early_leaves_all_sessions_as_they_were() -> None:
    ensemble = Ensemble(ENGINES)
    sessions = [ensemble.open(NO_PROMPT, member=member) for member in range(3)]
    ensemble.run([Feed(session, [1, 2, 3], last=1) for session in sessions])

    def end() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        ensemble.run([Feed(session, [4], last=1) for session in sessions], check=end)
    assert [session.length for session in sessions] == [3, 3, 3]
    found = ensemble.run([Feed(session, [5], last=1) for session in sessions])
    for logits, engine in zip(found, ENGINES, strict=True):
        alone = engine.open(NO_PROMPT).feed([1, 2, 3, 5], last=1)
        assert isinstance(logits, torch.Tensor)
        torch.testing.assert_close(logits, alone, atol=5e-5, rtol=1e-4)
