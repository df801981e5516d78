"""Real English documents for benchmarks: the manuals that come as Debian packages.

They are read where the packages are installed or unpacked, and never belong to this repository.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from collab_llm_nodes.errors import InvalidInput

PAGE = frozenset({"head", "script", "style", "nav", "footer"})
"""Elements of an HTML page that are not its text."""
_VERSION = re.compile(r"\S+ \((\S+)\)")
_SIGNS = str.maketrans({"\u00b6": "", "\u00ad": "", "\u00a0": " ", "\u200b": ""})
"""Pilcrows of headings, soft hyphens, and spaces that look like others."""


_NO_CHAPTERS = frozenset({"developers-reference", "index", "search"})
_HEADING = re.compile("<h[12][ >]")


@dataclass(frozen=True)
class Manual:
    """Files of one Debian package; ``files`` is a pattern below the root."""

    package: str
    files: str


MANUALS = (
    Manual("doc-debian", "usr/share/doc/debian/*[a-z].txt*"),  # only the newest constitution
    Manual("debian-policy", "usr/share/doc/debian-policy/policy.html/ch-*.html"),
    Manual("debian-policy", "usr/share/doc/debian-policy/fhs/fhs-3.0.txt.gz"),
    Manual("developers-reference", "usr/share/developers-reference/*.html"),
    Manual("maint-guide", "usr/share/doc/maint-guide/html/*.en.html"),
    Manual("debian-reference-en", "usr/share/debian-reference/ch*.en.html"),
    Manual("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html"),
)


def debian_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each manual's chapters below ``root``.

    A name is that of package, version and chapter: ``debian-policy_4.6.2.0/ch-files.txt``.

    Args:
        root: "/", or the folder into which the packages were unpacked (``dpkg-deb -x``).

    Raises:
        InvalidInput: none of the packages is there.
    """
    found = [(manual.package, file) for manual in MANUALS for file in root.glob(manual.files)]
    for package, file in sorted(found):
        chapter = file.name.partition(".html")[0].partition(".txt")[0]
        if chapter not in _NO_CHAPTERS:
            yield f"{package}_{_version(root, package)}/{chapter}.txt", _text(file)
    if not found:
        packages = dict.fromkeys(manual.package for manual in MANUALS)
        raise InvalidInput(
            f"{root} holds no manuals",
            field="root",
            remedy=f"install some of {', '.join(packages)}, or unpack them there",
        )


def write_debian_documents(root: Path, folder: Path) -> list[Path]:
    """Write the manuals below ``root`` as text files into ``folder``, and return these."""
    written = []
    for name, text in debian_documents(root):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written


def html_text(page: str, skipped: frozenset[str] = PAGE) -> str:
    """Return the text of an HTML page, a line for each block, without the ``skipped`` elements."""
    reader = _Blocks(skipped)
    reader.feed(page)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _text(file: Path) -> str:
    """Return the text of a chapter, with an empty line between two paragraphs."""
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = data.decode("utf-8", "replace").translate(_SIGNS)
    if file.suffix == ".html":
        heading = _HEADING.search(text)  # what stands before it leads to other pages
        text = text[heading.start() if heading else 0 :]
        return html_text(text).replace("\n", "\n\n") + "\n"
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _version(root: Path, package: str) -> str:
    """Return the version of an unpacked package, by the first line of its changelog."""
    folder = root / "usr/share/doc" / package
    for name in ("changelog.Debian.gz", "changelog.gz"):
        if (file := folder / name).is_file():
            with gzip.open(file, "rt", encoding="utf-8", errors="replace") as changes:
                match = _VERSION.match(changes.readline())
            if match is not None:
                return match[1]
    return "unknown"


class _Blocks(HTMLParser):
    """Collects the text of a page, with a line break between two blocks."""

    _INLINE = frozenset(
        {"a", "abbr", "acronym", "b", "code", "em", "i", "kbd", "q", "samp", "small", "span"}
        | {"strong", "sub", "sup", "tt", "var"}
    )

    def __init__(self, skipped: frozenset[str]) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped, self._skipping = skipped, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipping += tag in self._skipped
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipping = max(0, self._skipping - (tag in self._skipped))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.parts.append(data.replace("\n", " "))

    def _break(self, tag: str) -> None:
        if tag not in self._INLINE:
            self.parts.append("\n")
