"""The common beginning of two contexts, and what it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.protocols.contexts import common_length

SHORT = st.lists(st.integers(0, 2), max_size=12).map(tuple)


@given(SHORT, SHORT, SHORT)
def test_it_is_the_longest_beginning_of_both(
    shared: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    one, other = shared + a, shared + b
    lengths = range(min(len(one), len(other)) + 1)
    assert common_length(one, other) == max(n for n in lengths if one[:n] == other[:n])


class Counted(int):
    """A token that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_the_comparisons_grow_with_the_length_alone_wherever_they_part() -> None:
    size = 1000
    for parts in (0, 1, 499, 500, 998, 999, 1000):
        one = tuple(map(Counted, range(size)))
        other = tuple(-1 if i == parts else i for i in range(size))
        Counted.compared = 0
        assert common_length(one, other) == parts
        assert Counted.compared <= size + 10
