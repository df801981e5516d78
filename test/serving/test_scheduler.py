"""The laws of the scheduler: the next to compute, and the holders of KV caches."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from collab_llm_nodes.serving.scheduler import (
    BatchConfig,
    Evicted,
    Granted,
    ReadyQueue,
    Refused,
    Slots,
)

# --- The line before the model ------------------------------------------------------------------


@settings(max_examples=200)
@given(st.data())
def test_passes_are_first_come_first_served_and_nobody_starves(data: st.DataObject) -> None:
    config = BatchConfig(
        max_batch=data.draw(st.integers(1, 4)), prefill_tokens=data.draw(st.integers(1, 8))
    )
    line: ReadyQueue[int] = ReadyQueue(config)
    drafts: deque[int] = deque()
    prompts: deque[list[int]] = deque()  # [key, unread]
    for now in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(0, 3))):
            key = 1000 * now + len(drafts) + len(prompts)
            if data.draw(st.booleans()):
                line.add_turn(key, now)
                drafts.append(key)
            else:
                unread = data.draw(st.integers(1, 20))
                line.add_prompt(key, unread, now)
                prompts.append([key, unread])
        if drafts and data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(sorted(drafts)))
            line.discard(gone)
            drafts.remove(gone)
        assert len(line) == len(drafts) + len(prompts)
        assert (line.starts_at(coming=0) is None) == (not drafts and not prompts)
        batch = line.take()
        assert [key for key, _ in batch.turns] == list(drafts)[: config.max_batch]
        for _ in batch.turns:
            drafts.popleft()
        read = dict(batch.prompts)
        assert sum(read.values()) == min(config.prefill_tokens, sum(n for _, n in prompts))
        for key, count in batch.prompts:  # the oldest first, each to its end before the next
            assert prompts[0][0] == key
            prompts[0][1] -= count
            if not prompts[0][1]:
                prompts.popleft()


def test_a_pass_waits_for_others_only_while_there_are_any_and_room_for_them() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(max_batch=2, max_wait_s=0.5))
    assert line.starts_at(coming=3) is None
    line.add_turn("a", 10.0)
    assert line.starts_at(coming=0) == 10.0
    assert line.starts_at(coming=3) == 10.5
    line.add_turn("a", 11.0)  # it has its place already
    assert line.starts_at(coming=3) == 10.5
    line.add_turn("b", 10.2)
    assert line.starts_at(coming=3) == 10.0
    line.discard("a")
    assert line.starts_at(coming=3) == 10.7
    assert line.take().turns == (("b", 10.2),)


def test_prompts_of_one_owner_do_not_hold_up_anothers() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(prefill_tokens=10))
    for number in range(5):
        line.add_prompt(f"a{number}", 8, 0.0, "a")
    line.add_prompt("b0", 8, 1.0, "b")
    line.add_prompt("b1", 8, 1.0, "b")
    line.add_prompt("nobody's", 4, 2.0)
    assert line.take().prompts == (("a0", 8), ("b0", 2))
    assert line.take().prompts == (("nobody's", 4), ("b0", 6))
    assert line.take().prompts == (("a1", 8), ("b1", 2))
    assert line.take().prompts == (("b1", 6), ("a2", 4))
    assert line.take().prompts == (("a2", 4), ("a3", 6))
    assert line.take().prompts == (("a3", 2), ("a4", 8))
    assert not line


def test_an_owners_urgent_turns_and_prompts_come_first() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(max_batch=2, prefill_tokens=10))
    for number in range(3):
        line.add_turn(f"question {number}", 0.0, "a")
        line.add_prompt(f"long {number}", 100, 0.0, "a")
    line.add_turn("motion", 1.0, "a", urgent=True)
    line.add_prompt("frame", 8, 1.0, "a", urgent=True)
    batch = line.take()
    assert [key for key, _ in batch.turns] == ["motion", "question 0"]
    assert batch.prompts == (("frame", 8), ("long 0", 2))
    assert [key for key, _ in line.take().turns] == ["question 1", "question 2"]


def test_who_calls_everything_urgent_gains_nothing_over_others() -> None:
    line: ReadyQueue[str] = ReadyQueue(BatchConfig(max_batch=2, prefill_tokens=10))
    for number in range(4):
        line.add_turn(f"a{number}", 0.0, "a", urgent=True)
        line.add_prompt(f"A{number}", 8, 0.0, "a", urgent=True)
    line.add_turn("b0", 1.0, "b")
    line.add_prompt("B0", 8, 1.0, "b")
    batch = line.take()
    assert [key for key, _ in batch.turns] == ["a0", "b0"]
    assert batch.prompts == (("A0", 8), ("B0", 2))
    assert line.take().prompts == (("B0", 6), ("A1", 4))


# --- KV caches ----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data())
def test_caches_are_lent_in_order_and_never_taken_from_who_works(data: st.DataObject) -> None:
    config = BatchConfig(evict_idle_s=3.0, slot_wait_s=5.0)
    count = data.draw(st.integers(1, 3))
    slots: Slots[int] = Slots(count, config)
    line: dict[int, float] = {}
    busy: set[int] = set()
    idle: dict[int, float] = {}
    now, fresh = 0.0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["request", "work", "rest", "leave", "wait"]))
        if action == "request":
            fresh += 1
            slots.request(fresh, now)
            line[fresh] = now
        elif action == "work" and idle:
            key = data.draw(st.sampled_from(sorted(idle)))
            slots.mark_busy(key)
            del idle[key]
            busy.add(key)
        elif action == "rest" and busy:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.mark_idle(key, now)
            busy.remove(key)
            idle[key] = now
        elif action == "leave" and (everybody := sorted({*line, *busy, *idle})):
            key = data.draw(st.sampled_from(everybody))
            slots.leave(key)
            line.pop(key, None)
            busy.discard(key)
            idle.pop(key, None)
        elif action == "wait":
            now += data.draw(st.floats(0.1, 4.0))
        due = slots.due
        changes = slots.advance(now)
        if due is None:
            assert not line
        for change in changes:
            if isinstance(change, Evicted):
                assert change.key == next(iter(idle)), "not the longest idle"
                assert now - idle.pop(change.key) >= config.evict_idle_s - 1e-9  # sums of seconds
            elif isinstance(change, Granted):
                assert change.key == next(iter(line)), "not the first in line"
                del line[change.key]
                busy.add(change.key)
            else:
                assert isinstance(change, Refused)
                assert now - line.pop(change.key) >= config.slot_wait_s
        assert len(slots) == len(busy) + len(idle) <= count
        assert slots.waiting == len(line)
        if line:  # whoever waits, waits for a reason
            assert len(slots) == count
            assert all(now - since < config.evict_idle_s + 1e-9 for since in idle.values())
            assert slots.due is not None
            assert slots.due > now


@settings(max_examples=300)
@given(st.data())
def test_owners_share_the_caches_fairly(data: st.DataObject) -> None:
    """Nobody without one waits while an owner has two idle, and those who work keep theirs."""
    slots: Slots[tuple[str, int]] = Slots(4, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    line: set[tuple[str, int]] = set()
    busy: set[tuple[str, int]] = set()
    idle: set[tuple[str, int]] = set()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["request", "request", "rest", "work", "leave"]))
        if action == "request":
            key = (data.draw(st.sampled_from("abc")), number)
            slots.request(key, 0.0, key[0])
            line.add(key)
        elif action == "rest" and busy:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.mark_idle(key, 0.0)
            busy.remove(key)
            idle.add(key)
        elif action == "work" and idle:
            key = data.draw(st.sampled_from(sorted(idle)))
            slots.mark_busy(key)
            idle.remove(key)
            busy.add(key)
        elif action == "leave" and (everybody := sorted(line | busy | idle)):
            key = data.draw(st.sampled_from(everybody))
            slots.leave(key)
            for held in (line, busy, idle):
                held.discard(key)
        for change in slots.advance(0.0):
            if isinstance(change, Evicted):
                idle.remove(change.key)
            else:
                assert isinstance(change, Granted)
                line.remove(change.key)
                busy.add(change.key)
        held_by = Counter(owner for owner, _ in busy | idle)
        assert held_by.total() <= 4
        for newcomer, _ in line:
            assert held_by.total() == 4
            assert all(held_by[owner] <= held_by[newcomer] + 1 for owner, _ in idle)


def test_an_urgent_newcomer_takes_a_cache_of_its_own_owners_questions() -> None:
    """An idle one first, then one whose turn is due; never another urgent one's."""
    slots: Slots[str] = Slots(3, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    for key in ("busy", "idle", "busy too"):
        slots.request(key, 0.0, "robot")
    assert len(slots.advance(0.0)) == 3
    slots.mark_idle("idle", 0.0)
    slots.request("question", 0.0, "robot")
    assert slots.advance(0.0) == []
    slots.request("motion", 1.0, "robot", urgent=True)
    assert slots.advance(1.0) == [Evicted("idle"), Granted("motion")]
    slots.request("motion too", 1.0, "robot", urgent=True)
    (evicted, granted) = slots.advance(1.0)
    assert isinstance(evicted, Evicted)
    assert evicted.key.startswith("busy")
    assert granted == Granted("motion too")
    slots.request("third", 1.0, "robot", urgent=True)
    assert Granted("third") in slots.advance(1.0)
    slots.request("fourth", 1.0, "robot", urgent=True)
    assert slots.advance(1.0) == [], "only urgent ones are left"


def test_an_urgent_newcomer_takes_no_busy_cache_of_another_owner() -> None:
    """Even if it is small and theirs are large."""
    slots: Slots[str] = Slots(4, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    for owner in "bcde":
        slots.request(f"{owner} question", 0.0, owner, size=1000)
    assert len(slots.advance(0.0)) == 4
    for number in range(4):
        slots.request(f"motion {number}", 1.0, "a", size=10, urgent=True)
    assert slots.advance(1.0) == []
    slots.mark_idle("b question", 2.0)
    assert slots.advance(2.0) == [Evicted("b question"), Granted("motion 0")], "as for any newcomer"
    slots.request("c motion", 3.0, "c", size=10, urgent=True)
    assert slots.advance(3.0) == [Evicted("c question"), Granted("c motion")], "of its own owner"


def test_urgent_newcomers_of_two_owners_never_go_past_a_third() -> None:
    slots: Slots[str] = Slots(1, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    slots.request("a0", 0.0, "a", urgent=True)
    assert slots.advance(0.0) == [Granted("a0")]
    slots.request("question", 0.0, "c")
    slots.request("b0", 0.0, "b", urgent=True)
    slots.leave("a0")
    assert slots.advance(1.0) == [Granted("question")]


def test_an_urgent_newcomer_leaves_what_is_free_to_a_large_one_that_has_waited() -> None:
    slots: Slots[str] = Slots(8, BatchConfig(evict_idle_s=2.0, slot_wait_s=4.0))
    slots.room = 100
    for key, owner, size in (("busy", "b", 70), ("a question", "a", 10), ("idle", "b", 10)):
        slots.request(key, 0.0, owner, size)
    assert len(slots.advance(0.0)) == 3
    slots.mark_idle("idle", 0.0)
    slots.request("large", 0.0, "c", size=60)
    assert slots.advance(0.0) == []
    slots.request("motion", 3.0, "a", size=10, urgent=True)
    assert slots.advance(3.0) == [Evicted("a question"), Granted("motion")]
    slots.request("motion too", 3.0, "a", size=10, urgent=True)
    assert slots.advance(3.0) == [], "neither the free memory nor the idle cache is for it"


@settings(max_examples=200)
@given(st.data())
def test_caches_in_use_never_take_more_than_the_room(data: st.DataObject) -> None:
    slots: Slots[int] = Slots(8, BatchConfig(evict_idle_s=5.0, slot_wait_s=10.0))
    slots.room = 10
    sizes: dict[int, int] = {}
    busy: set[int] = set()
    idle: set[int] = set()
    for now in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            sizes[now] = data.draw(st.integers(0, 10))
            slots.request(now, now, size=sizes[now])
        if data.draw(st.booleans()) and busy:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.mark_idle(key, now)
            busy.remove(key)
            idle.add(key)
        if busy and data.draw(st.integers(0, 3)) == 0:
            key = data.draw(st.sampled_from(sorted(busy)))
            slots.leave(key)
            busy.remove(key)
        for change in slots.advance(now):
            if isinstance(change, Granted):
                busy.add(change.key)
            elif isinstance(change, Evicted):
                idle.remove(change.key)  # nobody who works is asked to make room
        assert slots.held_bytes == sum(sizes[key] for key in busy | idle) <= slots.room


def test_room_is_made_only_if_the_newcomer_then_fits() -> None:
    slots: Slots[str] = Slots(8, BatchConfig(evict_idle_s=0.0))
    slots.room = 10
    for key, size in (("busy", 5), ("old", 2), ("new", 2)):
        slots.request(key, 0.0, size=size)
    assert slots.advance(0.0) == [Granted("busy"), Granted("old"), Granted("new")]
    slots.mark_idle("old", 1.0)
    slots.mark_idle("new", 1.5)
    slots.request("large", 2.0, size=6)
    assert slots.advance(2.0) == [], "5 of 10 are busy: it would not fit without the idle ones"
    slots.leave("large")
    slots.request("fits", 2.0, size=5)
    assert slots.advance(2.0) == [Evicted("old"), Evicted("new"), Granted("fits")]


def test_an_owner_of_a_large_cache_makes_room_for_others() -> None:
    slots: Slots[str] = Slots(8, BatchConfig(evict_idle_s=60.0))
    slots.room = 10
    slots.request("large", 0.0, owner="greedy", size=9)
    assert slots.advance(0.0) == [Granted("large")]
    slots.mark_idle("large", 0.0)
    slots.request("another", 1.0, owner="greedy", size=2)
    assert slots.advance(1.0) == [], "its own"
    slots.request("small", 1.0, owner="modest", size=2)
    assert slots.advance(1.0) == [Evicted("large"), Granted("small"), Granted("another")]


def test_nobody_is_evicted_for_a_newcomer_who_must_wait_all_the_same() -> None:
    slots: Slots[str] = Slots(8, BatchConfig(evict_idle_s=2.0, slot_wait_s=60.0))
    slots.room = 100
    for key in ("first", "second"):
        slots.request(key, 0.0, size=50)
    assert len(slots.advance(0.0)) == 2
    slots.mark_idle("first", 0.0)
    slots.mark_idle("second", 1.0)
    slots.request("large", 1.5, size=80)
    assert slots.advance(2.0) == [], "the second one is not idle for long"
    assert slots.due == 3.0, "not a time that has passed: the caller would not wait at all"
    assert slots.advance(3.0) == [Evicted("first"), Evicted("second"), Granted("large")]


def test_small_newcomers_go_past_a_large_one_for_a_while() -> None:
    slots: Slots[str] = Slots(8, BatchConfig(evict_idle_s=60.0, slot_wait_s=2.0))
    slots.room = 100
    slots.request("busy", 0.0, size=85)
    assert slots.advance(0.0) == [Granted("busy")]
    slots.request("large", 0.0, size=20)
    slots.request("small", 0.1, size=5)
    assert slots.advance(0.1) == [Granted("small")]
    slots.request("another", 1.1, size=5)
    assert slots.advance(1.1) == [], "the large one has waited for long enough"
    assert slots.advance(2.0) == [Refused("large"), Granted("another")]


def test_with_all_slots_taken_newcomers_keep_their_order() -> None:
    slots: Slots[str] = Slots(1, BatchConfig(evict_idle_s=60.0, slot_wait_s=60.0))
    slots.room = 100
    for key, size in (("busy", 10), ("large", 90), ("small", 1)):
        slots.request(key, 0.0, size=size)
    assert slots.advance(0.0) == [Granted("busy")]
    slots.leave("busy")
    assert slots.advance(1.0) == [Granted("large")]
