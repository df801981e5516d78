"""The SROS 2 policy: it covers what the nodes make, and gives nobody else's topics away."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatch
from typing import Any
from xml.etree import ElementTree

import pytest
from folders import ROOT

pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
pytest.importorskip(
    "unitree_go", reason="test interfaces not built: run the tests with `make test`"
)

import security_policy

from collab_llm_nodes.ros.strangers import GO2_TOPICS, MOTION_TOPICS

Rights = dict[tuple[str, str], dict[str, set[str]]]


def rights(text: str) -> Rights:
    """Return the enclaves that may do something, by section and verb, then name."""
    found: Rights = defaultdict(lambda: defaultdict(set))
    for enclave in ElementTree.fromstring(text.encode()).iter("enclave"):
        for group in enclave.iterfind("profiles/profile/*"):
            (verb,) = (name for name, rule in group.attrib.items() if rule == "ALLOW")
            for each in group:
                found[group.tag, verb][each.text or ""].add(enclave.attrib["path"])
    return found


SHIPPED = rights(security_policy.POLICY.read_text(encoding="utf-8"))


@pytest.mark.ros
def test_the_policy_covers_all_that_the_nodes_make_and_no_more(ros_context: Any) -> None:
    with security_policy.made(context=ros_context) as nodes:
        made = rights(security_policy.policy(nodes))
    for kind, names in made.items():
        for name, enclaves in names.items():
            assert enclaves <= SHIPPED[kind][name], f"{kind} {name}: run `make policy`"
    for kind in SHIPPED.keys() - {("services", "reply")}:  # older ROS 2 has fewer of them
        assert set(SHIPPED[kind]) == set(made[kind]), "run `make policy`"


def test_only_the_owner_of_a_motion_topic_may_publish_it() -> None:
    enclave_of = {
        module: f"/collab_llm/{enclave}"
        for enclave, members in security_policy.ENCLAVES.items()
        for module in (member.split(":")[0] for member in members)
    }
    for topic, owners in {**MOTION_TOPICS, **GO2_TOPICS}.items():
        publishers = SHIPPED["topics", "publish"][topic]
        ours = {enclave_of[o] for o in owners if o in enclave_of}  # not of the robot's own topics
        assert publishers <= ours
        assert publishers or not ours
    assert SHIPPED["topics", "publish"]["cmd_vel_nav"] == {"/collab_llm/graph"}


def test_the_processes_beside_the_graph_and_the_motion_have_few_rights() -> None:
    common = {"/diagnostics", "/parameter_events", "/rosout"}
    for name, more in {
        "motion_watchdog": {"/api/sport/request"},
        "dashboard": {"emergency_stop"},
        "markers": {"markers"},
        "agents": {"emergency_stop", "pending_instruction", "speech"},
    }.items():
        own = {t for t, who in SHIPPED["topics", "publish"].items() if f"/collab_llm/{name}" in who}
        assert own - common - {f"{name}/transition_event"} == more


def test_agents_may_confirm_nothing_and_give_only_the_navigator_goals() -> None:
    agents = "/collab_llm/agents"
    assert agents not in SHIPPED["services", "request"]["confirm_instruction"]
    assert agents not in SHIPPED["services", "request"]["reset_emergency_stop"]
    called = {a for a, enclaves in SHIPPED["actions", "call"].items() if agents in enclaves}
    assert called == {"*/generate", "dragon/generate", "edge_cloud/generate", "navigate"}


def test_the_governance_for_a_go2_opens_the_robots_own_topics_and_no_others() -> None:
    rules = ElementTree.parse(ROOT / "config" / "sros2_governance_go2.xml").iter("topic_rule")
    opened: dict[str, bool] = {
        rule.findtext("topic_expression", ""): rule.findtext("data_protection_kind") == "NONE"
        for rule in rules
    }
    assert opened.pop("*") is False  # the last: the first that matches counts
    assert all(opened.values())
    states = {"/sportmodestate", "/lf/sportmodestate"}  # whichever state_topic names
    assert states <= SHIPPED["topics", "subscribe"].keys()
    assert {f"rt{name}" for name in states} <= opened.keys()
    absolute = {
        f"rt{name}" for verb in ("publish", "subscribe") for name in SHIPPED["topics", verb]
    }
    robots = {n for n in absolute if any(fnmatch(n, each) for each in opened)}
    ros = {"rt/diagnostics", "rt/parameter_events", "rt/rosout", "rt/tf"}
    assert robots == {name for name in absolute if name.startswith("rt/")} - ros


def test_nobody_may_set_parameters_or_change_the_state_of_another() -> None:
    asked = SHIPPED["services", "request"]
    assert asked
    setters = ("set_parameters", "set_parameters_atomically", "change_state")
    assert not [name for name in asked if name.endswith(setters)]
