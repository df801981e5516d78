"""Linear maps, norms and the LM head with little overhead per call, equal to the modules."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab_llm_nodes.models.architectures import DecoderParts

# Multiply-adds below which oneDNN's fixed cost (about 10 us) exceeds what it gains over MKL, on
# processors where it gains anything.
ONEDNN_WORK = 400_000
FEW = 16
COPIED_HEAD = 8 << 20
"""Bytes of a head up to which it is held as [in, out], too, beside the embedding's own layout.

With 5 rows and 3,072 tokens such a head takes two thirds of the time.
"""
KEPT_LAYOUT = 4 << 20
"""Bytes of a map up to which it is held in oneDNN's own layout, too.

oneDNN would make it anew for every call: decoding 16 sessions with the embedded text target takes
0.9 of the time with kept ones.
"""
_KERNEL_ROWS = 64
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
    """Rows to compute where ``rows`` are wanted: three, or an eighth, more at most.

    oneDNN makes a kernel for every number of rows and keeps most of them: half a megabyte and some
    milliseconds each. So there are to be few numbers: 76 up to 4096 rows.
    """
    if rows <= FEW:
        return rows
    step = max(4, 1 << (rows - 1).bit_length() >> 4)
    return -(-rows // step) * step


class Linear:
    """``x @ weight + bias`` with the weight as [in, out], in one kernel call.

    Args:
        weight: [in, out]; a transposed view will do.
        lasting: whether maps of this size are used often enough to make kernels for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, lasting: bool = True) -> None:
        self._weight, self._transposed = weight, weight.t()
        self._bias = bias
        self._onednn_rows = math.inf  # from which oneDNN computes
        self._pointwise: Callable[..., Tensor] | None = None  # oneDNN's, called by name
        if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            if weight.dtype in (torch.bfloat16, torch.float16):
                self._onednn_rows = 0.0  # torch hands them to it, where the processor has them
            elif weight.dtype == torch.float32 and lasting and not mkl_is_faster():
                self._onednn_rows = max(2.0, ONEDNN_WORK / max(1, weight.numel()))
                self._pointwise = torch.ops.mkldnn._linear_pointwise.default
                if _KEEPS_LAYOUTS and weight.nbytes <= KEPT_LAYOUT:
                    self._transposed = torch.ops.mkldnn._reorder_linear_weight(
                        self._transposed.contiguous(), _KERNEL_ROWS
                    )

    def rows(self, rows: int) -> int:
        """Return how many rows are computed where ``rows`` are wanted."""
        return rows if rows < self._onednn_rows else kernel_rows(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        rows = x.shape[0]
        if rows < self._onednn_rows:
            return self._multiply(x)
        spare = kernel_rows(rows) - rows
        if spare:
            x = functional.pad(x, (0, 0, 0, spare))
        if self._pointwise is None:
            return self._multiply(x)[:rows]
        y = self._pointwise(x, self._transposed, self._bias, "none", [], "")
        return y[:rows] if spare else y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` plus the map of ``x``, in a new tensor."""
        if self._bias is None and x.shape[0] < self._onednn_rows:
            return torch.addmm(residual, x, self._weight)
        return self(x).add_(residual)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)


class ModuleLinear:
    """A :class:`Linear` over modules that compute for themselves: quantised ones."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)

    def rows(self, rows: int) -> int:
        """Return ``rows``."""
        return rows

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, all out, side by side]."""
        outputs = [module(x) for module in self._modules]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` plus the map of ``x``."""
        return residual + self(x)


def fused(modules: Sequence[nn.Linear]) -> Linear | ModuleLinear:
    """Linear maps of one input as a single map; their outputs side by side.

    The weight is stored [in, out], the layout that is fastest with few rows in MKL and oneDNN
    alike. The modules' own weights become views of it: no memory is spent twice, and
    transformers' forward goes on working. (``save_pretrained`` does not: it wants whole tensors.)
    """
    if not all(_plain(m) for m in modules):
        return ModuleLinear(modules)
    weight = _shared(modules)
    if weight is None:
        weight = torch.cat([m.weight.detach() for m in modules]).t().contiguous()
        start = 0
        for m in modules:
            end = start + m.out_features
            m.weight = nn.Parameter(weight[:, start:end].t(), requires_grad=False)
            start = end
    if all(m.bias is None for m in modules):
        return Linear(weight, None)
    biases = [
        weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules
    ]
    return Linear(weight, torch.cat(biases))


def _shared(modules: Sequence[nn.Linear]) -> Tensor | None:
    """The fused weight that another engine on the same model has left."""
    first = modules[0].weight.detach()
    width, start = sum(m.out_features for m in modules), first.storage_offset()
    for m in modules:
        weight = m.weight.detach()
        if (
            weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or weight.storage_offset() != start
            or weight.stride() != (1, width)
        ):
            return None
        start += m.out_features
    return first.as_strided((first.shape[1], width), (width, 1), first.storage_offset())


def linear_of(module: nn.Linear) -> Linear | ModuleLinear:
    """One map whose weight stays where it is."""
    if not _plain(module):
        return ModuleLinear([module])
    return Linear(module.weight.detach().t(), module.bias)


class Head:
    """Final norm and LM head, without the rows that only pad the vocabulary.

    Attributes:
        norm: [rows, hidden_size] behind a layer -> what the matrix takes.
        vocab_size: columns of the logits.
    """

    def __init__(self, parts: DecoderParts, vocab_size: int) -> None:
        self.norm = norm_of(parts.norm)
        self.vocab_size = vocab_size
        self._module = parts.head
        self._maps: dict[int, Callable[[Tensor], Tensor]] = {}  # by the number of logits
        self._first(vocab_size)  # made now, not in the first pass

    def __call__(self, states: Tensor, first: int | None = None) -> Tensor:
        """Logits [rows, vocab_size] of normed ``states``, or of the ``first`` tokens only."""
        return self._first(self.vocab_size if first is None else first)(states)

    def some(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """The map to the logits of ``ids`` only; their weights are copied once."""
        if not _plain(self._module):
            return lambda states: self(states)[:, ids]
        weight, bias = self._module.weight.detach()[ids], self._module.bias
        # In float32 the processor needs no kernels, which would be new ones for every selection.
        dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
        linear = Linear(
            weight.to(dtype).t(), None if bias is None else bias[ids].to(dtype), lasting=False
        )
        return lambda states: linear(states.to(dtype)).to(states.dtype)

    def _first(self, count: int) -> Callable[[Tensor], Tensor]:
        """Return the map to the first ``count`` logits, which is made once."""
        if count not in self._maps:
            self._maps[count] = self._make_first(count)
        return self._maps[count]

    def _make_first(self, count: int) -> Callable[[Tensor], Tensor]:
        """Make the map to the first ``count`` logits; a small whole head has a copy of its own."""
        if not _plain(self._module):
            return lambda states: self._module(states)[:, :count]
        bias = self._module.bias
        weight = self._module.weight.detach()[:count].t()
        whole = count == self.vocab_size
        if whole and weight.device.type == "cpu" and weight.nbytes <= COPIED_HEAD:
            weight = weight.contiguous()
        return Linear(weight, None if bias is None else bias[:count])


def norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm as a function; an RMSNorm in float32 is spelled out."""
    if isinstance(module, nn.LayerNorm):
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: functional.layer_norm(x, shape, weight, bias, eps)
    gain, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if gain is None or epsilon is None or gain.dtype != torch.float32:
        return module.forward  # no RMSNorm, or one that computes in float32 and converts
    # x / sqrt(mean(x^2) + eps) * gain in four small steps instead of torch's eight.
    width = gain.numel()
    scaled = gain.detach() * math.sqrt(width)
    floor = scaled.new_tensor(math.sqrt(width * epsilon))

    def rms_norm(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(size, floor)).mul_(scaled)

    return rms_norm


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight.detach()) is Tensor
