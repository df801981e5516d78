"""Edge-cloud decoding over a link that is bad, or gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_models import EOS, VOCABULARY, FakeEngine, as_engine, encode
from packet_links import needs_packets
from typer.testing import CliRunner
from waiting import wait_for

from collab_llm_lab.bench.link import LinkProfile, LinkProxy, report
from collab_llm_lab.bench.link.report import Bed, Scenario, disturb, embedded_bed, silence
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_nodes.cli import app
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClient, EdgeClientConfig, Source
from collab_llm_nodes.protocols.edge_cloud.drafter import Drafter
from collab_llm_nodes.protocols.edge_cloud.link import LinkConfig
from collab_llm_nodes.protocols.edge_cloud.link_loss import LinkLossConfig, Patience, finish_alone
from collab_llm_nodes.protocols.edge_cloud.messages import Verdict
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

# The protocol over a bad link.


PROMPTS = [Prompt(f"question {i}") for i in range(8)]


@contextlib.contextmanager
def bed_of_fakes(
    keepalive_s: float = 0.5, **link: float
) -> Iterator[tuple[Bed, list[tuple[int, ...]]]]:
    """A verifier around a fake behind a proxy, and what it answers undisturbed."""
    target = FakeEngine(1)
    config = ClientLinkConfig(keepalive_s=keepalive_s, link=from_mapping(LinkConfig, link))
    server = VerifierConfig(address="127.0.0.1:0")
    with (
        start_server(server, as_engine(target), encode) as verifier,
        LinkProxy(f"127.0.0.1:{verifier.port}") as proxy,
        VerifierClient(replace(config, address=proxy.address)) as client,
    ):
        client.describe(10.0)
        draft = as_engine(FakeEngine(1, noise=0.5))
        runner = RemoteRunner(draft, client, encode=encode)
        yield (
            Bed(client, runner, VOCABULARY, proxy),
            [target.answer(encode(prompt), report.LAW, report.MAX_TOKENS) for prompt in PROMPTS],
        )


def test_twenty_cuts_cost_time_but_no_token() -> None:
    # Resets alone end connections here. With the usual deadlines a machine that stalls does so as
    # well: the keepalive's after twice 0.5 s, and an answer's wait for a verdict after 5 s.
    patient = {"keepalive_s": 10.0, "verdict_deadline_s": report.DEADLINE_S}
    with bed_of_fakes(**patient) as (bed, truth):
        profile = LinkProfile(delay_s=0.005, jitter_s=0.002)
        bed.change(profile)
        cuts = Scenario("cuts", profile, cuts=20, outages_s=(0.0, 0.0, 0.1))
        counts = disturb(bed, PROMPTS, truth, cuts, seed=1)
    assert counts.answers >= len(PROMPTS)
    assert counts.cuts == 20
    assert (counts.wrong_tokens, counts.hangs, counts.errors) == (0, 0, [])
    recovery = counts.row(profile)["recovery_ms"]
    assert recovery["count"] >= 10
    # The bound counts waits only; half of it more is granted to a busy machine's threads.
    late = [r["excess"] - 1.5 * r["bound"] for r in recovery["each"]]
    assert sum(ms > 0 for ms in late) <= len(late) // 4, "a machine that is busier still"


def test_a_lost_syn_costs_less_than_tcp_s_own_patience() -> None:
    """Nothing but the second attempt can connect: the first one's deadline is a minute."""
    with bed_of_fakes(connect_deadline_s=60.0) as (bed, truth):
        before = bed.link.accepted
        bed.link.swallow(1)
        bed.link.cut()
        wait_for(lambda: bed.link.accepted == before + 1)  # else a call revives the old channel
        assert bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS).tokens == truth[0]
        assert bed.link.accepted == before + 2
        wait_for(lambda: bed.link.connections == 1)  # whatever else was begun is given up


def test_refused_attempts_to_connect_come_after_ever_longer_pauses() -> None:
    with bed_of_fakes() as (bed, truth):
        bed.link.refuse()
        refused_from = bed.link.accepted
        started = time.monotonic()
        bed.link.cut()
        wait_for(lambda: bed.link.accepted >= refused_from + 5)
        assert time.monotonic() - started >= 0.05 + 0.1 + 0.2 + 0.4
        wait_for(lambda: bed.client.status.state == "DOWN")
        assert "failed to connect" in bed.client.status.error_msg
        bed.link.heal()
        assert bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS).tokens == truth[0]


def test_what_is_left_on_a_lost_connection_goes_on_with_the_next() -> None:
    """Closing a channel cancels its calls, and their tasks as if their session was over."""
    with bed_of_fakes() as (bed, truth):
        rounds: list[tuple[int, ...]] = []

        def on_tokens(tokens: tuple[int, ...]) -> None:
            rounds.append(tokens)
            if len(rounds) == 1:
                (session,) = bed.client.sessions
                assert session._task is not None
                bed.client._loop.call_soon_threadsafe(session._task.cancel)

        answer = bed.runner.generate(PROMPTS[0], report.LAW, report.MAX_TOKENS, on_tokens=on_tokens)
        assert answer.tokens == truth[0]
        assert bed.client.status.reconnects == 1


@pytest.mark.parametrize("fault", ["wrong_tokens", "failed", "hangs", ""])
def test_the_benchmark_s_exit_status_tells_of_every_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {name: int(name == fault) for name in ("wrong_tokens", "failed", "hangs")}
    monkeypatch.setattr(report, "run_link", lambda **_: {"runs": {"cuts": row}})
    assert CliRunner().invoke(app, ["bench", "link"]).exit_code == bool(fault)


def test_a_wrong_token_is_counted() -> None:
    """The comparison can fail."""
    assert report.differences((1, 2, 3), (1, 2, 3)) == 0
    assert report.differences((1, 5, 3), (1, 2, 3)) == 1
    assert report.differences((1, 2), (1, 2, 3, 4)) == 2
    with bed_of_fakes() as (bed, truth):
        wrong = [(*answer[:-1], answer[-1] + 1) for answer in truth]
        counts = disturb(bed, PROMPTS[:2], wrong[:2], Scenario("none", LinkProfile()), seed=1)
    assert counts.wrong_tokens == 2


def test_a_connection_that_falls_silent_is_replaced() -> None:
    """No reset tells of it: the keepalive must, well before the verdict's deadline."""
    with bed_of_fakes(verdict_deadline_s=10.0) as (bed, truth):
        result = silence(bed, PROMPTS[0], truth[0], bed.link.forget)
    assert result["wrong_tokens"] == result["next_answer_wrong_tokens"] == 0
    assert result["over_after_s"] < 8.0


def test_a_link_that_stays_silent_is_a_typed_error_in_time() -> None:
    with bed_of_fakes(verdict_deadline_s=1.5, connect_deadline_s=0.5) as (bed, truth):
        result = silence(bed, PROMPTS[0], truth[0], bed.link.half_open)
    assert result["error"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert result["over_after_s"] < 8.0
    assert result["next_answer_wrong_tokens"] == 0


# What becomes of an answer whose verifier cannot be reached.


def test_patience_ends_only_while_a_verdict_is_awaited() -> None:
    patience = Patience(2.0)
    assert not patience.over(1000.0)  # drafting the first draft may take its time
    patience.on_sent(10.0)
    patience.on_sent(11.0)  # another one ahead: the first is awaited still
    assert not patience.over(12.0)
    assert patience.over(12.1)
    patience.on_heard(12.1, waiting=True)  # the one ahead
    assert not patience.over(14.0)
    assert patience.over(14.2)
    patience.on_heard(14.2, waiting=False)
    assert not patience.over(1000.0)


@pytest.mark.parametrize(
    ("policy", "error", "alone"),
    [
        ("hold", Unavailable("gone"), False),
        ("draft_only", Unavailable("gone"), True),
        ("draft_only", DeadlineExceeded("silent"), True),
        ("draft_only", Unauthenticated("who are you?"), False),
        ("draft_only", InvalidInput("no picture"), False),
        ("draft_only", Cancelled("never mind"), False),
    ],
)
def test_only_a_lost_link_lets_the_draft_model_finish(
    policy: str, error: CollabError, alone: bool
) -> None:
    assert LinkLossConfig(policy=policy).finishes_alone(error) is alone


@pytest.mark.parametrize(
    ("field", "value"), [("policy", "hope"), ("after_s", 0.0), ("max_unverified", 0)]
)
def test_a_policy_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(LinkLossConfig, {field: value})
    assert caught.value.field == field


LAWS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.8, seed=3),
    SamplingConfig(temperature=0.8, seed=3, law="coupled"),
]


class Alone:
    """An answer of which the verifier has confirmed ``confirmed``, finished by the draft model."""

    def __init__(
        self,
        sampling: SamplingConfig,
        confirmed: tuple[int, ...] = (),
        max_tokens: int = 100,
        max_unverified: int = 100,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = FakeEngine(1, noise=0.5)
        self.prompt = encode(Prompt("where to?"))
        drafter = Drafter(as_engine(self.model), self.prompt, sampling)
        self.client = EdgeClient(EdgeClientConfig(max_tokens=max_tokens))
        if confirmed:  # by a verdict, after a draft that had nothing of it
            draft = drafter.draft(self.client.next_draft())
            assert draft is not None
            assert self.client.on_sent(draft)
            self.client.on_verdict(Verdict(0, confirmed, len(confirmed) - 1, False))
            drafter.advance(confirmed)
        self.said: list[int] = []
        try:
            finish_alone(
                self.client,
                drafter.next_token,
                self.model.eos,
                max_unverified,
                check=check,
                on_tokens=self.said.extend,
            )
        finally:
            drafter.close()


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("confirmed", [(), (5, 7, 11)])
def test_the_rest_is_what_the_draft_model_alone_says_after_the_confirmed_part(
    sampling: SamplingConfig, confirmed: tuple[int, ...]
) -> None:
    alone = Alone(sampling, confirmed)
    expected = list(confirmed)
    while expected[-1:] != [EOS] and len(expected) < 100:
        law = distribution(alone.model.logits((*alone.prompt.ids, *expected)), sampling)
        expected.append(own_token(law, sampling, len(expected)))
    client = alone.client
    assert client.generated == expected
    assert alone.said == expected[len(confirmed) :]
    assert client.sources[len(confirmed) :] == [Source.UNVERIFIED] * len(alone.said)
    assert Source.UNVERIFIED not in client.sources[: len(confirmed)]
    assert not client.verified
    assert client.finished
    assert client.metrics.unverified == len(alone.said)
    assert client.metrics.tau == len(confirmed)  # what was not verified does not count
    assert alone.model.alive == 0


def test_an_unverified_rest_keeps_the_request_s_length() -> None:
    whole = Alone(LAWS[1]).said
    alone = Alone(LAWS[1], max_tokens=len(whole) - 1)
    assert alone.said == whole[:-1]
    assert alone.client.finished


def test_an_unverified_rest_without_an_end_is_no_answer() -> None:
    whole = Alone(LAWS[1]).said
    assert 2 < len(whole) < 100
    assert whole[-1] == EOS
    with pytest.raises(Unavailable) as caught:
        Alone(LAWS[1], max_unverified=len(whole) - 1)
    assert caught.value.field == "link_loss.max_unverified"
    assert Alone(LAWS[1], max_unverified=len(whole)).said == whole


def test_an_unverified_rest_ends_with_its_time() -> None:
    def too_late() -> None:
        raise DeadlineExceeded("too late")

    with pytest.raises(DeadlineExceeded):
        Alone(SamplingConfig(), check=too_late)


@needs_packets
def test_lost_packets_and_cuts_cost_no_token_of_the_real_pair() -> None:
    """The embedded pair, the verifier in its own process and network namespace."""
    draft = Engine(load(ModelConfig(path="nav-draft")))
    prompts = scene_prompts(3, seed=5)
    profile = LinkProfile(delay_s=0.01, jitter_s=0.01, loss=0.01, reorder=0.02)
    with embedded_bed(draft, compute_s=0.1) as bed:
        truth = [bed.runner.generate(p, report.LAW, report.MAX_TOKENS).tokens for p in prompts]
        bed.change(profile)
        counts = disturb(bed, prompts, truth, Scenario("all", profile, 4, (0.0, 0.1)), seed=1)
    assert counts.tokens == sum(map(len, truth)) > 30
    assert (counts.wrong_tokens, counts.hangs, counts.failed) == (0, 0, 0)
    assert counts.cuts == 4
