"""The systemd units: what a service may not do, and what it must still be able to."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest
from folders import ROOT

UNITS = sorted((ROOT / "config").glob("*.service"))


def service(unit: Path) -> dict[str, str]:
    """Return the settings of a service; of those that are set twice, the last."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_service_gains_no_rights_and_writes_little(unit: Path) -> None:
    settings = service(unit)
    assert settings["ProtectSystem"] == "strict"
    assert settings["CapabilityBoundingSet"] == ""
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectKernelModules", "RestrictSUIDSGID"):
        assert settings[name] == "yes"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_service_can_still_use_its_devices_and_compile(unit: Path) -> None:
    """These would hide GPUs and cameras, forbid PyTorch's kernels, or hide its processors."""
    refused = {"MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock", "ProcSubset"}
    assert not refused & service(unit).keys()


def test_the_robot_s_service_can_keep_the_stop_and_find_its_twin() -> None:
    settings = service(ROOT / "config" / "collab_llm.service")
    assert settings["ReadWritePaths"].split() == ["/home/unitree", "-/run/lock"]
    assert settings["User"] == "unitree"
    assert "UMask" not in settings  # nodes of other users share memory with it
