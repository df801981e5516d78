"""Documents by content, from files of allowed folders, and from PDFs that may be hostile."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pdf_files
import pytest

from collab_llm_nodes.errors import Cancelled, CollabError, ConfigError, InvalidInput
from collab_llm_nodes.knowledge import pdf
from collab_llm_nodes.knowledge.documents import Document, DocumentLimits, checked, decoded
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.knowledge.pdf import Status, read_pdf

LIMITS = DocumentLimits()


def refusal(error: pytest.ExceptionInfo[CollabError]) -> str:
    """Return the text of a typed error that says where and what to do, on one line."""
    text = str(error.value)
    assert error.value.field
    assert "\n" not in text
    assert len(text) < 400
    return text


# --- Content -------------------------------------------------------------------------------------


def test_equal_texts_have_equal_ids() -> None:
    first, again = checked("a", "the same", LIMITS), checked("b", "the same", LIMITS)
    assert first.id == again.id
    assert first.id != checked("a", "another", LIMITS).id
    assert len(first.id) == 32


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("", "text", "name"),
        ("a\nb", "text", "name"),
        ("n" * 513, "text", "name"),
        ("a", "", "no text"),
        ("a", " \n\t\f\r\n", "no text"),
        ("a", "te\0xt", "binary"),
        ("a", "half \ud800", "half a character at 5"),
        ("a", "x" * 101, "101 characters"),
    ],
)
def test_what_is_no_document_is_refused(name: str, content: str, why: str) -> None:
    with pytest.raises(InvalidInput) as error:
        checked(name, content, DocumentLimits(characters=100))
    assert why in refusal(error)


def test_as_many_characters_as_allowed_are_taken() -> None:
    assert checked("a", "x" * 100, DocumentLimits(characters=100)).content == "x" * 100


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_are_known_for_certain_are_read(encoding: str) -> None:
    assert decoded("a", "Größe 漢字".encode(encoding)) == "Größe 漢字"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("Größe".encode("latin1"), "not UTF-8 at byte 2"),
        (b"\x7fELF\0\0", "binary"),
        (b"\xff\xfe\x00", "not UTF-16"),
        (b"\xef\xbb\xbf\xff", "not UTF-8"),
    ],
)
def test_other_bytes_are_a_typed_error(data: bytes, why: str) -> None:
    with pytest.raises(InvalidInput) as error:
        decoded("a.txt", data)
    assert why in refusal(error)


LINES = "".join(f"[INFO] [{n}.1] [driver]: Größe {n} mm\n" for n in range(60)).encode()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("length", [64, 4096])
def test_a_power_cut_spoils_its_own_place_only(
    encoding: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that were not written in time read as NUL, at the end of a log or within it."""
    lines = LINES.decode()
    data = f"{lines}half a li{chr(0) * length}{lines}{chr(0) * length}".encode(encoding)
    assert decoded("a.log", data) == f"{lines}half a li\ufffd{lines}\ufffd"
    (told,) = caplog.records
    assert told.getMessage() == "'a.log' is damaged; places that hold no text: 2"


def test_a_few_bytes_that_are_no_text_do_not_spoil_a_log() -> None:
    text = decoded("a.log", LINES + b"name=\xff\xfe?\n" + LINES)
    assert text == f"{LINES.decode()}name=\ufffd?\n{LINES.decode()}"
    assert decoded("a.log", LINES + b"a\0b" + LINES).count("\ufffd") == 1
    cut = (LINES.decode() + "ä").encode("utf-16")[:-1]
    assert decoded("a.log", cut) == f"{LINES.decode()}\ufffd"


@pytest.mark.parametrize(
    "data",
    [
        bytes(5000),
        LINES.decode().encode("utf-16-le"),
        LINES.decode().encode("latin1"),
        bytes(200) + os.urandom(5000),
        b"\x7fELF" + (b"\1\0\0\0" * 9 + bytes(500)) * 50,
    ],
    ids=["nothing", "utf-16", "latin1", "noise", "program"],
)
def test_what_is_no_text_is_not_read_as_a_damaged_one(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decoded("a", data)


def test_a_config_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="pdf_pages"):
        DocumentLimits(pdf_pages=0)


# --- Files ---------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder ``allowed`` that may be read, beside one with a secret."""
    for folder in ("allowed/inner", "allowed-not", "secret"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "allowed" / "a.txt").write_text("first")
    (tmp_path / "allowed" / "inner" / "b.md").write_text("# second")
    (tmp_path / "allowed-not" / "c.txt").write_text("secret")
    (tmp_path / "secret" / "key.txt").write_text("secret")
    return tmp_path


def test_files_of_the_folders_are_read(place: Path) -> None:
    folders = Folders([place / "allowed"])
    (place / "allowed" / "link.txt").symlink_to("inner/b.md")
    (place / "other").symlink_to(place / "allowed")
    for path in ("a.txt", place / "allowed" / "a.txt", "inner/../a.txt", place / "other/a.txt"):
        assert read_document(path, folders, LIMITS) == Document("a.txt", "first")
    assert read_document("link.txt", folders, LIMITS, "named").content == "# second"
    assert read_document("link.txt", folders, LIMITS, "named").name == "named"


def test_nothing_outside_is_read_or_told_about(place: Path) -> None:
    folders = Folders([place / "allowed"])
    (place / "allowed" / "out.txt").symlink_to(place / "secret" / "key.txt")
    (place / "allowed" / "up").symlink_to("..")
    told = set()
    for path in (
        "../secret/key.txt",
        "../secret/absent.txt",
        "inner/../../secret/key.txt",
        str(place / "secret" / "key.txt"),
        str(place / "allowed-not" / "c.txt"),
        "../allowed-not/c.txt",
        "out.txt",
        "up/secret/key.txt",
        "up/secret/absent.txt",
        "/proc/self/environ",
    ):
        with pytest.raises(InvalidInput) as error:
            folders.read(path, 1000)
        told.add(refusal(error).partition("' ")[2])
    assert len(told) == 1  # present or absent: no difference


def test_a_link_put_in_the_way_afterwards_is_not_followed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the opening somebody exchanges a folder for a link."""
    folders, inner, real = Folders([place / "allowed"]), place / "allowed" / "inner", os.open

    def exchange(path: str, flags: int, **rest: int) -> int:
        if inner.is_dir() and not inner.is_symlink():
            inner.rename(place / "moved")
            inner.symlink_to(place / "secret")
        return real(path, flags, **rest)

    monkeypatch.setattr(os, "open", exchange)
    with pytest.raises(InvalidInput, match="cannot read"):
        folders.read("inner/key.txt", 1000)
    with pytest.raises(InvalidInput, match="outside"):  # now that it can be seen
        folders.read("inner/key.txt", 1000)


def test_what_is_no_regular_file_is_refused_at_once(place: Path) -> None:
    folders = Folders([place / "allowed"])
    os.mkfifo(place / "allowed" / "pipe")
    (place / "allowed" / "loop").symlink_to("loop")
    for path in ("pipe", "inner", ".", "", "absent", "a.txt/b", "nul\0", "n" * 300, "loop"):
        with pytest.raises(InvalidInput) as error:
            folders.read(path, 1000)
        refusal(error)


def test_the_size_is_bounded_and_the_folder_must_exist(place: Path) -> None:
    folders = Folders([place / "allowed"])
    assert folders.read("a.txt", 5) == b"first"
    with pytest.raises(InvalidInput, match="too large"):
        folders.read("a.txt", 4)
    with pytest.raises(ConfigError, match="no folder"):
        Folders([place / "absent"])
    with pytest.raises(InvalidInput, match="outside"):
        Folders([]).read("a.txt", 1000)


def test_the_first_folder_that_has_a_file_gives_it(place: Path) -> None:
    folders = Folders([place / "allowed", place / "secret"])
    assert folders.read("key.txt", 100) == b"secret"


# --- PDF -----------------------------------------------------------------------------------------


def test_a_pdf_becomes_text_with_its_pages(place: Path) -> None:
    (place / "allowed" / "report").write_bytes(pdf_files.pdf("one", "two", "three"))
    document = read_document("report", Folders([place / "allowed"]), LIMITS)
    assert [page.strip() for page in document.content.split("\f")] == ["one", "two", "three"]


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\r\n", b"HTTP/1.1 200 OK\r\n\r\n\xff"])
def test_a_pdf_may_follow_something_else(place: Path, before: bytes) -> None:
    (place / "allowed" / "report").write_bytes(before + pdf_files.pdf("one"))
    assert read_document("report", Folders([place / "allowed"]), LIMITS).content.strip() == "one"


@pytest.mark.parametrize(
    "text",
    [
        "# PDF\n\nA file begins with `%PDF-1.7`.\n",
        "%PDF-1.7 is the header.\n",
        "```\n%PDF-1.7\n%%EOF\n```\n",
    ],
)
def test_a_text_about_pdfs_is_a_text(place: Path, text: str) -> None:
    (place / "allowed" / "notes.md").write_text(text)
    assert read_document("notes.md", Folders([place / "allowed"]), LIMITS).content == text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pdf_files.pdf("text")[:100], "not a readable PDF"),
        (b"%PDF-1.7\n" + bytes(range(256)) * 40, "not a readable PDF"),
        (pdf_files.nested(100_000), "not a readable PDF"),
        (pdf_files.many_pages(3000), "too many pages"),
        (pdf_files.encrypted("text", "password"), "encrypted"),
        (pdf_files.pdf("x" * 3000), "too much text"),
        (pdf_files.slow(300_000), "too long"),
    ],
    ids=["cut", "noise", "nested", "pages", "encrypted", "text", "slow"],
)
def test_a_hostile_pdf_is_a_typed_error(data: bytes, why: str) -> None:
    limits = DocumentLimits(characters=2000, pdf_cpu_s=1.5, pdf_pages=50)
    begun = time.monotonic()
    with pytest.raises(InvalidInput) as error:
        read_pdf("name.pdf", data, limits)
    assert why in refusal(error)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_a_pdf_is_read_unless_reading_needs_a_password(algorithm: str) -> None:
    assert read_pdf("a", pdf_files.encrypted("text", "", algorithm), LIMITS).strip() == "text"
    with pytest.raises(InvalidInput, match="is encrypted: it needs a password"):
        read_pdf("a", pdf_files.encrypted("text", "secret", algorithm), LIMITS)


def test_a_library_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pypdf reads AES with the help of cryptography."""
    for name in ("cryptography", "Crypto"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    for password in ("", "secret"):
        with pytest.raises(InvalidInput, match=r"not installed .*pip install 'pypdf\[crypto\]'"):
            read_pdf("a", pdf_files.encrypted("text", password, "AES-256"), LIMITS)


def test_a_pdf_that_contains_itself_ends() -> None:
    """The reader may call it empty or unreadable."""
    limits = DocumentLimits(pdf_cpu_s=2.0)
    with contextlib.suppress(InvalidInput):
        assert read_pdf("circle", pdf_files.circle(), limits).strip() == ""


def test_a_pdf_that_unpacks_to_half_a_gigabyte_is_refused() -> None:
    data = pdf_files.bomb(512 << 20)
    assert len(data) < 2 << 20
    with pytest.raises(InvalidInput) as error:
        read_pdf("bomb", data, LIMITS)
    refusal(error)


def test_a_pdf_that_takes_more_memory_than_allowed_is_refused() -> None:
    data = pdf_files.slow(60_000)
    assert read_pdf("much", data, LIMITS).strip() == ""
    limits = DocumentLimits(characters=2000, pdf_memory_bytes=16 << 20)
    with pytest.raises(InvalidInput, match="too much memory"):
        read_pdf("much", data, limits)


def test_a_pdf_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "_START_S", 0.0)
    monkeypatch.setattr(pdf, "_PATIENCE", 0.005)
    limits = DocumentLimits(pdf_cpu_s=60.0)
    begun = time.monotonic()
    with pytest.raises(InvalidInput, match="too long"):
        read_pdf("slow", pdf_files.slow(2_000_000), limits)
    assert time.monotonic() - begun < 20


def test_statuses_are_told_apart_from_those_of_python() -> None:
    """1 is an exception nobody caught, 2 a wrong command line."""
    assert {int(s) for s in Status} & {1, 2} == {Status.UNREADABLE}


def test_reading_a_pdf_ends_when_its_text_is_not_wanted_any_more() -> None:
    looks = iter([None, None, Cancelled("not wanted")])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    begun = time.monotonic()
    with pytest.raises(Cancelled):
        read_pdf("slow", pdf_files.slow(2_000_000), DocumentLimits(pdf_cpu_s=3600.0), check)
    assert time.monotonic() - begun < 60
