"""Chats that the worker and the planner learn from: right replies to the protocols' own prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from collab_llm_lab.training.minions.logs import ENTRY_OF, VALUE_OF, Entry, LogWriter
from collab_llm_lab.training.minions.questions import (
    CLASSES,
    HELD_OUT_SHAPES,
    SHAPES,
    draw,
    wording,
)
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.embedded.queries import (
    COUNT,
    FACTS,
    LOOKUP,
    RECALL,
    SUM,
    Query,
)
from collab_llm_nodes.protocols.minions.embedded.remote import PLANNER_PROMPT

STYLE = prompts.STYLES["embedded"]
NOTHING = "None"
ABSENT = json.dumps({"answer": None})
_KIND_OF_SERIES = {"spent": SUM, "alarm": COUNT, "seen": RECALL}
_ROLES = (("job", 0.6), ("talk", 0.3), ("direct", 0.1))
_PRESENT = 0.55
"""Share of tasks that the text answers, nearly: a wrong find costs little, since citations are
checked."""
_SEVERAL = 0.6
"""Share of the other tasks whose answer is in several lines, if the passage has such lines."""


@dataclass(frozen=True)
class Group:
    """Chats that begin with the same text: several tasks on one passage.

    Attributes:
        sources: of each chat, the lines of the passage that its reply is copied from, each with the
            length of the part that the task quotes; None if they are unknown.
        facts: the fact of ``queries.FACTS`` that each chat asks about.
    """

    chats: tuple[tuple[Turn, ...], ...]
    sources: tuple[tuple[tuple[str, int], ...] | None, ...]
    facts: tuple[str, ...]


def job_reply(found: Sequence[Entry], query: Query) -> str:
    """Return the worker's reply to a task of MinionS; ``found`` are the lines that answer it."""
    if not found:
        return ABSENT
    reply = {
        "explanation": "stated",
        "citation": "; ".join(entry.text for entry in found),
        "answer": "; ".join(_answers(found, query)),
    }
    return json.dumps(reply, ensure_ascii=False)


def talk_reply(found: Sequence[Entry], query: Query) -> str:
    """Return the worker's reply in Minion: each answer, with its line in brackets."""
    pairs = zip(_answers(found, query), found, strict=True)
    return "\n".join(f"{answer} ({entry.text})" for answer, entry in pairs) or NOTHING


def direct_reply(found: Sequence[Entry], query: Query) -> str:
    """Return the worker's reply to a question: the answer alone."""
    return (query.answer([_answers(found, query)]) if found else None) or NOTHING


def _answers(found: Sequence[Entry], query: Query) -> list[str]:
    return [entry.fields[VALUE_OF[query.fact]] for entry in found]


def worker_group(
    rng: random.Random, lines: int, tasks: int, *, held_out: bool = False, role: str = ""
) -> Group:
    """Return tasks of one role ("job", "talk", "direct" or any) on a passage of ``lines`` lines."""
    writer = LogWriter(rng, held_out=held_out)
    entries = _passage(writer, lines)
    parts = []
    for number, entry in enumerate(entries):
        parts.append(entry.text)
        parts.append("\n\n" if rng.random() < 0.15 or number == len(entries) else "\n")
    text = "".join(parts).strip()
    if rng.random() < 0.15:
        text = f"{writer.heading()}\n\n{text}"
    (drawn,) = rng.choices([name for name, _ in _ROLES], [share for _, share in _ROLES])
    chats, sources, facts = [], [], []
    for _ in range(tasks):
        query = _query(writer, entries)
        facts.append(query.fact)
        found = [entry for entry in entries if entry.key(query.fact) == query.of[0]]
        chats.append(_CHATS[role or drawn](rng, text, query, found))
        sources.append(tuple((entry.text, len(query.tasks[0])) for entry in found))
    return Group(tuple(chats), tuple(sources), tuple(facts))


def _passage(writer: LogWriter, lines: int) -> list[Entry]:
    """Return lines of a log; some are near misses of others, or state more about the same."""
    entries = [writer.line() for _ in range(max(1, round(0.6 * lines)))]
    more = writer.rng.choice((0.1, 0.4, 0.9))
    while len(entries) < lines:
        entry = writer.rng.choice(entries)
        if not entry.kind:
            entries.append(writer.line())
            continue
        fields = dict(writer.near(entry.kind, entry.fields))
        if entry.kind in ("paid", "alarm", "seen") and writer.rng.random() < more:
            series = next(name for name in _KIND_OF_SERIES if ENTRY_OF[name] == entry.kind)
            fields = writer.draw(entry.kind)
            fields |= {name: entry.fields[name] for name in FACTS[series].keys}
        entries.append(writer.state(entry.kind, fields))
    writer.rng.shuffle(entries)
    return entries


def _query(writer: LogWriter, entries: Sequence[Entry]) -> Query:
    """Return a query with one task, which the entries answer or nearly answer."""
    rng = writer.rng
    stating = [entry for entry in entries if entry.kind]
    if not stating or rng.random() < 0.15:
        fact = rng.choice(tuple(FACTS))
        fields = writer.draw(ENTRY_OF[fact])
    else:
        several = [entry for entry in stating if _more_of_it(entry, stating)]
        entry = rng.choice(several if several and rng.random() < _SEVERAL else stating)
        fact = rng.choice([name for name in FACTS if ENTRY_OF[name] == entry.kind])
        fields = dict(entry.fields)
        if rng.random() > _PRESENT / 0.85:
            fields = writer.near(entry.kind, fields)
    key = tuple(fields[name] for name in FACTS[fact].keys)
    return Query(_KIND_OF_SERIES.get(fact, LOOKUP), fact, (key,))


def _more_of_it(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Return True if other lines answer a question on several lines together with this one."""
    series = [name for name in _KIND_OF_SERIES if ENTRY_OF[name] == entry.kind]
    return any(
        other is not entry and other.kind == entry.kind and other.key(name) == entry.key(name)
        for name in series
        for other in entries
    )


def _job(rng: random.Random, text: str, query: Query, found: Sequence[Entry]) -> tuple[Turn, ...]:
    return job_chat(text, query.tasks[0], job_reply(found, query))


def job_chat(text: str, task: str, reply: str = "") -> tuple[Turn, ...]:
    """Return a job of MinionS as a chat; without ``reply`` it ends with the prompt."""
    prompt = STYLE.worker.format(chunk=text, task=task, advice="", question="")
    return (Turn("user", prompt), *([Turn("assistant", reply)] if reply else []))


def _talk(rng: random.Random, text: str, query: Query, found: Sequence[Entry]) -> tuple[Turn, ...]:
    system = prompts.CHAT_LOCAL.format(
        document=STYLE.document, context=text, question=wording(rng, query)
    )
    reply = talk_reply(found, query)
    return Turn("system", system), Turn("user", query.tasks[0]), Turn("assistant", reply)


def _direct(
    rng: random.Random, text: str, query: Query, found: Sequence[Entry]
) -> tuple[Turn, ...]:
    prompt = prompts.DIRECT.format(context=text, question=wording(rng, query))
    return Turn("user", prompt), Turn("assistant", direct_reply(found, query))


_CHATS = {"job": _job, "talk": _talk, "direct": _direct}


def planner_group(rng: random.Random, questions: int, *, held_out: bool = False) -> Group:
    """Return questions with their queries in short form.

    Args:
        held_out: use names and wordings that training never shows.
    """
    writer = LogWriter(rng, held_out=held_out)
    chats, facts = [], []
    for _ in range(questions):
        group = rng.choice(CLASSES)
        shapes = [shape for shape in SHAPES[group] if shape not in HELD_OUT_SHAPES]
        asked = draw(writer, group, shape=rng.choice(shapes), held_out_wording=held_out)
        chats.append(planner_chat(asked.text, asked.query.to_json()))
        facts.append(asked.query.fact)
    return Group(tuple(chats), (None,) * len(chats), tuple(facts))


def planner_chat(question: str, reply: str = "") -> tuple[Turn, ...]:
    """Return a question to the planner; without ``reply`` the chat ends with it."""
    prompt = Turn("user", PLANNER_PROMPT.format(question=question))
    return (prompt, *([Turn("assistant", reply)] if reply else []))
