"""Loading a model through transformers, with errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import logging as transformers_logging

from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.adapters import ExitAdapters, check_exit_layers
from collab_llm_nodes.models.architectures import (
    ARCHITECTURES,
    architecture_of,
    check_other,
    decoder_parts,
)
from collab_llm_nodes.models.trained import readable, weight_files
from collab_llm_nodes.models.vocabulary import control_tokens, vocabulary_size

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class ModelConfig:
    """The model to load, and the way to load it."""

    path: str = setting(
        "", "Folder of the checkpoint, its hub id, or the name of a shipped one.", read_only=True
    )
    dtype: str = setting("float32", "Type of the weights.", choices=tuple(DTYPES), read_only=True)
    device: str = setting("cpu", "cpu, cuda or cuda:N.", read_only=True)
    quantization: str = setting(
        "none",
        "Weight-only quantisation; needs bitsandbytes (with accelerate) or torchao.",
        choices=("none", *QUANTIZED_BYTES),
        read_only=True,
    )
    exits: str | None = setting(
        None,
        "Folder of trained early-exit adapters; 'beside' is the checkpoint's own folder; unset"
        " means untrained (the plain LM head at each of exit_layers).",
        read_only=True,
    )
    exit_layers: tuple[int, ...] = setting(
        (), "Exits used, counted in layers done; empty: all that are trained.", read_only=True
    )
    local_files_only: bool = setting(False, "Never ask the hub.", read_only=True)
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
class LoadedModel:
    """A model ready to run, with what its prompts need.

    Attributes:
        model: a ``PreTrainedModel`` (whose own attributes carry no types).
        image_processor: None for text-only models.
        adapters: early exits, None when there are none.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil | None
    adapters: ExitAdapters | None
    config: ModelConfig

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that no prompt may spell out."""
        return control_tokens(self.tokenizer)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device


def load(config: ModelConfig) -> LoadedModel:
    """Load what ``config`` names. Nothing process-wide changes (``threads.py`` sets threads).

    Raises:
        ModelError: not found or offline, unknown architecture, no safetensors, no chat template
            (of a model that sees), no image processor, too little memory, no such device,
            quantisation not installed, adapters that do not fit. ``field`` names the setting.
    """
    device = device_named(config.device)
    folder = model_folder(config)
    model_type = model_type_of(folder)
    vision = architecture_of(model_type).vision
    tokenizer = load_tokenizer(folder, vision)
    image_processor = load_image_processor(folder) if vision else None
    _check_memory(count_weights(folder), config, device)
    model = _model(folder, config, device, vision)
    check_other(model)
    parts = decoder_parts(model)
    if vocabulary_size(tokenizer) > parts.head.out_features:
        raise ModelError(
            f"{vocabulary_size(tokenizer)} tokens but only {parts.head.out_features} logits",
            field="path",
            remedy="the tokenizer beside the weights belongs to another model",
        )
    adapters = None
    if config.exits is not None:
        source = folder if config.exits == "beside" else Path(config.exits).expanduser()
        adapters = ExitAdapters.load(source, parts, config.exit_layers)
    elif config.exit_layers:
        check_exit_layers(config.exit_layers, len(parts.layers))
        adapters = ExitAdapters(parts.hidden_size, config.exit_layers)
    if adapters is not None:
        adapters.to(device, DTYPES[config.dtype]).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, image_processor, adapters, config)


def device_named(name: str) -> torch.device:
    """Return the device ``name``: cpu, cuda or cuda:N.

    Raises:
        ModelError: this machine has none of this name.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise ModelError(
            f"device {name!r} cannot be used: {first_line}", field="device", remedy="use cpu"
        ) from error
    return device


def model_folder(config: ModelConfig) -> Path:
    """Return the checkpoint's folder; a hub id is downloaded to the hub's cache first.

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
    try:
        return Path(
            snapshot_download(
                config.path,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
                local_files_only=config.local_files_only,
            )
        )
    # Not found, not allowed, offline, not cached: all are OSError; a bad id is a ValueError.
    except (OSError, HFValidationError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{config.path!r} is no folder here and the hub did not give it: {first_line}",
            field="path",
            remedy="check the id and the network, or copy the checkpoint here and give its folder",
        ) from error


def model_type_of(folder: Path) -> str:
    """Return the architecture that the checkpoint in ``folder`` names.

    Raises:
        ModelError: it names none.
    """
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(facts["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} holds no readable config.json with a model_type: {error}",
            field="path",
            remedy=f"give a transformers checkpoint of {', '.join(ARCHITECTURES)}",
        ) from error


def load_tokenizer(folder: Path, vision: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer in ``folder``, of a model that sees images or of another.

    Raises:
        ModelError: there is none, or it has no chat template and the model sees images.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load the tokenizer in {folder}: {error}",
            field="path",
            remedy="copy tokenizer.json and tokenizer_config.json beside the weights",
        ) from error
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
    try:
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        if not isinstance(template, str):
            raise TypeError("chat_template is no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot read {file}: {type(error).__name__}: {error}",
            field="path",
            remedy="download the file again, or put a chat_template.jinja beside it",
        ) from error
    return template


def load_image_processor(folder: Path) -> Qwen2VLImageProcessorPil:
    """Load the image processor in ``folder``.

    Raises:
        ModelError: there is none.
    """
    # Always the PIL variant: it needs no torchvision, so pixels are the same on every machine.
    try:
        processor: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(
            folder, local_files_only=True
        )
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"cannot load the image processor in {folder}: {error}",
            field="path",
            remedy="copy preprocessor_config.json beside the weights",
        ) from error
    return processor


def _check_memory(weights: int, config: ModelConfig, device: torch.device) -> None:
    """Refuse what cannot fit before minutes are spent on reading it."""
    per_weight: float = DTYPES[config.dtype].itemsize
    if config.quantization != "none" and _quantizer(config) == "bitsandbytes":
        per_weight = QUANTIZED_BYTES[config.quantization]  # quantised while it is read
    needed = per_weight * weights
    available = _available_bytes(device)
    if needed > available:
        raise ModelError(
            f"too little memory on {device}: the weights take {needed / 2**30:.1f} GiB,"
            f" {available / 2**30:.1f} GiB are free",
            field="quantization",
            remedy="set quantization to int8 or int4, dtype to bfloat16, or take a smaller model",
        )


def count_weights(folder: Path) -> int:
    """Count the weights of the model in ``folder``; only headers of its files are read.

    Raises:
        ModelError: there is none, or one cannot be read.
    """
    count = 0
    for file in weight_files(folder):
        with readable(file), safe_open(file, "pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        count += sum(math.prod(shape) for shape in shapes)
    if not count:
        raise ModelError(
            f"{folder} holds no safetensors file",
            field="path",
            remedy="pickled weights are not loaded; convert them to safetensors",
        )
    return count


def _available_bytes(device: torch.device) -> float:
    """Free memory on ``device``; infinite where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024


def _quantizer(config: ModelConfig) -> str:
    """The installed package that can quantise."""
    if _installed("bitsandbytes") and _installed("accelerate"):
        return "bitsandbytes"
    if _installed("torchao"):
        return "torchao"
    raise ModelError(
        f"quantization {config.quantization!r} needs a package that is not installed",
        field="quantization",
        remedy="pip install bitsandbytes accelerate; or pip install torchao",
    )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """A bar per model spoils logs and tables; downloads (``snapshot_download``) keep theirs."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _model(folder: Path, config: ModelConfig, device: torch.device, vision: bool) -> Any:
    auto: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": DTYPES[config.dtype], "use_safetensors": True}
    quantizer = _quantizer(config) if config.quantization != "none" else None
    if quantizer == "bitsandbytes":
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=config.quantization == "int8",
            load_in_4bit=config.quantization == "int4",
            bnb_4bit_quant_type="nf4",  # made for weights, which are about normal; not the default
            bnb_4bit_compute_dtype=DTYPES[config.dtype],
        )
    try:
        with no_progress_bar():
            model, report = auto.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **options
            )
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"too little memory on {device}: {error}",
            field="device",
            remedy="set quantization, or free the device",
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load {folder}: {error}", field="path", remedy="check the checkpoint's files"
        ) from error
    if report["missing_keys"]:  # transformers would leave these random
        raise ModelError(
            f"the checkpoint in {folder} lacks {', '.join(sorted(report['missing_keys'])[:3])}",
            field="path",
            remedy="copy or download it again",
        )
    model = model if quantizer == "bitsandbytes" else model.to(device)
    model.eval().requires_grad_(False)
    if quantizer == "torchao":
        _quantize_with_torchao(model, config.quantization)
    return model


def _quantize_with_torchao(model: Any, kind: str) -> None:
    """Quantise the linear maps of the decoder layers; head and vision stay as they are."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    from torchao.utils import TorchAOBaseTensor

    scheme = Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig()
    layers = decoder_parts(model).layers
    try:
        quantize_(layers, scheme)
    except (RuntimeError, ValueError, ImportError, AssertionError, NotImplementedError) as error:
        raise ModelError(
            f"torchao cannot quantise this model to {kind}: {error}",
            field="quantization",
            remedy="use int8, or pip install bitsandbytes accelerate",
        ) from error
    # torchao passes over what it cannot group: then the model is as large as it was.
    weights = [m.weight for m in layers.modules() if isinstance(m, nn.Linear)]
    if not any(isinstance(weight, TorchAOBaseTensor) for weight in weights):
        raise ModelError(
            f"no map of this model is wide enough for {kind} in groups of 128",
            field="quantization",
            remedy="use int8",
        )
