"""Tokens, TLS, configuration and signals of the verifier."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import verifier_bed
from certificates import Certificates
from fake_models import (
    FakeEngine,
    encode,
)
from folders import environment
from verifier_bed import (
    GREEDY,
    OPEN,
    PROMPT,
    WAIT_S,
    Connect,
    Serve,
    opened_session,
    refusal,
    runner,
)

from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.errors import (
    ConfigError,
    Unauthenticated,
)
from collab_llm_nodes.protocols.edge_cloud import service as service_module
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, load_config
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    ClientLinkConfig,
    LinkStatus,
    VerifierClient,
)

serve, connect = verifier_bed.serve, verifier_bed.connect  # fixtures


# --- Token and TLS ------------------------------------------------------------------------------


def test_the_token_must_be_right(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    server = serve(FakeEngine(1), token_file=str(secret))
    assert connect(server.port, token="s3cret").describe(WAIT_S).model == "fake"
    opened_session(connect(server.port, token_file=str(secret)))
    for wrong in ("", "s3cre", "s3cret2"):
        states: queue.SimpleQueue[LinkStatus] = queue.SimpleQueue()
        client = connect(server.port, on_state=states.put, token=wrong)
        assert refusal(client, OPEN).code == "UNAUTHENTICATED"
        with pytest.raises(Unauthenticated, match="token"):
            client.describe(WAIT_S)
        while states.get(timeout=WAIT_S).error_code != "UNAUTHENTICATED":
            pass


@pytest.mark.parametrize(
    ("address", "tls", "warns"),
    [
        ("cloud:50551", False, True),
        ("10.0.0.7:50551", False, True),
        ("[fd00::7]:50551", False, True),
        ("cloud:50551", True, False),
        ("127.0.0.1:50551", False, False),
        ("[::1]:50551", False, False),
        ("localhost:50551", False, False),
        ("unix:/run/verifier.sock", False, False),
    ],
)
def test_a_token_that_travels_in_the_clear_is_warned_of(
    address: str, tls: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with VerifierClient(ClientLinkConfig(address=address, tls=tls, token="s3cret")):
        pass
    assert ("unencrypted" in caplog.text) == warns
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_token_file_that_others_can_read_is_warned_of(
    mode: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    secret.chmod(mode)
    with VerifierClient(ClientLinkConfig(token_file=str(secret))):
        pass
    assert ("chmod 600" in caplog.text) == warns


def test_the_token_is_not_in_the_logs(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    config = VerifierConfig(token="s3cret")
    assert "s3cret" not in f"{config}{ClientLinkConfig(token='s3cret')}"
    caplog.set_level("DEBUG")
    server = serve(FakeEngine(1), token="s3cret")
    refusal(connect(server.port, token="wrong"), OPEN)
    assert "s3cret" not in caplog.text


def test_tls(
    serve: Serve, connect: Connect, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, theirs = certificates
    cert, key = ours.issue("verifier")
    target = FakeEngine(1)
    port = serve(target, tls_cert=cert, tls_key=key).port
    answer = runner(connect(port, tls=True, tls_ca=ours.ca)).generate(PROMPT, GREEDY, 24)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    stranger = connect(port, verdict_deadline_s=2.0, tls=True, tls_ca=theirs.ca)
    failure = refusal(stranger, OPEN)
    assert failure.code == "UNAVAILABLE"
    assert "handshake" in failure.message.lower() or "certificate" in failure.message.lower()
    in_clear = refusal(connect(port, verdict_deadline_s=0.5), OPEN)
    assert in_clear.code == "UNAVAILABLE"
    assert "it may ask for TLS" in in_clear.message


def test_a_certificate_for_another_host_needs_its_name(
    serve: Serve, connect: Connect, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, _ = certificates
    cert, key = ours.issue("verifier", "DNS:verifier.example")
    port = serve(FakeEngine(1), tls_cert=cert, tls_key=key).port
    known = {"tls": True, "tls_ca": ours.ca}
    assert refusal(connect(port, verdict_deadline_s=0.5, **known), OPEN).code == "UNAVAILABLE"
    opened_session(connect(port, **known, tls_server_name="verifier.example"))


def test_mutual_tls(
    serve: Serve, connect: Connect, certificates: tuple[Certificates, Certificates]
) -> None:
    ours, theirs = certificates
    cert, key = ours.issue("verifier")
    port = serve(FakeEngine(1), tls_cert=cert, tls_key=key, tls_client_ca=ours.ca).port
    robot_cert, robot_key = ours.issue("robot")
    known = {"tls": True, "tls_ca": ours.ca}
    opened_session(connect(port, **known, tls_cert=robot_cert, tls_key=robot_key))
    other_cert, other_key = theirs.issue("other")
    for extra in ({}, {"tls_cert": other_cert, "tls_key": other_key}):
        started = time.monotonic()
        client = connect(port, verdict_deadline_s=0.5, **known, **extra)
        failure = refusal(client, OPEN)
        assert time.monotonic() - started < WAIT_S / 2
        assert failure.code == "UNAVAILABLE"
        assert "another client certificate" in failure.message


def test_certificates_that_cannot_be_used_are_named(
    serve: Serve, certificates: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    ours, _ = certificates
    cert, key = ours.issue("one")
    _, other_key = ours.issue("another")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for own, its_key in ((str(junk), key), (cert, str(junk)), (cert, other_key)):
        with pytest.raises(ConfigError, match=r"^tls_cert: .* is no certificate with the key"):
            serve(FakeEngine(1), tls_cert=own, tls_key=its_key)
        with pytest.raises(ConfigError, match=r"^tls_cert: "):
            VerifierClient(ClientLinkConfig(tls=True, tls_cert=own, tls_key=its_key))
    with pytest.raises(ConfigError, match=r"^tls_client_ca: .* holds no certificate"):
        serve(FakeEngine(1), tls_cert=cert, tls_key=key, tls_client_ca=str(junk))
    with pytest.raises(ConfigError, match=r"^tls_ca: .* holds no certificate"):
        VerifierClient(ClientLinkConfig(tls=True, tls_ca=str(junk)))


@pytest.mark.parametrize(
    ("options", "open_to_all", "readable"),
    [
        ({}, True, True),
        ({"token": "s3cret"}, False, True),
        ({"tls_cert": "", "tls_key": ""}, True, False),
        ({"tls_cert": "", "tls_key": "", "tls_client_ca": ""}, False, False),
    ],
)
def test_who_listens_to_all_the_world_is_told_what_is_missing(
    serve: Serve,
    certificates: tuple[Certificates, Certificates],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, str],
    open_to_all: bool,
    readable: bool,
) -> None:
    ours, _ = certificates
    cert, key = ours.issue("verifier")
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ours.ca}
    given = {name: value or files[name] for name, value in options.items()}
    serve(FakeEngine(1), address="0.0.0.0:0", **given)
    assert ("anyone may use it" in caplog.text) == open_to_all
    assert ("without TLS" in caplog.text) == readable


# --- Configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "field_name"),
    [
        (lambda: VerifierConfig(tls_cert="a"), "tls_cert"),
        (lambda: VerifierConfig(tls_client_ca="a"), "tls_client_ca"),
        (lambda: VerifierConfig(token="a", token_file="b"), "token"),
        (lambda: VerifierConfig(drain_s=-1), "drain_s"),
        (lambda: Limits(max_sessions=0), "max_sessions"),
        (lambda: ClientLinkConfig(tls_ca="a"), "tls"),
        (lambda: ClientLinkConfig(tls=True, tls_key="a"), "tls_cert"),
        (lambda: VerifierClient(ClientLinkConfig(token_file="/nowhere")), "token_file"),
        (lambda: VerifierClient(ClientLinkConfig(tls=True, tls_ca="/nowhere")), "tls_ca"),
        (lambda: VerifierClient(ClientLinkConfig(token="zwei\nZeilen")), "token"),
        (lambda: load_config(), "model.path"),
        (lambda: VerifierConfig(address=""), "address"),
        (lambda: ClientLinkConfig(address="nowhere"), "address"),
        (lambda: ClientLinkConfig(address="127.0.0.1:99999"), "address"),
        (lambda: from_mapping(VerifierConfig, {"drain_s": -1}), "drain_s"),
        (lambda: from_mapping(VerifierConfig, {"exits": {"queue": "lifo"}}), "exits.queue"),
        (lambda: from_mapping(VerifierConfig, {"exits": None}), "exits"),
        (lambda: from_mapping(VerifierConfig, {"model": {"exit_layers": 2}}), "model.exit_layers"),
        (
            lambda: from_mapping(VerifierConfig, {"model": {"exit_layers": "2"}}),
            "model.exit_layers",
        ),
    ],
)
def test_settings_that_cannot_work_are_errors(build: Callable[[], object], field_name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field_name


def test_the_configuration_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "verifier.yaml"
    file.write_text(
        "model: {path: models/target, dtype: bfloat16}\nlimits: {max_sessions: 2}\n"
        "exits: {confidence: max}\n"
    )
    config = load_config(file, address="0.0.0.0:1")
    assert (config.model.path, config.model.dtype) == ("models/target", "bfloat16")
    assert (config.limits.max_sessions, config.exits.confidence) == (2, "max")
    assert config.address == "0.0.0.0:1"
    file.write_text("limits: {max_robots: 2}\n")
    with pytest.raises(ConfigError, match=r"limits\.max_robots"):
        load_config(file)


def test_a_shipped_configuration_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("verifier_embedded.yaml").model.exits == "beside"
    (tmp_path / "verifier_embedded.yaml").write_text("model: {path: mine}\n")
    assert load_config("verifier_embedded.yaml").model.path == "mine"
    with pytest.raises(ConfigError, match=r"'verifier_none\.yaml'"):
        load_config("verifier_none.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "verifier_none.yaml")


def test_signals_while_it_drains_are_ignored() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_TWICE],
        env=environment(Path(__file__).parent),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


SIGNALLED_TWICE = """
import asyncio, os, signal, types
from collab_llm_nodes.transport.server import run_until_signal

class Server:
    port, service = 1, types.SimpleNamespace(sessions=1, failed=asyncio.Event())

    async def start(self):
        pass

    async def stop(self, grace_s):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return True

first = lambda port: os.kill(os.getpid(), signal.SIGINT)
asyncio.run(run_until_signal(Server(), 1.0, first))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("address", ["foo", "127.0.0.1", "127.0.0.1:999999", ":50551", "host:ftp"])
def test_an_address_without_a_port_is_refused_before_grpc_guesses_one(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port"):
        load_config("verifier_embedded.yaml", model="nav-target", address=address)


def test_exits_are_scored_over_as_many_candidates_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(service_module, "load", lambda model: None)
    monkeypatch.setattr(
        service_module, "Engine", lambda loaded, candidates: made.append(candidates)
    )
    service_module.load_engine(VerifierConfig(exit_candidates=16))
    assert made == [16]
