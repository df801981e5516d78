"""The fake device that stands in for a GPU: it refuses, counts and delays what a GPU would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_device import CUDA, FakeDevice
from torch import Tensor


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as device, torch.inference_mode():
        yield device


def there(*sizes: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel(), device="cuda").view(sizes)


def test_tensors_know_where_they_are_inside_the_context_only() -> None:
    own_event = torch.cuda.Event
    with FakeDevice():
        x = there(2, 3)
        assert x.device == x[0].device == torch.zeros_like(x).device == CUDA
        assert x.is_cuda
        assert not x.is_cpu
        assert torch.ones(2).to(x).device == CUDA
        assert x.cpu().device.type == x.new_zeros(1, device="cpu").device.type == "cpu"
        assert torch.cuda.Event is not own_event
    assert x.device.type == "cpu"
    assert torch.cuda.Event is own_event


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.ones(3).mul_(x),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)),
        lambda x: x.index_select(0, torch.tensor([1])),
    ],
)
def test_a_mix_of_devices_raises(device: FakeDevice, mixed: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        mixed(there(3))
    there(3).mul_(torch.tensor(2.0))  # a number is an argument of the kernel


@pytest.mark.parametrize(
    ("copies", "kind"),
    [
        (lambda x: x.cpu(), "download"),
        (lambda x: x.to("cpu"), "download"),
        (lambda x: x.tolist(), "download"),
        (lambda x: x[0].item(), "download"),
        (lambda x: bool(x[0] > 0), "download"),
        (lambda x: torch.empty(3).copy_(x), "download"),
        (lambda x: torch.ones(3).to(x), "upload"),
        (lambda x: torch.ones(3, device="cpu").cuda(), "upload"),
        (lambda x: torch.tensor([1, 2], device=x.device), "upload"),
        (lambda x: x.new_tensor([1, 2]), "upload"),
        (lambda x: x.copy_(torch.ones(3)), "upload"),
        (lambda x: x[[0, 1]], "upload"),
        (lambda x: x.__setitem__(slice(2), torch.ones(2)), "upload"),
    ],
)
def test_copies_wait(device: FakeDevice, copies: Callable[[Tensor], object], kind: str) -> None:
    x = there(3)
    with device.watch() as ledger:
        copies(x)
    assert [entry.kind for entry in ledger.waits] == [kind]


@pytest.mark.parametrize(
    "sized",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream(x.device).synchronize(),
    ],
)
def test_what_else_waits(device: FakeDevice, sized: Callable[[Tensor], object]) -> None:
    x = there(3)
    with device.watch() as ledger:
        sized(x)
    assert [entry.waits for entry in ledger.entries].count(True) == 1


def test_launches_views_and_allocations_are_told_apart(device: FakeDevice) -> None:
    x = there(2, 3)
    with device.watch() as ledger:
        x.t().unsqueeze(0)
        x.mul_(2)
        x + 1
    kinds = [(entry.kind, entry.name, entry.nbytes) for entry in ledger.entries]
    assert kinds == [
        ("view", "t", 0),
        ("view", "unsqueeze", 0),
        ("launch", "mul_", 0),
        ("allocation", "add", 24),
        ("launch", "add", 0),
    ]


def test_a_copy_into_pinned_memory_comes_when_it_is_waited_for(device: FakeDevice) -> None:
    x, target = there(3), torch.zeros(3, pin_memory=True)
    later, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    with device.watch() as ledger:
        target.copy_(x, non_blocking=True)
        event.record()
        x.zero_()
        later.copy_(x, non_blocking=True)
        early = target.tolist()
        event.synchronize()
    assert [entry.name for entry in ledger.waits] == ["event"]
    assert early != target.tolist() == [1.0, 2.0, 3.0]
    assert later.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert later.tolist() == [0.0, 0.0, 0.0]


def test_pinned_memory_stays_as_it_is_until_it_was_uploaded(device: FakeDevice) -> None:
    source = torch.ones(3).pin_memory()
    with device.watch() as ledger:
        x = source.to("cuda", non_blocking=True)
    assert not ledger.waits
    torch.cuda.synchronize()
    source.zero_()
    x.copy_(source, non_blocking=True)
    source.fill_(2)
    with pytest.raises(AssertionError, match="pinned memory was changed"):
        torch.cuda.synchronize()
    assert torch.ones(3).to("cuda", non_blocking=True).tolist() == [1.0] * 3  # of pageable memory


def test_allocations_fail_on_demand_and_are_counted_while_they_live(device: FakeDevice) -> None:
    x = there(256)
    assert device.allocated == 1024
    assert torch.cuda.mem_get_info() == (device.total - 1024, device.total)
    device.fail_when = lambda entry: entry.nbytes > 1024
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([x, x])
    x.mul_(2)
    assert device.failures == 1
    del x
    assert device.allocated == 0
