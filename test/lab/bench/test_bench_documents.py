"""Debian's manuals as text: chapters, names, and what is left out of a page."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collab_llm_lab.bench.documents import debian_documents, html_text
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import InvalidInput


def write_manuals(root: Path) -> None:
    """Unpack a text and two pages, as ``dpkg-deb -x`` would."""
    doc = root / "usr/share/doc"
    for package in ("doc-debian", "debian-policy"):
        (doc / package).mkdir(parents=True)
        with gzip.open(doc / package / "changelog.gz", "wt") as file:
            file.write(f"{package} (4.6+x) unstable; urgency=low\n")
    (doc / "debian").mkdir()
    for name in ("constitution.txt.gz", "constitution.1.0.txt.gz"):
        (doc / "debian" / name).write_bytes(gzip.compress(b"A vote\n takes\n two weeks.\n\nEnd.\n"))
    pages = doc / "debian-policy/policy.html"
    pages.mkdir()
    (pages / "ch-files.html").write_text(
        "<head><title>no</title></head><body><div>index</div><h1>10. Files\u00b6</h1>"
        "<p>The\n <em>umask</em> is 022&nbsp;here.</p><nav>next</nav>"
    )
    (pages / "search.html").write_text("<h1>Search</h1>")


def test_each_chapter_is_a_document_of_a_named_version(tmp_path: Path) -> None:
    write_manuals(tmp_path)
    assert dict(debian_documents(tmp_path)) == {
        "doc-debian_4.6+x/constitution.txt": "A vote takes two weeks.\n\nEnd.\n",
        "debian-policy_4.6+x/ch-files.txt": "10. Files\n\nThe umask is 022 here.\n",
    }
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["bench", "documents", str(out), "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 chapters" in done.output
    assert (out / "debian-policy_4.6+x/ch-files.txt").read_text().startswith("10. Files")


def test_a_root_without_manuals_names_the_packages(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no manuals") as error:
        list(debian_documents(tmp_path))
    assert "debian-policy" in error.value.remedy


def test_elements_that_are_no_text_are_skipped() -> None:
    page = "<p>a <b>b</b></p><pre>x = 1</pre><script>no</script><p>c"
    assert html_text(page) == "a b\nx = 1\nc"
    assert html_text(page, frozenset({"pre", "script"})) == "a b\nc"
