"""Reader of vLLM's answers, which are not trusted: whatever does not fit is a ``ProtocolError``.

``top`` is the number of likeliest tokens in a row; 0 stands for the greedy one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from collab_llm_nodes.protocols.edge_cloud.stock.server import Row, wrong_answer

_LONGEST_ID = 9  # digits


def choices_of(answer: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the choices of ``answer``, in the order of the prompts."""
    found = answer.get("choices")
    choices = [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []
    choices.sort(key=lambda choice: choice.get("index") or 0)
    if [choice.get("index") for choice in choices] != list(range(number)):
        raise wrong_answer(f"it has not {number} choices")
    return choices


def streamed_tokens(event: Mapping[str, Any]) -> Iterator[int]:
    """Yield the tokens in one event of a stream."""
    for choice in event.get("choices") or ():
        for token in choice.get("token_ids") or ():
            yield token_of(token)


def token_of(name: object) -> int:
    """Return the token id of ``7`` or ``token_id:7``."""
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    number = name.removeprefix("token_id:") if isinstance(name, str) else ""
    if not number.isdecimal() or len(number) > _LONGEST_ID:
        raise wrong_answer("a token without id")
    return int(number)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        raise wrong_answer("a log-probability that is no number")
    return float(value)


def tokens_of(choice: Mapping[str, Any]) -> list[object]:
    """Return the names of a completion's tokens."""
    logprobs = choice.get("logprobs")
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    if not isinstance(tokens, list) or not tokens:
        raise wrong_answer("a choice without tokens")
    return tokens


def _likeliest(row: Mapping[int, float], top: int) -> Row:
    """Return the ``top`` likeliest tokens: a server adds the one that was drawn."""
    return dict(sorted(row.items(), key=lambda entry: -entry[1])[:top])


def row_of_completion(choice: Mapping[str, Any], top: int) -> Row:
    """Return the row of a completion of one token."""
    (drawn, *more) = tokens_of(choice)
    if more:
        raise wrong_answer("more than one token")
    if not top:
        return {token_of(drawn): 0.0}
    listed = choice["logprobs"].get("top_logprobs")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        raise wrong_answer("no log-probabilities")
    return _likeliest({token_of(t): _number(p) for t, p in listed[0].items()}, top)


def row_of_generation(choice: Mapping[str, Any], top: int) -> Row:
    """Return the row of one generated token."""
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list) or len(tokens) != 1:
        raise wrong_answer("not one token")
    return {token_of(tokens[0]): 0.0} if not top else _listed(choice, "token_id", top)


def row_of_chat(choice: Mapping[str, Any], top: int) -> Row:
    """Return the row of a chat's answer of one token."""
    return row_of_generation(choice, 0) if not top else _listed(choice, "token", top)


def _listed(choice: Mapping[str, Any], name: str, top: int) -> Row:
    """Return the top log-probabilities of a choice's only token."""
    try:
        (content,) = choice["logprobs"]["content"]
        row = {token_of(each[name]): _number(each["logprob"]) for each in content["top_logprobs"]}
    except (KeyError, TypeError, ValueError):
        raise wrong_answer("no log-probabilities") from None
    return _likeliest(row, top)


def rows_of_prompt(listed: object, tokens: tuple[int, ...], top: int) -> list[Row]:
    """Return the rows at the end of a prompt's log-probabilities, those of the draft ``tokens``."""
    if not tokens:
        return []
    ends = listed[-len(tokens) :] if isinstance(listed, list) else []
    if len(ends) != len(tokens):
        raise wrong_answer("no log-probabilities of the prompt")
    return [_row_of_prompt(entry, token, top) for entry, token in zip(ends, tokens, strict=True)]


def _row_of_prompt(entry: object, token: int, top: int) -> Row:
    if not isinstance(entry, dict) or str(token) not in entry:
        raise wrong_answer("log-probabilities of other tokens")
    try:
        if not top:  # of equal ones, the one that the server would choose has rank 1
            return {token_of(min(entry, key=lambda t: entry[t]["rank"])): 0.0}
        return _likeliest({token_of(t): _number(p["logprob"]) for t, p in entry.items()}, top)
    except (KeyError, TypeError):
        raise wrong_answer("log-probabilities without values") from None
