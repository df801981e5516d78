"""KV files beside chunks: bounded on disk, whole or absent, gone with their chunk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tiny_models import tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput, Unavailable
from collab_llm_nodes.knowledge.chunking import ChunkPlan, chunks
from collab_llm_nodes.knowledge.documents import Document
from collab_llm_nodes.knowledge.kv_files import KvFiles
from collab_llm_nodes.knowledge.store import Store, StoreLimits
from collab_llm_nodes.models.fingerprint import fingerprint
from collab_llm_nodes.models.prompt import Prompt, encode

MODEL, OTHER = "ab" * 32, "cd" * 32


def put(files: KvFiles, chunk: int, size: int = 100, model: str = MODEL) -> Path:
    return files.put(chunk, model, lambda path: path.write_bytes(bytes(size)))


def aged(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_a_file_is_found_by_chunk_and_model(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 1000)
    assert files.get(1, MODEL) is None
    file = put(files, 1)
    assert files.get(1, MODEL) == file
    assert file.read_bytes() == bytes(100)
    assert files.get(1, OTHER) is None
    assert files.get(2, MODEL) is None
    assert KvFiles(tmp_path, 1000).get(1, MODEL) == file


def test_those_not_used_for_longest_make_room(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 300)
    for chunk in (1, 2, 3):
        aged(put(files, chunk), 100 - chunk)
    assert files.get(1, MODEL)  # used now
    put(files, 4)
    assert [bool(files.get(chunk, MODEL)) for chunk in (1, 2, 3, 4)] == [True, False, True, True]
    assert files.size() == 300
    put(files, 5, 300)
    assert files.size() == 300
    assert files.get(5, MODEL)


def test_a_file_larger_than_all_may_be_removes_nothing(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 300)
    put(files, 1, 200)
    with pytest.raises(InvalidInput, match="301 bytes"):
        put(files, 2, 301)
    assert files.get(1, MODEL)
    assert [p.name for p in tmp_path.iterdir()] == [f"1.{MODEL[:32]}.safetensors"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 300)
    before = put(files, 1, 50)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise InvalidInput("no session")

    with pytest.raises(InvalidInput, match="no session"):
        files.put(1, MODEL, fail)
    assert before.read_bytes() == bytes(50)
    assert list(tmp_path.iterdir()) == [before]


def test_a_name_is_never_a_path(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 300)
    for model in ("", "../../etc", "AB" * 8, "ab" * 40, "ab\0" * 4):
        with pytest.raises(InvalidInput, match="fingerprint"):
            files.get(1, model)


def test_what_nobody_owns_is_removed(tmp_path: Path) -> None:
    files = KvFiles(tmp_path, 1000)
    for chunk in (1, 2, 3):
        put(files, chunk)
        put(files, chunk, model=OTHER)
    (tmp_path / "note.txt").write_text("not ours")
    for name, age in ((".building-old", 7200), (".building-new", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(bytes(10))
        aged(tmp_path / name, age)
    files.keep_only([2, 9])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(".building-new", f"2.{MODEL[:32]}.safetensors", f"2.{OTHER[:32]}.safetensors"),
        "note.txt",
    ]


def test_an_unusable_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="KV files"):
        KvFiles(tmp_path / "file" / "kv", 1000)
    files = KvFiles(tmp_path / "kv", 1000)
    (tmp_path / "kv").rmdir()
    with pytest.raises(Unavailable, match="KV files"):
        put(files, 1)


def test_the_files_of_a_store_go_with_their_chunks(tmp_path: Path) -> None:
    first, second = Document("first", "one text"), Document("second", "another text")
    with Store(tmp_path, StoreLimits(kv_bytes=1000)) as store:
        assert store.kv is not None
        ids = []
        for document in (first, second):
            store.add(document, chunks(document, ChunkPlan()))
            ids.append(store.chunks(document.name)[0].id)
            put(store.kv, ids[-1])
        store.remove("first")
        assert store.kv.get(ids[0], MODEL) is None
        assert store.kv.get(ids[1], MODEL)
        put(store.kv, ids[0])  # as if the process had been killed before it removed the file
    with Store(tmp_path) as store:
        assert store.kv is not None
        assert store.kv.get(ids[0], MODEL) is None
        assert store.kv.get(ids[1], MODEL)
        store.add(second, chunks(second, ChunkPlan()))
        assert store.kv.size() == 0
    with Store(None) as store:
        assert store.kv is None


def test_a_session_of_a_chunk_comes_back(tmp_path: Path) -> None:
    loaded = tiny_model("llama")
    engine, model = Engine(loaded), fingerprint(loaded.model)
    with Store(tmp_path) as store:
        assert store.kv is not None
        document = Document("manual", "The pump stands in hall 7. Its limit is 80 degrees.")
        store.add(document, chunks(document, ChunkPlan(characters=30)))
        for hit in store.chunks("manual"):
            prompt = encode(Prompt(hit.chunk.text, raw=True), loaded)
            session = engine.open(prompt)
            session.feed(prompt.ids, last=0)
            store.kv.put(hit.id, model, session.save)
            file = store.kv.get(hit.id, model)
            assert file is not None
            restored = engine.restore(file)
            assert restored.length == session.length
            assert restored.feed([5]).equal(session.feed([5]))
