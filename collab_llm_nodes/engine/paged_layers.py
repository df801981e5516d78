"""A decoder layer as ``cuda.py`` runs it: maps of one input side by side, RMS norms by trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab_llm_nodes.engine.kernels import ModuleLinear, is_plain
from collab_llm_nodes.engine.paged_kernels import Activation, HeadNorms, rms_norm
from collab_llm_nodes.models.architectures import LayerParts

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Norm:
    """An RMS norm: its gain [width], and the number under its root."""

    gain: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm | None:
        """Return what ``module`` computes, found by trial; None if it is no RMS norm."""
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor) or epsilon is None:
            return None
        weight = weight.detach()
        x = torch.linspace(-2.0, 3.0, 2 * weight.numel()).view(2, -1).to(weight)
        for gain in (weight, 1 + weight.float()):  # Gemma's is around 0
            if torch.allclose(module(x), rms_norm(x, gain, epsilon), atol=0.02, rtol=0.02):
                return cls(gain, epsilon)
        return None


class Layer:
    """One decoder layer: its maps and norms.

    Raises:
        NotImplementedError: it has another form than the pass follows.
    """

    def __init__(self, parts: LayerParts) -> None:
        activation = _activation_of(parts.activation)
        if not parts.norm_first or len(parts.up) != 2 or activation is None:
            raise NotImplementedError("feed-forward part")
        self.activation: Activation = activation
        self.attention_norm, self.mlp_norm = _norm(parts.attention_norm), _norm(parts.mlp_norm)
        self.out_norm = None if parts.out_norm is None else _norm(parts.out_norm)
        self.down_norm = None if parts.down_norm is None else _norm(parts.down_norm)
        self.head_norms = None
        if parts.query_norm is not None and parts.key_norm is not None:
            query, key = _norm(parts.query_norm), _norm(parts.key_norm)
            self.head_norms = HeadNorms(query.gain, key.gain, query.epsilon)
        self.qkv = side_by_side([parts.query, parts.key, parts.value])
        self.out, self.down = side_by_side([parts.out]), side_by_side([parts.down])
        self.up = side_by_side(parts.up)


def _norm(module: nn.Module) -> Norm:
    found = Norm.of(module)
    if found is None:
        raise NotImplementedError(type(module).__name__)
    return found


def _activation_of(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the name of an activation, found by trial; None if the kernels have it not."""
    x = torch.linspace(-6.0, 6.0, 100)
    known: dict[Activation, Tensor] = {
        "silu": functional.silu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
    }
    return next((name for name, y in known.items() if torch.allclose(function(x), y)), None)


def side_by_side(modules: Sequence[nn.Linear]) -> Map:
    """Return the linear maps of one input as one; their outputs stand side by side.

    The modules' own weights become views of the joined one: no memory is spent twice.
    """
    if not all(is_plain(module) for module in modules):
        return ModuleLinear(modules)
    if len(modules) == 1:
        weight, bias = modules[0].weight.detach(), modules[0].bias
        return partial(functional.linear, weight=weight, bias=bias)
    weight = _joined(modules)
    if all(module.bias is None for module in modules):
        return partial(functional.linear, weight=weight)
    biases = [
        weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
        for module in modules
    ]
    return partial(functional.linear, weight=weight, bias=torch.cat(biases))


def _joined(modules: Sequence[nn.Linear]) -> Tensor:
    """Return the weights [all out, in] of maps of one input as one."""
    before = _joined_before(modules)
    if before is not None:
        return before
    weight = torch.cat([module.weight.detach() for module in modules])
    sizes = [module.out_features for module in modules]
    for module, own in zip(modules, weight.split(sizes), strict=True):
        module.weight = nn.Parameter(own, requires_grad=False)
    return weight


def _joined_before(modules: Sequence[nn.Linear]) -> Tensor | None:
    """Return the joined weight that another engine on the same model has left, if there is one."""
    first = modules[0].weight.detach()
    width, end = first.shape[1], first.storage_offset()
    for module in modules:
        own = module.weight.detach()
        same = own.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or own.storage_offset() != end or own.stride() != (width, 1):
            return None
        end += own.numel()
    rows = (end - first.storage_offset()) // width
    return first.as_strided((rows, width), (width, 1))
