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

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.models.architectures import (
    ARCHITECTURES,
    architecture_of,
    context_length,
)
from collab_llm_nodes.models.checkpoint import (
    match_tensors,
    quantisation_of,
    readable,
    stored_tensors,
)
from collab_llm_nodes.models.devices import find_device
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint
from collab_llm_nodes.models.loading import (
    DTYPES,
    LoadedModel,
    ModelConfig,
    architecture_in,
    generation_in,
    load_errors,
    load_image_processor,
    load_tokenizer,
    model_folder,
    model_type_of,
    warn_of_overflow,
)
from collab_llm_nodes.models.prompt import try_prompts
from collab_llm_nodes.models.vocabulary import (
    check_rows,
    end_tokens,
    vocabulary_hash,
    vocabulary_size,
)

_VISION = "model.visual."
"""Beginning of the names of the vision encoder's tensors."""
_COMPUTED = re.compile(r"rotary_(pos_)?emb\.inv_freq$|(^|\.)position_ids$|decoder\.version$")
"""Names of tensors that older checkpoints hold and today's classes compute, or do not need."""


@dataclass(frozen=True)
class Place:
    """Place of a stored tensor: the name is the file's, not the model's."""

    file: Path
    name: str


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

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model reads and gives."""
        return vocabulary_size(self.tokenizer, self.architecture.get_text_config().vocab_size)

    @property
    def vocabulary(self) -> str:
        """Hash of these tokens."""
        return vocabulary_hash(self.tokenizer, self.vocab_size)

    @cached_property
    def weights(self) -> str:
        """Hash of the weights and type of their numbers: the same in processes that share a model.

        The first use reads the whole checkpoint.

        Raises:
            ModelError: a file cannot be read, or its tensors are not understood here.
        """
        folder = model_folder(self.config)
        with load_errors(folder):
            _places(empty_model(self.architecture, self.config), folder)
        return f"{checkpoint_fingerprint(folder)} {self.config.dtype}"

    def without_weights(self) -> LoadedModel:
        """Return a model that has no weights and computes nothing: facts and a tokenizer.

        Raises:
            ModelError: prompts for it cannot be encoded.
        """
        folder = model_folder(self.config)
        with load_errors(folder):
            model = empty_model(self.architecture, self.config)
            model.generation_config = generation_in(folder, self.architecture)
            loaded = LoadedModel(model, self.tokenizer, self.image_processor, None, self.config)
            try_prompts(loaded)
        return loaded


def read_facts(config: ModelConfig) -> CheckpointFacts:
    """Read the facts of a checkpoint from its files.

    Raises:
        ModelError: as ``load``; this architecture is not divided, or the checkpoint is quantised;
            quantisation is asked for.
    """
    if config.quantization != "none":
        raise ModelError(
            "a part of a model has no quantisation",
            field="quantization",
            remedy="leave quantization as it is by default",
        )
    folder = model_folder(config)
    with load_errors(folder):
        vision = _sees(folder)
        facts = architecture_in(folder)
        if quantisation_of(facts) is not None:
            raise ModelError(
                f"the checkpoint in {folder} is quantised, and so it is not divided",
                field="path",
                remedy="take the checkpoint that is not quantised, or load the whole model",
            )
        text = facts.get_text_config()
        tokenizer = load_tokenizer(folder, vision)
        check_rows(tokenizer, text.vocab_size)
        size = vocabulary_size(tokenizer, text.vocab_size)
        return CheckpointFacts(
            text.num_hidden_layers,
            context_length(text),
            text.hidden_size,
            end_tokens(generation_in(folder, facts), tokenizer, size),
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
        ModelError: as ``read_facts``; a file cannot be read, or its tensors are not understood
            here.
    """
    facts = read_facts(config)
    if not 0 <= first < last <= facts.num_layers:
        raise ConfigError(
            f"no layers {first} to {last} of {facts.num_layers}",
            field="layers",
            remedy=f"0 <= first < last <= {facts.num_layers}",
        )
    warn_of_overflow(config, facts.architecture.model_type)
    device = find_device(config.device)
    with load_errors(model_folder(config)):
        model = empty_model(facts.architecture, config)
        decoder = model.get_decoder()
        prefix = next(name for name, module in model.named_modules() if module is decoder)

        def wanted(name: str) -> bool:
            if name.startswith(_VISION):
                return False
            place = name.removeprefix(f"{prefix}.")
            if place.startswith("layers."):
                return first <= int(place.split(".")[1]) < last
            if place.startswith(("embed", "project_in")):
                return first == 0
            return last == facts.num_layers

        size = _fill(model, wanted, config, device)
        decoder.layers = nn.ModuleList(decoder.layers[first:last])
        if getattr(decoder, "rotary_emb", None) is not None:  # its angles are computed, not loaded
            rotary = type(decoder.rotary_emb)(config=facts.architecture.get_text_config())
            decoder.rotary_emb = rotary.to(device)
        model.eval().requires_grad_(False)
    return LoadedModel(model, facts.tokenizer, None, None, config), facts.num_layers, size


def load_vision(facts: CheckpointFacts) -> tuple[LoadedModel, int]:
    """Load a model's vision encoder, and nothing else of it; a text model has none.

    Returns:
        A model that can encode prompts and their images, and the bytes loaded.

    Raises:
        ModelError: as ``CheckpointFacts.without_weights`` and ``load_layers``.
    """
    loaded = facts.without_weights()
    if not facts.vision:
        return loaded, 0
    model, device = loaded.model, find_device(facts.config.device)
    with load_errors(model_folder(facts.config)):
        size = _fill(model, lambda name: name.startswith(_VISION), facts.config, device)
        encoder = model.model.visual
        rotary = type(encoder.rotary_pos_emb)(config=facts.architecture.vision_config)
        encoder.rotary_pos_emb = rotary.to(device)  # its angles are computed, not loaded
        model.eval().requires_grad_(False)
    return loaded, size


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


def empty_model(architecture: Any, config: ModelConfig) -> Any:
    """Return a model whose weights are all on the meta device."""
    vision = architecture_of(architecture.model_type).vision
    auto: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(architecture, dtype=DTYPES[config.dtype], trust_remote_code=False)


def _places(model: Any, folder: Path) -> dict[str, Place]:
    """Find each tensor of ``model``.

    Raises:
        ModelError: one is missing, or a stored one is not understood: it is no part of the model,
            it would have to be converted, it has another shape, or it is there twice.
    """
    stored, own = stored_tensors(folder), model.state_dict()
    places: dict[str, Place] = {}
    for match in match_tensors(model, stored):
        if match.name in own and match.whole and match.name not in places:
            shape, expected = stored[match.stored].shape, tuple(own[match.name].shape)
            if shape != expected:
                raise ModelError(
                    f"cannot load {folder}: {match.stored} is {shape}, config.json says {expected}",
                    field="path",
                    remedy="copy or download it again",
                )
            places[match.name] = Place(stored[match.stored].file, match.stored)
        elif not _COMPUTED.search(match.stored):
            raise ModelError(
                f"the checkpoint in {folder} holds {match.stored}, which is not understood here",
                field="path",
                remedy="load the whole model in one process, or take the original checkpoint",
            )
    # transformers ties the one to the other, whichever is stored, but not where both are.
    for pair in model.all_tied_weights_keys.items():
        for name, other in (pair, pair[::-1]):
            if name not in places and other in places:
                places[name] = places[other]
    missing = sorted(own.keys() - places.keys())
    if missing:
        raise ModelError(
            f"the checkpoint in {folder} lacks {', '.join(missing[:3])}",
            field="path",
            remedy="copy or download it again",
        )
    return places


def _fill(
    model: Any, wanted: Callable[[str], bool], config: ModelConfig, device: torch.device
) -> int:
    """Give ``model`` the ``wanted`` tensors, and return their bytes; the others are not read."""
    names: dict[Place, list[str]] = {}
    for name, place in _places(model, model_folder(config)).items():
        if wanted(name):
            names.setdefault(place, []).append(name)
    found: dict[str, torch.Tensor] = {}
    size = 0
    for file in sorted({place.file for place in names}):
        with readable(file), safe_open(file, "pt") as tensors:
            for place in (place for place in names if place.file == file):
                tensor = tensors.get_tensor(place.name).to(device, DTYPES[config.dtype])
                size += tensor.nbytes
                found.update(dict.fromkeys(names[place], tensor))
    model.load_state_dict(found, strict=False, assign=True)
    return size
