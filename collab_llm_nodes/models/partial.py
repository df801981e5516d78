"""Parts of a checkpoint: some of its layers, its vision encoder, or its facts without weights.

A model can be divided among processes of which none could hold it:

    | part           | holds                              | made by                   |
    | -------------- | ---------------------------------- | ------------------------- |
    | a stage        | layers; embedding or LM head too   | ``load_layers``           |
    | the front      | the vision encoder, if there is one| ``load_vision``           |
    | a reader       | nothing: facts and a tokenizer     | ``read_facts``            |

transformers loads each part like a whole model, from a class that lacks the other parts: names,
conversions and quantisation are those of the whole, and other parts' tensors are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from collab_llm_nodes.errors import ConfigError, ModelError
from collab_llm_nodes.models.architectures import (
    ARCHITECTURES,
    architecture_of,
    context_length,
    deepstack_levels,
)
from collab_llm_nodes.models.checkpoint import (
    check_quantiser,
    check_tensors,
    quantisation_of,
)
from collab_llm_nodes.models.devices import find_device
from collab_llm_nodes.models.fingerprint import checkpoint_fingerprint, plain_tensors
from collab_llm_nodes.models.loading import (
    DTYPES,
    ONE_AT_A_TIME,
    LoadedModel,
    ModelConfig,
    architecture_in,
    auto_class,
    generation_in,
    load_errors,
    load_image_processor,
    load_tokenizer,
    model_folder,
    model_type_of,
    package_for,
    read_model,
    warn_of_overflow,
)
from collab_llm_nodes.models.prompt import try_prompts
from collab_llm_nodes.models.vocabulary import (
    check_rows,
    end_tokens,
    vocabulary_hash,
    vocabulary_size,
)


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
    def feature_width(self) -> int:
        """Width of a row of picture features; more than ``width`` with DeepStack."""
        return (1 + deepstack_levels(self.architecture)) * self.width

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model reads and gives."""
        return vocabulary_size(self.tokenizer, self.architecture.get_text_config().vocab_size)

    @property
    def vocabulary(self) -> str:
        """Hash of these tokens."""
        return vocabulary_hash(self.tokenizer, self.vocab_size)

    @property
    def numbers(self) -> str:
        """Type of the weights, with their quantisation while they load: "bfloat16 int4"."""
        kind = self.config.quantization
        return self.config.dtype if kind == "none" else f"{self.config.dtype} {kind}"

    @cached_property
    def weights(self) -> str:
        """Hash of the weights and type of their numbers: the same in processes that share a model.

        "<hash> bfloat16", or "<hash> bfloat16 int4 by bitsandbytes", since packages round
        differently. The first use reads the whole checkpoint.

        Raises:
            ModelError: a file cannot be read, tensors are missing, or a package of quantisation.
        """
        folder, device = model_folder(self.config), find_device(self.config.device)
        with load_errors(folder):
            package = package_for(self.config, self.architecture, device)
            _check_readable(self, device)
        by = "" if package is None else f" by {package}"
        return f"{checkpoint_fingerprint(folder)} {self.numbers}{by}"

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
        ModelError: as ``load``; this architecture is not divided.
    """
    folder = model_folder(config)
    with load_errors(folder):
        vision = _sees(folder)
        facts = architecture_in(folder)
        quantisation_of(facts)  # refuses a method that transformers would pass over
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

    def keep(model: Any) -> None:
        _keep_layers(model, first, last)

    model, size = _read_part(facts, keep)
    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList(decoder.layers[first:last])
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
    part, size = _read_part(facts, _keep_vision)
    loaded.model.model.visual = part.model.visual
    return loaded, size


def _read_part(facts: CheckpointFacts, keep: Callable[[Any], None]) -> tuple[Any, int]:
    """Load the part of a model that ``keep`` leaves of it, and return its bytes as well."""
    folder, device = model_folder(facts.config), find_device(facts.config.device)
    with load_errors(folder):
        _check_readable(facts, device)
        whole = type(empty_model(facts.architecture, facts.config))
        model = read_model(folder, facts.config, device, _part_class(whole, keep))
    tensors = {t.data_ptr(): t for v in model.state_dict().values() for t in plain_tensors(v)}
    return model, sum(tensor.nbytes for tensor in tensors.values())


def _part_class(whole: Any, keep: Callable[[Any], None]) -> Any:
    """Return a subclass of the class ``whole`` whose models ``keep`` prunes before they load."""

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        keep(self)
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {a: b for a, b in tied if {a, b} <= held}

    members = {
        "__init__": begin,
        "__module__": whole.__module__,
        "_keys_to_ignore_on_load_unexpected": ["."],  # other parts' tensors deserve no warning
    }
    return type(whole.__name__, (whole,), members)


def _keep_layers(model: Any, first: int, last: int) -> None:
    """Remove all of ``model`` but layers ``first`` to ``last - 1``, and the ends beside them.

    Layers keep their numbers: quantised checkpoints name them. Tied ends stay together, since a
    checkpoint may hold either.
    """
    decoder = model.get_decoder()
    begins, ends = first == 0, last == len(decoder.layers)
    tied = bool(model.all_tied_weights_keys) and (begins or ends)
    for number in {*range(len(decoder.layers))} - {*range(first, last)}:
        decoder.layers[number] = nn.Identity()
    for name, _ in list(decoder.named_children()):
        if name.startswith(("embed", "project_in")):
            kept = begins or (tied and name == "embed_tokens")
        else:
            kept = ends or name == "layers" or name.startswith("rotary")
        if not kept:
            setattr(decoder, name, nn.Identity())
    if not (ends or tied):
        model.set_output_embeddings(nn.Identity())
    if hasattr(model.model, "visual"):
        model.model.visual = nn.Identity()


def _keep_vision(model: Any) -> None:
    """Remove all of ``model`` but its vision encoder."""
    decoder = model.get_decoder()
    for name, _ in list(decoder.named_children()):
        setattr(decoder, name, nn.Identity())
    model.set_output_embeddings(nn.Identity())


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
            remedy=f"take one of {', '.join(n for n, a in ARCHITECTURES.items() if a.divided)}",
        )
    return architecture.vision


def empty_model(architecture: Any, config: ModelConfig) -> Any:
    """Return a model whose weights are all on the meta device, which has no memory."""
    auto = auto_class(architecture_of(architecture.model_type).vision)
    with ONE_AT_A_TIME, torch.device("meta"):
        return auto.from_config(architecture, dtype=DTYPES[config.dtype], trust_remote_code=False)


def _check_readable(facts: CheckpointFacts, device: torch.device) -> None:
    """Refuse a checkpoint of which some part could not be loaded here; no weight is read.

    Raises:
        ModelError: tensors or a package are missing; ``field`` is ``path``.
    """
    stored = quantisation_of(facts.architecture)
    if stored is not None:
        check_quantiser(stored, DTYPES[facts.config.dtype], device)
    else:
        model = empty_model(facts.architecture, facts.config)
        check_tensors(model, model_folder(facts.config))
