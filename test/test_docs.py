"""Every link from one page to another leads to a file, and to a heading, that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "models").rglob("*.md"),
    ROOT / "test" / "interfaces" / "README.md",
]
_CODE = re.compile(r"`[^`]*`")
_TARGET = re.compile(r"\]\(([^()\s]*)\)|\b(?:href|src)=\"([^\"]*)\"")
_HEADING = re.compile(r"#{1,6} (.*)")
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*\)")
_ELSEWHERE = re.compile(r"[a-z]+:")


def prose(page: Path) -> Iterator[str]:
    """Yield the lines of ``page`` outside fenced code."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def links(page: Path) -> Iterator[str]:
    """Yield the targets of links and images, but those with a scheme, such as https."""
    for line in prose(page):
        for target in _TARGET.finditer(_CODE.sub("", line)):
            to = target[1] or target[2] or ""
            if not _ELSEWHERE.match(to):
                yield to


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of ``page``."""
    known: dict[str, int] = {}
    found = set()
    for line in prose(page):
        if heading := _HEADING.fullmatch(line):
            text = _LINK.sub(r"\1", heading[1]).strip().lower()
            anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            count = known[anchor] = known.get(anchor, -1) + 1
            found.add(f"{anchor}-{count}" if count else anchor)
    return found


def broken(page: Path) -> list[str]:
    """Return the links of ``page`` that lead nowhere."""
    lost = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        to = page.parent / name if name else page
        if not link or not to.exists() or (anchor and anchor not in anchors(to)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_pages_link_to_each_other() -> None:
    assert len(PAGES) > 10
    assert sum(1 for page in PAGES for link in links(page) if "#" in link) > 3
    assert sum(1 for page in PAGES for _ in links(page)) > 50


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text(
        "# One `command --of` it, ([a.json](a.json))\n## Twice\n## Twice\n```\n# no heading\n```\n"
    )
    right = (
        "other.md",
        "./other.md#one-command---of-it-ajson",
        "other.md#twice",
        "other.md#twice-1",
        "#top",
        "https://example.org/nowhere.md#x",
    )
    wrong = ("another.md", "other.md#one", "other.md#twice-2", "other.md#no-heading", "#other", "")
    told = "".join(f"see [`{to}`]({to}), " for to in (*right, *wrong))
    page.write_text(
        f'# Top\n{told}\n`[code](none.md)`\n```\n[code](none.md)\n```\n<img src="n.png">'
    )
    assert broken(page) == [*wrong, "n.png"]
