"""Replies of models read as JSON, in linear time whatever they contain."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.chat.completions import whole_characters
from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.protocols.minions.abstention import UNKNOWN, says_nothing
from collab_llm_nodes.protocols.minions.jobs import JobOutput
from collab_llm_nodes.protocols.minions.prompts import FINAL

_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def find_object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object in ``text``, among prose; None without one."""
    text = answer_of(text)
    found = last_object(text)
    if found is not None:
        return {str(_proper(key)): _proper(value) for key, value in found.content.items()}
    return {} if _ends_empty(text) else None


def _ends_empty(text: str) -> bool:
    """Return True if ``text`` ends with an empty object, in a code fence or not."""
    text = text.rstrip().removesuffix("```").rstrip()
    return text.endswith("}") and text[:-1].rstrip().endswith("{")


def _proper(value: Any) -> Any:
    """Return ``value`` without lone surrogates, which JSON can express and UTF-8 cannot."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_proper(item) for item in value]
    if isinstance(value, dict):
        return {_proper(key): _proper(item) for key, item in value.items()}
    return value


def find_program(text: str) -> str:
    """Return the code blocks of a reply as one program; without any, the whole reply."""
    text = answer_of(text)
    blocks = _CODE.findall(text)
    program: str = _proper("\n".join(blocks) if blocks else text)
    return program


def as_text(value: Any) -> str | None:
    """Return a field of a model's reply as text; None if it is empty or says that it is."""
    if isinstance(value, list):
        texts = [text for item in value if (text := as_text(item)) is not None]
        return "; ".join(texts) or None
    if isinstance(value, dict):
        pairs = [(key, text) for key, item in value.items() if (text := as_text(item))]
        return "; ".join(f"{key}: {text}" for key, text in pairs) or None
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = "" if value is None else str(value).strip()
    return None if says_nothing(text) else text


def worker_output(text: str, *, quotes: bool, max_characters: int) -> JobOutput | None:
    """Return a worker's output; None for a reply of the wrong form.

    Args:
        quotes: read an object of quotes by keyword, whose citation is all quotes; an object with
            explanation, citation and answer is read in any case.
        max_characters: length to which each field is cut.
    """
    fields = find_object(text)
    if fields is None:
        return None
    fields = _unwrapped(fields)
    if quotes and "answer" not in fields:
        found = {key: quote for key, value in fields.items() if (quote := as_text(value))}
        quoted = "; ".join(f"{key}: {quote}" for key, quote in found.items())[:max_characters]
        return JobOutput("", "; ".join(found.values()) or None, quoted or None)
    if "answer" not in fields:
        return None
    explanation, citation, answer = (
        value and value[:max_characters]
        for value in (as_text(fields.get(key)) for key in ("explanation", "citation", "answer"))
    )
    return JobOutput(explanation or "", citation, answer)


def _unwrapped(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the object with an answer, which may be the only value of ``fields``."""
    inner = next(iter(fields.values())) if len(fields) == 1 else None
    return inner if isinstance(inner, dict) and "answer" in inner else fields


@dataclass(frozen=True)
class Decision:
    """Decision of the remote model.

    Attributes:
        final: ``answer`` is its answer; otherwise it asks for more.
        missing: the information that it asks for.
        scratchpad: its notes for the next round.
    """

    final: bool
    answer: str = ""
    explanation: str = ""
    missing: str = ""
    scratchpad: str = ""


def decision(text: str) -> Decision | None:
    """Return the decision in the remote's reply; None without one.

    Any decision but the final one asks for more, and so does a message to the local model.
    """
    fields = find_object(text)
    if fields is None:
        return None

    def of(name: str) -> str:
        return as_text(fields.get(name)) or ""

    missing = of("message") or of("missing_info")
    if not (of("decision") or of("message")):
        return None
    final = of("decision").lower() == FINAL
    answer = of("answer") or (UNKNOWN if final and _is_written(fields.get("answer")) else "")
    if final and not answer:
        return None
    return Decision(final, answer, of("explanation"), missing, of("scratchpad"))


def _is_written(answer: Any) -> bool:
    return isinstance(answer, str) and bool(answer.strip())
