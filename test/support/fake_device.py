"""A stand-in for a GPU that computes real values on the CPU and writes down what a GPU would do.

Tensors on the fake device are ordinary CPU tensors; a table of storages says which of them are
"there". Views share their storage, so they need no bookkeeping, and code that asks for the type of
a tensor finds ``torch.Tensor``. Inside ``with FakeDevice() as device:`` ``x.device`` is cuda:0 for
such a tensor, ``load(ModelConfig(device="cuda"))`` loads a model onto it, and

- an operator that mixes both devices raises, as CUDA does;
- the device's ``ledger`` lists all copies, waits, launches, views, allocations and calls of
  attention, each with the line of the package that caused it;
- ``fail_when`` lets allocations fail with ``torch.OutOfMemoryError``;
- copies between the device and pinned memory are asynchronous: what a copy to the host brings is
  garbage until somebody has waited for it, and changing the source of a copy to the device before
  it is done is an error.

torch's own hook for private devices (``torch.utils.backend_registration``) is not used. Its device
cannot be named cuda, it has no pinned memory, ``torch.tensor`` and lists as indices do not reach
its operators, and it cannot be taken back: the other tests of a run would have an accelerator.

Limits: one thread and one stream; ``torch.cuda.is_available()`` stays False; a composite operator
counts as one launch.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import collab_llm_nodes
from collab_llm_nodes.models.architectures import decoder_parts

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_PACKAGE = f"{Path(collab_llm_nodes.__file__).parent}/"

Kind = Literal["upload", "download", "wait", "launch", "view", "allocation"]

_SIZED_BY_VALUES = {
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operators that take indices from the other device, and copy them first."""


@dataclass(frozen=True)
class Entry:
    """One thing that the device was asked to do.

    Attributes:
        name: the operator.
        where: line of the package that asked, "engine/cache.py:58"; empty outside it.
        nbytes: of what was copied or allocated.
        waits: the host waited until the device had done all it was given before.
    """

    kind: Kind
    name: str
    where: str
    nbytes: int = 0
    waits: bool = False


@dataclass(frozen=True)
class Attention:
    """One call of scaled_dot_product_attention.

    Attributes:
        query, key: their shapes.
        strides: those of the keys.
        mask: its shape; None without a mask.
        mask_strides: in elements.
        mask_offset: of its first element in its storage, in bytes.
        mask_address: of its first element.
        where: line of the package that called.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    strides: tuple[int, ...]
    mask: tuple[int, ...] | None
    mask_strides: tuple[int, ...]
    mask_offset: int
    mask_address: int
    where: str


@dataclass
class Ledger:
    """What the device was asked to do, in order.

    Attributes:
        layer_reads: for each operator that read weights of a decoder layer, the index of its entry.
    """

    entries: list[Entry] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    layer_reads: list[int] = field(default_factory=list)

    def of(self, *kinds: Kind) -> list[Entry]:
        """Return the entries of these kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def waits(self) -> list[Entry]:
        """Everything that made the host wait, copies included."""
        return [entry for entry in self.entries if entry.waits]

    @property
    def between_layers(self) -> list[Entry]:
        """Entries after the first use of a decoder layer's weights, and before the last one."""
        reads = self.layer_reads
        return self.entries[reads[0] : reads[-1]] if reads else []

    @staticmethod
    def show(entries: Sequence[Entry]) -> str:
        """Return the entries line by line, for the message of an assertion."""
        counts = Counter(f"{e.kind} {e.name} at {e.where or 'the test'}" for e in entries)
        return "\n".join(f"{count} x {entry}" for entry, count in counts.items())


class FakeDevice:
    """A context in which cuda:0 is this device.

    Attributes:
        ledger: of the innermost ``watch``.
        fail_when: called with the entry of each allocation; True lets it fail.
        failures: allocations that ``fail_when`` has let fail.
        queued: asynchronous copies that ever were begun.
        total: bytes that ``torch.cuda.mem_get_info`` reports as the device's.
    """

    def __init__(self, total: int = 1 << 34) -> None:
        self.ledger = Ledger()
        self.fail_when: Callable[[Entry], bool] = lambda entry: False
        self.failures = 0
        self.total = total
        # By address. A weak reference keeps the address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._full = 10_000  # storages, some of which are freed
        self._pinned: dict[int, StorageWeakRef] = {}
        self._layers: set[int] = set()  # addresses of decoder layers' weights
        self._queue: list[Callable[[], None]] = []  # asynchronous copies that are not done
        self.queued = 0
        self._context = ExitStack()

    def __enter__(self) -> FakeDevice:
        with ExitStack() as context:
            # transformers loads in this thread, and settings for CUDA are undone on leaving.
            context.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
            for place, name, replacement in _replacements(self):
                context.enter_context(patch.object(place, name, replacement))
            context.enter_context(_Calls(self))
            context.enter_context(_Operators(self))
            self._context = context.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close()
        self.finish(self.queued)

    @contextmanager
    def watch(self, model: Any = None) -> Iterator[Ledger]:
        """Write a new ledger; with ``model``, one that knows when its decoder layers run."""
        if model is not None:
            self._layers = {_address(x) for x in decoder_parts(model).layers.parameters()}
        before, self.ledger = self.ledger, Ledger()
        try:
            yield self.ledger
        finally:
            self.ledger = before

    def holds(self, tensor: Tensor) -> bool:
        """Return True for a tensor on the device."""
        return _address(tensor) in self._storages

    @property
    def allocated(self) -> int:
        """Bytes of all tensors on the device."""
        return sum(nbytes for ref, nbytes in self._storages.values() if not ref.expired())

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True for a tensor in pinned memory of the host."""
        return _address(tensor) in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """Count the (new) tensor of the host as pinned."""
        self._pinned[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def note(self, kind: Kind, name: str, nbytes: int = 0, *, waits: bool = False) -> None:
        """Add an entry to the ledger."""
        if waits:
            self.finish(self.queued)
        self.ledger.entries.append(Entry(kind, name, _where(), nbytes, waits))

    def wait(self, name: str, until: int | None = None) -> None:
        """Wait for the first ``until`` asynchronous copies, by default for all."""
        self.finish(self.queued if until is None else until)
        self.ledger.entries.append(Entry("wait", name, _where(), waits=True))

    def take(self, tensor: Tensor, name: str) -> Tensor:
        """Count the (new) tensor as allocated on the device.

        Raises:
            torch.OutOfMemoryError: ``fail_when`` says so.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        entry = Entry("allocation", name, _where(), nbytes)
        if self.fail_when(entry):
            self.failures += 1
            raise torch.OutOfMemoryError(f"the fake device has no {nbytes} bytes")
        if len(self._storages) > self._full:
            self._storages = {a: s for a, s in self._storages.items() if not s[0].expired()}
            self._full = 10_000 + 2 * len(self._storages)
        self._storages[storage._cdata] = StorageWeakRef(storage), nbytes
        self.ledger.entries.append(entry)
        return tensor

    def upload(self, target: Tensor, source: Tensor, name: str, *, non_blocking: bool) -> None:
        """Write down a copy to the device, whose values ``target`` has already."""
        if not target.numel():
            return
        later = non_blocking and self.is_pinned(source)
        self.note("upload", name, target.nbytes, waits=not later)
        if later:
            with no_dispatch():
                before = source.clone()

            def done() -> None:
                assert torch.equal(source, before), "pinned memory was changed during its upload"

            self._enqueue(done)

    def download(self, target: Tensor, source: Tensor, name: str, *, non_blocking: bool) -> None:
        """Copy to the host, now or, into pinned memory, when somebody waits."""
        later = non_blocking and self.is_pinned(target)
        self.note("download", name, target.nbytes, waits=not later)
        with no_dispatch():
            if not later:
                target.copy_(source)
                return
            values = source.clone()
            target.fill_(torch.nan if target.is_floating_point() else 85)

        def done() -> None:
            with no_dispatch():
                target.copy_(values)

        self._enqueue(done)

    def _enqueue(self, done: Callable[[], None]) -> None:
        self._queue.append(done)
        self.queued += 1

    def finish(self, until: int) -> None:
        """Complete the first ``until`` asynchronous copies."""
        while self._queue and self.queued - len(self._queue) < until:
            self._queue.pop(0)()

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write down what it is to the device."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = {_address(x) for x in tensors} & self._storages.keys()
        if not there:
            return operator(*args, **kwargs)
        name = operator._schema.name.removeprefix("aten::")
        if name == "copy_" and self.holds(args[0]) != self.holds(args[1]):
            return self.copy(args[0], args[1], non_blocking=False)
        for tensor in tensors:
            if tensor.dim() and not self.holds(tensor):
                self._admit(operator, name, args, tensor)
        if there & self._layers:
            self.ledger.layer_reads.append(len(self.ledger.entries))
        result = operator(*args, **kwargs)
        made = [
            x
            for x in tree_leaves(result)
            if isinstance(x, Tensor) and _address(x) not in self._storages
        ]
        for tensor in made:
            self.take(tensor, name)
        if isinstance(result, (bool, int, float)):
            self.note("download", name, waits=True)
        elif made or operator._schema.is_mutable:
            self.note("launch", name, waits=_shape_depends_on_values(name, args, kwargs))
        else:
            self.note("view", name)
        return result

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        """Copy between the devices, as ``target.copy_(source)``."""
        if self.holds(target):
            with no_dispatch():
                target.copy_(source)
            self.upload(target, source, "copy_", non_blocking=non_blocking)
        else:
            self.download(target, source, "copy_", non_blocking=non_blocking)
        return target

    def move(
        self,
        tensor: Tensor,
        device: torch.device | None,
        dtype: torch.dtype | None,
        *,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Tensor:
        """Return the tensor on a device, as ``tensor.to(device, dtype)``."""
        here = self.holds(tensor)
        there = here if device is None else device.type == CUDA.type
        dtype = tensor.dtype if dtype is None else dtype
        if here == there:
            return tensor.to(None if here else device, dtype, copy=copy)
        with no_dispatch():
            moved = tensor.to(dtype, copy=True)
        if there:
            self.upload(self.take(moved, "to"), tensor, "to", non_blocking=non_blocking)
            return moved
        if non_blocking:  # torch takes pinned memory for it
            self.pin(moved)
        self.download(moved, tensor, "to", non_blocking=non_blocking)
        return moved

    def _admit(self, operator: Any, name: str, args: tuple[Any, ...], stranger: Tensor) -> None:
        """Accept indices that lie on the host; refuse any other mix of devices."""
        if name not in _INDEXED or stranger is args[0] or not self.holds(args[0]):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" cuda:0 and cpu! {operator} at {_where() or 'the test'}"
            )
        self.note("upload", name, stranger.nbytes, waits=True)


class _Operators(TorchDispatchMode):
    """Hands every operator to the device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._device.run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Answers the calls of torch that ask for a device, or go past the operators."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._answers: dict[Any, Callable[..., Any]] = {
            _getter("device"): lambda x: CUDA if device.holds(x) else x.device,
            _getter("is_cuda"): device.holds,
            _getter("is_cpu"): lambda x: x.is_cpu and not device.holds(x),
            Tensor.get_device: lambda x: 0 if device.holds(x) else -1,
            Tensor.to: self._to,
            Tensor.cpu: lambda x: device.move(x, CPU, None),
            Tensor.cuda: lambda x, *_, **__: device.move(x, CUDA, None),
            Tensor.copy_: self._copy,
            Tensor.tolist: self._tolist,
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
            Tensor.pin_memory: lambda x, *_: device.pin(x.clone()),
            Tensor.is_pinned: lambda x, *_: device.is_pinned(x),
            Tensor.new_tensor: self._new_tensor,
            torch.tensor: self._tensor,
            torch.as_tensor: self._tensor,
            torch.nn.functional.scaled_dot_product_attention: self._attend,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if kwargs.get("device") is not None or "pin_memory" in kwargs:
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor where it is asked for."""
        device, name = self._device, getattr(func, "__name__", "")
        pinned = kwargs.pop("pin_memory", False)
        wanted = kwargs.pop("device", None)
        if wanted is None:
            result = func(*args, **kwargs)
        elif torch.device(wanted).type != CUDA.type:
            with no_dispatch():
                result = func(*args, **kwargs, device=wanted)
        else:
            with no_dispatch():
                result = func(*args, **kwargs, device=CPU)
            device.note("launch", name)
            device.take(result, name)
        return device.pin(result) if pinned else result

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, Tensor):
            device = CUDA if self._device.holds(other) else other.device
            return self._device.move(tensor, device, other.dtype, copy=copy)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._device.move(tensor, device, dtype, non_blocking=non_blocking, copy=copy)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self._device.holds(target) == self._device.holds(source):
            return target.copy_(source)
        return self._device.copy(target, source, non_blocking=non_blocking)

    def _tolist(self, tensor: Tensor) -> Any:
        if self._device.holds(tensor):
            self._device.note("download", "tolist", tensor.nbytes, waits=True)
        return tensor.tolist()

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._device.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        return tensor.numpy(*args, **kwargs)

    def _tensor(
        self, data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any
    ) -> Tensor:
        """Make a tensor from numbers, or from a tensor, as ``torch.as_tensor``."""
        wanted = None if device is None else torch.device(device)
        if isinstance(data, Tensor):
            return self._device.move(data, wanted, kwargs.get("dtype"))
        if wanted is None or wanted.type != CUDA.type:
            made = torch.tensor(data, device=wanted, **kwargs)
            return self._device.pin(made) if pin_memory else made
        made = torch.tensor(data, **kwargs)
        self._device.upload(self._device.take(made, "tensor"), made, "tensor", non_blocking=False)
        return made

    def _new_tensor(self, like: Tensor, data: Any, **kwargs: Any) -> Tensor:
        place = CUDA if self._device.holds(like) else None
        return self._tensor(data, **{"dtype": like.dtype, "device": place, **kwargs})

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        query, key, mask = args[0], args[1], kwargs.get("attn_mask", (*args, None, None)[3])
        if self._device.holds(query):
            self._device.ledger.attentions.append(
                Attention(
                    tuple(query.shape),
                    tuple(key.shape),
                    key.stride(),
                    None if mask is None else tuple(mask.shape),
                    () if mask is None else mask.stride(),
                    0 if mask is None else mask.storage_offset() * mask.itemsize,
                    0 if mask is None else mask.data_ptr(),
                    _where(),
                )
            )
        output = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        if not self._device.holds(query) or output.ndim != 4:
            return output
        with no_dispatch():  # CUDA's kernels lay heads out inside rows
            output = output.transpose(1, 2).contiguous().transpose(1, 2)
        return self._device.take(output, "scaled_dot_product_attention")


class _Event:
    """Stands in for ``torch.cuda.Event``."""

    device: FakeDevice

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._mark = 0
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._mark, self._time = self.device.queued, time.perf_counter()

    def synchronize(self) -> None:
        self.device.wait("event", self._mark)

    def query(self) -> bool:
        """Return True, as a device that is fast does: what was before the event is done."""
        self.device.finish(self._mark)
        return True

    def wait(self, stream: Any = None) -> None:
        """Do nothing: there is one stream."""

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._time - self._time)


class _Stream:
    """Stands in for ``torch.cuda.Stream``."""

    device: FakeDevice

    def __init__(self, *args: Any, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        self.device.wait("stream")

    def query(self) -> bool:
        self.device.finish(self.device.queued)
        return True

    def record_event(self, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Do nothing: there is one stream."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: there is one stream."""


def _replacements(device: FakeDevice) -> list[tuple[Any, str, Any]]:
    """Return what takes the place of torch's own: (module, name, replacement)."""
    event = type("Event", (_Event,), {"device": device})
    stream = type("Stream", (_Stream,), {"device": device})
    current = stream()

    properties = SimpleNamespace(
        name="fake", total_memory=device.total, major=8, minor=0, is_integrated=False
    )

    def synchronize(*args: Any) -> None:
        device.wait("synchronize")

    return [
        (Tensor, "record_stream", lambda *_: None),
        (torch, "Event", event),
        (torch.cuda, "Event", event),
        (torch.cuda, "Stream", stream),
        (torch.cuda, "current_stream", lambda *_: current),
        (torch.cuda, "default_stream", lambda *_: current),
        (torch.cuda, "current_device", lambda: CUDA.index),
        (torch.cuda, "device", lambda *_: nullcontext()),
        (torch.cuda, "stream", lambda *_: nullcontext()),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "mem_get_info", lambda *_: (device.total - device.allocated, device.total)),
        (torch.cuda, "get_device_capability", lambda *_: (8, 0)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "memory_allocated", lambda *_: device.allocated),
        (torch.cuda, "memory_reserved", lambda *_: device.allocated),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.accelerator, "current_stream", lambda *_: current),
        (torch.accelerator, "synchronize", synchronize),
    ]


def _address(tensor: Tensor) -> int:
    """Return the address of the storage, which all views of a tensor have in common."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _getter(name: str) -> Any:
    """Return what torch calls for an attribute of a tensor."""
    return getattr(Tensor, name).__get__


def _shape_depends_on_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for an operator whose result has a shape that the host must wait for."""
    if name in _INDEXED:  # places that are True are counted
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if name == "repeat_interleave":
        return isinstance((*args, None)[1], Tensor) and kwargs.get("output_size") is None
    return name in _SIZED_BY_VALUES


def _where() -> str:
    """Return the innermost line of the package on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename[len(_PACKAGE) :]}:{frame.f_lineno}"
