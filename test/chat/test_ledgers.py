"""The ledgers of cost and privacy."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.chat.base import Finish, Reply, Usage
from collab_llm_nodes.chat.ledger import Call, CostLedger, EnergyMeter, Mishaps, PriceTable
from collab_llm_nodes.chat.privacy import Disclosure, DisclosureLimit, PrivacyLedger
from collab_llm_nodes.config import from_mapping, from_yaml
from collab_llm_nodes.errors import BY_CODE, CollabError, ConfigError, Unavailable

TABLE = from_yaml(PriceTable, config_file("prices.yaml"))


def remote(round: int, prefill: int, decode: int, cached: int = 0) -> Call:
    reply = Reply("", Finish.STOP, Usage(prefill, cached, decode))
    return Call.of(round, "gpt-4o", reply, remote=True)


def local(round: int, prefill: int, decode: int) -> Call:
    reply = Reply("", Finish.STOP, Usage(prefill, 0, decode))
    return Call.of(round, "llama", reply, remote=False)


# Table 6 of the Minions paper: thousands of tokens in and out, dollars per question.
TABLE_6 = [
    (103.04, 0.32, 0.261),
    (120.10, 0.07, 0.301),
    (54.40, 0.09, 0.137),
    (0.88, 0.46, 0.007),
    (8.28, 0.82, 0.029),
    (15.99, 1.29, 0.053),
    (18.96, 0.65, 0.054),
    (24.67, 1.77, 0.079),
    (3.44, 0.61, 0.015),
]


@pytest.mark.parametrize(("prompt", "reply", "dollars"), TABLE_6)
def test_the_papers_prices_are_its_dollars(prompt: float, reply: float, dollars: float) -> None:
    ledger = CostLedger([remote(1, round(1000 * prompt), round(1000 * reply))])
    assert ledger.usd(TABLE) == pytest.approx(dollars, abs=0.0006)


def test_tokens_are_summed_by_round_and_side() -> None:
    ledger = CostLedger()
    for call in (remote(1, 10, 2), local(1, 500, 30), remote(2, 20, 3, cached=5), local(2, 7, 1)):
        ledger.record(call)
    assert ledger.by_round(remote=True) == {1: Usage(10, 0, 2), 2: Usage(20, 5, 3)}
    assert ledger.usage(remote=False) == Usage(507, 0, 31)
    assert ledger.usage(remote=True, round=2) == Usage(20, 5, 3)
    assert ledger.usd(TABLE) == pytest.approx((30 * 2.5 + 5 * 1.25 + 5 * 10) / 1e6)


@pytest.mark.parametrize(("alpha", "tokens"), [(1, 40), (5, 60)])
def test_cost_in_prompt_tokens(alpha: float, tokens: float) -> None:
    ledger = CostLedger([remote(1, 30, 5, cached=5), local(1, 999, 999)])
    assert ledger.weighted_tokens(alpha) == tokens


@pytest.mark.parametrize("alpha", [0.9, 5.1, float("nan")])
def test_alpha_has_the_papers_range(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        CostLedger().weighted_tokens(alpha)


def test_a_model_without_a_price_is_named() -> None:
    unpriced = dataclasses.replace(remote(1, 1, 1), model="gpt-4")
    with pytest.raises(ConfigError, match="gpt-4o"):
        CostLedger([unpriced]).usd(TABLE)
    assert CostLedger([local(1, 1, 1)]).usd(PriceTable()) == 0.0


def test_prices_are_checked() -> None:
    with pytest.raises(ConfigError) as raised:
        from_mapping(PriceTable, {"prices": [{"model": "x", "input_usd": -1.0}]})
    assert raised.value.field == "prices[0].input_usd"
    with pytest.raises(ConfigError, match="unknown key"):
        from_mapping(PriceTable, {"prices": [{"model": "x", "per_token": 1.0}]})


def write_zone(folder: Path, name: str, energy_uj: int) -> None:
    zone = folder / name
    zone.mkdir(exist_ok=True)
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text("1000000000\n")


def test_energy_is_read_from_all_packages(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", 999_000_000)
    write_zone(tmp_path, "intel-rapl:1", 10_000_000)
    write_zone(tmp_path, "intel-rapl:0:0", 0)  # the cores of the first package
    meter = EnergyMeter(tmp_path)
    write_zone(tmp_path, "intel-rapl:0", 1_000_000)  # begun anew
    write_zone(tmp_path, "intel-rapl:1", 13_500_000)
    write_zone(tmp_path, "intel-rapl:0:0", 900_000_000)
    ledger = CostLedger()
    for _ in range(2):
        joules = meter.joules()
        assert joules is not None
        ledger.record_energy(1, joules)
    assert ledger.energy_j == {1: pytest.approx(5.5)}


def test_energy_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).joules() is None
    write_zone(tmp_path, "intel-rapl:0", 1)
    meter = EnergyMeter(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("?")
    assert meter.joules() is None
    write_zone(tmp_path, "intel-rapl:0", 5)
    assert meter.joules() is None  # the earlier reading failed
    write_zone(tmp_path, "intel-rapl:0", 1_000_005)
    assert meter.joules() == pytest.approx(1.0)


def test_mishaps_are_counted() -> None:
    usage = Usage(1, 0, 1)
    results: list[Reply | CollabError] = [
        Reply("", Finish.STOP, usage),
        Reply("", Finish.LENGTH, usage, attempts=3),
        Reply("", Finish.REFUSAL, usage),
        Reply("", Finish.DEADLINE, None, attempts=2),
        Reply("", Finish.STOP, None),
        Unavailable("gone"),
    ]
    ledger = CostLedger([Call.of(1, "m", result, remote=True) for result in results])
    assert ledger.mishaps == Mishaps(
        truncated=1, refused=1, late=1, failed=1, retried=3, unmetered=2
    )


def enter(ledger: PrivacyLedger, kind: str, text: str, round: int = 1) -> Disclosure:
    (disclosure,) = ledger.enter(round, "gpt-4o", [(kind, text)])
    return disclosure


@given(st.lists(st.tuples(st.sampled_from("qx"), st.text()), max_size=8), st.integers(0, 40))
def test_no_more_leaves_than_the_cap_allows(texts: list[tuple[str, str]], cap: int) -> None:
    ledger = PrivacyLedger(cap)
    left = b""
    for kind, text in texts:
        content = text.encode("utf-8", "surrogatepass")
        if len(left) + len(content) > cap:
            with pytest.raises(DisclosureLimit) as raised:
                enter(ledger, kind, text)
            assert raised.value.code in BY_CODE
            assert raised.value.remedy
        else:
            disclosure = enter(ledger, kind, text)
            assert disclosure.sha256 == hashlib.sha256(content).hexdigest()
            left += content
    assert ledger.bytes == len(left) <= cap
    assert ledger.room == cap - len(left)


def test_the_texts_of_one_request_leave_together_or_not_at_all() -> None:
    ledger = PrivacyLedger(10)
    with pytest.raises(DisclosureLimit, match="11 bytes of question, extract"):
        ledger.enter(1, "gpt-4o", [("question", "12345"), ("extract", "123456")])
    assert ledger.disclosures == []
    entered = ledger.enter(1, "gpt-4o", [("question", "12345"), ("extract", "12345")])
    assert ledger.disclosures == [*entered]
    assert ledger.room == 0


def test_what_cannot_be_recorded_does_not_leave() -> None:
    def full(disclosures: object) -> None:
        raise OSError("disk full")

    ledger = PrivacyLedger(10)
    with pytest.raises(OSError, match="full"):
        ledger.enter(1, "gpt-4o", [("question", "12345")], full)
    assert (ledger.bytes, ledger.by_round()) == (0, {})


def test_bytes_by_round_and_kind() -> None:
    ledger = PrivacyLedger(100)
    enter(ledger, "question", "how much?")
    enter(ledger, "extraction", "5 €")
    enter(ledger, "extraction", "x")
    enter(ledger, "extraction", "yz", round=2)
    assert ledger.by_round() == {1: {"question": 9, "extraction": 6}, 2: {"extraction": 2}}


def test_equal_texts_have_entries_of_their_own() -> None:
    ledger = PrivacyLedger(100)
    first, second = (enter(ledger, "question", "a secret") for _ in range(2))
    ledger.set_times(second, 3)
    assert ledger.disclosures == [first, dataclasses.replace(second, times=3)]
    assert ledger.bytes == 16


def test_a_text_that_reached_nobody_takes_no_room() -> None:
    ledger = PrivacyLedger(9)
    ledger.set_times(enter(ledger, "question", "x" * 9), 0)
    assert (ledger.bytes, ledger.room, ledger.by_round()) == (0, 9, {})
    assert enter(ledger, "question", "x" * 9).times == 1


def test_records_cannot_be_changed() -> None:
    disclosure = enter(PrivacyLedger(9), "question", "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        disclosure.bytes = 0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        remote(1, 1, 1).round = 2  # type: ignore[misc]
