"""The client of the verifier: what is lost on the way, and comes back."""

from __future__ import annotations

import gc
import queue
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import verifier_bed
from fake_models import (
    VOCABULARY,
    FakeEngine,
    VerifierProcess,
    as_engine,
    encode,
)
from verifier_bed import (
    GREEDY,
    OPEN,
    PROMPT,
    WAIT_S,
    Connect,
    Gate,
    Serve,
    opened_session,
    runner,
)

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import (
    ConfigError,
    DeadlineExceeded,
    Unavailable,
)
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.verifier_client import (
    LinkStatus,
)
from collab_llm_nodes.transport.wire import Failure

serve, connect = verifier_bed.serve, verifier_bed.connect  # fixtures


# --- Losses -------------------------------------------------------------------------------------


def test_an_absent_verifier_is_unavailable_within_the_deadline(connect: Connect) -> None:
    client = connect(free_port(), verdict_deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="connect") as caught:
        runner(client).generate(PROMPT, deadline_s=2 * WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    assert caught.value.remedy
    with pytest.raises(Unavailable, match="connect"):
        client.describe(0.3)


def test_a_hanging_model_ends_in_deadline_exceeded(serve: Serve, connect: Connect) -> None:
    gate = Gate(1)
    client = connect(serve(FakeEngine(1, before_layer=gate)).port, verdict_deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="no verdict"):
        runner(client).generate(PROMPT, deadline_s=2 * WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    gate.go.set()


def test_an_answer_leaves_nothing_to_the_garbage_collector(serve: Serve, connect: Connect) -> None:
    """The collector comes late: until then pictures and caches of many answers would stay."""
    client = connect(serve(FakeEngine(1)).port)
    followed: list[weakref.ref[EncodedPrompt]] = []
    freed: queue.SimpleQueue[object] = queue.SimpleQueue()

    def follow(prompt: Prompt) -> EncodedPrompt:
        encoded = encode(prompt)
        followed.append(weakref.ref(encoded, freed.put))
        return encoded

    noisy = as_engine(FakeEngine(1, noise=0.5))
    gc.disable()
    try:
        for _ in range(3):
            RemoteRunner(noisy, client, encode=follow).generate(PROMPT, GREEDY, 24)
            freed.get(timeout=WAIT_S)
    finally:
        gc.enable()
    assert len(followed) == 3


def test_the_answer_survives_a_restart_between_rounds(serve: Serve, connect: Connect) -> None:
    target = FakeEngine(1)
    port = free_port()
    address = f"127.0.0.1:{port}"
    servers = [serve(target, address=address)]
    client = connect(port)
    rounds: list[int] = []

    def restart(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) in (2, 4):
            servers[-1].stop()
            servers.append(serve(target, address=address))

    answer = runner(client).generate(PROMPT, GREEDY, 24, on_tokens=restart)
    assert answer.tokens == target.answer(encode(PROMPT), GREEDY, 24)
    assert len(servers) == 3
    assert client.status.reconnects >= 2


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(1.0, seed=4)])
def test_the_answer_survives_a_kill_during_a_verification(
    serve: Serve, connect: Connect, sampling: SamplingConfig
) -> None:
    calm = runner(connect(serve(FakeEngine(1)).port)).generate(PROMPT, sampling, 24)
    gate = Gate(2, passes=1)
    port = free_port()
    address = f"127.0.0.1:{port}"
    doomed = serve(FakeEngine(1, before_layer=gate), address=address)
    client = connect(port)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(runner(client).generate, PROMPT, sampling, 24)
        assert gate.reached.wait(WAIT_S)
        doomed.stop()  # its compute thread still hangs
        serve(FakeEngine(1), address=address)
        assert answer.result(WAIT_S).tokens == calm.tokens
    gate.go.set()
    assert client.status.reconnects >= 1


def test_the_link_status_follows_the_verifier(serve: Serve, connect: Connect) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    states: queue.SimpleQueue[LinkStatus] = queue.SimpleQueue()

    def status_when(state: str) -> LinkStatus:
        while (status := states.get(timeout=WAIT_S)).state != state:
            pass
        return status

    connect(port, on_state=states.put)
    down = status_when("DOWN")
    assert down.error_code == "UNAVAILABLE"
    assert down.error_msg
    server = serve(FakeEngine(1), address=address)
    up = status_when("UP")
    assert (up.model, up.vocabulary, up.error_code) == ("fake", VOCABULARY, "")
    assert 0 < up.rtt_s < 1
    server.stop()
    status_when("DOWN")
    serve(FakeEngine(1), address=address)
    status_when("UP")


def test_closing_the_client_ends_its_sessions(serve: Serve, connect: Connect) -> None:
    engine = FakeEngine(1)
    client = connect(serve(engine).port)
    _, inbox = opened_session(client)
    client.close()
    assert inbox.get(Failure).code == "CANCELLED"
    engine.freed.get(timeout=WAIT_S)
    with pytest.raises(Unavailable, match="closed"):
        client.open(OPEN, inbox.put)
    with pytest.raises(Unavailable, match="closed"):
        client.describe(1.0)


def test_a_second_verifier_on_one_port_is_an_error(serve: Serve) -> None:
    server = serve(FakeEngine(1))
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(FakeEngine(1), address=f"127.0.0.1:{server.port}")


@pytest.fixture
def processes() -> Iterator[tuple[VerifierProcess, VerifierProcess, int]]:
    """Two verifiers as processes of their own, not listening yet, for one port."""
    port = free_port()
    pair = VerifierProcess(f"127.0.0.1:{port}"), VerifierProcess(f"127.0.0.1:{port}")
    yield (*pair, port)
    for process in pair:
        process.end()


def test_sigkill_costs_no_token_and_sigterm_drains(
    processes: tuple[VerifierProcess, VerifierProcess, int], connect: Connect
) -> None:
    first, second, port = processes
    first.listen()
    client = connect(port)
    expected = FakeEngine(1).answer(encode(PROMPT), GREEDY, 24)
    rounds: list[int] = []

    def kill(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) == 2:
            first.end()
            second.listen()

    assert runner(client).generate(PROMPT, GREEDY, 24, on_tokens=kill).tokens == expected
    assert client.status.reconnects >= 1
    rounds.clear()

    def terminate(tokens: tuple[int, ...]) -> None:
        rounds.append(len(tokens))
        if len(rounds) == 1:
            second.terminate()

    assert runner(client).generate(PROMPT, GREEDY, 24, on_tokens=terminate).tokens == expected
    assert len(rounds) > 1
    assert second.exit_code() == 0
