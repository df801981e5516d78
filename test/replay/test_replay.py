"""Bags without nodes: written and read, damaged and mended, asked again and compared."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import OLD_ROOM, ROOM
from typer.testing import CliRunner

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")

from bag_content import TEXTS, drive, type_of, write_bag
from rclpy.serialization import deserialize_message, serialize_message
from rosbags.rosbag2 import Reader
from std_msgs.msg import String

from collab_llm.msg import Status
from collab_llm_nodes.cli import app
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.replay import bag as bag_module
from collab_llm_nodes.replay.bag import (
    BagWriter,
    definition,
    open_bag,
    storage_files,
    type_hash,
)
from collab_llm_nodes.replay.compare import Reply, compare
from collab_llm_nodes.replay.mend import mend
from collab_llm_nodes.replay.recording import Action, Step, read_recording
from collab_llm_nodes.replay.replayers import Models
from collab_llm_nodes.robot.grammar import Code, Kind

STORAGES = ("mcap", "sqlite3")
Change = Callable[[Path], None]


def contents(path: Path) -> list[tuple[str, int, bytes]]:
    """All that rosbags' own reader finds."""
    with Reader(path) as reader:
        return [(c.topic, stamp, bytes(data)) for c, stamp, data in reader.messages()]


def as_recorded(step: Step) -> Reply:
    assert step.action is not None
    return Reply(step.tokens, step.text, step.action, step.tau, 0.0)


def invoke(*arguments: object) -> Any:
    """The exit status and what is printed, as the entry point has it."""
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"})


# Writing.


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_written_is_read(tmp_path: Path, storage: str) -> None:
    messages = drive()
    path = write_bag(tmp_path, messages, storage)
    stored = [d for _, _, d in contents(path)]
    for data, (_, message) in zip(stored, messages, strict=True):
        assert deserialize_message(data, type(message)) == message
    with open_bag(path) as bag:
        assert bag.types == {f"/{topic}": type_of(m) for topic, m in messages}
        texts = [m for _, _, m in bag.messages(["/generated_text"])]
    assert [t.text for t in texts] == [TEXTS[n % 2] for n in range(1, 5)]
    assert "GeneratedText" in (path / "metadata.yaml").read_text()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_recording_is_for_its_owner_alone(tmp_path: Path, storage: str) -> None:
    """Whatever the umask: it holds pictures, questions and answers."""

    def modes(*places: Path) -> set[int]:
        return {place.stat().st_mode & 0o777 for place in places}

    before = os.umask(0o022)
    try:
        writer = BagWriter(tmp_path / "bags", "drive", storage)
        writer.write("/told", "std_msgs/msg/String", 0, serialize_message(String(data="private")))
        assert writer.path is not None
        part = writer.path
        assert modes(*part.iterdir()) == {0o600}, "while it is written as well"
        writer.close()
    finally:
        os.umask(before)
    assert modes(tmp_path / "bags", part) == {0o700}
    assert len([*part.iterdir()]) == 2
    assert modes(*part.iterdir()) == {0o600}


def test_definitions_have_the_hashes_of_rosidl() -> None:
    """The hashes are those of the generators; with others, rosbag2 would see other types."""
    prefix = storage_of("collab_llm")
    for file in sorted(prefix.glob("*.json")):
        name = f"collab_llm/msg/{file.stem}"
        hashes = {
            h["type_name"]: h["hash_string"] for h in json.loads(file.read_text())["type_hashes"]
        }
        assert definition(name)[1] == hashes[name]


def storage_of(package: str) -> Path:
    from ament_index_python.packages import get_package_share_directory

    return Path(get_package_share_directory(package)) / "msg"


def test_a_type_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_msgs/msg/Thing is not installed"):
        BagWriter(tmp_path, "x", "mcap").write("/x", "no_such_msgs/msg/Thing", 0, b"")


@pytest.mark.parametrize("storage", STORAGES)
def test_parts_are_whole_bags_that_begin_with_the_latched_states(
    tmp_path: Path, storage: str
) -> None:
    writer = BagWriter(tmp_path, "drive", storage, max_bytes=300, max_parts=3)
    kind = "std_msgs/msg/String"
    writer.write("/state", kind, 0, serialize_message(String(data="latched")), keep=True)
    for n in range(80):
        writer.write("/other", kind, n, serialize_message(String(data=f"number {n:02}")))
    writer.close()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    assert parts[0].name != "drive_000", "the oldest are gone"
    told: list[str] = []
    for part in parts:
        with open_bag(part) as bag:
            found = [(t, m.data) for t, _, m in bag.messages(["/state", "/other"])]
        assert found[0] == ("/state", "latched")
        told += [data for topic, data in found if topic == "/other"]
    assert told == [f"number {n:02}" for n in range(80)][-len(told) :]
    assert len(told) > 20


def test_nothing_is_written_before_the_first_message(tmp_path: Path) -> None:
    writer = BagWriter(tmp_path / "bags", "drive", "mcap")
    writer.flush()
    writer.close()
    assert not (tmp_path / "bags").exists()


# Reading a drive.


def test_a_recording_has_each_answer_with_its_picture_and_action(tmp_path: Path) -> None:
    recording = read_recording(write_bag(tmp_path, drive()))
    assert [s.number for s in recording.steps] == [1, 2, 3, 4]
    second = recording.steps[1]
    assert second.picture == bytes([2]) * 50
    assert second.prompt == "find the red ball. history: 2."
    assert second.instruction == "find the red ball"
    assert second.action == Action(Kind.TURN, second.action.value if second.action else 0, Code.OK)
    assert str(second.action) == "turn left 45 degree"
    assert [s.turn for s in recording.steps] == [1, 2, 3, 4]


def test_sampling_is_that_of_the_navigator(tmp_path: Path) -> None:
    told = {
        "navigator": {"answer.temperature": 0.5, "answer.seed": 7, "answer.law": "coupled"},
        "draft_vlm": {"client.max_tokens": 33, "model.path": "/home/robot/models/nav-draft"},
        "navigation_action_parser": {"grammar.max_distance": 0.5, "grammar.of_the_future": 1},
    }
    info = ("recording", String(data=json.dumps({"nodes": told})))
    recording = read_recording(write_bag(tmp_path, [info, *drive(2), *drive(3)[:-1]]))
    assert [s.turn for s in recording.steps] == [1, 2, 3], "session ids are those of the first two"
    sampling = recording.sampling(recording.steps[0])
    assert (sampling.temperature, sampling.law) == (0.5, "coupled")
    assert sampling.seed == 7 + 1
    assert recording.max_tokens == 33
    models = Models().named(recording)
    assert (models.draft, models.target) == ("nav-draft", "nav-target")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"status": Status(code=Status.UNAVAILABLE, message="no link")}, "cut off: no link"),
        ({"verified": False}, "the draft model finished the answer alone"),
    ],
)
def test_answers_that_circumstances_shaped_are_left_out(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    report = compare(read_recording(write_bag(tmp_path, drive(**changes))), as_recorded)
    assert len(report.compared) == 3
    (skipped,) = report.as_json(texts=True)["skipped"]
    assert skipped["step"] == 2
    assert why in skipped["why"]


def test_questions_that_wanted_no_motion_are_no_steps(tmp_path: Path) -> None:
    recording = read_recording(write_bag(tmp_path, drive(for_motion=False)))
    assert [(s.text, s.turn) for s in recording.steps] == [
        (text, turn) for turn, text in enumerate((TEXTS[1], TEXTS[1], TEXTS[0]), 1)
    ]


def test_a_picture_that_is_missing_leaves_its_step_out_and_none_is_an_error(tmp_path: Path) -> None:
    messages = drive()
    pictures = [n for n, (topic, _) in enumerate(messages) if topic == "observation"]
    del messages[pictures[0]]
    report = compare(read_recording(write_bag(tmp_path / "a", messages)), as_recorded)
    assert [s.unusable for s in report.skipped] == ["its picture is not in the bag"]
    other = drive()[1]
    other[1].header.stamp.sec = 99
    left = [m for m in messages if m[0] != "observation"]
    with pytest.raises(InvalidInput, match="no answer of .* can be compared: its picture"):
        compare(read_recording(write_bag(tmp_path / "b", [*left, other])), as_recorded)


def test_of_two_robots_one_must_be_named(tmp_path: Path) -> None:
    spaces = ("/robot1", "/robot2")
    both = [(f"{s[1:]}/{t}", m) for s in spaces for t, m in drive(3 if s == spaces[0] else 2)]
    path = write_bag(tmp_path, both)
    with pytest.raises(InvalidInput, match="several robots") as caught:
        read_recording(path)
    assert caught.value.field == "namespace"
    assert len(read_recording(path, "robot1").steps) == 3
    assert len(read_recording(path, "/robot2").steps) == 2


# Comparing.


def test_differences_are_told_action_by_action(tmp_path: Path) -> None:
    recording = read_recording(write_bag(tmp_path, drive()))

    def otherwise(step: Step) -> Reply:
        reply = as_recorded(step)
        if step.number == 2:  # other words, the same action
            return Reply((9,), "turn left 45 degree", reply.action, 1.0, 0.0)
        if step.number == 3:
            return Reply((9,), "stop", Action(Kind.STOP, 0.0, Code.OK), 1.0, 0.0)
        return reply

    report = compare(recording, otherwise)
    assert [c.step.number for c in report.differences(texts=False)] == [3]
    assert [c.step.number for c in report.differences(texts=True)] == [2, 3]
    told = report.as_json(texts=False)
    assert (told["action_differences"], told["text_differences"]) == (1, 2)
    assert not told["same"]
    assert told["answers"][2]["recorded"]["action"] == "move forward 75 cm"
    assert told["answers"][2]["replayed"]["action"] == "stop"
    assert report.table(texts=True).row_count == 2


def test_the_pace_is_no_faster_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collab_llm_nodes.replay import compare as module

    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    asked: list[float] = []

    def slowly(step: Step) -> Reply:
        asked.append(now[0] - 100.0)
        now[0] += 0.3 if step.number != 2 else 2.0  # two seconds recorded take one
        return as_recorded(step)

    compare(read_recording(write_bag(tmp_path, drive())), slowly, speed=2.0)
    assert asked == pytest.approx([0.0, 0.5, 2.5, 2.8])


# The bag that lies beside this file, through both models in this process.


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("replay") / "result.json"
    result = invoke(ROOM, "--texts", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert isinstance(found, dict)
    return found


def test_the_recorded_room_is_answered_word_for_word(replayed: dict[str, Any]) -> None:
    assert replayed["steps"] >= 5
    assert replayed["compared"] == replayed["steps"]
    assert replayed["action_differences"] == replayed["text_differences"] == 0
    assert replayed["answers"][-1]["replayed"]["action"] == "stop"
    assert replayed["models"]["target"] == "nav-target"
    size = sum(f.stat().st_size for f in ROOM.iterdir())
    assert size < 2_000_000


def test_a_room_recorded_with_older_messages_is_read_by_its_own_schema(tmp_path: Path) -> None:
    with open_bag(OLD_ROOM) as bag:
        text = next(message for _, _, message in bag.messages(["/generated_text"]))
    assert text.status == 0, "a number then"
    assert text.metrics.tau > 0, "a field of its own then"
    file = tmp_path / "result.json"
    result = invoke(OLD_ROOM, "--texts", "--json", file)
    assert result.exit_code in (0, 1), result.output  # 1: other models answer than recorded
    told = json.loads(file.read_text())
    assert told["steps"] == told["compared"] >= 5


def test_the_pace_changes_nothing(replayed: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert invoke(ROOM, "--texts", "--speed", 50, "--json", file).exit_code == 0
    again = json.loads(file.read_text())
    for result in (replayed, again):
        del result["figures"]["answer_s"]
    assert again == replayed


def test_another_model_is_compared_with_the_recording(tmp_path: Path) -> None:
    """The draft model alone: it takes other turns, which is why it is only the draft model."""
    file = tmp_path / "result.json"
    result = invoke(ROOM, "--target-model", "nav-draft", "--json", file)
    assert result.exit_code == 1, result.output
    told = json.loads(file.read_text())
    assert 0 < told["action_differences"] <= told["compared"]
    assert "differences to room" in result.output


# What cannot be read.


def without(topic: str) -> Callable[[Path], Path]:
    return lambda folder: write_bag(folder, [m for m in drive() if m[0] != topic])


def of_another_type(folder: Path) -> Path:
    return write_bag(folder, [("generated_text", String(data="hello")), *drive()[1:2]])


def changed(storage: str, change: Change) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write_bag(folder, drive(), storage)
        change(path)
        return path

    return make


def other_hash(path: Path) -> None:
    file = path / "metadata.yaml"
    text = file.read_text()
    begin = text.index("RIHS01_") + 7
    file.write_text(text[:begin] + "0" * 64 + text[begin + 64 :])


def no_definitions(path: Path) -> None:
    with sqlite3.connect(storage_files(path)[0]) as base:
        base.execute("DELETE FROM message_definitions WHERE topic_type LIKE '%GeneratedText'")


def cut(path: Path) -> None:
    file = storage_files(path)[0]
    file.write_bytes(file.read_bytes()[:-500])


def unclosed(path: Path) -> None:
    (path / "metadata.yaml").unlink()


def emptied(path: Path) -> None:
    storage_files(path)[0].unlink()


def no_yaml(path: Path) -> None:
    (path / "metadata.yaml").write_text("rosbag2_bagfile_information: [")


BAD: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "absent": (lambda folder: folder / "none", "does not exist", "give a bag's folder"),
    "no bag": (lambda folder: folder, "is no bag", "give a bag's folder"),
    "no texts": (without("generated_text"), "lacks the topic /generated_text", "record it"),
    "no pictures": (without("observation"), "lacks the topic /observation", "record it"),
    "other type": (of_another_type, "is std_msgs/msg/String", "is it a bag of this system?"),
    "other hash": (changed("mcap", other_hash), "hash mismatch", "are not those it names"),
    "no definition": (changed("sqlite3", no_definitions), "no definition of", "Jazzy"),
    "truncated mcap": (changed("mcap", cut), "was not closed", "record --mend"),
    "truncated sqlite3": (changed("sqlite3", cut), "cannot be read", "record --mend"),
    "unclosed": (changed("mcap", unclosed), "was not closed", "record --mend"),
    "no file": (changed("mcap", emptied), "files are missing", "record --mend"),
    "broken metadata": (changed("mcap", no_yaml), "cannot be read", "record --mend"),
}


@pytest.mark.parametrize(("make", "what", "remedy"), BAD.values(), ids=BAD)
def test_a_bad_bag_is_one_clear_error_and_status_2(
    tmp_path: Path,
    make: Callable[[Path], Path],
    what: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        read_recording(path)
    assert what in str(caught.value)
    assert remedy in str(caught.value)
    assert invoke(path).exit_code == 2


def test_fields_of_another_version_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The types in the bag count, not the installed ones; and the bag lacks what we need."""

    def of_old(name: str) -> tuple[str, str]:
        text = definition(name)[0].replace("bool final ", "bool last ")
        return text, type_hash(name, text)

    monkeypatch.setattr(bag_module, "definition", of_old)
    with pytest.raises(InvalidInput, match="another version of the package.*final"):
        read_recording(write_bag(tmp_path, drive()))


# What is not ours.


def mcap_record(kind: int, body: bytes) -> bytes:
    return struct.pack("<BQ", kind, len(body)) + body


def sized(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def with_neighbour(file: Path, schema: tuple[str, str, str], encoding: str, qos: str) -> None:
    """Add a topic ``/fleet`` with one message to an mcap file, which has no index then."""
    data = file.read_bytes()
    metadata = sized("offered_qos_profiles") + sized(qos)
    out = [data[:8]]
    place = 8
    while data[place] != 0x0F:  # the end of the data
        (size,) = struct.unpack_from("<Q", data, place + 1)
        out.append(data[place : place + 9 + size])
        place += 9 + size
        if len(out) == 2:
            out += [
                mcap_record(3, struct.pack("<H", 900) + b"".join(map(sized, schema))),
                mcap_record(
                    4,
                    struct.pack("<HH", 900, 900)
                    + sized("/fleet")
                    + sized(encoding)
                    + struct.pack("<I", len(metadata))
                    + metadata,
                ),
                mcap_record(5, struct.pack("<HIQQ", 900, 0, 1, 1) + b"{}"),
            ]
    out += [mcap_record(0x0F, bytes(4)), mcap_record(2, bytes(20)), data[:8]]
    file.write_bytes(b"".join(out))


NEIGHBOURS = {
    "json": (("foxglove.Log", "jsonschema", "{}"), "json", ""),
    "protobuf": (("foxglove.Log", "protobuf", "\n\x00"), "protobuf", ""),
    "ros1": (("std_msgs/String", "ros1msg", "string data"), "ros1", ""),
    "no schema": (("", "", ""), "json", ""),
    "no parser": (("odd/msg/Odd", "ros2msg", "wstring<=5 x 'abc'"), "cdr", ""),
    "unknown": (("odd/msg/Odd", "unknown", ""), "cdr", ""),
    "qos": (("std_msgs/msg/String", "ros2msg", "string data"), "cdr", "- history: 3"),
}


@pytest.mark.parametrize("alone", [False, True], ids=["folder", "file alone"])
@pytest.mark.parametrize("neighbour", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_a_topic_of_another_system_does_not_spoil_a_bag(
    tmp_path: Path, neighbour: tuple[tuple[str, str, str], str, str], alone: bool
) -> None:
    path = write_bag(tmp_path, drive())
    recorded, messages = read_recording(path), set(contents(path))
    schema, encoding, qos = neighbour
    (file,) = storage_files(path)
    with_neighbour(file, schema, encoding, qos)
    about = yaml.safe_load((path / "metadata.yaml").read_text())
    about["rosbag2_bagfile_information"]["topics_with_message_count"].append(
        {
            "message_count": 1,
            "topic_metadata": {
                "name": "/fleet",
                "type": schema[0],
                "serialization_format": encoding,
                "offered_qos_profiles": qos,
            },
        }
    )
    (path / "metadata.yaml").write_text(yaml.safe_dump(about))
    assert read_recording(file if alone else path).steps == recorded.steps
    mended, _ = mend(file if alone else path, tmp_path / "mended")
    assert {m for m in contents(mended) if m[0] != "/fleet"} == messages


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("qos", [[], "", "- history: 3", [{"reliability": "best_available"}]])
def test_qos_that_was_edited_hides_no_message(tmp_path: Path, storage: str, qos: Any) -> None:
    """``ros2 bag play`` takes a topic's QoS from metadata.yaml, so that people change it there."""
    path = write_bag(tmp_path, drive(), storage)
    recorded = read_recording(path)
    about = yaml.safe_load((path / "metadata.yaml").read_text())
    for topic in about["rosbag2_bagfile_information"]["topics_with_message_count"]:
        topic["topic_metadata"]["offered_qos_profiles"] = qos
    (path / "metadata.yaml").write_text(yaml.safe_dump(about))
    assert read_recording(path) == recorded


@pytest.mark.parametrize("storage", STORAGES)
def test_no_damage_gets_through_untyped(tmp_path: Path, storage: str) -> None:
    path = write_bag(tmp_path, drive(), storage)
    file = storage_files(path)[0]
    whole = file.read_bytes()
    dice = random.Random(0)
    refused = 0
    for _ in range(150):
        broken = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        file.write_bytes(broken)
        try:
            read_recording(path)
        except InvalidInput:
            refused += 1
    assert refused > 10


def flipped(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << position % 8
    file.write_bytes(data)


@pytest.mark.parametrize("alone", [False, True], ids=["folder", "file alone"])
def test_one_flipped_bit_of_an_mcap_file_is_found_or_changes_nothing(
    tmp_path: Path, alone: bool
) -> None:
    """The folder's ``metadata.yaml`` is another witness; without it there are only checksums."""
    path = write_bag(tmp_path, drive())
    file = storage_files(path)[0]
    given = file if alone else path
    recorded, refused = read_recording(given), 0
    for position in range(0, file.stat().st_size, 61):
        flipped(file, position)
        try:
            assert read_recording(given) == recorded, position
        except InvalidInput:
            refused += 1
        flipped(file, position)
    assert refused > 100


def test_sqlite3_has_no_checksums_but_indices_and_counts(tmp_path: Path) -> None:
    path = write_bag(tmp_path, drive(), "sqlite3")
    with sqlite3.connect(storage_files(path)[0]) as base:
        base.execute("DELETE FROM messages WHERE id = 4")
    with pytest.raises(InvalidInput, match="lacks 1 of the messages"):
        read_recording(path)
    with sqlite3.connect(storage_files(path)[0]) as base:
        base.execute("PRAGMA writable_schema = 1")
        base.execute("DELETE FROM sqlite_master WHERE name = 'timestamp_idx'")
    with pytest.raises(InvalidInput, match="is damaged: .*never used"):
        read_recording(path)


# Mending.


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.999])
def test_what_is_whole_of_a_cut_file_is_saved(tmp_path: Path, share: float) -> None:
    writer = BagWriter(tmp_path, "cut", "mcap")
    for n in range(200):
        message = serialize_message(String(data=f"number {n} " * 20))
        writer.write("/numbers", "std_msgs/msg/String", n, message)
        if n % 10 == 9:
            writer.flush()
    path = writer.path
    assert path is not None
    writer.close()
    whole = contents(path)
    file = storage_files(path)[0]
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    (path / "metadata.yaml").unlink()
    out, count = mend(path)
    saved = contents(out)
    assert len(saved) == count
    assert saved == whole[:count]
    assert count % 10 == 0
    assert count >= 10
    if share > 0.9:
        assert count == 200
    assert file.read_bytes() == data[: int(share * len(data))], "the original stays as it is"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_mended_bag_is_the_one_it_was(tmp_path: Path, storage: str) -> None:
    path = write_bag(tmp_path, drive(), storage)
    out, count = mend(path, tmp_path / "new")
    assert contents(out) == contents(path)
    assert count == len(drive())
    assert read_recording(out).steps == read_recording(path).steps
    with pytest.raises(InvalidInput, match="^mend: .*exists; .*earlier --mend .*move or delete it"):
        mend(path, tmp_path / "new")


@pytest.mark.parametrize("storage", STORAGES)
def test_all_files_of_a_bag_are_mended(tmp_path: Path, storage: str) -> None:
    """``ros2 bag record`` splits a bag into files; ours has one."""
    path, suffix = tmp_path / "split", {"mcap": ".mcap", "sqlite3": ".db3"}[storage]
    path.mkdir()
    for n in (0, 1, 10, 2):
        part = write_bag(tmp_path / str(n), [("text", String(data=f"part {n}"))], storage)
        storage_files(part)[0].rename(path / f"split_{n}{suffix}")
    out, count = mend(path)
    with open_bag(out) as bag:
        told = sorted(m.data for _, _, m in bag.messages(["/text"]))
    assert told == ["part 0", "part 1", "part 10", "part 2"]
    assert count == 4


def test_a_chunk_that_is_lost_takes_no_other_with_it(tmp_path: Path) -> None:
    writer = BagWriter(tmp_path, "made", "mcap")
    for n in range(3):
        message = serialize_message(String(data=f"part {n}"))
        writer.write("/text", "std_msgs/msg/String", n, message)
        writer.flush()
    path = writer.path
    assert path is not None
    writer.close()
    file = storage_files(path)[0]
    assert file.read_bytes().count(b"part 1") == 1  # too short to be packed
    flipped(file, file.read_bytes().index(b"part 1"))
    with pytest.raises(InvalidInput, match="record --mend"), open_bag(path) as bag:
        list(bag.messages(["/text"]))
    out, count = mend(path)
    with open_bag(out) as bag:
        assert [m.data for _, _, m in bag.messages(["/text"])] == ["part 0", "part 2"]
    assert count == 2


def test_the_command_mends(tmp_path: Path) -> None:
    path = write_bag(tmp_path, drive())
    unclosed(path)
    result = CliRunner().invoke(app, ["record", "--mend", str(path)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    unwrapped = "".join(result.output.split())  # a long path is broken at spaces, too
    assert f"{path.name}_mended:{len(drive())}messages" in unwrapped
    assert len(read_recording(path.with_name(f"{path.name}_mended")).steps) == 4


def test_mending_never_raises_what_is_not_typed(tmp_path: Path) -> None:
    path = write_bag(tmp_path, drive())
    file = storage_files(path)[0]
    whole = file.read_bytes()
    dice = random.Random(1)
    for n in range(100):
        broken = bytearray(whole[: dice.randrange(20, len(whole))])
        for _ in range(n % 3):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        file.write_bytes(broken)
        try:
            out, _ = mend(path)
        except InvalidInput:
            continue
        contents(out)
        shutil.rmtree(out)
