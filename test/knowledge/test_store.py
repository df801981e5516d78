"""The store: what is written can be read, found and removed; bounds and damage are typed errors."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sqlite3
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from collab_llm_nodes.errors import Busy, CollabError, ConfigError, InvalidInput, Unavailable
from collab_llm_nodes.knowledge import store as store_module
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.store import Hit, Store, StoreLimits
from collab_llm_nodes.processes import module_environment

PLAN = ChunkPlan(characters=40)
ENCODER = WordHashes()
PUMP = Document("pump", "The pump stands in hall 7.\nIts motor_temp limit is 80 degrees.\n" * 2)
ARM = Document("arm", "The arm has six joints.\nDie Größe der Zange ist 80 mm.\n")


@pytest.fixture(params=["folder", "temporary"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store" if request.param == "folder" else None) as made:
        yield made


def add(store: Store, *documents: Document) -> None:
    for document in documents:
        store.add(document, chunks(document, PLAN))


def found(hits: tuple[Hit, ...]) -> list[str]:
    return [hit.chunk.text for hit in hits]


def test_what_is_added_is_read_again(store: Store) -> None:
    add(store, PUMP, ARM)
    assert store.document("pump") == PUMP
    assert [hit.chunk for hit in store.chunks("arm")] == list(chunks(ARM, PLAN))
    arm, pump = store.documents()
    assert (arm.name, arm.id, arm.characters, arm.chunks) == ("arm", ARM.id, len(ARM.content), 2)
    assert (pump.version, arm.version, store.version) == (1, 2, 2)


def modes(*places: Path) -> set[int]:
    return {stat.S_IMODE(place.stat().st_mode) for place in places}


def test_a_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask: documents are private."""
    folder, snapshot = tmp_path / "store", tmp_path / "snapshot.db"
    before = os.umask(0o022)
    try:
        with Store(folder) as store:
            add(store, PUMP)
            assert store.kv is not None
            store.kv.put(
                store.chunks("pump")[0].id, "ab" * 16, lambda path: path.write_bytes(b"kv")
            )
            store.snapshot(snapshot)
            files = [*folder.rglob("*"), snapshot]  # while the write-ahead log is there
            assert {"store.db", "store.db-wal"} <= {file.name for file in files}
            assert modes(*(f for f in files if f.is_file())) == {0o600}
            assert modes(folder, *(f for f in files if f.is_dir())) == {0o700}
    finally:
        os.umask(before)


def test_a_store_that_others_can_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of an earlier release. It may be shared on purpose, so that it stays as it is."""
    Store(tmp_path / "store").close()
    assert not caplog.records
    (tmp_path / "store" / "store.db").chmod(0o644)
    Store(tmp_path / "store").close()
    (told,) = caplog.records
    assert "others can read the store" in told.getMessage()
    assert modes(tmp_path / "store" / "store.db") == {0o644}


def test_a_document_of_the_same_name_takes_the_place(store: Store) -> None:
    add(store, PUMP, ARM)
    before = {hit.id for hit in store.chunks("pump")}
    add(store, Document("pump", "The pump was sold."))
    assert found(store.search("pump", 9)) == ["The pump was sold."]
    assert not before & {hit.id for hit in store.chunks("pump")}
    assert [entry.name for entry in store.documents()] == ["arm", "pump"]


def test_what_is_removed_is_gone(store: Store) -> None:
    add(store, PUMP, ARM)
    assert store.remove("pump") == 3
    assert store.search("pump motor", 9) == ()
    assert store.chunks("pump") == ()
    for missing in (lambda: store.document("pump"), lambda: store.remove("pump")):
        with pytest.raises(InvalidInput, match="no document 'pump'"):
            missing()
    store.compact()
    assert found(store.search("joints", 9)) == ["The arm has six joints."]


def test_words_are_found_whatever_the_question_holds(store: Store) -> None:
    add(store, PUMP, ARM)
    assert "motor_temp" in store.search("motor_temp", 1)[0].chunk.text
    assert "Größe" in store.search("GROSSE? grosse Größe", 1)[0].chunk.text
    assert "Größe" in store.search("grösse größe", 1)[0].chunk.text
    for question in ("", "___", '" OR *', "AND OR NOT NEAR( ^ : -", "x" * 50_000, "absent"):
        assert store.search(question, 9) == ()
    assert store.search('joints" OR "pump', 1)  # words only, no language of queries


LETTERS = {  # as written, and as asked
    "two characters": ("Sa\u0308ge", "S\xe4ge"),
    "one character": ("S\xe4ge", "Sa\u0308ge"),
    "ligature": ("\ufb01lter", "filter"),
    "no ligature": ("filter", "\ufb01lter"),
    "wide": ("\uff2d\uff18", "M8"),
    "Angstrom": ("\u212bngstrom", "\xc5ngstrom"),
    "Korean": ("\u1107\u1162\u1110\u1165\u1105\u1175", "\ubc30\ud130\ub9ac"),
}


@pytest.mark.parametrize(("written", "asked"), LETTERS.values(), ids=LETTERS)
def test_equal_words_are_found_however_they_are_encoded(
    store: Store, written: str, asked: str
) -> None:
    text = f"The {written} of the pump"
    add(store, PUMP, ARM, Document("odd", text))
    assert found(store.search(asked, 1)) == [text], "and stays as it was written"
    assert (ENCODER.encode([text]) == ENCODER.encode([f"the {asked} of the pump"])).all()
    assert store.mend(ENCODER) == (0, False)
    store.remove("odd")
    assert store.search(asked, 1) == ()
    assert store.mend(ENCODER) == (0, False)


FORMAT_1 = (
    *("DROP TRIGGER chunk_removed", "DROP TABLE terms", "DROP TABLE words", "DROP VIEW indexed"),
    """CREATE VIRTUAL TABLE words USING fts5(
        text, content='chunk', content_rowid='id', tokenize='unicode61 remove_diacritics 2')""",
    "CREATE VIRTUAL TABLE terms USING fts5vocab(words, row)",
    """CREATE TRIGGER chunk_removed AFTER DELETE ON chunk BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, old.text); END""",
    "INSERT INTO words (words) VALUES ('rebuild')",
    "PRAGMA user_version = 1",
)


@pytest.mark.parametrize("encoder", ["word hashes 1 1024", "of a model"])
def test_a_store_of_the_earlier_format_is_brought_up_to_date(tmp_path: Path, encoder: str) -> None:
    """Its index and its hashes of words were those of texts as they had been written."""
    named = f"UPDATE meta SET value = '{encoder}' WHERE key = 'encoder'"
    change = "UPDATE chunk SET text = replace(text, 'hall', 'Gro\u0308\xdfe')"
    changed(tmp_path, change, *FORMAT_1, named)
    for _ in range(2):
        with Store(tmp_path) as store:
            assert "Gro\u0308\xdfe" in store.search("Gr\xf6\xdfe", 1)[0].chunk.text
            assert store.document("pump") == PUMP
            kept = encoder == "of a model"
            assert store.encoder == (encoder if kept else "")
            assert (store.without_vector() == 0) == kept
    with Store(tmp_path) as store:
        store.remove("pump")
        assert store.search("Gr\xf6\xdfe", 1) == ()


def test_words_that_most_chunks_hold_do_not_count_beside_others(store: Store) -> None:
    add(store, Document("log", "\n".join(f"the motor of unit{i} runs on" for i in range(50))))
    assert "unit17" in store.search("the motor of unit17", 3)[0].chunk.text
    assert len(store.search("the motor of unit17", 30)) < 5
    assert len(store.search("the motor", 30)) == 30  # nothing else is there to go by


def okapi(question: str, texts: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """BM25 as in Robertson and Zaragoza (2009), written from the formula."""
    split = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, split)) / len(split)
    scores = [0.0] * len(texts)
    for word in dict.fromkeys(re.findall(r"\w+", question.lower())):
        holding = sum(word in words for words in split)
        weight = max(math.log((len(texts) - holding + 0.5) / (holding + 0.5)), 1e-6)
        for i, words in enumerate(split):
            count = words.count(word)
            scores[i] += weight * count * (k1 + 1) / (count + k1 * (1 - b + b * len(words) / mean))
    return scores


def test_scores_are_those_of_bm25(store: Store) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(40)]
    texts = [" ".join(rng.choice(words, rng.integers(1, 9)).tolist()) for _ in range(60)]
    for i, text in enumerate(texts):
        add(store, Document(f"d{i:02d}", text))
    question = "w3 w7 w8 w30"
    expected = {f"d{i:02d}": s for i, s in enumerate(okapi(question, texts)) if s > 0}
    hits = store.search(question, 100)
    assert {hit.name for hit in hits} == set(expected)
    assert [hit.score for hit in hits] == pytest.approx([expected[hit.name] for hit in hits])
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert store.search(question, 5) == hits[:5]


# --- Vectors -------------------------------------------------------------------------------------


def embed_all(store: Store, most: int = 2) -> None:
    while store.embed(ENCODER, most):
        pass


def test_nearest_is_the_exact_order_and_follows_changes(store: Store) -> None:
    encoder = ENCODER
    question = encoder.encode(["six joints of the arm"])[0]
    assert store.nearest(question, ENCODER.fingerprint, 5) == ()
    for change in (
        lambda: add(store, PUMP, ARM),
        lambda: add(store, Document("pump", "Two arms, six joints each.\nNo pump.")),
        lambda: store.remove("arm"),
        lambda: add(store, ARM, Document("third", "Six arms and joints, once more.")),
    ):
        change()
        embed_all(store)
        every = [hit for entry in store.documents() for hit in store.chunks(entry.name)]
        scores = encoder.encode([hit.chunk.text for hit in every]) @ question
        best = sorted(zip(-scores, (hit.id for hit in every), strict=True))[:3]
        hits = store.nearest(question, ENCODER.fingerprint, 3)
        assert [hit.id for hit in hits] == [i for _, i in best]
        assert [hit.score for hit in hits] == pytest.approx([-s for s, _ in best])


def test_of_equal_chunks_the_oldest_comes_first(store: Store) -> None:
    add(store, *(Document(f"d{i}", "pump") for i in range(9)))
    embed_all(store)
    question = ENCODER.encode(["pump"])[0]
    assert [hit.name for hit in store.nearest(question, ENCODER.fingerprint, 4)] == [
        "d0",
        "d1",
        "d2",
        "d3",
    ]
    assert [hit.name for hit in store.search("pump", 4)] == ["d0", "d1", "d2", "d3"]


def test_vectors_may_be_missing_and_come_later(store: Store) -> None:
    add(store, PUMP)
    total = len(store.chunks("pump"))
    assert store.embed(ENCODER, 1) == total - 1
    question = ENCODER.encode(["pump"])[0]
    assert len(store.nearest(question, ENCODER.fingerprint, 99)) == 1
    add(store, ARM)
    assert store.embed(ENCODER, 99) == 0
    assert len(store.nearest(question, ENCODER.fingerprint, 99)) == total + 2


def test_vectors_of_two_encoders_are_never_mixed(store: Store) -> None:
    add(store, PUMP)
    embed_all(store)
    assert store.encoder == ENCODER.fingerprint
    other = WordHashes(64)
    with pytest.raises(ConfigError, match="encoder"):
        store.embed(other)
    store.forget_vectors()
    assert store.encoder == ""
    assert store.embed(other, 99) == 0
    assert len(store.nearest(other.encode(["pump"])[0], other.fingerprint, 1)) == 1
    with pytest.raises(ConfigError, match="not word hashes"):
        store.nearest(ENCODER.encode(["pump"])[0], ENCODER.fingerprint, 1)


class Reversed(WordHashes):
    """Another encoder of the same width."""

    fingerprint = "reversed"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return -super().encode(texts)


def test_new_vectors_of_the_same_width_replace_the_old_ones(store: Store) -> None:
    add(store, PUMP)
    embed_all(store)
    question = ENCODER.encode(["pump"])[0]
    before = store.nearest(question, ENCODER.fingerprint, 1)[0].score
    store.forget_vectors()
    store.embed(Reversed(), 99)
    assert store.nearest(question, "reversed", 99)[-1].score == pytest.approx(-before)


# --- Bounds --------------------------------------------------------------------------------------


def test_too_many_chunks_change_nothing(tmp_path: Path) -> None:
    with Store(tmp_path, StoreLimits(chunks=3)) as store:
        add(store, Document("kept", "as it is"))
        with pytest.raises(InvalidInput, match="more than 3 chunks"):
            add(store, Document("kept", "another line of words in it\n" * 20))
        assert store.document("kept").content == "as it is"
        assert store.version == 1


def test_what_a_caller_raises_undoes_everything(store: Store) -> None:
    add(store, PUMP)

    def cancel() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        store.add(ARM, chunks(ARM, PLAN), cancel)
    assert [entry.name for entry in store.documents()] == ["pump"]
    assert store.search("joints", 1) == ()
    add(store, ARM)


def test_a_full_store_is_a_typed_error_and_stays_whole(tmp_path: Path) -> None:
    with Store(tmp_path, StoreLimits(bytes=1 << 20)) as store:
        add(store, PUMP)
        large = Document("large", "\n".join(f"line {i} of it" for i in range(100_000)))
        with pytest.raises(Unavailable, match="no room"):
            add(store, large)
        assert [entry.name for entry in store.documents()] == ["pump"]
        add(store, ARM)
        assert store.search("joints", 1)


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "store.db") as other:
        other.execute("CREATE TABLE t (x)")
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "store.db").write_bytes(b"noise" * 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no store of format"):
        Store(tmp_path / "other")
    with pytest.raises(Unavailable, match="damaged"):
        Store(tmp_path / "noise")
    with pytest.raises(Unavailable, match="cannot make"):
        Store(tmp_path / "file" / "inner")
    with sqlite3.connect(tmp_path / "other" / "store.db") as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


# --- Stores of strangers, and damaged ones -------------------------------------------------------


def changed(folder: Path, *statements: str, values: Sequence[object] = ()) -> Path:
    """Make a store with ``PUMP`` and its vectors, and change it without our code."""
    with Store(folder) as store:
        add(store, PUMP)
        embed_all(store)
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        db.create_function("normal_form", 1, str)
        for statement in statements:
            db.execute(statement, values)
        db.commit()
    return folder


def use(folder: Path) -> None:
    """Do everything that a store can."""
    with Store(folder, create=False) as store:
        store.documents()
        store.document("pump")
        store.chunks("pump")
        store.search("pump motor", 3)
        store.nearest(ENCODER.encode(["pump"])[0], ENCODER.fingerprint, 3)
        add(store, ARM)
        store.embed(ENCODER)
        store.remove("pump")
        store.mend(ENCODER)
        store.compact()


ENDLESS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        ([f"CREATE TRIGGER late AFTER INSERT ON chunk BEGIN {ENDLESS}; END"], "trigger 'late'"),
        ([f"CREATE VIEW busy AS {ENDLESS}"], "view 'busy'"),
        (["DROP TABLE meta", "CREATE VIEW meta AS SELECT 'a' AS key, 1 AS value"], "table 'meta'"),
        (["ALTER TABLE chunk ADD COLUMN huge AS (zeroblob(1 << 30))"], "table 'chunk'"),
        (["CREATE TABLE more (x)"], "table 'more'"),
        (["CREATE INDEX mine ON chunk (upper(text))"], "index 'mine'"),
        (["DROP INDEX vector_of_chunk"], "index 'vector_of_chunk'"),
        (["DROP TRIGGER chunk_removed"], "trigger 'chunk_removed'"),
    ],
)
def test_only_our_own_schema_is_used(tmp_path: Path, statements: list[str], named: str) -> None:
    changed(tmp_path / "theirs", *statements)
    with pytest.raises(ConfigError, match=f"theirs does not have the schema .*: {named}") as error:
        Store(tmp_path / "theirs", create=False)
    assert error.value.remedy


@pytest.mark.parametrize("claimed", [len(PUMP.content), 0, -1, 1 << 28, 1 << 40])
def test_a_row_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path, claimed: int) -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    change = f"UPDATE document SET content = ?, characters = {claimed}"
    changed(tmp_path, change, values=(bomb,))
    probe = "print(*[line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line])"
    read = (
        "import sys; from collab_llm_nodes.errors import CollabError\n"
        "from collab_llm_nodes.knowledge.store import Store\n"
        "try: Store(sys.argv[1]).document('pump')\n"
        "except CollabError as error: print(error.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", read + probe, tmp_path],
        env=module_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    code, kilobytes = done.stdout.split()
    assert code in ("UNAVAILABLE", "INVALID_INPUT")
    assert int(kilobytes) < 200_000


def test_a_text_beyond_the_limit_is_refused_on_both_ways(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        add(store, PUMP)
    with Store(tmp_path, StoreLimits(characters=50)) as store:
        for refused in (lambda: add(store, PUMP), lambda: store.document("pump")):
            with pytest.raises(InvalidInput, match="126 characters"):
                refused()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE key = 'version'",
        "UPDATE meta SET value = 'none' WHERE key = 'version'",
        "UPDATE meta SET value = 1 WHERE key = 'encoder'",
        "UPDATE document SET name = x'70756d70'",
        "UPDATE document SET added = 'now'",
        "UPDATE document SET content = 'text'",
        "UPDATE document SET digest = 'abc'",
        "UPDATE chunk SET start = 'begin'",
        "UPDATE chunk SET text = CAST(x'ff' AS TEXT)",
        "UPDATE vector SET value = 'text' WHERE chunk = 2",
        "UPDATE vector SET value = zeroblob(5) WHERE chunk = 2",
        "UPDATE vector SET value = zeroblob(5)",
    ],
)
def test_values_that_cannot_be_ours_are_damage(tmp_path: Path, statement: str) -> None:
    changed(tmp_path / "theirs", statement)
    with pytest.raises(Unavailable, match="the store in .*theirs is damaged") as error:
        use(tmp_path / "theirs")
    assert "snapshot" in error.value.remedy


def test_sqlite_may_quote_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = changed(tmp_path) / "store.db"
    file.write_bytes(file.read_bytes().replace(b"WITHOUT ROWID", b"WITHOUT\xcbROWID"))
    with pytest.raises(Unavailable, match="damaged"):
        Store(tmp_path)


def test_damage_is_always_a_typed_error(tmp_path: Path) -> None:
    sound = (changed(tmp_path) / "store.db").read_bytes()
    remedies: list[str] = []
    for seed in range(60):
        chance, data = random.Random(seed), bytearray(sound)
        for _ in range(chance.choice([1, 20, 200])):
            data[chance.randrange(100, len(data))] = chance.randrange(256)
        for old in tmp_path.glob("store.db-*"):
            old.unlink()
        (tmp_path / "store.db").write_bytes(data)
        try:
            use(tmp_path)
        except CollabError as error:
            remedies.append(error.remedy)
    assert len(remedies) > 20
    assert all(remedies)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.documents()


MEMORY = """
import resource
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.store import Store

lines = (f"{i} motor {i % 97} runs at {i * i} degrees\\n" for i in range(600_000))
document = Document("log", "".join(lines))
document.id
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with Store(None) as store:
    store.add(document, chunks(document, ChunkPlan()))
    assert store.search("motor 17", 50)
print(len(document.content), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_a_temporary_store_does_not_hold_its_content_in_memory() -> None:
    """Its text, its words and its log of changes come to several times the document."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        env=module_environment(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=110,
    )
    characters, taken = map(int, done.stdout.split())
    assert characters > 20e6
    assert taken < 3 * characters


# --- Several at once -----------------------------------------------------------------------------


def test_a_reader_sees_the_old_state_until_all_of_the_new_one_is_there(tmp_path: Path) -> None:
    with Store(tmp_path) as store, Store(tmp_path) as other:
        add(store, PUMP)
        seen = []

        def look() -> None:
            seen.append([[entry.name for entry in s.documents()] for s in (store, other)])

        store.add(ARM, chunks(ARM, PLAN), look)  # called within the transaction
        look()
        assert seen == [[["pump"], ["pump"]], [["arm", "pump"], ["arm", "pump"]]]


def test_a_second_writer_waits_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BUSY_S", 0.05)
    with Store(tmp_path) as store, Store(tmp_path) as other:

        def write() -> None:
            with pytest.raises(Busy, match="another process"):
                add(other, PUMP)

        store.add(ARM, chunks(ARM, PLAN), write)
        add(other, PUMP)
        assert len(store.documents()) == 2


def test_threads_share_one_store(store: Store) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                add(store, Document(f"{number}", f"thread{number} round{i}"))
                assert found(store.search(f"thread{number}", 9)) == [f"thread{number} round{i}"]
                embed_all(store)
        except BaseException as error:  # noqa: BLE001  told below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert len(store.documents()) == 4


def test_a_snapshot_is_a_store(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        add(store, PUMP, ARM)
        (tmp_path / "copy").mkdir()
        store.snapshot(tmp_path / "copy" / "store.db")
        store.remove("arm")
        with Store(tmp_path / "copy") as copy:
            assert copy.id == store.id
            assert copy.version == 2
            assert found(copy.search("joints", 1)) == ["The arm has six joints."]
            add(copy, Document("new", "text"))
        assert len(store.documents()) == 1
        with pytest.raises(Unavailable, match="cannot write"):
            store.snapshot(tmp_path / "absent" / "store.db")
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == ["kv", "store.db"]
