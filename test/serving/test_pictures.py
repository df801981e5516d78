"""Pictures decoded in processes of their own, and a verifier that receives hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch
from folders import environment
from hostile_pictures import claiming_jpeg, png, progressive_jpeg
from raw_client import WAIT_S, RawClient
from signals import freeze
from tiny_models import scene, tiny_model
from waiting import gone, wait_for

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput, Unavailable
from collab_llm_nodes.models.pictures import Picture
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import Open, Opened
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.serving.pictures import PictureConfig, PictureLimits, PictureReader
from collab_llm_nodes.transport.admission import Peer
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.server import ServerHandle
from collab_llm_nodes.transport.wire import Failure

T = TypeVar("T")
FULL_HD = 1920 * 1080
LIMITS = PictureLimits(message_bytes=9 << 20, image_bytes=2 << 20, pixels=FULL_HD, scans=20)
PATIENT = PictureConfig(cpu_s=60.0, deadline_s=600.0)  # where a busy machine must not matter
ROBOT, FLOOD = Peer("robot:1", "robot"), Peer("flood:1", "flood")


# --- Processes that decode -----------------------------------------------------------------------


def workers() -> set[int]:
    """Processes that decode pictures for this one."""
    found = set()
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"picture_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def with_reader(
    use: Callable[[PictureReader], Awaitable[T]],
    config: PictureConfig = PATIENT,
    limits: PictureLimits = LIMITS,
) -> T:
    """Return what ``use`` returns; no process is left then."""

    async def run() -> T:
        reader = PictureReader(config, limits, tiny_model("qwen2_vl"))
        reader.start()
        try:
            return await use(reader)
        finally:
            await reader.stop()

    result = asyncio.run(run())
    wait_for(lambda: not workers())
    return result


def read(reader: PictureReader, data: bytes, peer: Peer | None = None) -> Awaitable[Picture]:
    return reader.read(data, peer or Peer(), "images[0]")


def test_a_worker_gives_the_pixels_that_decoding_here_gives() -> None:
    quarter_turn = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"
    turned = b"\xff\xd8\xff\xe1\0\x1eExif\0\0" + quarter_turn + scene(3, 120, 40)[2:]
    shown = (
        *(scene(0), scene(1, 300, 40), scene(2, 20, 20), scene(4, 1280, 720)),
        *(png(side=100), turned),
    )

    async def use(reader: PictureReader) -> list[Picture]:
        return [await read(reader, data) for data in shown]

    loaded = tiny_model("qwen2_vl")
    there = encode(Prompt("go", shown, tuple(with_reader(use))), loaded)
    here = encode(Prompt("go", shown), loaded)
    assert there.ids == here.ids
    assert there.pixel_values is not None
    assert here.pixel_values is not None
    assert torch.equal(there.pixel_values, here.pixel_values)


def test_a_worker_tells_what_is_wrong() -> None:
    async def use(reader: PictureReader) -> None:
        for data, message in (
            (b"nonsense", "not a readable"),
            (scene(0)[:-300], "truncated"),
            (claiming_jpeg(5000), "5000x5000 pixels"),
            (progressive_jpeg(1440, 500), "500 scans"),
            (scene(0, 1000, 4), "aspect ratio"),
        ):
            with pytest.raises(InvalidInput, match=message) as caught:
                await read(reader, data)
            assert caught.value.field == "images[0]"
            assert caught.value.remedy
        assert (await read(reader, scene(0))).rgb

    with_reader(use)


def test_a_worker_that_dies_fails_its_picture_only(caplog: pytest.LogCaptureFixture) -> None:
    async def use(reader: PictureReader) -> None:
        await read(reader, scene(0))
        for pid in workers():
            freeze(pid)  # as if it took for ever
        waiting = asyncio.ensure_future(read(reader, scene(0)))
        await asyncio.sleep(0)
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="has died") as caught:
            await waiting
        assert caught.value.field == "images[0]"
        assert (await read(reader, scene(0))).rgb

    with_reader(use, replace(PATIENT, workers=1))
    (told,) = (r for r in caplog.records if "has died" in r.getMessage())
    assert told.levelno == logging.WARNING
    assert f"{-signal.SIGKILL}" in told.getMessage()


@pytest.mark.parametrize(
    "config", [PictureConfig(1, cpu_s=0.01), PictureConfig(1, cpu_s=60.0, deadline_s=0.01)]
)
def test_a_picture_that_takes_too_long_is_given_up(config: PictureConfig) -> None:
    limits = replace(LIMITS, pixels=1 << 26, scans=1000)

    async def use(reader: PictureReader) -> None:
        started = time.monotonic()
        with pytest.raises(InvalidInput, match="too long"):
            await read(reader, progressive_jpeg(4992, 500))  # half a minute, if it were let
        assert time.monotonic() - started < 15.0

    with_reader(use, config, limits)


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collab_llm_nodes.serving.pictures._BYTES_PER_PIXEL", 0)
    monkeypatch.setattr("collab_llm_nodes.serving.pictures._OVERHEAD_BYTES", 1 << 20)

    async def use(reader: PictureReader) -> None:
        with pytest.raises(InvalidInput, match="memory"):
            await read(reader, png(side=4000))
        assert (await read(reader, scene(0))).rgb

    limits = replace(LIMITS, pixels=1 << 26, image_bytes=4 << 20)
    with_reader(use, PATIENT, limits)


def test_a_picture_whose_client_has_gone_is_given_up() -> None:
    async def use(reader: PictureReader) -> None:
        await read(reader, scene(0))
        (pid,) = workers()
        freeze(pid)
        tasks = [asyncio.ensure_future(read(reader, scene(0))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await read(reader, scene(0))).rgb
        assert pid not in workers()

    with_reader(use, replace(PATIENT, workers=1))


def test_bytes_that_wait_are_limited_and_others_have_room() -> None:
    limits = replace(LIMITS, message_bytes=4096)  # eight of these, four of an address
    data = png((b"tEXt", bytes(1900)))
    rival, robot = Peer("b:1", "b"), Peer("c:1", "c")

    async def use(reader: PictureReader) -> None:
        await read(reader, scene(0))
        (pid,) = workers()
        freeze(pid)

        def hold(count: int, peer: Peer) -> list[asyncio.Task[tuple[Picture, ...]]]:
            return [asyncio.ensure_future(reader.read_all([data], peer)) for _ in range(count)]

        async def refuses(peer: Peer) -> None:
            with pytest.raises(Unavailable, match="too many bytes") as caught:
                await within(reader.read_all([data], peer), WAIT_S)
            assert caught.value.field == "images"
            assert caught.value.remedy

        half = 4 * limits.message_bytes // len(data)
        tasks = hold(half, FLOOD)
        await asyncio.sleep(0)
        await refuses(FLOOD)
        tasks += hold(half, rival)
        await asyncio.sleep(0)
        await refuses(robot)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in (robot, FLOOD):
            assert len(await reader.read_all([data, data], peer)) == 2
        assert not reader._held

    with_reader(use, replace(PATIENT, workers=1), limits)


def test_memory_is_returned_after_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Event()
    monkeypatch.setattr("collab_llm_nodes.serving.pictures._TRIM_S", 0.0)
    monkeypatch.setattr("collab_llm_nodes.serving.pictures._return_memory", returned.set)

    async def use(reader: PictureReader) -> None:
        await reader.read_all([scene(0)], ROBOT)
        assert reader._trimming is None
        await reader.read_all([png((b"tEXt", bytes(1 << 20)))], ROBOT)
        assert await asyncio.get_running_loop().run_in_executor(None, returned.wait, WAIT_S)

    with_reader(use)


def test_nothing_is_imported_from_the_folder_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("struct", "argparse", "signal"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])

    async def use(reader: PictureReader) -> Picture:
        return await read(reader, scene(0))

    assert with_reader(use).rgb
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere"])
def test_a_worker_that_cannot_start_is_told_once(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(reader: PictureReader) -> None:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await read(reader, scene(0))

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        with_reader(use, replace(PATIENT, workers=1))
    (told,) = (r for r in caplog.records if "cannot start" in r.getMessage())
    assert told.levelno == logging.ERROR
    assert "picture_worker" in told.getMessage()


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env=environment(Path(__file__).parent),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    freeze(pids[0])  # one is in the midst of a picture
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)


PARENT = """
import asyncio
from test_pictures import PATIENT, LIMITS, PictureReader, read, scene, tiny_model, workers

async def main():
    reader = PictureReader(PATIENT, LIMITS, tiny_model("qwen2_vl"))
    reader.start()
    await asyncio.gather(*(read(reader, scene(0), None) for _ in range(9)))
    print(*workers(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


# --- The whole verifier -------------------------------------------------------------------------


@pytest.fixture
def serve() -> Iterator[Callable[[Limits], ServerHandle]]:
    """Start verifiers; they are stopped in the end."""
    with contextlib.ExitStack() as stack:

        def start(limits: Limits) -> ServerHandle:
            config = VerifierConfig(address="127.0.0.1:0", pictures=PATIENT, limits=limits)
            return stack.enter_context(start_server(config, Engine(tiny_model("qwen2_vl"))))

        yield start
    wait_for(lambda: not workers())


def asked(server: ServerHandle, *images: bytes) -> RawClient:
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    client = RawClient(grpc.insecure_channel(f"127.0.0.1:{server.port}", own_connection))
    vocabulary = Engine(tiny_model("qwen2_vl")).vocabulary
    client.send(Open("go", images, SamplingConfig(), 4, vocabulary))
    return client


def test_hostile_pictures_are_refused(serve: Callable[[Limits], ServerHandle]) -> None:
    server = serve(Limits())
    for data in (claiming_jpeg(5000), progressive_jpeg(4992, 500), progressive_jpeg(1440, 500)):
        client = asked(server, scene(0), data)
        failure = client.next()
        assert isinstance(failure, Failure)
        assert (failure.code, failure.field) == ("INVALID_INPUT", "images[1]")
        client.close()


class Wire:
    """A client's stream without a network: it sends ``message`` and stays."""

    def __init__(self, message: bytes) -> None:
        self._messages = [message]
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.hang_up = asyncio.Event()

    async def read(self) -> bytes | None:
        if self._messages:
            return self._messages.pop()
        await self.hang_up.wait()
        return None

    async def write(self, data: bytes) -> None:
        self.answers.put_nowait(data)


@pytest.mark.parametrize("readable", [True, False])
def test_a_picture_is_forgotten_when_it_is_decoded(
    readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, 60 sessions kept 60 messages of 16 MB for as long as they lasted."""
    engine = Engine(tiny_model("qwen2_vl"))
    picture = png((b"tEXt", os.urandom(1 << 20))) if readable else scene(0)[:-300]
    message = codec.encode_client(
        Open("go", (picture,) * 2, SamplingConfig(), 4, engine.vocabulary)
    )
    received: list[bytes] = [message]
    decode_client = codec.decode_client

    def note(data: bytes) -> Any:
        decoded: Any = decode_client(data)
        received.extend(decoded.images)
        return decoded

    monkeypatch.setattr(codec, "decode_client", note)

    async def run() -> list[int]:
        verifier = Verifier(
            VerifierConfig(pictures=PATIENT), engine, lambda asked: encode(asked, engine.loaded)
        )
        verifier.start()
        wire = Wire(message)
        talk = asyncio.ensure_future(verifier.accept(wire))
        answer = codec.decode_server(await within(wire.answers.get(), WAIT_S))
        assert isinstance(answer, Opened if readable else Failure), answer
        gc.disable()  # nothing is left for it to find
        references = [sys.getrefcount(received[i]) for i in range(3)]
        gc.enable()
        wire.hang_up.set()
        await within(talk, WAIT_S)
        assert await verifier.stop()
        return references

    held_here = 4  # message: two names, the list and the argument of getrefcount
    references = asyncio.run(run())
    assert references[0] <= held_here + 1
    assert references[1:] == [2, 2]


def test_a_robot_does_not_wait_for_another_clients_pictures(
    serve: Callable[[Limits], ServerHandle],
) -> None:
    server = serve(Limits(max_image_pixels=1 << 26, max_image_scans=1000))
    slow = asked(server, *[progressive_jpeg(4992, 500)] * 4)  # two minutes
    wait_for(lambda: server.sessions)
    for _ in range(5):
        robot = asked(server, scene(0))
        robot.skip_to(Opened)
        robot.close()
    assert slow.replies.is_active()
    slow.close()
    slow.replies.cancel()
    wait_for(lambda: not server.sessions)


@pytest.mark.parametrize("busy", ["reader", "compute"])
def test_sigterm_ends_it_whatever_runs(busy: str) -> None:
    """Before, a thread within C code held up the interpreter's exit for as long as it liked."""
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY, busy],
        env=environment(Path(__file__).parent),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert select.select([child.stdout], [], [], 2 * WAIT_S)[0], "nothing hangs"
        child.terminate()
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()


BUSY = """
import asyncio, sys, threading, time
import grpc
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from raw_client import RawClient
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig
from collab_llm_nodes.transport.server import Server
from collab_llm_nodes.transport.server import run_until_signal

def hang(*_):
    print("busy", flush=True)
    time.sleep(600)

def read(prompt):
    return hang() if sys.argv[1] == "reader" else encode(prompt)

def ask(port):
    global client
    client = RawClient(grpc.insecure_channel(f"127.0.0.1:{port}"))
    client.send(Open("go", (), SamplingConfig(), 4, VOCABULARY), Draft(0, 0, (1,)))

config = VerifierConfig(address="127.0.0.1:0", drain_s=0.5)
server = Server(Verifier(config, as_engine(FakeEngine(before_layer=hang)), read))
asyncio.run(run_until_signal(server, 0.5, ask))
"""
