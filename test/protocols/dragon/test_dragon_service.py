"""Device and cloud over a real connection: the answer of a plain loop, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from dragon_sides import EOS, INFO, VOCAB, Ask, Serve, Tables, TableSide, ask, connect, serve
from dragon_timeline import plain_answer
from waiting import wait_for

from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_lab.bench.link.proxy import LinkProxy
from collab_llm_nodes.decoding.aggregation import AggregationConfig, AggregationLaw, Party
from collab_llm_nodes.errors import (
    Busy,
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unauthenticated,
    Unavailable,
    VocabularyMismatch,
)
from collab_llm_nodes.protocols.base import Control, Source
from collab_llm_nodes.protocols.dragon.client import DragonClient
from collab_llm_nodes.protocols.dragon.device import AnswerSoFar, Rules
from collab_llm_nodes.protocols.dragon.link import PatienceConfig
from collab_llm_nodes.protocols.dragon.machine import AheadConfig
from collab_llm_nodes.protocols.dragon.scheduler import ScheduleConfig
from collab_llm_nodes.protocols.dragon.service import Limits

__all__ = ["ask", "connect", "serve"]  # fixtures
DEVICE, CLOUD = Party.DEVICE, Party.CLOUD
Connect = Callable[..., DragonClient]


def expected(
    model: Tables, seed: int = 0, tokens: int = 24, law: str = "shared"
) -> tuple[int, ...]:
    own = AggregationLaw(AggregationConfig(law=law), VOCAB, 1.0, seed)
    return plain_answer(own, model, EOS, tokens)


def long_answer(tokens: int, model: Tables) -> int:
    """A seed whose answer has that many tokens."""
    return next(seed for seed in range(1000) if len(expected(model, seed, tokens)) == tokens)


def rules(policy: str = "auto", law: str = "shared", **patience: Any) -> Rules:
    return Rules(
        AggregationConfig(law=law),
        ScheduleConfig(aggregate_on=policy),
        patience=PatienceConfig(**{"patience_s": 60.0, "silence_s": 30.0, **patience}),
    )


@pytest.mark.parametrize("policy", ["device", "cloud", "follow", "auto", "random"])
@pytest.mark.parametrize("law", ["shared", "coin"])
def test_two_sides_write_the_answer_of_a_plain_loop(
    serve: Serve, connect: Connect, ask: Ask, policy: str, law: str
) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model))
    client = connect(f"127.0.0.1:{cloud.port}")
    for seed in range(4):
        told = ask(TableSide(DEVICE, model), client, rules(policy, law), seed=seed)
        assert told.tokens == expected(model, seed, law=law)
        assert told.metrics.unverified == 0
        assert told.metrics.rounds == len(told.tokens)
        assert told.metrics.bytes_up > 0
        assert told.metrics.bytes_down > 0


def test_a_slow_link_and_rejected_passes_change_nothing(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    """Passes are ended in their middle, drafts cross targets; the answer stands."""
    model = Tables(3, likeness=0.3)
    cloud = serve(TableSide(CLOUD, model, pass_s=0.01))
    with LinkProxy(f"127.0.0.1:{cloud.port}", LinkProfile(delay_s=0.02)) as link:
        client = connect(link.address)
        for policy in ("device", "follow"):
            device = TableSide(DEVICE, model, pass_s=0.004)
            told = ask(device, client, rules(policy), seed=5)
            assert told.tokens == expected(model, 5)
            assert told.metrics.discarded > 0
        assert told.metrics.handovers > 0


def test_the_answer_is_told_as_it_grows(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model))
    heard: list[AnswerSoFar] = []
    told = ask(
        TableSide(DEVICE, model), connect(f"127.0.0.1:{cloud.port}"), rules(), emit=heard.append
    )
    assert heard[-1].tokens == told.tokens
    for one, following in zip(heard, heard[1:], strict=False):
        assert following.tokens[: len(one.tokens)] == one.tokens
    assert told.metrics.time_to_first_token_s > 0


def test_several_devices_share_one_cloud(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    side = TableSide(CLOUD, model, pass_s=0.002)
    cloud = serve(side)
    client = connect(f"127.0.0.1:{cloud.port}")
    found: dict[int, tuple[int, ...]] = {}

    def write(seed: int) -> None:
        found[seed] = ask(TableSide(DEVICE, model), client, rules("follow"), seed=seed).tokens

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found == {seed: expected(model, seed) for seed in range(6)}
    wait_for(lambda: all(decoder.closed for decoder in side.decoders))
    wait_for(lambda: cloud.sessions == 0)


def test_the_query_leaves_before_the_device_retrieves(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    model = Tables()
    far, near = TableSide(CLOUD, model), TableSide(DEVICE, model)
    cloud = serve(far)
    there = threading.Event()
    far.before_pass = lambda pushed: there.set()
    slow = near.decoder
    near.decoder = lambda *given: there.wait(30.0) and slow(*given)  # type: ignore
    told = ask(near, connect(f"127.0.0.1:{cloud.port}"), rules())
    assert there.is_set()
    assert told.tokens == expected(model)


# ------------------------------------------------------- the cloud goes away


def test_a_broken_connection_is_mended_with_the_answer_so_far(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    model = Tables()
    seed = long_answer(20, model)
    cloud = serve(TableSide(CLOUD, model, pass_s=0.003))
    with LinkProxy(f"127.0.0.1:{cloud.port}") as link:
        client = connect(link.address)
        cuts = {5, 11}

        def cut(told: AnswerSoFar) -> None:
            due = {n for n in cuts if n <= len(told.tokens)}
            if due:
                cuts.difference_update(due)
                link.cut()

        told = ask(
            TableSide(DEVICE, model, pass_s=0.003),
            client,
            rules("follow"),
            seed=seed,
            max_tokens=20,
            emit=cut,
        )
    assert told.tokens == expected(model, seed, 20)
    assert told.metrics.reconnects >= 2
    assert told.metrics.unverified == 0


def test_a_cloud_that_vanishes_leaves_the_device_to_finish_alone(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    model = Tables()
    seed = long_answer(20, model)
    cloud = serve(TableSide(CLOUD, model, pass_s=0.003))
    client = connect(f"127.0.0.1:{cloud.port}")
    stopped: list[int] = []

    def vanish(told: AnswerSoFar) -> None:
        if len(told.tokens) >= 6 and not stopped:
            stopped.append(len(told.tokens))
            cloud.stop()

    told = ask(
        TableSide(DEVICE, model),
        client,
        rules(patience_s=3.0, silence_s=3.0),
        seed=seed,
        max_tokens=20,
        emit=vanish,
    )
    together = told.metrics.tokens - told.metrics.unverified
    assert stopped[0] <= together < len(told.tokens)
    assert told.tokens[:together] == expected(model, seed, 20)[:together]
    assert set(told.sources[together:]) == {Source.UNVERIFIED}


def test_a_cloud_that_falls_silent_is_given_up(serve: Serve, connect: Connect, ask: Ask) -> None:
    """The connection stands, but nothing comes: every wait has an end."""
    model = Tables()
    side = TableSide(CLOUD, model)
    stuck = threading.Event()
    side.before_pass = lambda pushed: pushed >= 3 and stuck.wait(60.0)  # type: ignore
    cloud = serve(side)
    told = ask(
        TableSide(DEVICE, model),
        connect(f"127.0.0.1:{cloud.port}"),
        rules("device", patience_s=4.0, silence_s=2.0),
        seed=long_answer(20, model),
        max_tokens=20,
    )
    stuck.set()
    assert told.metrics.unverified > 0
    assert told.metrics.unverified < len(told.tokens) == 20


def test_without_a_cloud_the_device_answers_alone(connect: Connect, ask: Ask) -> None:
    model = Tables()
    told = ask(TableSide(DEVICE, model), connect("127.0.0.1:9"), rules(patience_s=0.2))
    assert told.metrics.unverified == len(told.tokens) > 0
    assert ask(TableSide(DEVICE, model), None).tokens == told.tokens


def test_failing_without_the_cloud_is_a_choice(connect: Connect, ask: Ask) -> None:
    patience = PatienceConfig(patience_s=0.2, without_cloud="fail")
    with pytest.raises(Unavailable):
        ask(TableSide(DEVICE, Tables()), connect("127.0.0.1:9"), Rules(patience=patience))


# ------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("differs", "error", "field"),
    [
        ({"vocabulary": "other"}, VocabularyMismatch, "identity.vocabulary"),
        ({"scorer": "other"}, ConfigError, "identity.scorer"),
        ({"model": "other"}, ConfigError, "identity.model"),
    ],
)
def test_sides_that_do_not_match_are_refused(
    serve: Serve,
    connect: Connect,
    ask: Ask,
    differs: dict[str, str],
    error: type[CollabError],
    field: str,
) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model))
    device = TableSide(DEVICE, model, info=replace(INFO, **differs))  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        ask(device, connect(f"127.0.0.1:{cloud.port}"), rules())
    assert caught.value.field == field
    assert caught.value.remedy


def test_another_model_may_be_allowed(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model), other_models=True)
    device = TableSide(DEVICE, model, info=replace(INFO, model="other"))
    told = ask(device, connect(f"127.0.0.1:{cloud.port}"), rules())
    assert told.tokens == expected(model)


def test_what_the_cloud_cannot_do_is_told(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model), limits=Limits(max_tokens=10, max_query_chars=40))
    client = connect(f"127.0.0.1:{cloud.port}")
    device = TableSide(DEVICE, model)
    for given, field in (({"max_tokens": 11}, "max_tokens"), ({"query": 41 * "x"}, "query")):
        with pytest.raises(InvalidInput) as caught:
            ask(device, client, rules(), **{"max_tokens": 10, **given})
        assert caught.value.field == field
    assert ask(device, client, rules(), max_tokens=10).tokens == expected(model, tokens=10)


def test_the_devices_own_failure_ends_the_answer(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model))
    client = connect(f"127.0.0.1:{cloud.port}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        ask(TableSide(DEVICE, model), client, rules(), query="unreadable")
    device = TableSide(DEVICE, model)
    device.before_pass = lambda pushed: 1 // 0 if pushed == 2 else None  # type: ignore
    with pytest.raises(CollabError, match="model failed"):
        ask(device, client, rules())
    wait_for(lambda: cloud.sessions == 0)


def test_a_full_cloud_is_waited_for_then_missed(serve: Serve, connect: Connect, ask: Ask) -> None:
    model = Tables()
    side = TableSide(CLOUD, model)
    held = threading.Event()
    side.before_pass = lambda pushed: held.wait(60.0)  # type: ignore
    cloud = serve(side, limits=Limits(max_sessions=1))
    client = connect(f"127.0.0.1:{cloud.port}")
    first: list[tuple[int, ...]] = []
    occupant = threading.Thread(
        target=lambda: first.append(ask(TableSide(DEVICE, model), client, rules()).tokens)
    )
    occupant.start()
    wait_for(lambda: cloud.sessions == 1)
    told = ask(TableSide(DEVICE, model), client, rules(patience_s=0.2))
    assert told.metrics.unverified == len(told.tokens)
    held.set()
    occupant.join(60.0)
    assert first == [expected(model)]
    assert issubclass(Busy, CollabError)


def test_cancel_and_deadline_end_an_answer_on_both_sides(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    model = Tables()
    side = TableSide(CLOUD, model)
    cloud = serve(side)
    client = connect(f"127.0.0.1:{cloud.port}")
    held = threading.Event()
    device = TableSide(DEVICE, model)
    device.before_pass = lambda pushed: pushed >= 4 and held.wait(60.0)  # type: ignore
    control = Control()
    seed = long_answer(20, model)

    def cancel(told: AnswerSoFar) -> None:
        if len(told.tokens) >= 2:
            control.cancel()

    with pytest.raises(Cancelled):
        ask(device, client, rules(), seed=seed, max_tokens=20, control=control, emit=cancel)
    held.set()
    wait_for(lambda: cloud.sessions == 0)
    wait_for(lambda: all(decoder.closed for decoder in side.decoders))
    slow = TableSide(DEVICE, model, pass_s=5.0)
    with pytest.raises(DeadlineExceeded):
        ask(slow, client, rules(), control=Control(time.monotonic() + 0.2))
    wait_for(lambda: cloud.sessions == 0)


def test_a_lead_of_one_is_token_wise_synchronisation(
    serve: Serve, connect: Connect, ask: Ask
) -> None:
    model = Tables()
    cloud = serve(TableSide(CLOUD, model))
    near = TableSide(DEVICE, model)
    told = ask(
        near,
        connect(f"127.0.0.1:{cloud.port}"),
        replace(rules("device"), ahead=AheadConfig(1)),
        seed=3,
    )
    assert told.tokens == expected(model, 3)
    assert near.passes == len(told.tokens)  # nothing was drafted in vain


# ------------------------------------------------------- who may speak to whom


def test_token_and_tls(serve: Serve, connect: Connect, ask: Ask, tmp_path: Path) -> None:
    made = Certificates(tmp_path, "authority")
    cert, key = made.issue("cloud")
    model = Tables()
    cloud = serve(TableSide(CLOUD, model), token="secret", tls_cert=cert, tls_key=key)
    address = f"localhost:{cloud.port}"
    client = connect(address, token="secret", tls=True, tls_ca=made.ca)
    assert ask(TableSide(DEVICE, model), client, rules()).tokens == expected(model)
    assert client.describe(30.0).model == "tables"
    stranger = connect(address, token="guess", tls=True, tls_ca=made.ca)
    with pytest.raises(Unauthenticated):
        ask(TableSide(DEVICE, model), stranger, rules())


def test_describe_tells_facts_and_limits(serve: Serve, connect: Connect) -> None:
    cloud = serve(TableSide(CLOUD, Tables()), limits=Limits(max_tokens=77))
    info = connect(f"127.0.0.1:{cloud.port}").describe(30.0)
    assert (info.max_tokens, info.vocab_size, info.sessions) == (77, VOCAB, 0)
    assert info.identity.scorer == "scorer"
