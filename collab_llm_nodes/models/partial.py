"""Parts of a checkpoint: some of its layers, its vision encoder, or its facts without weights.

What is left out of a model stays on torch's meta device, which has no memory. So a model can be
divided among processes of which none could hold it:

    | part           | holds                              | made by                   |
    | -------------- | ---------------------------------- | ------------------------- |
    | a stage        | layers; embedding or LM head too   | ``load_layers``           |
    | the front      | the vision encoder, if there is one| ``load_vision``           |
    | a reader       | nothing: facts and a tokenizer     | ``read_facts``            |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.models.architectures import ARCHITECTURES, architecture_of
from collab_llm_nodes.models.devices import device_named
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.loading import (
    DTYPES,
    LoadedModel,
    ModelConfig,
    load_image_processor,
    load_tokenizer,
    model_folder,
    model_type_of,
    warn_of_overflow,
)
from collab_llm_nodes.models.trained import readable, weight_files
from collab_llm_nodes.models.vocabulary import end_tokens

_VISION = "model.visual."
"""Beginning of the names of the vision encoder's tensors."""


@dataclass(frozen=True)
class CheckpointFacts:
    """A model as its files describe it; no weight is read.

    Attributes:
        num_layers: decoder layers.
        context: tokens that it reads.
        width: of a hidden state.
        eos: end tokens.
        image_processor: None for text models.
        architecture: ``transformers``' configuration of the model.
        config: names the checkpoint.
    """

    num_layers: int
    context: int
    width: int
    eos: frozenset[int]
    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil | None
    architecture: Any
    config: ModelConfig

    @property
    def vision(self) -> bool:
        """The model sees images."""
        return self.image_processor is not None

    @property
    def placeholder(self) -> int | None:
        """Id of the tokens that stand for pictures; None: the model reads text only."""
        return self.architecture.image_token_id if self.vision else None

    @cached_property
    def weights(self) -> str:
        """Hash of the weights and type of their numbers: the same in processes that share a model.

        The first use reads the whole checkpoint.
        """
        return f"{checkpoint_fingerprint(model_folder(self.config))} {self.config.dtype}"

    def without_weights(self) -> LoadedModel:
        """Return a model that has no weights and computes nothing: facts and a tokenizer."""
        model = _empty_model(self.architecture, self.config)
        return LoadedModel(model, self.tokenizer, self.image_processor, None, self.config)


def read_facts(config: ModelConfig) -> CheckpointFacts:
    """Read what a checkpoint's files say about it.

    Raises:
        ModelError: as ``load``; or this architecture is not divided.
    """
    folder = model_folder(config)
    vision = _sees(folder)
    facts = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = facts.get_text_config()
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # not every checkpoint has one
        generation = GenerationConfig.from_model_config(facts)
    tokenizer = load_tokenizer(folder, vision)
    return CheckpointFacts(
        text.num_hidden_layers,
        text.max_position_embeddings,
        text.hidden_size,
        end_tokens(generation, tokenizer),
        tokenizer,
        load_image_processor(folder) if vision else None,
        facts,
        config,
    )


def load_layers(config: ModelConfig, first: int, last: int) -> tuple[LoadedModel, int, int]:
    """Load layers ``first`` to ``last - 1`` of a model's decoder, and nothing else of it.

    The embedding is loaded with the first layer, norm and LM head with the last one; a vision
    encoder never.

    Returns:
        A model of these layers only, the number of all layers, and the bytes loaded.

    Raises:
        ConfigError: there are no such layers. ``field`` is ``layers``.
        ModelError: as ``load``; quantisation or exits are asked for.
    """
    facts = read_facts(config)
    if config.quantization != "none" or config.exits is not None or config.exit_layers:
        raise ModelError(
            "a part of a model has no quantisation and no exits",
            field="quantization",
            remedy="leave quantization, exits and exit_layers as they are by default",
        )
    if not 0 <= first < last <= facts.num_layers:
        raise ConfigError(
            f"no layers {first} to {last} of {facts.num_layers}",
            field="layers",
            remedy=f"0 <= first < last <= {facts.num_layers}",
        )
    warn_of_overflow(config, facts.architecture.model_type)
    model = _empty_model(facts.architecture, config)
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    embedding = f"{prefix}.embed_tokens.weight"
    tied = last == facts.num_layers and facts.architecture.tie_word_embeddings

    def wanted(name: str) -> bool:
        if name.startswith(_VISION):
            return False
        place = name.removeprefix(f"{prefix}.")
        if place.startswith("layers."):
            return first <= int(place.split(".")[1]) < last
        if place.startswith(("embed", "project_in")):
            return first == 0 or (tied and name == embedding)
        return last == facts.num_layers and not (tied and name == "lm_head.weight")

    device = device_named(config.device)
    found = _read_tensors(model, wanted, config, device)
    size = _bytes_of(found)
    if tied:
        found["lm_head.weight"] = found[embedding]
        if first:
            del found[embedding]
    model.load_state_dict(found, strict=False, assign=True)
    decoder.layers = nn.ModuleList(decoder.layers[first:last])
    if getattr(decoder, "rotary_emb", None) is not None:  # its angles are computed, not loaded
        rotary = type(decoder.rotary_emb)(config=facts.architecture.get_text_config())
        decoder.rotary_emb = rotary.to(device)
    model.eval().requires_grad_(False)
    loaded = LoadedModel(model, facts.tokenizer, None, None, config)
    return loaded, facts.num_layers, size


def load_vision(facts: CheckpointFacts) -> tuple[LoadedModel, int]:
    """Load a model's vision encoder, and nothing else of it; a text model has none.

    Returns:
        A model that can encode prompts and their images, and the bytes loaded.

    Raises:
        ModelError: the checkpoint cannot be read, or there is no such device.
    """
    loaded = facts.without_weights()
    if not facts.vision:
        return loaded, 0
    model, device = loaded.model, device_named(facts.config.device)
    found = _read_tensors(model, lambda name: name.startswith(_VISION), facts.config, device)
    model.load_state_dict(found, strict=False, assign=True)
    encoder = model.model.visual
    rotary = type(encoder.rotary_pos_emb)(config=facts.architecture.vision_config)
    encoder.rotary_pos_emb = rotary.to(device)  # its angles are computed, not loaded
    model.eval().requires_grad_(False)
    return loaded, _bytes_of(found)


def _sees(folder: Path) -> bool:
    """Return True if the model in ``folder`` sees images.

    Raises:
        ModelError: it is of an architecture that is not divided.
    """
    architecture = architecture_of(model_type_of(folder))
    if not architecture.divided:
        raise ModelError(
            "only models of known architectures are divided",
            field="path",
            remedy=f"take one of {', '.join(ARCHITECTURES)}",
        )
    return architecture.vision


def _empty_model(architecture: Any, config: ModelConfig) -> Any:
    """Return a model whose weights are all on the meta device."""
    vision = architecture_of(architecture.model_type).vision
    auto: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(architecture, dtype=DTYPES[config.dtype])


def _read_tensors(
    model: Any, wanted: Callable[[str], bool], config: ModelConfig, device: torch.device
) -> dict[str, torch.Tensor]:
    """Read the ``wanted`` tensors of a model; the rest of its checkpoint is not touched."""
    folder = model_folder(config)
    missing = {name for name in model.state_dict() if wanted(name)}
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with readable(file), safe_open(file, "pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118  it is no dictionary
                name = _name_in_model(stored, model)
                if name in missing:
                    found[name] = tensors.get_tensor(stored).to(device, DTYPES[config.dtype])
    missing -= found.keys()
    if missing:
        raise ModelError(
            f"the checkpoint in {folder} lacks {', '.join(sorted(missing)[:3])}",
            field="path",
            remedy="copy or download it again",
        )
    return found


def _name_in_model(stored: str, model: Any) -> str:
    """Return the name that a checkpoint's tensor has in ``model``.

    Checkpoints of Qwen2-VL and Qwen2.5-VL name tensors as the first classes of these models did.
    """
    if not architecture_of(model.config.model_type).vision:
        return stored
    if stored.startswith("visual."):
        return f"model.{stored}"
    if stored.startswith("model.") and not stored.startswith((_VISION, "model.language_model.")):
        return f"model.language_model.{stored.removeprefix('model.')}"
    return stored


def _bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
