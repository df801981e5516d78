"""Thoughts of reasoning models: text that a model writes for itself, before or between its answer.

No object, action or point may be taken from a thought, so all readers of answers use this module.
A thought goes from an opening marker to the closing one of the same form; other forms between them
are not read. Thoughts of one form may nest.

- Without the closing marker (the answer was cut off) all that follows is a thought.
- Without the opening marker (the chat template wrote it into the prompt) all before is a thought.
- A marker within quotes or backticks is a mention of it, not a marker.

An answer may also quote or explain such markers. There are two readings, therefore:

- :func:`answer_of` removes only the thoughts before the answer. An opening marker counts where the
  answer would begin, and no marker counts within a JSON string.
- :func:`blank_thoughts` removes all that may be a thought, for readers that move a robot.
"""

from __future__ import annotations

import re

_END_OF_PROMPT = 256
"""Characters at the end of a prompt in which a chat template may open a thought."""
_FORMS = (
    *(  # Qwen, DeepSeek, Seed, prompts that ask for tags
        (rf"<\s*{name}(?:\s[^<>/]{{0,64}})?>", rf"<\s*/\s*{name}\s*>")
        for name in (
            *("think", "thinking", "thought", "thoughts", "reasoning", "reflection"),
            *("reason", "scratchpad", "seed:think"),
        )
    ),
    (r"\[think\]", r"\[/think\]"),  # Mistral
    (r"\[thinking\]", r"\[/thinking\]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
    (r"<\|(?:begin_of_|start_)?(?:thought|think|thinking)\|>",)  # OpenThinker, Command
    + (r"<\|(?:end_of_|end_|/)(?:thought|think|thinking)\|>",),
    (r"<\|channel>", r"<channel\|>"),  # Gemma
    # gpt-oss: every channel but the final one; decoded without special tokens, bare words remain.
    (
        r"<\|channel\|>(?!\s*final)|<\|(?:end|return|call)\|>"
        r"|\A\s*(?-i:analysis(?=[^\sa-z:,.;)-]))",
        r"<\|channel\|>\s*final(?:[^<>]{0,64}(?:<\|constrain\|>[^<>]{0,64})?<\|message\|>)?"
        r"|(?-i:assistantfinal)",
    ),
    (r"\A\s*here(?: i|')s my thought process:", r"^[ \t]*here(?: i|')s my response:"),  # Granite
    (r"\A\s*here are my reasoning steps:", r"\[begin final response\]"),  # Apriel
)
_FLAT = frozenset({len(_FORMS) - 3})
"""Forms whose thoughts do not nest: each channel ends the one before."""
_JSON_STRING = (
    r"""[{\[,:]\s*(?:"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')(?=\s*(?:[]},:]|\Z))"""
)
_ASIDE = r"(?:reason|reflection|scratchpad)"
"""Tags that are as often part of an answer in XML."""
_NO_MARKER = re.compile(
    rf"{_JSON_STRING}|<\s*/?\s*{_ASIDE}\b[^<>]{{0,64}}>", re.IGNORECASE | re.DOTALL
)
_LEADING_ASIDE = re.compile(
    rf"\s*<\s*({_ASIDE})\b[^<>]{{0,64}}>.*?<\s*/\s*\1\s*>", re.IGNORECASE | re.DOTALL
)
_SENTENCE_BEFORE = re.compile(r"[^\s.?!] |.?\(")
_SENTENCE_AFTER = re.compile(r" [a-z]|[.,;:?!)]")
_MARKER = re.compile(
    r"(?<![^\s([{:,=])[`\"'](?:<[^<>]{0,40}>|\[/?think(?:ing)?\])[`\"']|"
    + "|".join(
        f"(?P<opens_{form}>{opens})|(?P<closes_{form}>{closes})"
        for form, (opens, closes) in enumerate(_FORMS)
    ),
    re.IGNORECASE | re.MULTILINE,
)


def answer_of(text: str) -> str:
    """Return the answer in a model's text, without the thoughts before it."""
    seen = _NO_MARKER.sub(lambda found: "x" * len(found[0]), text)
    parts, last = [], 0
    for begin, end in find_thoughts(seen, skip_mentions=True):
        # An answer in one of gpt-oss's channels ends where the next channel begins.
        in_channel = text.endswith("<|message|>", 0, last)
        if text[last:begin].strip() and not in_channel:
            break
        parts.append(text[last:begin])
        last = end
    if aside := _LEADING_ASIDE.match(text, last):
        last = aside.end()
    return "".join([*parts, text[last:]]).strip() if last else text


def blank_thoughts(text: str) -> str:
    """Return ``text`` with spaces for all that may be a thought, so that indices stay valid."""
    parts, last = [], 0
    for begin, end in find_thoughts(text):
        parts += [text[last:begin], " " * (end - begin)]
        last = end
    return "".join([*parts, text[last:]])


def find_thoughts(text: str, *, skip_mentions: bool = False) -> list[tuple[int, int]]:
    """Return the begin and end of each thought, markers included. Linear in the text's length.

    Args:
        skip_mentions: a closing marker amid a sentence, without an opening one, closes nothing.
    """
    found: list[tuple[int, int]] = []
    form, depth, begin, opened = "", 0, 0, 0
    for marker in _MARKER.finditer(text):
        action, _, own = (marker.lastgroup or "").partition("_")
        if not action or (depth and own != form):
            continue
        if action == "closes":
            if skip_mentions and not depth and _is_in_sentence(text, *marker.span()):
                continue
            depth -= 1
            if depth < 0:
                found, begin, depth = [], 0, 0
            if not depth:
                found.append((begin, marker.end()))
            continue
        if not depth:
            form, begin, depth = own, marker.start(), 1
        elif int(own) not in _FLAT and text[opened : marker.start()].strip():
            depth += 1  # an opening marker straight after another is the template's, repeated
        opened = marker.end()
    if depth:
        found.append((begin, len(text)))
    return found


def _is_in_sentence(text: str, begin: int, end: int) -> bool:
    before, after = text[max(0, begin - 2) : begin], text[end : end + 2]
    return bool(_SENTENCE_BEFORE.fullmatch(before) and _SENTENCE_AFTER.match(after))


def is_thought_tag(token: str) -> bool:
    """Return True for a token such as ``</think>``, which marks a thought and nothing else."""
    marker = _MARKER.fullmatch(token)
    return bool(marker and marker.lastgroup and "|" not in token)


def opened_thought(prompt: str) -> str:
    """Return the opening marker if ``prompt``, as a chat template made it, ends in a thought.

    What the model writes goes on with that thought: put the marker before it.
    """
    end = prompt[-_END_OF_PROMPT:]
    last = ""
    for marker in _MARKER.finditer(end):
        if marker.lastgroup:
            last = marker.lastgroup
            span = marker.span()
    return end[slice(*span)] if last.startswith("opens") and not end[span[1] :].strip() else ""
