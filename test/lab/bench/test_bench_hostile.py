"""The attacks of ``bench verifier --hostile`` attack, and what they do is noticed.

A verifier with a model of a few lines in this process stands in for the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attacking import assert_attacks
from fake_models import VOCABULARY, FakeEngine, as_engine, encode
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from collab_llm_lab.bench.hostile import report, verifier_server
from collab_llm_lab.bench.hostile.messages import MESSAGES, Session
from collab_llm_lab.bench.hostile.pictures import flat_png, progressive_jpeg
from collab_llm_lab.bench.hostile.report import RunningServer, read_log, withstand
from collab_llm_lab.bench.hostile.robots import DEADLINE_S, ROBOTS, Endpoint, Robots, percentiles
from collab_llm_lab.bench.hostile.table import ATTACKS, GOALS, STRANGERS
from collab_llm_lab.bench.hostile.verifier_server import VERIFIER
from collab_llm_lab.bench.verifier import Recording
from collab_llm_lab.bench.wire import connect
from collab_llm_nodes.cli import app
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, Open, Verdict
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.transport.background import within
from collab_llm_nodes.transport.server import ServerHandle

WAIT_S = 60.0
TOKEN = "only-robots-with-this"
OPEN = Open("go to the red box", (), SamplingConfig(), 8, VOCABULARY)
MANY = 20
"""Sessions that honest clients never have."""


class ThisProcess:
    """Stands in for the verifier's process."""

    pid = os.getpid()

    def __init__(self, log: Path) -> None:
        self.log = log
        log.write_text("before\n")

    def check(self) -> None:
        pass

    def stop(self, timeout_s: float) -> float:
        return timeout_s


class StandIn:
    """A verifier, and what it answers; ``slow``: it computes nothing while it has many sessions."""

    def __init__(self, folder: Path, *, slow: bool = False) -> None:
        self.slow = slow
        config = VerifierConfig(
            address="127.0.0.1:0",
            metrics_address="127.0.0.1:0",
            token=TOKEN,
            limits=Limits(max_streams=1024),
        )
        engine = FakeEngine(1, before_layer=self._wait)
        self.server: ServerHandle = start_server(config, as_engine(engine), encode)
        address, metrics = (
            f"127.0.0.1:{port}" for port in (self.server.port, self.server.metrics_port)
        )
        process = ThisProcess(folder / "log")
        self.site = RunningServer(VERIFIER, process, address, metrics, token=TOKEN)  # type: ignore[arg-type]
        self.recording = asyncio.run(within(self._record(), WAIT_S))

    def _wait(self, layer: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.slow and self.server.sessions >= MANY and time.monotonic() < deadline:
            time.sleep(0.02)

    async def _record(self) -> Recording:
        connection = await connect(self.site.address, token=TOKEN)
        call = connection.call(codec.SESSION, WAIT_S)
        await call.write(codec.encode_client(OPEN))
        drafts, verdicts, finished = list[bytes](), list[tuple[int, ...]](), False
        while not finished:
            drafts.append(codec.encode_client(Draft(len(drafts), len(drafts), ())))
            await call.write(drafts[-1])
            while not isinstance(verdict := codec.decode_server(await call.read()), Verdict):
                pass
            verdicts.append(verdict.tokens)
            finished = verdict.finished
        connection.close()
        return Recording(
            codec.encode_client(OPEN), tuple((draft, 0) for draft in drafts), (), tuple(verdicts)
        )


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path)
    yield made
    made.server.stop()


def test_pictures_are_whole_and_as_large_as_they_say() -> None:
    for data in (progressive_jpeg(640, 480, 20), flat_png(640, 480)):
        picture = Image.open(io.BytesIO(data))
        assert picture.convert("RGB").size == (640, 480)
        assert len(data) < 640 * 480 / 100
    assert len(progressive_jpeg(640, 480, 21)) > len(progressive_jpeg(640, 480, 20))


@pytest.mark.parametrize("server", ATTACKS)
def test_every_attack_has_one_sentence_and_messages(server: str) -> None:
    assert set(MESSAGES[server]) == set(ATTACKS[server]) - set(STRANGERS)
    for name, attack in ATTACKS[server].items():
        assert attack.text.endswith("."), name
        assert ". " not in attack.text, name
        assert bool(attack.per_s) is (name not in STRANGERS), name


@pytest.mark.parametrize("name", ATTACKS["verifier"])
def test_every_attack_sends(name: str, stand_in: StandIn) -> None:
    honest = VERIFIER.recorded(stand_in.recording)
    draft = codec.encode_client(Draft(0, 0, (3,)))  # there is a token to replay
    session = Session(honest.opened, honest.light, [draft, *honest.messages])
    assert_attacks(VERIFIER, name, stand_in.server, TOKEN, session)


def test_a_long_wait_counts_as_all_that_would_have_begun_meanwhile() -> None:
    calm = [0.01] * 500
    assert percentiles(calm, 0.03) == pytest.approx((10.0, 10.0))
    median, worst = percentiles([*calm, 5.0], 0.03)  # one in 501, but 5 of 20 seconds
    assert median == pytest.approx(10.0)
    assert worst > 4000
    assert percentiles([], 0.03) == (1e3 * DEADLINE_S, 1e3 * DEADLINE_S)


def test_wrong_tokens_and_refusals_are_noticed(stand_in: StandIn) -> None:
    right = stand_in.recording
    wrong = replace(right, verdicts=((99,), *right.verdicts[1:]))

    def work(recording: Recording, token: str) -> tuple[int, int]:
        async def ask() -> tuple[int, int]:
            endpoint = Endpoint(stand_in.site.address, token=token)
            robots = Robots(endpoint, [recording], VERIFIER.converse)
            seen = await robots.work(0.0)
            robots.close()
            return seen.wrong, len(seen.failures)

        return asyncio.run(within(ask(), WAIT_S))

    assert work(right, TOKEN) == (0, 0)
    assert work(wrong, TOKEN) == (ROBOTS, 0)
    assert work(right, "wrong") == (0, ROBOTS)


def test_an_attack_that_makes_others_wait_misses_the_goal(stand_in: StandIn) -> None:
    stand_in.slow = True
    job = withstand(stand_in.site, "idle_sessions", [stand_in.recording], 3.0)
    row = asyncio.run(within(job, 2 * WAIT_S))
    assert set(GOALS) <= set(row)
    assert row["sent"]["streams"] >= MANY
    assert max(row["normal_p99_ratio"], row["opening_p99_ratio"]) > GOALS["normal_p99_ratio"], row
    assert row["wrong"] == 0
    assert not row["ok"]


def test_lines_that_anyone_wrote_into_the_log_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    trace = json.dumps({"exception": "Traceback (most recent call last):\n  ..."})
    log.write_bytes(b"begun\n" + b'{"message": "x"}\nforged\n[1]\n\xff\n' + trace.encode())
    found = read_log(log, len("begun\n"))
    assert (found["raw_log_lines"], found["tracebacks"]) == (3, 1)
    assert found["raw"] == ["forged", "[1]", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(("stopped_s", "status"), [(5.0, 0), (12.0, 1)])
def test_the_command_says_whether_all_goals_are_met(
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_s: float,
    status: int,
) -> None:
    """Goals that a busy machine may miss are put off, but that of SIGTERM."""
    recorded = replace(VERIFIER, prepare=lambda folder, seed: ({}, [stand_in.recording]))
    monkeypatch.setattr(verifier_server, "VERIFIER", recorded)
    monkeypatch.setattr(report, "running", lambda *_: contextlib.nullcontext(stand_in.site))
    monkeypatch.setattr(report, "SIGTERM_S", stopped_s)
    monkeypatch.setattr(report, "SIGTERM_AFTER_S", 0.1)
    for name in GOALS:
        monkeypatch.setitem(GOALS, name, 1e9)
    file = tmp_path / "hostile.json"
    command = f"bench verifier --hostile --attack garbage --seconds 1 --json {file}"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == status, done.output
    results = json.loads(file.read_text())
    assert set(GOALS) < set(results["hostile"]["garbage"])
    assert results["hostile"]["sigterm_s"] == stopped_s
    assert results["hostile"]["drain_s"] == 10.0
    assert results["goals"]["sigterm_s"] == 11.0


def test_the_table_is_readable_at_80_columns() -> None:
    bad = {name: 8.0 * goal + 7777.5 for name, goal in GOALS.items()}
    good = dict.fromkeys(GOALS, 0)
    rows = {name: bad if i % 2 else good for i, name in enumerate(ATTACKS["verifier"])}
    results = {
        "front": True,
        "goals": {"sigterm_s": 11.0},
        "hostile": {**rows, "sigterm_s": 12.5},
    }
    told = io.StringIO()
    report.show(results, list(ATTACKS["verifier"]), Console(file=told, width=80))
    lines = told.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in told.getvalue()
    words = told.getvalue().split()
    assert all(words.count(name) == 1 for name in ATTACKS["verifier"])
    for name, goal in GOALS.items():  # each is missed in every other row
        assert words.count(name) >= len(ATTACKS["verifier"]) // 2
        assert words.count(f"{8.0 * goal + 7777.5:.0f}") >= len(ATTACKS["verifier"]) // 2
    assert "12.5" in words


def test_an_attack_that_only_a_proxy_can_hold_off_misses_nothing_without_one() -> None:
    bad = {name: goal + 1.0 for name, goal in GOALS.items()}
    for front in (False, True):
        results = {
            "front": front,
            "goals": {"sigterm_s": 11.0},
            "hostile": {"rapid_reset": bad, "sigterm_s": 1.0},
        }
        told = io.StringIO()
        report.show(results, ["rapid_reset"], Console(file=told, width=80))
        assert ("no goal " in told.getvalue()) is not front
        assert ("tracebacks 1" in told.getvalue()) is front


@pytest.mark.parametrize(
    ("server", "command", "wrong", "meant"),
    [
        ("verifier", "verifier", "rapid-rest", "rapid_reset"),
        ("dragon", "dragon-hostile", "slow_reader", "slow_readers"),
        ("jupiter", "jupiter-hostile", "slow_reader", "slow_readers"),
    ],
)
def test_the_help_lists_the_attacks_and_unknown_ones_are_refused_with_the_nearest(
    server: str, command: str, wrong: str, meant: str
) -> None:
    done = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert all(name in done.output for name in ATTACKS[server])
    asked = ["bench", command, "--attack", wrong]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "800"})
    assert done.exit_code == 2
    assert "--attack" in done.output
    assert f"did you mean {meant}?" in done.output
    assert all(name in done.output for name in ATTACKS[server])
    asked[-1] = "qqq"
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "800"})
    assert done.exit_code == 2
    assert "did you mean" not in done.output
    assert "rapid_reset" in done.output


@pytest.mark.parametrize("option", [["--attack", "garbage"], ["--front"]])
def test_options_of_an_attack_need_hostile(option: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "verifier", *option], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert "--hostile" in done.output
