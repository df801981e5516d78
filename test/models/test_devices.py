"""Facts of devices, with CUDA's answers in place of a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models import devices

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one GPU and 7 GB for the host; returns the folder of its system files."""
    (tmp_path / "meminfo").write_text("MemFree: 1000 kB\nMemAvailable:    7000000 kB\n")
    for name, file in (
        ("_MEMORY", "meminfo"),
        ("_TEGRA_RELEASE", "nv_tegra_release"),
        ("_DEVICE_TREE", "compatible"),
    ):
        monkeypatch.setattr(devices, name, tmp_path / file)
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is as before in the end
        monkeypatch.delenv(variable)
    gpu(monkeypatch, integrated=False)
    return tmp_path


def gpu(monkeypatch: pytest.MonkeyPatch, *, integrated: bool) -> None:
    facts = SimpleNamespace(is_integrated=int(integrated))
    for name, answer in {
        "get_device_properties": facts,
        "mem_get_info": (4_000, 80_000),
        "memory_reserved": 900,
        "memory_allocated": 200,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)


def make_tegra(folder: Path, sign: str) -> None:
    if sign == "release":
        (folder / "nv_tegra_release").touch()
    else:
        (folder / "compatible").write_bytes(b"nvidia,p3768\x00nvidia,tegra234\x00")


def test_what_the_allocator_holds_in_reserve_is_free() -> None:
    assert devices.free_bytes(CUDA) == 4_000 + 700


@pytest.mark.parametrize("sign", ["release", "compatible", "integrated"])
def test_page_cache_is_free_where_host_and_device_share_memory(
    sign: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sign == "integrated":
        gpu(monkeypatch, integrated=True)
    else:
        make_tegra(machine, sign)
    assert devices.free_bytes(CUDA) == 7_000_000 * 1024 + 700
    assert devices.shares_host_memory(CUDA)


def test_a_board_of_another_maker_is_no_tegra(machine: Path) -> None:
    (machine / "compatible").write_bytes(b"raspberrypi,5-model-b\x00brcm,bcm2712\x00")
    assert not devices.is_tegra()
    assert not devices.shares_host_memory(CUDA)


def test_the_host_says_what_is_available(machine: Path) -> None:
    assert devices.free_bytes(CPU) == 7_000_000 * 1024
    assert devices.shares_host_memory(CPU)
    (machine / "meminfo").write_text("MemFree: 1000 kB\n")
    assert devices.free_bytes(CPU) == math.inf, "of an old kernel"
    (machine / "meminfo").unlink()
    assert devices.free_bytes(CPU) == math.inf
    assert devices.free_bytes(torch.device("meta")) == math.inf


def test_this_machine_has_a_plausible_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_MEMORY", Path("/proc/meminfo"))
    assert 2**26 < devices.free_bytes(CPU) < 2**45


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What cuDNN's attention is set to."""
    calls: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    return calls


def test_cuda_is_prepared_before_it_is_first_used(
    cudnn: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str | None, list[bool]]] = []

    def ones(size: int, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        made.append((os.environ.get("PYTORCH_ALLOC_CONF"), cudnn.copy()))
        return torch.zeros(size)

    monkeypatch.setattr(torch, "ones", ones)
    assert devices.find_device("cuda:0") == CUDA
    assert made == [("expandable_segments:True", [False])]


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_users_own_allocator_settings_win(
    variable: str, cudnn: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    devices.prepare(CUDA)
    (other,) = set(VARIABLES) - {variable}
    assert os.environ[variable] == "max_split_size_mb:64"
    assert other not in os.environ
    assert cudnn == [False]


def test_a_jetson_keeps_plain_segments(machine: Path, cudnn: list[bool]) -> None:
    """Its driver fails what expandable ones ask for (unslothai/unsloth-zoo#1235)."""
    make_tegra(machine, "compatible")
    devices.prepare(CUDA)
    assert not os.environ.keys() & set(VARIABLES)
    assert cudnn == [False]


def test_without_cuda_nothing_is_prepared(cudnn: list[bool]) -> None:
    assert devices.find_device("cpu") == CPU
    assert not os.environ.keys() & set(VARIABLES)
    assert cudnn == []


def test_torch_reads_the_setting_after_it_has_been_imported() -> None:
    """Otherwise it would have to be set before anything imports torch."""
    code = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:77';"
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "max_split_size_mb:77"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_errors_after_which_a_device_is_of_no_use(error: Exception, lost: bool) -> None:
    assert devices.is_lost(error) is lost


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution"),
        torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable"),
    ],
)
def test_a_device_that_computes_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*sizes: int, device: torch.device) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "ones", fails)
    with pytest.raises(ModelError, match="cannot be used") as refused:
        devices.find_device("cuda")
    assert str(error) in str(refused.value)
    assert "driver" in refused.value.remedy
