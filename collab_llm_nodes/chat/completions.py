"""Reads the responses of OpenAI's chat completions, which may come from any server."""

from __future__ import annotations

import json
from typing import Any

from collab_llm_nodes.chat.base import Finish, Usage
from collab_llm_nodes.errors import ProtocolError, quoted

_FINISHES = {
    "stop": Finish.STOP,
    "eos": Finish.STOP,
    "length": Finish.LENGTH,
    "content_filter": Finish.REFUSAL,
}
_MOST_TOKENS = 1 << 40


def read_completion(content: bytes) -> tuple[str, Finish, Usage | None]:
    """Return text, finish and usage of a response; usage is None where the server tells none.

    Raises:
        ProtocolError: ``content`` is no chat completion.
    """
    try:
        response = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is no JSON: {type(error).__name__}") from None
    choices = _object(response, "response").get("choices")
    if not isinstance(choices, list) or not choices:
        raise _wrong("it has no choices")
    choice = _object(choices[0], "choice")
    message = _object(choice.get("message"), "message")
    usage = _usage(response.get("usage"))
    refusal, text = message.get("refusal"), message.get("content")
    if isinstance(refusal, str) and refusal:
        return whole_characters(refusal), Finish.REFUSAL, usage
    reason = choice.get("finish_reason") or "stop"
    finish = _FINISHES.get(reason) if isinstance(reason, str) else None
    if finish is None:
        raise _wrong(f"finish_reason is {quoted(reason)}")
    if text is None and finish is not Finish.STOP:
        text = ""
    if not isinstance(text, str):
        raise _wrong("the message's content is no text")
    return whole_characters(text), finish, usage


def whole_characters(text: str) -> str:
    """Return ``text`` with halves of characters joined, or replaced where they stand alone.

    JSON can spell them; UTF-8, and with it ROS and files, cannot.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _usage(told: object) -> Usage | None:
    if told is None:
        return None
    fields = _object(told, "usage")
    details = fields.get("prompt_tokens_details")
    prompt = _count(fields.get("prompt_tokens"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    cached = min(cached, prompt)
    return Usage(prompt - cached, cached, _count(fields.get("completion_tokens")))


def _count(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        raise _wrong(f"usage counts {quoted(value)} tokens")
    return int(value)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(f"the {name} is no object")
    return value


def _wrong(what: str) -> ProtocolError:
    return ProtocolError(
        f"the server's answer is no chat completion: {what}",
        field="url",
        remedy="check that url ends with /v1 and that the server speaks OpenAI's API",
    )
