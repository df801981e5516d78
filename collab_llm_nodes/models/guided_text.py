"""Guides at work: the tokens that may come next, by ``llguidance``.

After each prefix of an answer a guide allows some tokens. The guided law is the model's law over
these alone. Where the guide leaves one text only, it allows the one token that the tokenizer would
write it with, so forced tokens are known without the model.

A guide may come from a peer. Its size, the work for it and the text that it forces are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.guide import FIELD, Guide, refused
from collab_llm_nodes.models.vocabulary import vocabulary_size

_LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=8_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""A guide takes some 50 ms to read, and 20 ms for a set of tokens, at most."""
_COMPILED = 8
"""Guides that are kept compiled."""
_MOST_ADDED = 1 << 10
"""Most characters that groups and repetitions of regular expressions may add, written out.

llguidance has no such limit, and its work grows with the square: to tens of ms here.
"""
_QUANTIFIERS = ("?", "*", "+")
_MOST_REPEATED = 4096
"""Largest lower bound of a length in a JSON schema."""
_LOWER_BOUNDS = ("minLength", "minItems", "minProperties")
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")
"""A flag of regular expressions by which comments could hide parentheses."""
_PARTS = re.compile(
    r"""\\(?:[pPuUx]\{[^{}]*\}|.)   # an escaped sign
    |   \[\^?\]?                    # a class begins; it may hold a ]
    |   \{([\s0-9,]*)\}             # a repetition
    |   .""",
    re.VERBOSE | re.DOTALL,
)
"""Parts of a regular expression, found in linear time."""
_BOUND = re.compile(r"0*([0-9]{1,9})")
"""A bound of a repetition, or its first digits."""
_JSON_FORM: Any = {
    # A choice of white space between any two parts also ends every forced text there.
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,8}",
    "item_separator": ",",
    "key_separator": ":",
}
_SAMPLE = 'The next\naction "is": 5 m.\n'


class Guides:
    """The guides of one model.

    Args:
        size: of the model's vocabulary.
        eos: its end tokens.
        control: ids of tokens that no text spells; they are never allowed.

    Raises:
        ModelError: the tokenizer is none that llguidance reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        size: int,
        eos: Collection[int],
        control: Collection[int],
    ) -> None:
        self._size = size
        self._eos = frozenset(eos)
        self._never = np.array(sorted({*control, *eos}), dtype=np.intp)
        self._never = self._never[self._never < size]
        self._tokenizer = _read_tokenizer(tokenizer, size, sorted(eos))
        self._compile = lru_cache(maxsize=_COMPILED)(self._compiled)

    def open(self, guide: Guide) -> GuidedText:
        """Return the state of ``guide`` before the first token of an answer.

        Raises:
            InvalidInput: it cannot be read, no text satisfies it, or it takes too much work.
        """
        return self._text(self._compile(guide), guide)

    def _text(self, compiled: LLMatcher, guide: Guide) -> GuidedText:
        again = partial(self._read_guide, guide)
        return GuidedText(compiled.deep_copy(), again, self._size, self._eos, self._never)

    def _compiled(self, guide: Guide) -> LLMatcher:
        compiled = self._read_guide(guide)
        self._text(compiled, guide).allowed(())
        return compiled

    def _read_guide(self, guide: Guide) -> LLMatcher:
        found = LLMatcher(self._tokenizer, _grammar(guide), log_level=0, limits=_LIMITS)
        _check(found, f"cannot be used as {guide.kind}")
        return found


class GuidedText:
    """The tokens that a guide allows in one answer. Not thread-safe.

    Answers are token ids without the prompt; methods take them in any order, and are quick for
    those that share a prefix with the last one.

    Args:
        matcher: the guide before the first token.
        again: makes another one.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        again: Callable[[], LLMatcher],
        size: int,
        eos: frozenset[int],
        never: NDArray[np.intp],
    ) -> None:
        self._matcher = matcher
        self._again = again
        self._size = size
        self._eos = eos
        self._ends = np.array(sorted(token for token in eos if token < size), dtype=np.intp)
        self._never = never
        self._read: list[int] = []

    def allows(self, answer: Sequence[int]) -> bool:
        """Return True if the guide allows ``answer``, with any end token as its last one."""
        text = answer[:-1] if answer and answer[-1] in self._eos else answer
        read = self._advance(text) or self._restart(text)
        return read and (text is answer or self._matcher.is_accepting())

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        """Return the mask [V] of tokens that may follow ``answer``; all of them after its end.

        Raises:
            InvalidInput: the guide does not allow ``answer``, nothing can follow it, or the guide
                takes too much work here.
        """
        if answer and answer[-1] in self._eos:
            return np.ones(self._size, dtype=np.bool_)
        bits = np.frombuffer(self._bits(answer), np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=self._size).view(np.bool_)
        mask[self._never] = False
        mask[self._ends] = self._matcher.is_accepting()
        if not mask.any():
            raise refused("no text of this model satisfies it", "allow other texts")
        return mask

    def rows(
        self, answer: Sequence[int], draft: Sequence[int], parents: Sequence[int] = ()
    ) -> NDArray[np.bool_]:
        """Return the masks [len(draft) + 1, V] after ``answer`` and each token of ``draft``.

        Rows after a token that is not allowed allow all: no verdict reads them.

        Args:
            parents: of a tree, the row that each token follows; empty: they follow one another.

        Raises:
            InvalidInput: as :meth:`allowed`.
        """
        masks = np.ones((len(draft) + 1, self._size), dtype=np.bool_)
        ends: list[tuple[int, ...] | None] = [tuple(answer)]  # None: not allowed
        masks[0] = self.allowed(answer)
        for row, (token, parent) in enumerate(
            zip(draft, parents or range(len(draft)), strict=True), 1
        ):
            before = ends[parent]
            possible = before is not None and masks[parent, token]
            ends.append((*before, token) if before is not None and possible else None)
            if (end := ends[-1]) is not None:
                masks[row] = self.allowed(end)
        return masks

    def forced(self, answer: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens after ``answer`` that the guide leaves no choice of.

        Raises:
            InvalidInput: as :meth:`allowed`.
        """
        found: list[int] = []
        while len(found) < most and not (found and found[-1] in self._eos):
            mask = self.allowed((*answer, *found))
            if np.count_nonzero(mask) != 1:
                break
            found.append(int(mask.argmax()))
        return tuple(found)

    def _bits(self, answer: Sequence[int]) -> bytes:
        """Return the tokens that may follow ``answer``, a bit each."""
        for read in (self._advance, self._restart):
            if read(answer):
                bits: bytes = self._matcher.compute_bitmask()
                if not self._matcher.is_error():
                    return bits
        _check(self._matcher, "no text satisfies it, or it takes too much work")
        raise refused("does not allow this answer, or takes too much work", "begin a new answer")

    def _advance(self, answer: Sequence[int]) -> bool:
        """Put the matcher after ``answer``; return False if it cannot go there."""
        shared = next(
            (i for i, (a, b) in enumerate(zip(answer, self._read, strict=False)) if a != b),
            min(len(answer), len(self._read)),
        )
        self._matcher.rollback(len(self._read) - shared)
        del self._read[shared:]
        return self._append(answer[shared:])

    def _restart(self, answer: Sequence[int]) -> bool:
        """Do the same with a new matcher, since copies share the work that they may take."""
        self._matcher, self._read = self._again(), []
        return self._append(answer)

    def _append(self, tokens: Sequence[int]) -> bool:
        new = [int(token) for token in tokens]
        if self._matcher.validate_tokens(new) < len(new):
            return False
        self._matcher.consume_tokens(new)
        self._read += new
        return not self._matcher.is_error()


def _grammar(guide: Guide) -> str:
    """Return ``guide`` in the form that llguidance reads.

    Raises:
        InvalidInput: it is no JSON, or forces too long a text.
    """
    if guide.kind == "regex":
        _check_patterns([guide.source])
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind == "choice":
        choices = [line.strip() for line in guide.source.splitlines() if line.strip()]
        return LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in choices))
    try:
        schema = json.loads(guide.source)
        _check_patterns([text for node in _nodes(schema) for text in _patterns(node)])
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_FORM)
    except (ValueError, RecursionError) as error:
        raise refused(f"is no JSON schema: {error}", "give a JSON schema") from error


def _literal(text: str) -> str:
    """Return the regular expression of ``text``; ``re.escape`` escapes what Rust does not know."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in ``schema``."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _patterns(node: dict[str, Any]) -> list[str]:
    """Return the regular expressions of an object of a schema.

    Raises:
        InvalidInput: it could force an endless text, or changes how llguidance writes JSON.
    """
    if "x-guidance" in node:
        raise refused("x-guidance is not taken", "leave it out")
    for key in _LOWER_BOUNDS:
        if isinstance(node.get(key), int | float) and node[key] > _MOST_REPEATED:
            raise refused(f"{key} is {node[key]}", f"at most {_MOST_REPEATED}")
    patterns = node.get("patternProperties")
    found = [node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]
    return [pattern for pattern in found if isinstance(pattern, str)]


def _check_patterns(patterns: Sequence[str]) -> None:
    """Refuse regular expressions that take too much work, or force too long a text.

    ``((a{1000}){1000}){1000}`` forces a gigabyte, and ``(a?){5000}a{5000}`` takes seconds to read.
    """
    if any(map(_VERBOSE.search, patterns)):
        raise refused("flag x is not taken", "write the expression without comments")
    if sum(map(_added, patterns)) > _MOST_ADDED:
        raise refused(
            f"groups and repetitions, written out, add more than {_MOST_ADDED} characters",
            "repeat less often",
        )


def _added(pattern: str) -> int:
    """Return how many characters the repetitions add, as of ``_Counted``; or enough to refuse it.

    Alternatives are added, as if all were written.
    """
    groups, last, classes = [_NOTHING], _NOTHING, 0  # open groups; latest part; open classes
    for part in _PARTS.finditer(pattern):
        sign, repeated = part[0], part[1]
        if classes:
            classes += (sign[0] == "[") - (sign == "]")
        elif sign in _QUANTIFIERS or repeated is not None:
            bounds = _BOUND.findall(repeated or "")
            again = last.again(max([1, *map(int, bounds)]))
            groups[-1], last = groups[-1].plus(again), last.plus(again)
        elif sign == "(":
            groups.append(_NOTHING)
        elif sign == ")" and len(groups) > 1:
            last = groups.pop().plus(_Counted(0, 1))
            groups[-1] = groups[-1].plus(last)
        else:
            last = _Counted(1, 0)
            groups[-1] = groups[-1].plus(last)
            classes += sign[0] == "["
        if groups[-1].added > _MOST_ADDED:
            break
    return sum(group.added for group in groups)


class _Counted(NamedTuple):
    """A part of a regular expression.

    Attributes:
        length: with its repetitions written out.
        added: what they add to it; each quantifier and each group counts as one more.
    """

    length: int
    added: int

    def plus(self, other: _Counted) -> _Counted:
        return _Counted(self.length + other.length, self.added + other.added)

    def again(self, times: int) -> _Counted:
        """Return what a quantifier of up to so many ``times`` adds to the part."""
        length = (times - 1) * self.length
        return _Counted(length, length + (times - 1) * self.added + 1)


_NOTHING = _Counted(0, 0)


def _read_tokenizer(
    tokenizer: PreTrainedTokenizerBase, size: int, eos: Sequence[int]
) -> LLTokenizer:
    """Return ``tokenizer`` for llguidance.

    A normaliser that adds characters, as the joiners of the embedded text family, is left out: it
    would force tokens that do not spell the text.

    Raises:
        ModelError: it cannot be read.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            "the tokenizer has no fast form",
            field=FIELD,
            remedy="copy the model's tokenizer.json beside the weights, or set answer.guide: none",
        )
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    rows = max(size, vocabulary_size(tokenizer))
    for normalizer in (facts.get("normalizer"), None):
        own = {**facts, "normalizer": normalizer, "truncation": None, "padding": None}
        try:
            found = LLTokenizer(json.dumps(own), n_vocab=rows, eos_token=list(eos))
        except ValueError as error:
            raise ModelError(
                f"llguidance cannot read the tokenizer: {error}",
                field=FIELD,
                remedy="set answer.guide: none for this model",
            ) from error
        if found.decode_bytes(found.tokenize_str(_SAMPLE)) == _SAMPLE.encode():
            break
    return found


def _check(matcher: LLMatcher, what: str) -> None:
    """Raise InvalidInput if ``matcher`` has failed."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:200]
        raise refused(f"{what}: {reason}", "give a simpler guide that some text satisfies")
