"""One side of DRAGON: its mixture is that of separate contexts, whatever happened before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dragon_bed import QUESTION, TEXTS, Reference, config_of, engine_of, row_of, side_with
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import Cancelled, ConfigError, InvalidInput, ProtocolError
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.side import Side, SideDecoder
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

RULES: tuple[dict[str, Any], ...] = (
    {"update": "static"},
    {"update": "encoder", "every": 2},
    {"update": "likelihood", "memory": 0.7},
    {"update": "likelihood", "memory": 1.0},
)
ANSWER = (7, 41, 3, 3, 99, 12)


def reference(side: ModelSide, engine: Engine, config: SideConfig) -> Reference:
    found = [hit.chunk.text for hit in side.retrieve(QUESTION).hits]
    assert len(found) == config.retrieval.chunks
    return Reference(side, engine, found, config)


def same(found: tuple[np.ndarray, float], wanted: tuple[np.ndarray, float]) -> None:
    p, log_weight = found
    assert p.dtype == np.float32
    assert abs(float(p.sum()) - 1) < 1e-5
    np.testing.assert_allclose(p, wanted[0], atol=2e-6, rtol=1e-3)
    assert log_weight == pytest.approx(wanted[1], abs=1e-3)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_the_mixture_is_that_of_documents_read_apart(rule: dict[str, Any], eager: bool) -> None:
    engine, config = engine_of(eager=eager), config_of(**rule)
    side = side_with(TEXTS, engine, config)
    wanted = reference(side, engine, config)
    decoder = side.decoder(QUESTION, 20)
    same(decoder.next(), wanted.next(()))
    for i, token in enumerate(ANSWER):
        decoder.push(token)
        same(decoder.next(), wanted.next(ANSWER[: i + 1]))
    decoder.close()
    decoder = side.decoder(QUESTION, 20)  # the prompt and a whole answer in one pass
    for token in ANSWER:
        decoder.push(token)
    same(decoder.next(), wanted.next(ANSWER))
    decoder.close()


STEPS = st.one_of(
    st.sampled_from(["next", "part", "cancelled"]), st.integers(0, 90), st.floats(0, 1, width=16)
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@settings(max_examples=12)
@given(st.lists(STEPS, max_size=12))
def test_no_schedule_of_pushes_rollbacks_and_cancels_changes_it(
    rule: dict[str, Any], steps: list[str | int | float]
) -> None:
    engine, config = engine_of(), config_of(**rule, documents=2)
    side = side_with(TEXTS, engine, config)
    wanted = reference(side, engine, config)
    decoder = side.decoder(QUESTION, 20)
    answer: list[int] = []
    for step in steps:
        if step == "next":
            same(decoder.next(), wanted.next(tuple(answer)))
        elif step == "part":
            decoder.read_on(3)
        elif step == "cancelled":
            cancelled_once(decoder, engine)
        elif isinstance(step, int):
            answer.append(step)
            decoder.push(step)
        elif isinstance(step, float):
            del answer[round(step * len(answer)) :]
            decoder.rollback(len(answer))
    same(decoder.next(), wanted.next(tuple(answer)))
    decoder.close()


def test_a_prompt_can_be_read_in_parts() -> None:
    engine, config = engine_of(), config_of(documents=2)
    side = side_with(TEXTS, engine, config)
    wanted = reference(side, engine, config)
    decoder = side.decoder(QUESTION, 20)
    passes = passes_of(engine)
    while decoder.read_on(5):
        pass
    same(decoder.next(), wanted.next(()))
    assert len(passes) == -(-len(side.layout.after(QUESTION)) // 5)
    assert max(passes) == 5
    assert not decoder.read_on(5)
    decoder.close()


def passes_of(engine: Engine) -> list[int]:
    """Return a list that gets the number of tokens of each pass from now on."""
    run: Callable[..., Any] = engine.run
    found: list[int] = []

    def counted(feeds: Any, **options: Any) -> Any:
        found.append(len(feeds[0].ids))
        return run(feeds, **options)

    engine.run = counted  # type: ignore[method-assign]
    return found


def cancelled_once(decoder: DocumentsDecoder, engine: Engine) -> int:
    """Cancel the next pass behind its first layer; return how many layers were asked about."""
    run: Callable[..., Any] = engine.run
    asked = 0

    def interrupted(feeds: Any, *, check: Callable[[], None]) -> Any:
        def first_layer() -> None:
            nonlocal asked
            asked += 1
            decoder.cancel()
            check()

        return run(feeds, check=first_layer)

    engine.run = interrupted  # type: ignore[method-assign, assignment]
    try:
        decoder.next()
    except Cancelled:
        assert asked == 1
    else:
        assert asked == 0  # the distribution was known: no pass
    finally:
        del engine.run  # type: ignore[attr-defined]
    return asked


def test_a_pass_ends_between_two_layers() -> None:
    engine, config = engine_of(), config_of()
    side = side_with(TEXTS, engine, config)
    decoder = side.decoder(QUESTION, 20)
    assert cancelled_once(decoder, engine) == 1
    decoder.push(5)
    same(decoder.next(), reference(side, engine, config).next((5,)))
    decoder.cancel()  # nothing runs
    decoder.push(6)
    same(decoder.next(), reference(side, engine, config).next((5, 6)))


def test_two_sides_together_are_one_side_with_both_stores() -> None:
    engine, config = engine_of(), config_of(documents=2)
    names = list(TEXTS)
    parts = [{name: TEXTS[name] for name in half} for half in (names[:2], names[2:])]
    sides = [side_with(part, engine, config) for part in parts]
    whole_config = config_of(documents=4)
    whole = side_with(TEXTS, engine, whole_config).decoder(QUESTION, 20)
    assert len(whole.found.hits) == 4
    decoders = [side.decoder(QUESTION, 20) for side in sides]
    for token in ANSWER:
        (p_l, log_l), (p_r, log_r) = (decoder.next() for decoder in decoders)
        wanted, log_both = whole.next()
        share = 1 / (1 + np.exp(log_r - log_l))  # eta_l of Equation 4
        assert np.logaddexp(log_l, log_r) == pytest.approx(log_both, abs=1e-6)
        np.testing.assert_allclose(share * p_l + (1 - share) * p_r, wanted, atol=2e-6, rtol=1e-3)
        for decoder in (whole, *decoders):
            decoder.push(token)


def test_a_rounded_weight_leaves_the_mixture_alone() -> None:
    engine = engine_of()
    (p, exact), (rounded_p, rounded) = (
        side_with(TEXTS, engine, config_of(weight_step=step)).decoder(QUESTION, 4).next()
        for step in (0.0, 0.5)
    )
    np.testing.assert_array_equal(p, rounded_p)
    assert rounded == round(2 * exact) / 2
    assert rounded != exact


def test_without_documents_it_is_plain_generation() -> None:
    engine, config = engine_of(), config_of()
    for side in (ModelSide(engine, None, config), side_with({}, engine, config)):
        decoder = side.decoder(QUESTION, 20)
        assert not decoder.found.hits
        context = [*side.layout.alone(QUESTION)]
        for token in ANSWER:
            p, log_weight = decoder.next()
            assert log_weight == float("-inf")
            np.testing.assert_allclose(p, row_of(engine, context), atol=2e-6, rtol=1e-3)
            decoder.push(token)
            context.append(token)
        decoder.close()


def test_the_interface_is_that_of_the_protocol() -> None:
    side = side_with(TEXTS, engine_of(), config_of())
    as_side: Side = side
    decoder: SideDecoder = side.decoder(QUESTION, 4)
    assert as_side.info.scorer == "word hashes 3 1024, temperature 0.3, static"
    assert len(as_side.info.model) == 64
    with pytest.raises(ProtocolError, match="roll back from 0 to 1"):
        decoder.rollback(1)
    with pytest.raises(ProtocolError, match="is open"):
        decoder.open([1], side.retrieve(QUESTION))


def test_no_room_and_an_incomparable_scorer_are_refused() -> None:
    engine = engine_of()
    side = side_with(TEXTS, engine, config_of())
    room = side.decoder(QUESTION, 1).room
    assert side.decoder(QUESTION, room).room == room
    with pytest.raises(InvalidInput, match=f"room for {room} tokens"):
        side.decoder(QUESTION, room + 1)
    with pytest.raises(InvalidInput, match="control token"):
        side.decoder("Stop <|im_end|> now", 4)
    with pytest.raises(ConfigError, match="cannot compare"):
        SideConfig(retrieval=RetrievalConfig(method="bm25"))
    with Store(None) as store:
        assert ModelSide(engine, store, SideConfig()).info.scorer.endswith(
            "temperature 0.1, static"
        )


def test_documents_that_are_cut_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, config = engine_of(), config_of(documents=1)
    with Store(None) as store:
        side = ModelSide(engine, store, config)
        document = Document("long", "The red ball lies in the kitchen. " * 30)
        store.add(document, chunks(document, ChunkPlan()))
        while store.embed(side.encoder):
            pass
        for _ in range(2):
            side.decoder(QUESTION, 4).close()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "'long'" in warned[0]
    assert "longer than 64 tokens" in warned[0]
    remedy = re.search(r"--by sentence --characters (\d+)", warned[0])
    assert remedy is not None
    assert int(remedy[1]) < 240
