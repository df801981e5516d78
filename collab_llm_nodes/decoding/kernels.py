"""Linear maps and norms with little overhead per call; same results as the modules they replace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

# Below it oneDNN's fixed cost (about 10 us) exceeds what it gains over MKL, multiply-adds.
ONEDNN_WORK = 400_000


class FusedLinear:
    """Linear maps of one input as a single map; their outputs side by side.

    The fused weight is stored [in, out], the layout that is fastest with few rows in MKL and
    oneDNN alike. The modules' own weights become views of it: no memory is spent twice, and
    transformers' forward goes on working. Quantised modules are called one by one.
    """

    def __init__(self, modules: Sequence[nn.Linear], *, fuse: bool = True) -> None:
        """``fuse=False``: one module whose weight must stay as it is (it may be tied)."""
        self._modules = tuple(modules)
        self._weight: Tensor | None = None  # [in, out]
        self._bias: Tensor | None = None
        if all(_plain(m) for m in modules):
            if fuse:
                self._fuse()
            else:
                (module,) = modules
                self._weight, self._bias = module.weight.detach().t(), module.bias
        self._onednn = self._weight is not None and _onednn(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        weight, bias = self._weight, self._bias
        if weight is None:
            outputs = [m(x) for m in self._modules]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        if self._onednn and len(x) > 1 and len(x) * weight.numel() >= ONEDNN_WORK:
            # MKL is two to three times slower here on processors that are not Intel's.
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.t(), bias, "none", [], "")
            return y
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` + the map of ``x``, in a new tensor."""
        weight = self._weight
        if weight is None or self._bias is not None or len(x) * weight.numel() >= ONEDNN_WORK:
            return residual + self(x)
        return torch.addmm(residual, x, weight)

    def _fuse(self) -> None:
        weight = torch.cat([m.weight.detach() for m in self._modules]).t().contiguous()
        start = 0
        for m in self._modules:
            end = start + m.out_features
            m.weight = nn.Parameter(weight[:, start:end].t(), requires_grad=False)
            start = end
        if any(m.bias is not None for m in self._modules):
            biases = [
                weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach()
                for m in self._modules
            ]
            self._bias = torch.cat(biases)
        self._weight = weight


def _onednn(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
    )


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight.detach()) is Tensor


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
    scaled = gain * math.sqrt(width)
    floor = gain.new_tensor(math.sqrt(width * epsilon))

    def rms_norm(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(size, floor)).mul_(scaled)

    return rms_norm
