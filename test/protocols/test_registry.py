"""The registry of protocols, and options of one request."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from types import ModuleType
from unittest.mock import Mock

import pytest

from collab_llm_nodes.config import ANY, check_ranges, setting
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.protocols import options, registry
from collab_llm_nodes.protocols.base import Entry


@dataclass(frozen=True)
class Inner:
    gamma: int = setting(4, "Length.", low=0, high=8, per_request=ANY)
    path: str = setting("model", "A folder.")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    rate: float = setting(0.5, "A share.", low=0.0, high=1.0, per_request=ANY)
    policy: str = setting("a", "Which.", choices=("a", "b"), per_request=ANY)
    loud: bool = setting(False, "Loud.", per_request=ANY)

    def __post_init__(self) -> None:
        check_ranges(self)


@pytest.mark.parametrize("name", sorted(registry.PROTOCOLS))
def test_every_line_leads_to_a_protocol_of_that_name(name: str) -> None:
    entry = registry.find(name)
    assert entry.name == name
    assert is_dataclass(entry.config())


@pytest.mark.parametrize("name", sorted(registry.PROTOCOLS))
def test_no_option_is_a_path_an_address_or_a_secret(name: str) -> None:
    for option in options.names(registry.find(name).config()):
        words = set(option.replace(".", "_").split("_"))
        assert not words & {"path", "folder", "file", "address", "token", "model", "url"}, option


def test_the_registry_imports_no_protocol() -> None:
    """A caller that only lists protocols need not wait for torch."""
    code = (
        "import sys, collab_llm_nodes.protocols.registry;"
        "print({'torch', 'grpc', 'rclpy'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "set()"


def test_an_unknown_protocol_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="'edgecloud' .did you mean edge_cloud.") as told:
        registry.find("edgecloud")
    assert told.value.field == "protocol"


def test_options_change_a_copy() -> None:
    before = Outer()
    names, values = zip(
        ("inner.gamma", "7"), ("rate", "1"), ("policy", "b"), ("loud", "True"), strict=True
    )
    after = options.with_options(before, names, values)
    assert after == Outer(Inner(7), 1.0, "b", True)
    assert before == Outer()
    assert options.with_options(before, (), ()) is before


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("inner.gama", "7", "inner.gama: .*did you mean inner.gamma"),
        ("gamma", "7", "gamma: is no option"),
        ("inner.path", "/etc", "inner.path: is no option"),
        ("inner", "7", "inner: is no option"),
        ("__class__", "x", "__class__: is no option"),
        ("inner.gamma", "9", "inner.gamma: 9 is out of range .0 to 8"),
        ("inner.gamma", "4.5", "inner.gamma: '4.5' is no int"),
        ("rate", "nan", "rate: nan is not finite"),
        ("policy", "c", "policy: 'c' is unknown .one of 'a', 'b'"),
        ("loud", "yes", "loud: 'yes' is no bool .true or false"),
    ],
)
def test_an_option_that_cannot_be_set_is_named(name: str, value: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        options.with_options(Outer(), [name], [value])


@dataclass(frozen=True)
class Unchecked:
    """Neither level checks itself."""

    @dataclass(frozen=True)
    class Deep:
        mode: str = setting("a", "Which.", choices=("a", "b"), per_request=ANY)

    deep: Deep = field(default_factory=Deep)
    size: int = setting(4, "Length.", high=8, per_request=ANY)


@pytest.mark.parametrize(("name", "value"), [("deep.mode", "c"), ("size", "9")])
def test_an_option_is_checked_even_if_its_dataclass_does_not(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}: '?{value}'? is"):
        options.with_options(Unchecked(), [name], [value])


@pytest.mark.parametrize("default", [(1, 2), None])
def test_an_option_that_no_text_can_set_is_refused_with_its_entry(
    monkeypatch: pytest.MonkeyPatch, default: object
) -> None:
    config = make_dataclass(
        "Config", [("sizes", object, setting(default, "Sizes.", per_request=ANY))], frozen=True
    )
    module = ModuleType("wrong_protocol")
    module.ENTRY = Entry("wrong", config, Mock())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wrong_protocol", module)
    monkeypatch.setitem(registry.PROTOCOLS, "wrong", "wrong_protocol")
    with pytest.raises(ConfigError, match="sizes: a request cannot set a"):
        registry.find("wrong")


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("no_such_module", "No module named 'no_such_module'"),
        ("echo_protocol", "its ENTRY is 'echo'"),
        ("math", "the module has no ENTRY"),
    ],
)
def test_a_wrong_line_is_named(monkeypatch: pytest.MonkeyPatch, module: str, told: str) -> None:
    monkeypatch.setitem(registry.PROTOCOLS, "ekho", module)
    with pytest.raises(ConfigError, match=f'"ekho": "{module}" of protocols/registry.py: {told}'):
        registry.find("ekho")


WIDENS = {  # option: the operator's value, a narrower one, a wider one
    "way": ("protocol", "local_only", "rag"),
    "rounds": (3, 2, 4),
    "local.max_tokens": (100, 50, 101),
    "planner": ("plan", "plan", "program"),
    "tasks": (3, 1, 0),
    "samples": (2, 1, 3),
    "chunker": ("chunk_by_page", "chunk_by_section", ""),
    "chunk_size": (500, 100, 0),
    "choice_bits": (64, 0, 65),
    "abstain_filter": (True, True, False),
    "check_citations": (True, True, False),
    "carry": ("scratchpad", "retries", "history"),
    "retrieve": (20, 10, 0),
    "retrieval.chunks": (10, 1, 1000),
    "retrieval.candidates": (10, 1, 1000),
    "side.retrieval.chunks": (2, 1, 100),
    "side.retrieval.candidates": (10, 1, 1000),
    "side.answers": ("free", "free", "quote"),
    "side.quoted_tokens": (3, 1, 0),
    "aggregation.top_p": (0.8, 0.5, 1.0),
    "aggregation.max_support": (64, 8, 65),
    "schedule.aggregate_on": ("device", "device", "auto"),
    "ahead.max_ahead": (2, 1, 0),
    "use_cloud": (False, False, True),
}
NEUTRAL = {
    *("store", "force_final", "reduce", "remote.temperature", "remote.max_tokens"),
    *("local.temperature", "retrieval.method", "retrieval.temperature", "max_tokens"),
    *("side.retrieval.method", "side.retrieval.temperature", "side.relevance.update"),
    *("side.relevance.every", "side.relevance.memory", "aggregation.law", "aggregation.gamma"),
    *("aggregation.paper_faithful", "patience.without_cloud", "client.gamma", "link_loss.policy"),
    "client.drafted_by",
    *("drafter", "outline", "outline_guided", "outline_tokens", "task", "groups"),
    *("answer.guide", "answer.guide_source"),
    *("worker_form", "examples", "advice", "aggregate"),
}


@pytest.mark.parametrize("name", sorted(registry.PROTOCOLS))
def test_a_request_narrows_what_leaves_and_never_widens_it(name: str) -> None:
    config = registry.find(name).config()
    known = options.names(config)
    assert set(known) <= WIDENS.keys() | NEUTRAL, "say of the new option whether it widens"
    for option in WIDENS.keys() & set(known):
        ours, narrower, wider = map(str, WIDENS[option])
        mine = options.with_options(config, [option], [ours], by_operator=True)
        for allowed in (ours, narrower):
            options.with_options(mine, [option], [allowed])
        with pytest.raises(InvalidInput, match="would let more leave") as refused:
            options.with_options(mine, [option], [wider])
        assert refused.value.field == option
        assert "a request may" in refused.value.remedy


def test_a_way_leads_to_more_private_ones_only() -> None:
    config = registry.find("minions").config()
    order = ["remote_only", "rag", "protocol", "local_only"]
    for i, ours in enumerate(order):
        mine = options.with_options(config, ["way"], [ours], by_operator=True)
        for wider in order[:i]:
            with pytest.raises(InvalidInput, match="way: "):
                options.with_options(mine, ["way"], [wider])
        for narrower in order[i:]:
            options.with_options(mine, ["way"], [narrower])


def test_an_option_without_a_direction_is_refused_with_its_entry() -> None:
    config = make_dataclass("C", [("n", int, setting(1, "N.", per_request=True))])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="n: per_request is True"):
        options.names(config())


def test_an_option_is_given_once_with_one_value() -> None:
    with pytest.raises(InvalidInput, match="rate: is given twice"):
        options.with_options(Outer(), ["rate", "rate"], ["0.1", "0.2"])
    with pytest.raises(InvalidInput, match="2 names and 1 values"):
        options.with_options(Outer(), ["rate", "loud"], ["0.1"])
