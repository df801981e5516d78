"""Loading a model through transformers, with errors that name a remedy."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging

from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.adapters import ExitAdapters, check_exit_layers
from collab_llm_nodes.models.architectures import (
    ARCHITECTURES,
    DecoderParts,
    architecture_of,
    check_eager,
    decoder_parts,
)
from collab_llm_nodes.models.checkpoint import match_tensors, quantisation_of, stored_tensors
from collab_llm_nodes.models.devices import find_device, free_bytes
from collab_llm_nodes.models.footprint import check_fits, weight_bytes
from collab_llm_nodes.models.processor import load_processor, written_tokens
from collab_llm_nodes.models.prompt import begun_thought, takes_system, try_prompts
from collab_llm_nodes.models.quantised import (
    check_quantised,
    quantization_options,
    quantization_package,
    quantized_bytes,
)
from collab_llm_nodes.models.tokenizer import token_id
from collab_llm_nodes.models.trained import SUBFOLDER
from collab_llm_nodes.models.vocabulary import (
    check_rows,
    control_tokens,
    end_tokens,
    shared_sizes,
    vocabulary_size,
)

if TYPE_CHECKING:
    from collab_llm_nodes.models.guided_text import Guides

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
QUANTIZATIONS = ("none", "int8", "int4")
_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Files of a checkpoint beside its weights."""

# A checkpoint is data: its code is not run, and nobody is asked whether to run it.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


ONE_AT_A_TIME = threading.Lock()
"""Held while transformers makes a model: it patches torch for the whole process meanwhile."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to load, and how to load it."""

    path: str = setting(
        "", "Folder of the checkpoint, its hub id, or the name of a shipped one.", read_only=True
    )
    dtype: str = setting("float32", "Type of the weights.", choices=tuple(DTYPES), read_only=True)
    device: str = setting("cpu", "cpu, cuda or cuda:N.", read_only=True)
    quantization: str = setting(
        "none",
        "Weight-only quantisation, by torchao or by bitsandbytes with accelerate; torchao's int4"
        " needs CUDA and dtype bfloat16.",
        choices=QUANTIZATIONS,
        read_only=True,
    )
    threads: int = setting(
        0,
        "CPU threads of this process's forward passes, set where the process begins; 0: one for a"
        " small model, else torch's own choice.",
        low=0,
        high=1024,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class TargetConfig(ModelConfig):
    """A model whose early exits are used."""

    exits: str | None = setting(
        None,
        "Folder of trained early-exit adapters; 'beside' is the checkpoint's own folder; unset"
        " means untrained (the plain LM head at each of exit_layers).",
        read_only=True,
    )
    exit_layers: tuple[int, ...] = setting(
        (),
        "Exits used, counted in layers done; empty: all that are trained."
        " Name fewer where they cost more time than they save.",
        read_only=True,
    )


def with_exits(config: ModelConfig, exits: str | None) -> TargetConfig:
    """Return ``config`` with the early exits in the folder ``exits``, or with none."""
    own = {each.name: getattr(config, each.name) for each in fields(ModelConfig)}
    return TargetConfig(**own, exits=exits)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with tokenizer and image processor.

    Attributes:
        model: a ``PreTrainedModel`` (whose own attributes carry no types).
        image_processor: of models whose pictures are encoded here; None for others.
        processor: transformers' own (``models/processor.py``), of other models that see; else None.
        adapters: early exits, None when there are none.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil | None
    adapters: ExitAdapters | None
    config: ModelConfig
    processor: Any = None

    @property
    def sees(self) -> bool:
        """True if prompts may hold pictures."""
        return self.image_processor is not None or self.processor is not None

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that no prompt may spell out."""
        found = control_tokens(self.tokenizer, self.vocab_size)
        written = () if self.processor is None else written_tokens(self.processor)
        return tuple(dict.fromkeys((*found, *written)))

    @cached_property
    def begun_thought(self) -> str:
        """Marker of a thought in which every answer to a chat begins; mostly none."""
        return begun_thought(self)

    @cached_property
    def takes_system(self) -> bool:
        """True if chats may begin with a system turn; else the first user turn begins with it."""
        return takes_system(self)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids that the model reads and gives."""
        return vocabulary_size(self.tokenizer, self.model.config.get_text_config().vocab_size)

    @cached_property
    def vocabulary(self) -> str:
        """Hash of these tokens."""
        *_, own = self.shared_sizes
        return own

    @cached_property
    def shared_sizes(self) -> Mapping[str, int]:
        """Vocabularies of drafts for this model, and the number of ids shared with each."""
        return shared_sizes(self.tokenizer, self.vocab_size)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @cached_property
    def guides(self) -> Guides:
        """The guides of this model's answers; the first use takes up to a second.

        Raises:
            ModelError: the tokenizer cannot be used for them.
        """
        from collab_llm_nodes.models.guided_text import Guides  # llguidance: a GPU check has none

        size = self.vocab_size
        eos = end_tokens(self.model.generation_config, self.tokenizer, size)
        control = [token_id(self.tokenizer, token) for token in self.control_tokens]
        return Guides(self.tokenizer, size, eos, control)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device


def load(config: ModelConfig) -> LoadedModel:
    """Load the model that ``config`` names, and encode a small prompt of each kind.

    Nothing process-wide changes (``threads.py`` sets threads), except for CUDA, which is set up
    where it is used (``devices.prepare``).

    Raises:
        ModelError: not found or offline, unknown architecture, no safetensors, no chat template
            (of a model that sees), no image processor, too little memory, no such device,
            quantisation that cannot be done here, adapters that do not fit, a prompt that cannot be
            encoded, or any other error of a library. ``field`` names the setting.
    """
    device = find_device(config.device)
    folder = model_folder(config)
    with load_errors(folder):
        loaded = _load(folder, config, device)
        try_prompts(loaded)
    return loaded


def load_errors(folder: Path) -> AbstractContextManager[None]:
    """Turn all errors of loading the model in ``folder`` into a ModelError."""
    return translate_errors(
        ModelError,
        f"cannot load {folder}",
        field="path",
        remedy="check the checkpoint's files, and install the packages they need",
    )


def _load(folder: Path, config: ModelConfig, device: torch.device) -> LoadedModel:
    model_type = model_type_of(folder)
    architecture = architecture_of(model_type)
    vision, known = architecture.vision, architecture.known
    tokenizer = load_tokenizer(folder, vision)
    image_processor = load_image_processor(folder) if vision and known else None
    processor = load_processor(folder, model_type, tokenizer) if vision and not known else None
    warn_of_overflow(config, model_type)
    package = package_for(config, architecture_in(folder), device)
    _check_memory(folder, config, device, package)
    model = read_model(folder, config, device, auto_class(vision))
    check_eager(model)
    parts = decoder_parts(model)
    check_rows(tokenizer, parts.head.out_features)
    model.generation_config = generation_in(folder, model.config)
    adapters = _early_exits(folder, config, parts)
    if adapters is not None:
        adapters.to(device, DTYPES[config.dtype]).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, image_processor, adapters, config, processor)


def _early_exits(folder: Path, config: ModelConfig, parts: DecoderParts) -> ExitAdapters | None:
    if not isinstance(config, TargetConfig):
        return None
    if config.exits is not None:
        source = folder if config.exits == "beside" else Path(config.exits).expanduser()
        return ExitAdapters.load(source, parts, config.exit_layers)
    if not config.exit_layers:
        return None
    check_exit_layers(config.exit_layers, len(parts.layers))
    return ExitAdapters(parts.hidden_size, config.exit_layers)


def model_folder(config: ModelConfig, *, offline: bool = False, weights: bool = True) -> Path:
    """Return the checkpoint's folder; a hub id is downloaded to the hub's cache first.

    Args:
        offline: look for a hub id in the cache only.
        weights: download them, too; else configuration and tokenizer only.

    Raises:
        ModelError: no model is named, or it is not found.
    """
    if not config.path:
        raise ModelError(
            "no model is named",
            field="path",
            remedy="give a folder, a hub id, or a shipped one's name such as nav-draft: parameter"
            " model.path of the node, launch argument model, option --model",
        )
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if "/" not in config.path:
        return shipped_model(config.path)
    if config.path[0] in "/.~" or config.path.count("/") != 1:
        raise ModelError(
            f"no such folder: {config.path!r}",
            field="path",
            remedy="give the folder of a checkpoint, or a hub id such as Qwen/Qwen2-VL-2B-Instruct",
        )
    with translate_errors(
        ModelError,
        f"{config.path!r} is no folder here and the hub did not give it",
        field="path",
        remedy="check the id and the network, or copy the checkpoint here and give its folder",
    ):
        if weights:
            ours = [f"{SUBFOLDER}/*"]
            snapshot_download(config.path, allow_patterns=ours, local_files_only=offline)
        return Path(
            snapshot_download(
                config.path,
                allow_patterns=[*_DESCRIPTION, "*.safetensors"] if weights else _DESCRIPTION,
                ignore_patterns=["*/*", "consolidated*"],  # the same weights in another form
                local_files_only=offline,
            )
        )


def model_type_of(folder: Path) -> str:
    """Return the architecture that the checkpoint in ``folder`` names.

    Raises:
        ModelError: it names none.
    """
    with translate_errors(
        ModelError,
        f"{folder} holds no readable config.json with a model_type",
        field="path",
        remedy=f"give a transformers checkpoint of {', '.join(ARCHITECTURES)}",
    ):
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(facts["model_type"])


def architecture_in(folder: Path) -> Any:
    """Return transformers' configuration of the model in ``folder``.

    Raises:
        ModelError: it cannot be read.
    """
    with translate_errors(
        ModelError,
        f"cannot read {folder / 'config.json'}",
        field="path",
        remedy="copy or download it again",
    ):
        return AutoConfig.from_pretrained(folder, **LOCAL)


def generation_in(folder: Path, architecture: Any) -> GenerationConfig:
    """Return the generation settings in ``folder``, or else those of the configuration.

    transformers passes over a damaged file, and the end tokens that only it names are lost.

    Raises:
        ModelError: the file cannot be read.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return GenerationConfig.from_model_config(architecture)
    with translate_errors(
        ModelError, f"cannot read {file}", field="path", remedy="copy or download it again"
    ):
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        ends = found.eos_token_id
        if not all(isinstance(i, int) for i in (ends if isinstance(ends, list) else [ends or 0])):
            raise TypeError(f"eos_token_id is {ends!r}")
        return found


def load_tokenizer(folder: Path, vision: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder``, of a model that sees images or of another.

    Raises:
        ModelError: there is none, or it has no chat template and the model sees images.
    """
    with translate_errors(
        ModelError,
        f"cannot load the tokenizer in {folder}",
        field="path",
        remedy="copy this model's tokenizer.json and tokenizer_config.json beside the weights;"
        " custom code is not run",
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **LOCAL)
    if tokenizer.chat_template is None:  # older checkpoints keep it with the processor
        legacy = folder / "chat_template.json"
        if legacy.is_file():
            tokenizer.chat_template = _legacy_template(legacy)
    if not tokenizer.chat_template and vision:  # base models of text read raw text
        raise ModelError(
            f"the tokenizer in {folder} has no chat template",
            field="path",
            remedy="use an instruction-tuned checkpoint, or put a chat_template.jinja beside it",
        )
    return tokenizer


def _legacy_template(file: Path) -> str:
    with translate_errors(
        ModelError,
        f"cannot read {file}",
        field="path",
        remedy="download the file again, or put a chat_template.jinja beside it",
    ):
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        if not isinstance(template, str):
            raise TypeError("chat_template is no text")
        return template


def load_image_processor(folder: Path) -> Qwen2VLImageProcessorPil:
    """Load the image processor in ``folder``.

    Raises:
        ModelError: there is none.
    """
    # Always the PIL variant: it needs no torchvision, so pixels are the same on every machine.
    with translate_errors(
        ModelError,
        f"cannot load the image processor in {folder}",
        field="path",
        remedy="copy preprocessor_config.json beside the weights",
    ):
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(
            folder, local_files_only=True
        )
        if not (processor.size["shortest_edge"] and processor.size["longest_edge"]):
            raise ValueError("its size lacks shortest_edge or longest_edge")
        return processor


def warn_of_overflow(config: ModelConfig, model_type: str) -> None:
    """Log a warning for Qwen models in float16, whose activations overflow there.

    QwenLM/Qwen3#761, huggingface/transformers#33294.
    """
    if config.dtype == "float16" and model_type.startswith("qwen"):
        log.warning(
            "%s in float16: activations of Qwen models overflow in it; set dtype to bfloat16",
            config.path,
        )


def package_for(config: ModelConfig, architecture: Any, device: torch.device) -> str | None:
    """Return the package that quantises the model while it loads; None: it is not asked for.

    Raises:
        ModelError: none can, or the checkpoint is quantised already; ``field`` is ``quantization``.
    """
    if config.quantization == "none":
        return None
    if quantisation_of(architecture) is not None:
        raise ModelError(
            "the checkpoint is quantised already",
            field="quantization",
            remedy="leave it as it is by default",
        )
    return quantization_package(config.quantization, DTYPES[config.dtype], device)


def _check_memory(
    folder: Path, config: ModelConfig, device: torch.device, package: str | None
) -> None:
    """Refuse a model that cannot fit before minutes are spent on reading it."""
    dtype = DTYPES[config.dtype]

    def bytes_of(name: str, dimensions: int) -> float:
        if package is None:
            return dtype.itemsize
        return quantized_bytes(config.quantization, package, name, dimensions, dtype)

    facts = architecture_in(folder)
    if quantisation_of(facts) is None:
        weights = weight_bytes(folder, bytes_of)
    else:
        weights = sum(tensor.bytes for tensor in stored_tensors(folder).values())
    check_fits(weights, facts, dtype, device, free_bytes(device))


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars while a model loads; downloads keep theirs."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def auto_class(vision: bool) -> Any:
    """Return the class of transformers that chooses the class of a model."""
    return AutoModelForImageTextToText if vision else AutoModelForCausalLM


def read_model(folder: Path, config: ModelConfig, device: torch.device, model_class: Any) -> Any:
    """Read the weights in ``folder`` to ``device``; weights are quantised one by one.

    Args:
        model_class: of the model, or of a part of it, which reads its own tensors only.

    Raises:
        ModelError: weights are missing or mean nothing without their scales, too little memory,
            or quantisation that cannot be done here.
    """
    architecture = architecture_in(folder)
    package = package_for(config, architecture, device)
    dtype = DTYPES[config.dtype]
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    if package is not None:
        options["quantization_config"] = quantization_options(package, config.quantization, dtype)
    # Straight to the device; without accelerate, which is optional, through the host's memory.
    if package == "bitsandbytes" or (device.type != "cpu" and is_accelerate_available()):
        options["device_map"] = {"": device}
    try:
        with ONE_AT_A_TIME, no_progress_bar():
            model, report = model_class.from_pretrained(
                folder, output_loading_info=True, **LOCAL, **options
            )
        if report["missing_keys"]:  # transformers would leave these random
            raise ModelError(
                f"the checkpoint in {folder} lacks {', '.join(sorted(report['missing_keys'])[:3])}",
                field="path",
                remedy="copy or download it again",
            )
        if quantisation_of(architecture) is None:  # else numbers come with their scales
            match_tensors(model, stored_tensors(folder))
        model.eval().requires_grad_(False)
        if package == "torchao":
            check_quantised(model, config.quantization)
        if device.type != "cpu" and "device_map" not in options:
            model.to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"too little memory on {device}: {error}",
            field="device",
            remedy="set quantization, or free the device",
        ) from error
    return model
