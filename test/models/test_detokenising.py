"""Text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence

from collab_llm_nodes.models.detokenising import REPLACEMENT, Detokeniser


def from_bytes(tokens: Sequence[int]) -> str:
    """Decode tokens that are bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    answer = Detokeniser(from_bytes)
    tokens = list("é a😀b".encode())
    for count in (1, 3, 5, 6, len(tokens)):  # as rounds come
        answer.update(tokens[:count])
        assert len(answer.ends) == count
        assert answer.ends[-1] == len(answer.text)
    assert answer.ends == (0, 1, 2, 3, 3, 3, 3, 4, 5)


def test_half_a_character_is_told_only_at_the_end() -> None:
    answer = Detokeniser(from_bytes)
    tokens = list("aé".encode())[:2]
    answer.update(tokens)
    assert (answer.text, answer.ends) == ("a", (1, 1))
    answer.update(tokens, final=True)
    assert (answer.text, answer.ends) == ("a" + REPLACEMENT, (1, 2))


def test_nothing_has_no_ends() -> None:
    answer = Detokeniser(from_bytes)
    answer.update([], final=True)
    assert (answer.text, answer.ends) == ("", ())
