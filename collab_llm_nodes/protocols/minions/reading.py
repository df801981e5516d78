"""Replies of models read as JSON. A model may write anything: the work is bounded and linear."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.protocols.minions.jobs import JobOutput

_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NOTHING = frozenset({"", "none", "null", "n/a"})
_FINAL = "provide_final_answer"


def find_object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object in ``text``, which may have prose around it; None without one."""
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
    """Return ``value`` without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_proper(item) for item in value]
    if isinstance(value, dict):
        return {_proper(key): _proper(item) for key, item in value.items()}
    return value


def find_program(text: str) -> str:
    """Return the code blocks of a reply as one program; the whole reply if it has none."""
    text = answer_of(text)
    blocks = _CODE.findall(text)
    program: str = _proper("\n".join(blocks) if blocks else text)
    return program


def as_text(value: Any) -> str | None:
    """Return a field of a model's answer as text; None where it says that there is nothing."""
    if isinstance(value, list):
        texts = [text for item in value if (text := as_text(item)) is not None]
        return "; ".join(texts) or None
    if value is None or isinstance(value, (bool, dict)):
        return None
    text = str(value).strip()
    return None if text.lower() in _NOTHING else text


def worker_output(text: str, *, quotes: bool, max_characters: int) -> JobOutput | None:
    """Return what a worker has found; None if its answer has not the form asked for.

    Args:
        quotes: the form is a quote for each keyword, where a keyword without one is left out. Else
            it is an explanation, a citation and an answer; that is understood in both cases. The
            citation of quotes is all of them.
        max_characters: length of each field; the rest is cut off. An answer of quotes has it, too.
    """
    fields = find_object(text)
    if fields is None:
        return None
    if quotes and "answer" not in fields:
        texts = [(as_text(key), as_text(value)) for key, value in fields.items()]
        found = {key: quote for key, quote in texts if quote}
        said = "; ".join(f"{key}: {quote}" for key, quote in found.items())[:max_characters]
        return JobOutput("", "; ".join(found.values()) or None, said or None)
    if "answer" not in fields:
        return None
    explanation, citation, answer = (
        value and value[:max_characters]
        for value in (as_text(fields.get(key)) for key in ("explanation", "citation", "answer"))
    )
    return JobOutput(explanation or "", citation, answer)


@dataclass(frozen=True)
class Decision:
    """Decision of the remote model.

    Attributes:
        final: ``answer`` is its answer; else it wants to know more.
        missing: the information that it asks for.
        scratchpad: its notes for the next round.
    """

    final: bool
    answer: str = ""
    explanation: str = ""
    missing: str = ""
    scratchpad: str = ""


def decision(text: str) -> Decision | None:
    """Return the decision in the remote's reply; None if there is none.

    "request_additional_info" and QASPER's "need more information" mean the same, and so does a
    message to the local model alone.
    """
    fields = find_object(text)
    if fields is None:
        return None

    def of(name: str) -> str:
        return as_text(fields.get(name)) or ""

    missing = of("message") or of("missing_info")
    if not (of("decision") or of("message")):
        return None
    final = of("decision").lower() == _FINAL
    if final and not of("answer"):
        return None
    return Decision(final, of("answer"), of("explanation"), missing, of("scratchpad"))
