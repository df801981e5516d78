"""Write the field tables of docs/interfaces.md from the comments in msg/, srv/ and action/.

The interface files are the one place where fields are described; run this after editing one
(``make docs``). A test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "interfaces.md"
MARK = "<!-- Below: written by `make docs` from msg/, srv/ and action/. -->\n"
PARTS = {"msg": [""], "srv": ["Request", "Response"], "action": ["Goal", "Result", "Feedback"]}
KINDS = {"msg": "Messages", "srv": "Services", "action": "Actions"}

# TYPE NAME [DEFAULT] or TYPE NAME=VALUE, then a comment.
LINE = re.compile(
    r"(?P<type>[\w/]+(?:\[[<=\d]*\])?)\s+"
    r"(?P<name>\w+)(?:\s*=\s*(?P<value>\S+)|\s+(?P<default>\"[^\"]*\"|[^#\s]+))?"
    r"\s*(?:#\s*(?P<comment>.*))?"
)


def declarations(path: Path) -> list[list[re.Match[str]]]:
    """The fields and constants of each part of an interface file (a message has one part).

    Raises:
        ValueError: a line is neither declaration, comment, empty nor ``---``.
    """
    parts: list[list[re.Match[str]]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        if line == "---":
            parts.append([])
        elif line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"{path.name}: cannot read {line!r}")
            parts[-1].append(match)
    return parts


def tables(path: Path) -> str:
    """One interface as Markdown: heading, purpose, and a table of fields and of constants."""
    purpose = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    out = [f"### {path.relative_to(ROOT).with_suffix('')}", "", purpose, ""]
    for title, part in zip(PARTS[path.suffix[1:]], declarations(path), strict=True):
        fields = [d for d in part if d["value"] is None]
        constants = [d for d in part if d["value"] is not None]
        out += [f"**{title}**", ""] if title else []
        if fields:
            out += ["| field | type | meaning |", "|---|---|---|"]
        for d in fields:
            default = f" = {d['default']}" if d["default"] else ""
            out.append(f"| `{d['name']}` | `{d['type']}{default}` | {_cell(d)} |")
        if constants:
            out += ["", "| constant | value | meaning |", "|---|---|---|"]
        out += [f"| `{d['name']}` | {d['value']} | {_cell(d)} |" for d in constants]
        out.append("")
    return "\n".join(out)


def page() -> str:
    """The whole page: what people wrote above the mark, and all tables below it."""
    written, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} has lost its line {MARK!r}")
    out = [written + mark]
    for kind, title in KINDS.items():
        files = sorted((ROOT / kind).glob(f"*.{kind}"))
        out += [f"## {title}\n", *(tables(path) for path in files)]
    return "\n".join(out)


def _cell(declaration: re.Match[str]) -> str:
    return (declaration["comment"] or "").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
