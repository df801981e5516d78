"""The remote ``oracle``, which understands every question of the benchmark and reads correctly.

It replaces a large model, so that the figures depend only on worker and protocol. It knows the
grammar of questions and log lines, but of the log only the text of its prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collab_llm_lab.bench.minions.patterns import pattern
from collab_llm_lab.training.minions.logs import ENTRY_OF, FORMS, VALUE_OF
from collab_llm_lab.training.minions.questions import WORDINGS
from collab_llm_nodes.chat.base import Control
from collab_llm_nodes.protocols.minions.embedded.queries import FACTS, Query
from collab_llm_nodes.protocols.minions.embedded.remote import UNKNOWN, PlannedRemote
from collab_llm_nodes.protocols.minions.messages import CannotPlan
from collab_llm_nodes.protocols.minions.plan import number


class Oracle(PlannedRemote):
    """Remote that plans and reads by the benchmark's grammar."""

    def close(self) -> None:
        pass

    def understand(self, question: str, control: Control) -> Query:
        for (kind, fact), wordings in WORDINGS.items():
            for phrase in wordings:
                match = pattern(phrase.text).fullmatch(question.strip())
                if match is None:
                    continue
                fields = match.groupdict()
                names = FACTS[fact].keys
                of = [tuple(fields[name] for name in names)]
                if any(name.startswith("second_") for name in fields):
                    of.append(tuple(fields.get(f"second_{n}") or fields[n] for n in names))
                return Query(kind, fact, tuple(of))
        raise CannotPlan("it is no question of the benchmark")

    def read(self, text: str, question: str, control: Control) -> str:
        query = self.understand(question, control)
        lines = text.splitlines()
        found = [[v for line in lines for v in stated(query, keys, line)] for keys in query.of]
        return query.answer(found) or UNKNOWN

    def findings(self, query: Query, task: int, answer: str, citation: str) -> list[str]:
        """Return the answers that the cited lines state."""
        answers = super().findings(query, task, answer, citation)
        cited = [v for line in _lines(citation) for v in stated(query, query.of[task], line)]
        return [value for value in cited if any(_agrees(part, value) for part in answers)]


def _agrees(said: str, value: str) -> bool:
    """Return True for the same words, or for the same number with a unit."""
    return said.lower() == value.lower() or (
        value.replace(".", "", 1).isdigit() and number(said) == number(value)
    )


def _lines(citation: str) -> list[str]:
    """Return the lines in a citation, which are separated by semicolons."""
    return [line.strip() for part in citation.splitlines() for line in part.split(";")]


def stated(query: Query, keys: Sequence[str], line: str) -> Iterator[str]:
    """Yield the value that a line of a log states for ``keys``, if it does."""
    fact = FACTS[query.fact]
    lower = line.lower()
    if not all(key.lower() in lower for key in keys):
        return
    fixed = tuple(zip(fact.keys, keys, strict=True))
    match = pattern(FORMS[ENTRY_OF[query.fact]], fixed).fullmatch(line.strip())
    if match is not None:
        yield match[VALUE_OF[query.fact]]
