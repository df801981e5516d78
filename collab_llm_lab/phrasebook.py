"""Data files of sentences, words and tables: headings, and lines beneath them.

::

    # a comment
    = where                              a section
    == questions                         a section within it
    Where is the {thing}?                a line of that section
    [Please ]name the room of the {thing}.

``\\n`` in a line stands for a line break. Blank lines are skipped. The lines of a section are
templates of ``phrases``, words, or rows of a table, ``name | value | ...``; its reader knows which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from collab_llm_lab.phrases import Phrase, compiled
from collab_llm_nodes.errors import InvalidInput

Compile = Callable[..., tuple[Phrase, ...]]
"""Compiles templates, as ``phrases.compiled`` does."""


@dataclass(frozen=True)
class Line:
    """One line of a file; ``place`` is ``file:number``."""

    text: str
    place: str

    def error(self, message: str, remedy: str) -> InvalidInput:
        """Return an error about this line."""
        return InvalidInput(f"{message}: {self.text[:60]!r}", field=self.place, remedy=remedy)

    def phrases(self, compile_texts: Compile, *texts: str) -> tuple[Phrase, ...]:
        """Return ``texts`` of this line, or all of it, as templates."""
        try:
            return compile_texts(*(texts or (self.text,)))
        except ValueError as error:
            raise self.error(str(error), "close each bracket that is opened") from error


@dataclass(frozen=True)
class Section:
    """A heading with its lines and the sections within it.

    Raises (in its methods):
        InvalidInput: a line is malformed or a section is missing; names file and line.
    """

    heading: Line
    lines: list[Line] = field(default_factory=list)
    sections: dict[str, Section] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Section:
        if name not in self.sections:
            raise self.heading.error(f"no section {name!r} in", "add it, with one more =")
        return self.sections[name]

    def phrases(self, compile_texts: Compile = compiled) -> tuple[Phrase, ...]:
        """Return the lines as templates.

        Args:
            compile_texts: a ``Grammar`` that is to know the words of the lines.
        """
        return tuple(phrase for line in self.lines for phrase in line.phrases(compile_texts))

    def phrases_by_name(self, compile_texts: Compile = compiled) -> dict[str, tuple[Phrase, ...]]:
        """Return the templates of each section within this one."""
        return {name: part.phrases(compile_texts) for name, part in self.sections.items()}

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the lines."""
        return tuple(line.text for line in self.lines)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all lines."""
        return tuple(word for text in self.texts for word in text.split())

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        """The rows by their first cells, all with as many cells."""
        rows: dict[str, tuple[str, ...]] = {}
        for line in self.lines:
            name, *cells = line.text.split(" | ")
            width = len(next(iter(rows.values()), cells))
            if not cells or len(cells) != width or name in rows:
                raise line.error("not a new row of this table", "NAME | CELL | ..., as above it")
            rows[name] = tuple(cells)
        return rows


def read(file: Path) -> Section:
    """Read a data file as one section that holds all others.

    Raises:
        InvalidInput: a line is malformed; names file and line.
    """
    open_sections = [Section(Line(file.name, file.name))]
    for number, raw in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        line = Line(raw.strip().replace("\\n", "\n"), f"{file.name}:{number}")
        if not line.text or line.text.startswith("# "):
            continue
        if not line.text.startswith("="):
            if len(open_sections) == 1:
                raise line.error("a line before the first heading", "put a heading above: = NAME")
            open_sections[-1].lines.append(line)
            continue
        marks, _, name = line.text.partition(" ")
        depth = len(marks)
        if marks.strip("=") or not name:
            raise line.error("not a heading", "write = NAME")
        if depth > len(open_sections):
            raise line.error("a heading that skips a level", f"write {'=' * len(open_sections)}")
        del open_sections[depth:]
        if name in open_sections[-1].sections:
            raise line.error("a second section of this name", "merge the two")
        section = open_sections[-1].sections[name] = Section(line)
        open_sections.append(section)
    return open_sections[0]
