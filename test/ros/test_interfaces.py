"""The ROS interfaces: generated, documented field by field, and one with the Python code."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import interface_tables
import pytest
from folders import ROOT
from interface_tables import declarations

from collab_llm_nodes import errors
from collab_llm_nodes.protocols.edge_cloud import messages

FILES = sorted(p for kind in ("msg", "srv", "action") for p in (ROOT / kind).glob(f"*.{kind}"))
IDS = [str(p.relative_to(ROOT)) for p in FILES]
SERVICES = [p for p in FILES if p.suffix == ".srv"]
STATUS = ROOT / "msg" / "Status.msg"
WITH_STATUS = [
    *SERVICES,
    ROOT / "msg" / "GeneratedText.msg",
    ROOT / "msg" / "Verdict.msg",
    ROOT / "action" / "Generate.action",
    ROOT / "action" / "Navigate.action",
]


def parts_of(path: Path) -> list[tuple[Any, list[re.Match[str]]]]:
    """Each part of an interface file with the Python class generated from it."""
    kind = path.suffix[1:]
    module = pytest.importorskip(
        f"collab_llm.{kind}", reason="interfaces not built: run the tests with `make test`"
    )
    generated = getattr(module, path.stem)
    names = {"msg": [], "srv": ["Request", "Response"], "action": ["Goal", "Result", "Feedback"]}
    classes = [getattr(generated, name) for name in names[kind]] or [generated]
    return list(zip(classes, declarations(path), strict=True))


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_line_says_what_it_means(path: Path) -> None:
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# "), "the file's first line says what it is for"
    for declaration in (d for part in declarations(path) for d in part):
        comment = declaration["comment"] or ""
        assert len(comment) >= 4, f"{path.name}: {declaration['name']} has no comment"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_quantities_name_their_unit(path: Path) -> None:
    for declaration in (d for part in declarations(path) for d in part):
        if declaration["type"] in ("float32", "float64"):
            comment = declaration["comment"] or ""
            assert re.match(r"\[[^\]]+\] ", comment), f"{path.name}: {declaration['name']}: unit?"
        if declaration["name"].endswith("_s"):
            assert (declaration["comment"] or "").startswith("[s] ")


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_generated_class_has_the_files_fields_and_constants(path: Path) -> None:
    for generated, part in parts_of(path):
        expected = [d["name"] for d in part if d["value"] is None]
        assert list(generated.get_fields_and_field_types()) == expected
        for d in part:
            if d["value"] is not None:
                assert getattr(generated, d["name"]) == int(d["value"])
            if d["default"] is not None:
                assert str(getattr(generated(), d["name"])) == d["default"].strip('"')


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_header_comes_first(path: Path) -> None:
    for part in declarations(path):
        names = [d["name"] for d in part if d["value"] is None]
        assert "header" not in names[1:]


def test_documentation_has_every_field() -> None:
    text = (ROOT / "docs" / "interfaces.md").read_text(encoding="utf-8")
    assert text == interface_tables.page(), "run `make docs`"
    for path in FILES:
        for declaration in (d for part in declarations(path) for d in part):
            assert f"| `{declaration['name']}` |" in interface_tables.tables(path)


def test_documentation_has_every_parameter() -> None:
    pytest.importorskip("rclpy", reason="no ROS 2 here: run the tests with `make test`")
    import parameter_tables

    assert {"camera_ingest", "go2_driver", "motion_guard"} <= {
        n for n, _ in parameter_tables.nodes()
    }
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert text == parameter_tables.page(), "run `make docs`"
    for node, config in parameter_tables.nodes():
        for row in parameter_tables.table(config)[2:]:
            _, name, rest = row.split("`", 2)
            parts = name.split(".")  # a group has its rows without the prefix
            suffixes = (".".join(parts[i:]) for i in range(len(parts)))
            assert any(f"| `{suffix}`{rest}" in text for suffix in suffixes), (node, name)


def test_status_codes_cover_all_errors() -> None:
    (part,) = declarations(STATUS)
    codes = {d["name"]: int(d["value"]) for d in part if d["value"] is not None}
    assert codes["OK"] == 0
    assert len(set(codes.values())) == len(codes)
    assert set(errors.BY_CODE) <= set(codes), "an error without a status code"


@pytest.mark.parametrize("path", WITH_STATUS, ids=[p.name for p in WITH_STATUS])
def test_a_status_is_the_one_message_and_its_codes_are_nowhere_else(path: Path) -> None:
    parts = declarations(path)
    answer = parts[1 if len(parts) > 1 else 0]
    assert {d["name"]: d["type"] for d in answer}["status"] == "collab_llm/Status"
    constants = {d["name"] for part in parts for d in part if d["value"] is not None}
    assert not constants & set(errors.BY_CODE)


@pytest.mark.parametrize("path", SERVICES, ids=[p.name for p in SERVICES])
def test_services_have_a_deadline(path: Path) -> None:
    request, _ = ({d["name"] for d in part} for part in declarations(path))
    assert "deadline_s" in request


@pytest.mark.parametrize("name", ["Draft", "EarlyExit", "Verdict"])
def test_messages_carry_the_protocols_fields(name: str) -> None:
    """The ROS message has every field of the protocol's, so nothing is lost between processes."""
    (part,) = declarations(ROOT / "msg" / f"{name}.msg")
    have = {d["name"] for d in part}
    want = {f.name for f in fields(getattr(messages, name))}
    if "autoregressive_rounds" in want:  # the wire's name is shorter, and older
        want = want - {"autoregressive_rounds"} | {"solo"}
    if "probs" in want:  # a tuple of sparse distributions travels as three flat arrays
        want = want - {"probs"} | {"support_sizes", "support_ids", "support_probs"}
    if "autoregressive_rounds" in want:  # older than its name in Python
        want = want - {"autoregressive_rounds"} | {"solo"}
    assert want | {"header", "session_id"} <= have


@pytest.mark.parametrize("name", ["OpenSession.srv", "EdgeCloudGenerate.srv", "Generate.action"])
def test_requests_carry_the_whole_sampling_config(name: str) -> None:
    from collab_llm_nodes.decoding.sampling import SamplingConfig

    path = next(p for p in FILES if p.name == name)
    request = {d["name"]: d for d in declarations(path)[0]}
    for field in fields(SamplingConfig):
        assert field.name in request
    generated, _ = parts_of(path)[0]
    defaults = generated()
    # An empty request is a valid one, and means what SamplingConfig() means.
    assert SamplingConfig(
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        seed=defaults.seed,
        law=defaults.law,
    ) == SamplingConfig(seed=0)


@pytest.mark.parametrize("name", ["OpenSession.srv", "EdgeCloudGenerate.srv", "Generate.action"])
def test_zero_switches_top_p_off_as_documented(name: str) -> None:
    from collab_llm_nodes.ros.convert import sampling_from

    path = next(p for p in FILES if p.name == name)
    (told,) = (d["comment"] for d in declarations(path)[0] if d["name"] == "top_p")
    assert "0 or 1 = off" in told
    generated, _ = parts_of(path)[0]
    assert sampling_from(generated(top_p=0.0)) == sampling_from(generated(top_p=1.0))


@pytest.mark.ros
def test_a_draft_survives_the_wire(ros_graph: Any) -> None:
    import array

    from collab_llm.msg import Draft

    node = ros_graph.node("peer")
    received = ros_graph.collect(node, Draft, "draft")
    publisher = node.create_publisher(Draft, "draft", 10)
    sent = Draft(session_id="s", round=3, start=7, cached=True, draft_s=0.25)
    sent.header.stamp.sec, sent.header.stamp.nanosec = 12, 34
    sent.tokens = array.array("i", [5, 0, 2**31 - 1])
    sent.support_sizes = array.array("H", [2, 0, 1])
    sent.support_ids = array.array("i", [5, 9, 1])
    sent.support_probs = array.array("f", [0.75, 0.25, 1.0])
    ros_graph.wait_for(lambda: publisher.get_subscription_count() == 1)
    publisher.publish(sent)
    ros_graph.wait_for(lambda: received)
    assert received == [sent]


def test_what_is_installed_is_what_is_here() -> None:
    """Tests import the source tree; this makes sure that `ros2 run` and launch get the same."""
    packages = pytest.importorskip(
        "ament_index_python.packages", reason="no ROS 2 here: run the tests with `make test`"
    )
    try:
        prefix = Path(packages.get_package_prefix("collab_llm"))
    except packages.PackageNotFoundError:
        pytest.skip("collab_llm is not built: run the tests with `make test`")
    spec = importlib.util.find_spec("collab_llm")
    assert spec is not None
    assert spec.origin is not None
    site = Path(spec.origin).parents[1]
    for source, installed in {
        ROOT / "collab_llm_nodes": site / "collab_llm_nodes",
        ROOT / "launch": prefix / "share" / "collab_llm" / "launch",
        ROOT / "config": prefix / "share" / "collab_llm" / "config",
        ROOT / "models": prefix / "share" / "collab_llm" / "models",
    }.items():
        assert _contents(source) == _contents(installed), "run `make build`"


def test_every_console_script_is_installed() -> None:
    packages = pytest.importorskip(
        "ament_index_python.packages", reason="no ROS 2 here: run the tests with `make test`"
    )
    declared = re.findall(
        r"^ {4}([\w-]+) = ([\w.]+):(\w+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE
    )
    assert len(declared) >= 9
    for name, module, function in declared:
        assert (Path(packages.get_package_prefix("collab_llm")) / "lib/collab_llm" / name).exists()
        assert callable(getattr(importlib.import_module(module), function))


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
