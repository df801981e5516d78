"""Linear maps, norms and the LM head with little overhead per call, equal to the modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab_llm_nodes.engine import onednn
from collab_llm_nodes.models.architectures import DecoderParts

COPIED_HEAD = 8 << 20
"""Bytes of a head up to which it is held as [in, out], too, beside the embedding's own layout.

With 5 rows and 3,072 tokens such a head takes two thirds of the time (on a CPU).
"""


class Linear:
    """``x @ weight + bias`` with the weight as [in, out], in one kernel call.

    Args:
        weight: [in, out]; a transposed view will do.
        lasting: whether maps of this size are used often enough to make kernels for it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, lasting: bool = True) -> None:
        self._weight, self._bias = weight, bias
        self._onednn = onednn.product(weight, bias, lasting=lasting)
        self._onednn_rows = math.inf if self._onednn is None else self._onednn.least_rows

    @property
    def by_onednn(self) -> bool:
        """True if oneDNN computes the map, of so many rows that it is worth its cost."""
        return self._onednn is not None

    def rows(self, rows: int) -> int:
        """Return how many rows are computed where ``rows`` are wanted."""
        return rows if rows < self._onednn_rows else onednn.kernel_rows(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._onednn is not None and x.shape[0] >= self._onednn_rows:
            return self._onednn(x)
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return ``residual`` plus the map of ``x``, in a new tensor."""
        if self._bias is None and x.shape[0] < self._onednn_rows:
            return torch.addmm(residual, x, self._weight)
        return self(x).add_(residual)


class ModuleLinear:
    """A :class:`Linear` over modules that compute for themselves: quantised ones."""

    by_onednn = False

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
        """Return ``residual`` plus the map of ``x``."""
        return residual + self(x)


def fuse(modules: Sequence[nn.Linear]) -> Linear | ModuleLinear:
    """Return the linear maps of one input as a single map; their outputs stand side by side.

    The weight is stored [in, out], the layout that is fastest with few rows in MKL and oneDNN
    alike. The modules' own weights become views of it: no memory is spent twice, and
    transformers' forward goes on working. (``save_pretrained`` does not: it wants whole tensors.)
    """
    if not all(is_plain(m) for m in modules):
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
    """Return the fused weight that another engine on the same model has left, if there is one."""
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


def as_linear(module: nn.Linear) -> Linear | ModuleLinear:
    """Return a map whose weight stays where it is."""
    if not is_plain(module):
        return ModuleLinear([module])
    return Linear(module.weight.detach().t(), module.bias)


class Head:
    """Final norm and LM head, without the rows that only pad the vocabulary.

    Attributes:
        norm: [rows, hidden_size] after a layer -> input of the matrix.
        vocab_size: columns of the logits.
    """

    def __init__(self, parts: DecoderParts, vocab_size: int) -> None:
        self.norm = norm_function(parts.norm)
        self.vocab_size = vocab_size
        self._module = parts.head
        self._maps: dict[int, Callable[[Tensor], Tensor]] = {}  # by the number of logits
        self._first(vocab_size)  # made now, not in the first pass

    def __call__(self, states: Tensor, first: int | None = None) -> Tensor:
        """Return the logits [rows, vocab_size] of normed ``states``, or the ``first`` of them."""
        return self._first(self.vocab_size if first is None else first)(states)

    def some(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map to the logits of ``ids`` only; their weights are copied once."""
        if not is_plain(self._module):
            return lambda states: self(states)[:, ids]
        weight, bias = self._module.weight.detach()[ids], self._module.bias
        # In float32 a CPU needs no kernels, which would be new ones for every selection.
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
        if not is_plain(self._module):
            return lambda states: self._module(states)[:, :count]
        bias = self._module.bias
        weight = self._module.weight.detach()[:count].t()
        whole = count == self.vocab_size
        if whole and weight.device.type == "cpu" and weight.nbytes <= COPIED_HEAD:
            weight = weight.contiguous()
        return Linear(weight, None if bias is None else bias[:count])


def norm_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a norm as a function: an RMSNorm in one launch, or spelled out in float32 on a CPU."""
    if isinstance(module, nn.LayerNorm):
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: functional.layer_norm(x, shape, weight, bias, eps)
    gain, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if gain is None or epsilon is None:
        return module.forward  # no RMSNorm
    if gain.device.type != "cpu":
        return partial(
            functional.rms_norm, normalized_shape=gain.shape, weight=gain.detach(), eps=epsilon
        )
    if gain.dtype != torch.float32:
        return module.forward  # which computes in float32 and converts
    # x / sqrt(mean(x^2) + eps) * gain in four small steps instead of torch's eight.
    width = gain.numel()
    scaled = gain.detach() * math.sqrt(width)
    floor = scaled.new_tensor(math.sqrt(width * epsilon))

    def rms_norm(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(size, floor)).mul_(scaled)

    return rms_norm


def is_plain(module: nn.Module) -> bool:
    """Return True for a linear map whose weight is an ordinary tensor: not quantised."""
    return type(module) is nn.Linear and type(module.weight.detach()) is Tensor
