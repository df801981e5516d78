"""The architectures this package runs, and where their parts are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from collab_llm_nodes.errors import ModelError


@dataclass(frozen=True)
class Architecture:
    """Differences between architectures.

    Attributes:
        vision: it takes images. Those of a known one are encoded here, and its positions are
            three-dimensional (M-RoPE); any other one does both by its own code.
        norm: name of the final norm in the text decoder.
        known: its layers are as ``layer_parts`` takes them apart.
        divided: its layers can be loaded a part at a time.
    """

    vision: bool
    norm: str = "norm"
    known: bool = True
    divided: bool = True


ARCHITECTURES = {
    "qwen2_vl": Architecture(vision=True),
    "qwen2_5_vl": Architecture(vision=True),
    "qwen3_vl": Architecture(vision=True),
    "llama": Architecture(vision=False),
    "qwen2": Architecture(vision=False),
    "qwen3": Architecture(vision=False),
    "gemma3_text": Architecture(vision=False),
    "mistral": Architecture(vision=False),
    "smollm3": Architecture(vision=False),
    "opt": Architecture(vision=False, norm="final_layer_norm"),
}
_UNKNOWN = Architecture(vision=False, known=False, divided=False)
_UNKNOWN_SEEING = Architecture(vision=True, known=False, divided=False)
RECURRENT = {
    "qwen3_5_text": _UNKNOWN,
    "qwen3_5": _UNKNOWN,  # its text alone
    "qwen3_next": _UNKNOWN,
    "olmo_hybrid": _UNKNOWN,
    "granitemoehybrid": _UNKNOWN,
    "bamba": replace(_UNKNOWN, norm="final_layernorm"),
    "falcon_h1": replace(_UNKNOWN, norm="final_layernorm"),
    "lfm2": replace(_UNKNOWN, norm="embedding_norm"),
    "lfm2_moe": replace(_UNKNOWN, norm="embedding_norm"),
}
"""Architectures with recurrent states, whose forward pass goes on from them with several tokens.

That of Jamba begins from empty states instead; Nemotron-H's differs by more than rounding.
"""
_STATES_ALONE = {"linear_attention", "conv"}  # types of layers, as configurations name them
_STATES_BESIDE = {"hybrid", "hybrid_sliding"}
_SPECIALITIES = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
"""Settings of a configuration, any of which the hand-written layer loops do not follow."""
_ROPE_TYPES = ("default", "linear", "llama3")
"""Rotations whose angles depend on the position alone."""
_TAKEN = {"inputs_embeds", "position_ids", "attention_mask", "logits_to_keep"}


def architecture_of(model_type: str) -> Architecture:
    """Return the architecture of a ``config.model_type``.

    Any causal language model of transformers may run, and any that answers about pictures;
    ``check_eager`` decides at loading.

    Raises:
        ModelError: it is none of these.
    """
    found = ARCHITECTURES.get(model_type) or RECURRENT.get(model_type)
    if found is None and model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        found = _UNKNOWN_SEEING
    if found is None and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found = _UNKNOWN
    if found is None:
        raise ModelError(
            f"unknown architecture {model_type!r}",
            field="path",
            remedy=f"supported: {', '.join((*ARCHITECTURES, *RECURRENT))}, and most models of"
            " transformers that answer texts, or texts with pictures",
        )
    return found


def check_eager(model: Any) -> None:
    """Check that a model of any architecture has the parts that the eager backend needs.

    Raises:
        ModelError: its layers, cache or positions work differently (as in Mamba or GPT-2).
    """
    decoder = model.get_decoder()
    recurrent = is_recurrent(model.config.get_text_config())
    lacks = sorted(
        (_TAKEN | {cache_argument(model)}) - inspect.signature(model.forward).parameters.keys()
    )
    if not hasattr(decoder, architecture_of(model.config.model_type).norm):
        lacks.append("a final norm")
    layers = list(getattr(decoder, "layers", ()))
    if recurrent and model.config.model_type not in RECURRENT:
        lacks.append("a pass that is known to go on exactly from recurrent states")
    elif not recurrent and not all(hasattr(layer, "self_attn") for layer in layers or [None]):
        lacks.append("a list of layers with self_attn")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        lacks.append("a linear LM head")
    vision = architecture_of(model.config.model_type).vision
    if vision and getattr(model.config, "image_token_id", None) is None:
        lacks.append("an image_token_id")
    if lacks:
        raise ModelError(
            f"a model of type {model.config.model_type!r} is built differently from those that run"
            f" here: it lacks {', '.join(lacks)}",
            field="path",
            remedy=f"take one of {', '.join(ARCHITECTURES)}, or one built like them",
        )


def is_recurrent(text: Any) -> bool:
    """Return True if layers have recurrent states, in place of keys and values or beside them.

    Args:
        text: configuration of the text decoder (``config.get_text_config()``).
    """
    return not (_STATES_ALONE | _STATES_BESIDE).isdisjoint(_layer_types(text))


def attention_layers(text: Any) -> int:
    """Count the layers that hold keys and values; ``text`` as of ``is_recurrent``."""
    alone = sum(kind in _STATES_ALONE for kind in _layer_types(text))
    return int(text.num_hidden_layers) - alone


def _layer_types(text: Any) -> Sequence[str]:
    return getattr(text, "layer_types", None) or ()


def context_length(text: Any) -> int:
    """Return the tokens that a model reads, with YaRN's factor.

    With YaRN, ``max_position_embeddings`` may be the length before it: Qwen2.5 with factor 4 has
    32,768 there, and reads 131,072.

    Args:
        text: configuration of the text decoder (``config.get_text_config()``).
    """
    own: int = text.max_position_embeddings
    rotation = getattr(text, "rope_parameters", None) or {}
    factor = rotation.get("factor")
    if rotation.get("rope_type") != "yarn" or not factor:
        return own
    return max(own, int(factor * rotation["original_max_position_embeddings"]))


def deepstack_levels(config: Any) -> int:
    """Return after how many of the first decoder layers a picture's features are added.

    DeepStack (Qwen3-VL): features of intermediate layers of the vision encoder are added to the
    hidden states of a picture's tokens. 0 for models without it.

    Args:
        config: configuration of the whole model.
    """
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def first_layers(config: Any) -> int:
    """Return the fewest layers of a first stage: with DeepStack, all that features are added after.

    Args:
        config: configuration of the whole model.
    """
    return max(1, min(deepstack_levels(config), config.get_text_config().num_hidden_layers))


def cache_argument(model: Any) -> str:
    """Return the argument of ``model``'s forward pass that takes keys and values."""
    renamed = "cache" in inspect.signature(model.forward).parameters  # since transformers 5.24
    return "cache" if renamed else "past_key_values"


@dataclass(frozen=True)
class DecoderParts:
    """The text decoder of a model, taken apart for early exits.

    Attributes:
        layers: the decoder layers; layer ``i`` (from 1) is done after ``layers[i - 1]``.
        hidden_size: width between the layers.
        norm: final norm (and OPT's output projection), [..., hidden_size] -> input of the head.
        head: LM head.
    """

    layers: nn.ModuleList
    hidden_size: int
    norm: nn.Module
    head: nn.Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] after any layer -> [..., rows of the head]."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def decoder_parts(model: Any) -> DecoderParts:
    """Take a supported ``PreTrainedModel`` apart; nothing is copied."""
    architecture = architecture_of(model.config.model_type)
    decoder = model.get_decoder()
    steps = [getattr(decoder, architecture.norm), getattr(decoder, "project_out", None)]
    present = [step for step in steps if step is not None]  # small OPTs lack the one or the other
    return DecoderParts(
        layers=decoder.layers,
        hidden_size=model.config.get_text_config().hidden_size,
        norm=present[0] if len(present) == 1 else nn.Sequential(*present),
        head=model.get_output_embeddings(),
    )


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer, taken apart for a hand-written loop.

    Attributes:
        attention_norm, mlp_norm: norms of the two halves.
        query, key, value, out: the attention's maps.
        up: the maps into the feed-forward part: (gate, up), or one where it has no gate.
        activation: of the gate, or of ``up`` where there is none.
        down: the map out of it.
        norm_first: norms stand before the halves, else after their sums (OPT-350m).
        query_norm, key_norm: norms of each head, before it is rotated; None where there are none.
        out_norm, down_norm: norms of the output of each half; None where there are none.
    """

    attention_norm: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    mlp_norm: nn.Module
    up: tuple[nn.Linear, ...]
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    norm_first: bool = True
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    out_norm: nn.Module | None = None
    down_norm: nn.Module | None = None


def layer_parts(layer: Any) -> LayerParts:
    """Take a decoder layer of a supported architecture apart; nothing is copied."""
    attention = layer.self_attn
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if hasattr(layer, "fc1"):  # OPT
        return LayerParts(
            layer.self_attn_layer_norm,
            *projections,
            attention.out_proj,
            layer.final_layer_norm,
            (layer.fc1,),
            layer.activation_fn,
            layer.fc2,
            layer.do_layer_norm_before,
        )
    around = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: norms on both sides of each half
    return LayerParts(
        layer.input_layernorm,
        *projections,
        attention.o_proj,
        layer.pre_feedforward_layernorm if around else layer.post_attention_layernorm,
        (layer.mlp.gate_proj, layer.mlp.up_proj),
        layer.mlp.act_fn,
        layer.mlp.down_proj,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        out_norm=layer.post_attention_layernorm if around else None,
        down_norm=layer.post_feedforward_layernorm if around else None,
    )


def attention_windows(model: Any) -> list[int | None]:
    """Return the sliding window of each decoder layer; None where it attends to everything."""
    layers = model.get_decoder().layers
    # Mistral and others keep it in the configuration alone, for all layers.
    whole = getattr(model.config.get_text_config(), "sliding_window", None)
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    found = [getattr(attention, "sliding_window", whole) for attention in attentions]
    if not any(found) and not architecture_of(model.config.model_type).known:
        return [whole] * len(layers)
    return found


def has_plain_attention(model: Any) -> bool:
    """Return True for known layers with plain attention, in windows of one size at most.

    Their rotations depend on the position alone.
    """
    config = model.config.get_text_config()
    if not architecture_of(model.config.model_type).known:
        return False
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    rope_type = "default" if rotary is None else rotary.rope_type
    rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return (
        all(name in _ROPE_TYPES for name in rope_types)
        and len({window for window in attention_windows(model) if window}) <= 1
        and all(_scales_as_usual(layer.self_attn) for layer in decoder_parts(model).layers)
        and not any(getattr(config, name, None) for name in _SPECIALITIES)
    )


def _scales_as_usual(attention: Any) -> bool:
    """Return True if scores are divided by the root of the head's width."""
    usual = attention.head_dim**-0.5
    return math.isclose(getattr(attention, "scaling", usual), usual)
