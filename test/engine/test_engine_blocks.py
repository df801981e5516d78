"""Columns that stay side by side from pass to pass: the same logits, and little copying."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from collab_llm_nodes.engine import attention, blocks
from collab_llm_nodes.engine.blocks import Block, Blocks
from collab_llm_nodes.engine.cache import StaticCache
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.masks import SHORT
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.models.prompt import EncodedPrompt

ENGINE = Engine(tiny_model("llama"))
V = ENGINE.vocab_size


def prompted(length: int, seed: int = 0) -> Session:
    rng = random.Random(seed)
    prompt = EncodedPrompt(tuple(rng.randrange(V) for _ in range(length)))
    session = ENGINE.open(prompt)
    session.feed(prompt.ids, last=0)
    return session


def alone(tokens: list[int], last: int) -> torch.Tensor:
    return ENGINE.open(EncodedPrompt(())).feed(tokens, last=last)


def copied(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how many columns have been copied into blocks since the last call."""
    columns = 0
    plain = blocks.Block._complete

    def count(self: Any, chunk: Any, slot: int, targets: Any, *others: Any) -> None:
        nonlocal columns
        before = len(targets)
        plain(self, chunk, slot, targets, *others)
        columns += sum(target.shape[2] for target in targets[before:])

    def read() -> int:
        nonlocal columns
        found, columns = columns, 0
        return found

    monkeypatch.setattr(blocks.Block, "_complete", count)
    return read


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_any_schedule_of_passes_gives_the_logits_of_each_session_alone(seed: int) -> None:
    """Sessions come and go, roll back, branch, fork, and meet others in every pass."""
    rng = random.Random(seed)
    known: list[tuple[Session, list[int]]] = []
    for _ in range(rng.randrange(6, 14)):
        while len(known) < 2 or (len(known) < 7 and rng.random() < 0.3):
            known.append((ENGINE.open(EncodedPrompt(())), []))
        if len(known) > 2 and rng.random() < 0.2:
            known.pop(rng.randrange(len(known)))[0].close()
        if rng.random() < 0.2 and known[0][1]:
            known.append((known[0][0].fork(), list(known[0][1])))
        asked = rng.sample(known, rng.randrange(1, len(known) + 1))
        feeds = []
        for session, tokens in asked:
            if tokens and rng.random() < 0.4:
                keep = rng.randrange(len(tokens))
                session.length = keep
                del tokens[keep:]
            if tokens and rng.random() < 0.3:  # two branches, of which one becomes the trunk
                branches = [rng.randrange(V) for _ in range(3)]
                last = session.length - 1
                session.grow(branches, [last, last, last + 1])
                column = rng.choice((last + 1, last + 2, last + 3))
                session.retain(column)
                tokens += branches[::2] if column == last + 3 else [branches[column - last - 1]]
            new = [rng.randrange(V) for _ in range(rng.choice((1, 1, 3, 5, SHORT + 4)))]
            tokens += new
            feeds.append(Feed(session, new, last=1))
        for (_, tokens), logits in zip(asked, ENGINE.run(feeds), strict=True):
            assert isinstance(logits, torch.Tensor)
            torch.testing.assert_close(logits, alone(tokens, 1), atol=5e-5, rtol=1e-4)


def test_what_retain_drops_is_no_longer_taken_from_the_block() -> None:
    sessions = [prompted(10, i) for i in range(2)]
    ENGINE.run([Feed(session, [7, 8], parents=[9, 9]) for session in sessions])
    sessions[0].retain(10)
    sessions[0].feed([3])  # alone: it is written where the block has the other branch
    found, _ = ENGINE.run([Feed(session, [4], last=1) for session in sessions])
    assert isinstance(found, torch.Tensor)
    tokens = [*sessions[0].prompt.ids, 7, 3, 4]
    torch.testing.assert_close(found, alone(tokens, 1), atol=5e-5, rtol=1e-4)


def test_a_block_knows_columns_behind_what_it_skips_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that was cut into its shared prefix comes back with as long a one."""
    monkeypatch.setattr(attention, "GATHERED", 100 * prompted(1)._cache.column_bytes)
    first = prompted(300, 1)
    other = first.fork()
    ENGINE.run([Feed(first, [1], last=1), Feed(other, [2], last=1)])
    rng = random.Random(5)
    tail = [rng.randrange(V) for _ in range(200)]
    first.length = 100
    first._prompt = EncodedPrompt(first.prompt.ids[:100])
    first.feed(tail, last=0)
    twin = first.fork()
    assert first._cache.offset == 300
    found = ENGINE.run([Feed(first, [3], last=1), Feed(twin, [4], last=1)])
    for logits, token in zip(found, (3, 4), strict=True):
        assert isinstance(logits, torch.Tensor)
        tokens = [*first.prompt.ids, *tail, token]
        torch.testing.assert_close(logits, alone(tokens, 1), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("column_bytes", [1 << 10, 1 << 15, 1 << 20])
def test_blocks_of_large_models_have_little_to_spare(column_bytes: int) -> None:
    like = StaticCache.empty(1, 1, column_bytes // 4, torch.empty(0, device="meta"))
    for slots, columns in ((2, 8), (2, 300), (16, 100)):
        size = Block(like, slots, columns, 0).columns.nbytes
        assert size <= 2 * slots * columns * column_bytes + (32 << 20)
    kept = Blocks()
    for _ in range(3):
        kept.give_back(Block(like, 2, (48 << 20) // column_bytes, 0))
    assert kept._bytes() <= blocks.KEPT_BYTES


def test_sessions_that_go_on_together_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = copied(monkeypatch)
    sessions = [prompted(20 + i, i) for i in range(4)]
    ENGINE.run([Feed(session, [1], last=1) for session in sessions])
    assert read() == 20 + 21 + 22 + 23
    for _ in range(3):
        ENGINE.run([Feed(session, [2, 3], last=1) for session in sessions])
        for session in sessions:
            session.length -= 1
    assert read() == 0


def test_two_batches_in_turn_keep_a_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read = copied(monkeypatch)
    sessions = [prompted(20, i) for i in range(8)]
    for turn in range(6):
        half = sessions[:4] if turn % 2 else sessions[4:]
        ENGINE.run([Feed(session, [turn], last=1) for session in half])
        assert read() == (80 if turn < 2 else 0)


def test_one_that_leaves_is_replaced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read = copied(monkeypatch)
    sessions = [prompted(20, i) for i in range(4)]
    ENGINE.run([Feed(session, [1], last=1) for session in sessions])
    sessions[1].close()
    sessions[1] = prompted(30, 9)
    read()
    ENGINE.run([Feed(session, [2], last=1) for session in sessions])
    assert read() == 30


def test_what_others_leave_in_a_slot_disturbs_nobody() -> None:
    """A column that is hidden is still multiplied by 0: NaN there would spread."""
    sessions = [prompted(20, i) for i in range(2)]
    broken = prompted(40, 5)
    with torch.inference_mode():
        broken._cache.own.fill_(torch.nan)
    ENGINE.run([Feed(sessions[0], [1], last=1), Feed(broken, [1], last=1)])
    broken.close()
    _, found = ENGINE.run([Feed(sessions[0], [2], last=1), Feed(sessions[1], [2], last=1)])
    assert isinstance(found, torch.Tensor)
    assert found.isfinite().all()


def test_what_a_fork_has_made_common_is_copied_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block lacks columns that were read alone, and that a fork has since come to share."""
    read = copied(monkeypatch)
    first, other = prompted(20, 1), prompted(150, 2)
    ENGINE.run([Feed(session, [1], last=1) for session in (first, other)])
    more = [7 + i % 5 for i in range(200)]
    first.feed(more, last=0)
    twin = first.fork()
    assert twin.shared_bytes > 0
    read()
    found, _ = ENGINE.run([Feed(first, [2], last=1), Feed(other, [2], last=1)])
    assert read() == 200
    assert isinstance(found, torch.Tensor)
    tokens = [*first.prompt.ids, 1, *more, 2]
    torch.testing.assert_close(found, alone(tokens, 1), atol=5e-5, rtol=1e-4)


def test_a_pass_that_ends_early_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    read = copied(monkeypatch)
    sessions = [prompted(20, i) for i in range(2)]
    twins = [prompted(20, i) for i in range(2)]
    feeds = [Feed(session, [1], last=1) for session in sessions]
    ENGINE.run(feeds)
    ENGINE.run([Feed(twin, [1], last=1) for twin in twins])
    calls = iter(range(10))

    def end() -> None:
        if next(calls) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        ENGINE.run([Feed(session, [5, 6, 7], last=1) for session in sessions], check=end)
    read()
    found = ENGINE.run([Feed(session, [2], last=1) for session in sessions])
    assert read() == 0, "the block is as it was, too"
    expected = ENGINE.run([Feed(twin, [2], last=1) for twin in twins])
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_short_sessions_of_unlike_lengths_attend_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would attend over columns that masks hide; where those are few, one call is better."""
    groups: list[int] = []
    plain = attention.GatheredAttention.attend

    def noted(self: Any, layer: int, *others: Any) -> torch.Tensor:
        if not layer:
            groups.append(len(self._chunks))
        return plain(self, layer, *others)

    monkeypatch.setattr(attention.GatheredAttention, "attend", noted)
    rng = random.Random(3)
    sessions = [prompted(5 + 3 * i, seed=i) for i in range(17)]
    rng.shuffle(sessions)
    for hidden, expected in ((1, [8, 9]), (1 << 40, [17])):
        monkeypatch.setattr(attention, "HIDDEN", hidden)
        groups.clear()
        found = ENGINE.run([Feed(session, [7, 8], last=1) for session in sessions])
        assert groups == expected
        for session, logits in zip(sessions, found, strict=True):
            assert isinstance(logits, torch.Tensor)
            own = alone([*session.prompt.ids, 7, 8], 1)
            torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
            session.length -= 2
