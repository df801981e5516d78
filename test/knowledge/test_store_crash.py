"""A writer that is killed leaves the state before or after its change, and nothing between."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.processes import module_environment

LINES = 400
WAIT_S = 60.0
PLAN = ChunkPlan(characters=32)


def written(number: int) -> Document:
    """The document of one change: a name that comes again, and a text that does not."""
    lines = (f"change{number} line{i} of {LINES}" for i in range(LINES))
    return Document(f"d{number % 3}", "\n".join(lines))


def write_for_ever(folder: str, first: int) -> None:
    """Add, replace and remove documents; say the number of each change that has been made."""
    number = first
    with Store(folder) as store:
        assert store.kv is not None
        while True:
            document = written(number)
            store.add(document, chunks(document, PLAN))
            chunk = store.chunks(document.name)[0].id
            store.kv.put(chunk, "ab" * 8, lambda path: path.write_bytes(b"x" * 5000))
            print(number, flush=True)
            number += 1


def start(folder: Path, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )


def check(folder: Path, last: int) -> int:
    """Check that the state is that after change ``last`` or the next one; return which."""
    with Store(folder) as store:
        state = store.version
        assert state in (last, last + 1)
        by_name = {written(n).name: n for n in range(1, state + 1)}
        assert {entry.name for entry in store.documents()} == set(by_name)
        every = set()
        for name, number in by_name.items():
            document = written(number)
            assert store.document(name) == document
            assert [hit.chunk for hit in store.chunks(name)] == list(chunks(document, PLAN))
            assert len(store.search(f"change{number}", 10 * LINES)) == len(store.chunks(name))
            every |= {hit.id for hit in store.chunks(name)}
        for gone in set(range(1, state + 1)) - set(by_name.values()):
            assert store.search(f"change{gone}", 1) == ()
        kv = [path for path in (folder / "kv").iterdir() if not path.name.startswith(".")]
        assert {int(path.name.partition(".")[0]) for path in kv} <= every
        assert all(path.stat().st_size == 5000 for path in kv)
    return state


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    last, chance = 0, random.Random(5)
    for _ in range(8):
        child = start(tmp_path, last + 1)
        assert child.stdout is not None
        try:
            told = [child.stdout.readline() for _ in range(1 + chance.randrange(4))]
            assert all(told), "the writer has failed"
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(chance.uniform(0.0, 0.06))  # somewhere within the next change
        finally:
            child.kill()
        told += child.stdout.readlines()
        child.wait(WAIT_S)
        child.stdout.close()
        last = check(tmp_path, int(told[-1]))
    assert last >= 8


def test_processes_that_make_one_store_at_the_same_time_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from collab_llm_nodes.knowledge.store import Store\n"
        "sys.stdin.readline()\n"
        "with Store(sys.argv[1]) as store: print(store.id)"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=module_environment(),
        )
        for _ in range(4)
    ]
    said = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        said.append(child.communicate(timeout=WAIT_S)[0].strip())
    assert len(set(said)) == 1
    assert len(said[0]) == 32


def test_a_damaged_page_is_a_typed_error(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        document = written(1)
        store.add(document, chunks(document, PLAN))
    file = tmp_path / "store.db"
    size = file.stat().st_size
    with file.open("r+b") as db:
        for place in range(8192, size, 4096):  # the first pages name the tables
            db.seek(place)
            db.write(os.urandom(64))

    def read() -> None:
        with Store(tmp_path) as store:
            store.document(document.name)
            store.chunks(document.name)

    with pytest.raises(CollabError) as error:
        read()
    assert error.value.code == "UNAVAILABLE"
    assert error.value.remedy


if __name__ == "__main__":
    write_for_ever(sys.argv[1], int(sys.argv[2]))


def test_damaged_vectors_and_words_are_made_anew_from_the_texts(tmp_path: Path) -> None:
    encoder = WordHashes(8)
    with Store(tmp_path) as store:
        document = written(1)
        store.add(document, chunks(document, PLAN))
        while store.embed(encoder):
            pass
        count = store.pieces()
        (query,) = encoder.encode([store.chunks(document.name)[0].chunk.text])
        wanted = store.nearest(query, encoder.fingerprint, 2)
        word = store.chunks(document.name)[0].chunk.text.split()[0]
        read = store.search(word, 2)
        assert wanted
        assert read
        assert store.mend(encoder) == (0, False)
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("UPDATE vector SET value = ?", (b"\xff" * 32,))  # not numbers
        db.execute("UPDATE vector SET value = zeroblob(5) WHERE chunk = 1")
        db.execute("UPDATE words_data SET block = zeroblob(64) WHERE id > 10")
    with Store(tmp_path) as store:
        removed, words = store.mend(encoder)
        assert (removed, words) == (count, True)
        assert store.without_vector() == count
        while store.embed(encoder):
            pass
        assert store.nearest(query, encoder.fingerprint, 2) == wanted
        assert store.search(word, 2) == read
        assert store.mend(encoder) == (0, False)
