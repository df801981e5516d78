"""Reader of responses of OpenAI's chat completions, from any server.

An answer in the response counts. Fields beside it (``finish_reason``, ``usage``, an error object)
may be missing or malformed; each is read if it can be understood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from collab_llm_nodes.chat.base import Finish, Usage
from collab_llm_nodes.errors import ProtocolError

_FINISHES = {
    "length": Finish.LENGTH,
    "max_length": Finish.LENGTH,
    "max_output_tokens": Finish.LENGTH,
    "max_tokens": Finish.LENGTH,
    "model_context_window_exceeded": Finish.LENGTH,
    "model_length": Finish.LENGTH,
    "token_limit": Finish.LENGTH,
    "blocklist": Finish.REFUSAL,
    "content_filter": Finish.REFUSAL,
    "content_filtered": Finish.REFUSAL,
    "guardrail_intervened": Finish.REFUSAL,
    "prohibited_content": Finish.REFUSAL,
    "recitation": Finish.REFUSAL,
    "refusal": Finish.REFUSAL,
    "safety": Finish.REFUSAL,
    "sensitive": Finish.REFUSAL,
    "spii": Finish.REFUSAL,
}
"""Names that servers use; any other one, such as eos_token, means STOP."""
_BROKEN_OFF = frozenset(
    (
        *("abort", "aborted", "cancelled", "canceled", "error"),
        *("insufficient_system_resource", "network_error", "timeout"),
    )
)
"""Reasons of a server that did not finish the answer."""
_TEXT_PARTS = (None, "text", "output_text")
_MAX_TOKENS = 1 << 40
_MAX_MESSAGE = 400
"""Longest error message that is taken from a server [characters]."""
_MAX_DEPTH = 8


class BrokenOff(ProtocolError):
    """The response is incomplete; another attempt may succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="url", remedy="try again later; see the server's own log")


class Reported(Exception):
    """The response is an error report with status 200.

    Attributes:
        body: the report.
    """

    def __init__(self, body: object) -> None:
        super().__init__()
        self.body = body


def read_completion(content: bytes, secret: str = "") -> tuple[str, Finish, Usage | None]:
    """Return text, finish and usage of a response; usage is None if the server reports none.

    Args:
        secret: masked where an error repeats the response.

    Raises:
        BrokenOff: the response or the answer is incomplete.
        ProtocolError: ``content`` is no chat completion.
        Reported: it is an error report.
    """
    response = _decoded(content, secret)
    choices = response.get("choices")
    found = (
        [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    )
    choice = next((each for each in found if isinstance(each.get("message"), dict)), None)
    error = next((each["error"] for each in (*found, response) if each.get("error")), None)
    if choice is None:
        if error or (not found and (words_of(response) or status_of(response))):
            raise Reported(error or response)
        raise _wrong("it has no choices with a message")
    message = choice["message"]
    usage = _usage(response.get("usage"))
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        return whole_characters(refusal), Finish.REFUSAL, usage
    text = whole_characters(_text(message.get("content")))
    reason = str(choice.get("finish_reason") or "").lower().replace("-", "_")
    if not text and error:
        raise Reported(error)
    if reason in _BROKEN_OFF:
        if not text:
            raise BrokenOff(f"the server broke off the answer: {reason}")
        return text, Finish.LENGTH, usage
    return text, _FINISHES.get(reason, Finish.STOP), usage


def whole_characters(text: str) -> str:
    """Return ``text`` with surrogate pairs joined and lone surrogates replaced.

    JSON can contain them; UTF-8, and thus ROS and files, cannot.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def words_of(body: object, secret: str = "") -> str:
    """Return the bounded message of an error report, from any of the usual places.

    Args:
        secret: replaced by ``***`` before the message is shortened, so that no part of it remains.
    """
    words = "; ".join(dict.fromkeys(_words(body, 0)))
    words = words.replace(secret, "***") if secret else words
    words = " ".join(whole_characters(words).split())
    return words if len(words) <= _MAX_MESSAGE else f"{words[:_MAX_MESSAGE]}..."


def status_of(body: object) -> int:
    """Return the HTTP status that an error report names; 0 if it names none."""
    for name in ("code", "status", "status_code", "statusCode"):
        value = body.get(name) if isinstance(body, dict) else None
        if isinstance(value, (int, str)) and str(value).isdecimal() and len(str(value)) == 3:
            return int(value)
    return 0


def kind_of(body: object, depth: int = 0) -> str:
    """Return the names of an error report's kind, in lower case."""
    if isinstance(body, list):
        body = {"detail": body[0]} if body else None
    if not isinstance(body, dict) or depth == _MAX_DEPTH:
        return ""
    named = (body.get(name) for name in ("code", "type", "status"))
    own = " ".join(value[:64].lower() for value in named if isinstance(value, str))
    inner = next((body[name] for name in ("error", "detail") if body.get(name)), None)
    return f"{own} {kind_of(inner, depth + 1)}".strip()


def _words(body: object, depth: int) -> Iterator[str]:
    if isinstance(body, str):
        yield body
    elif isinstance(body, list) and depth < _MAX_DEPTH:
        for item in body[:_MAX_DEPTH]:
            yield from _words(item, depth + 1)
    elif isinstance(body, dict) and depth < _MAX_DEPTH:
        if isinstance(body.get("loc"), list):  # the wrong field, as FastAPI names it
            yield ".".join(str(part)[:64] for part in body["loc"][:_MAX_DEPTH])
        for name in ("message", "detail", "msg", "error", "error_description"):
            if body.get(name):
                yield from _words(body[name], depth + 1)
                break
        metadata = body.get("metadata")
        if isinstance(metadata, dict):  # a provider's message, as OpenRouter passes it on
            yield from _words(metadata.get("raw"), depth + 1)


def _decoded(content: bytes, secret: str) -> dict[str, Any]:
    """Return the JSON object of a response."""
    try:
        response = json.loads(content)
    except (ValueError, RecursionError) as error:
        begun = words_of(content.decode(errors="replace"), secret)
        if isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        ):
            raise BrokenOff(f"the server's answer ends too early: {begun!r}") from None
        raise _wrong(f"it is no JSON: {begun!r}") from None
    if not isinstance(response, dict):
        raise _wrong(f"it is no object: {words_of(response, secret)!r}")
    return response


def _text(content: object) -> str:
    """Return the text of a message's content, without parts such as reasoning or images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[object] = []
    for part in parts:
        if isinstance(part, dict):
            texts.append(part.get("text") if part.get("type") in _TEXT_PARTS else None)
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise _wrong("the message's content is no text")
    return "".join(text for text in texts if isinstance(text, str))


def _usage(report: object) -> Usage | None:
    if not isinstance(report, dict):
        return None
    details = report.get("prompt_tokens_details")
    prompt, decode = _count(report.get("prompt_tokens")), _count(report.get("completion_tokens"))
    if prompt is None or decode is None:
        return None
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    cached = min(cached or 0, prompt)
    return Usage(prompt - cached, cached, decode)


def _count(value: object) -> int | None:
    """Return ``value`` as a number of tokens; None if it is none."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return int(number) if 0 <= number <= _MAX_TOKENS and number.is_integer() else None


def _wrong(what: str) -> ProtocolError:
    return ProtocolError(
        f"the server's answer is no chat completion: {what}",
        field="url",
        remedy="check that url ends with /v1 and that the server speaks OpenAI's API",
    )
