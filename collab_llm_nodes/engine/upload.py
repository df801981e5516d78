"""Small arrays of one pass on their way to its device, all in one copy.

Each copy to an accelerator costs some 10 us and, from pageable memory, a wait. Token ids,
positions, slots and masks of a pass are known before its first layer runs, so they travel
together::

    upload = Upload(device)
    ids = upload.add([4, 8, 15])          # nothing is copied yet
    mask = upload.add(torch.eye(3) > 0)
    rows = table[ids()]                   # the first call copies all that was added
    scores.masked_fill_(mask(), 0.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from collab_llm_nodes.engine.cache import rounded_up

_ALIGNED = 16  # bytes: what vector loads of kernels want

OnDevice = Callable[[], Tensor]
"""Return an array on the device; the first call of any sends all that were added."""


class Upload:
    """See the module docstring. On the CPU nothing is copied.

    Args:
        device: of the pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[Tensor] = []
        self._sent: list[Tensor] = []

    def add(self, values: Sequence[int] | Tensor) -> OnDevice:
        """Take integers (as int64) or a tensor on the CPU; return what gives it on the device."""
        array = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.long)
        if self._device.type == "cpu":
            return lambda: array
        self._waiting.append(array)
        number = len(self._sent) + len(self._waiting) - 1

        def on_device() -> Tensor:
            if number >= len(self._sent):
                self._send()
            return self._sent[number]

        return on_device

    def _send(self) -> None:
        arrays = [array.contiguous() for array in self._waiting]
        self._waiting.clear()
        begins = [0, *accumulate(rounded_up(array.nbytes, _ALIGNED) for array in arrays)]
        pinned = self._device.type != "meta"  # where nothing is copied
        packed = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=pinned)
        for array, begin in zip(arrays, begins, strict=False):
            packed[begin : begin + array.nbytes] = array.view(-1).view(torch.uint8)
        # torch's allocator of pinned memory keeps the buffer until the copy has been made.
        there = packed.to(self._device, non_blocking=True)
        for array, begin in zip(arrays, begins, strict=False):
            own = there[begin : begin + array.nbytes]
            self._sent.append(own.view(array.dtype).view(array.shape))
