"""Products of oneDNN, where it multiplies faster than torch does by itself: on CPUs only.

oneDNN makes a kernel for each number of rows, and reads small weights faster in a layout of its
own. Both are settled here; ``kernels.Linear`` has a :class:`Product`, or None on accelerators.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

WORK = 400_000
"""Multiply-adds below which oneDNN's fixed cost (about 10 us) exceeds its gain over MKL."""
FEW = 16
"""Rows up to which every number has a kernel of its own."""
KEPT_LAYOUT = 4 << 20
"""Bytes of a weight up to which it is held in oneDNN's own layout, too.

oneDNN would make it anew for every call: decoding 16 sessions with the embedded text target takes
0.9 of the time with kept ones.
"""
_LAYOUT_ROWS = 64
"""Rows for which oneDNN chooses its layout; others differ by little."""
_KEEPS_LAYOUTS = platform.machine() in ("x86_64", "AMD64")  # not tried on others
CPUINFO = Path("/proc/cpuinfo")


@cache
def mkl_is_faster() -> bool:
    """Return True on Intel's processors, where float32 products are left to MKL.

    For 15 shapes of 128 to 8,960 columns and 1 to 128 rows MKL takes 0.5 to 0.9 of oneDNN's time
    there (Sapphire Rapids, one thread). On others it is two to three times slower than oneDNN. The
    vendor decides, not a trial: two processes of one machine should round alike.
    """
    with contextlib.suppress(OSError):
        return torch.backends.mkl.is_available() and "GenuineIntel" in CPUINFO.read_text()
    return False


def kernel_rows(rows: int) -> int:
    """Return the rows to compute where ``rows`` are wanted: three, or an eighth, more at most.

    For each number of rows that it has met, oneDNN keeps half a megabyte for every size of weight,
    and takes a millisecond for a new one. So there are few of them: 76 up to 4096 rows.
    """
    if rows <= FEW:
        return rows
    step = max(4, 1 << (rows - 1).bit_length() >> 4)
    return -(-rows // step) * step


class Product:
    """``x @ weight + bias`` for ``least_rows`` rows or more.

    Args:
        weight: [in, out]; a transposed view will do.
        named: oneDNN is called by name; else torch hands the product to it.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, least_rows: float, *, named: bool
    ) -> None:
        self.least_rows = least_rows
        self._weight, self._bias = weight, bias
        self._pointwise: Callable[..., Tensor] | None = None
        if named:
            self._pointwise = torch.ops.mkldnn._linear_pointwise.default
            self._weight = weight.t()
            if _KEEPS_LAYOUTS and weight.nbytes <= KEPT_LAYOUT:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(
                    self._weight.contiguous(), _LAYOUT_ROWS
                )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        rows = x.shape[0]
        spare = kernel_rows(rows) - rows
        if spare:
            x = functional.pad(x, (0, 0, 0, spare))
        if self._pointwise is not None:
            y = self._pointwise(x, self._weight, self._bias, "none", [], "")
        elif self._bias is None:
            y = torch.mm(x, self._weight)
        else:
            y = torch.addmm(self._bias, x, self._weight)
        return y[:rows] if spare else y


def product(weight: Tensor, bias: Tensor | None, *, lasting: bool) -> Product | None:
    """Return oneDNN's product with ``weight`` [in, out]; None where torch's own is to be used.

    Args:
        lasting: whether products of this size are computed often enough to make kernels for it.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype in (torch.bfloat16, torch.float16):
        return Product(weight, bias, 0, named=False)  # where the processor has such instructions
    if weight.dtype == torch.float32 and lasting and not mkl_is_faster():
        return Product(weight, bias, max(2.0, WORK / max(1, weight.numel())), named=True)
    return None
