"""What a checkpoint would be in this engine, by its files alone: the model is not loaded.

Every fault becomes a :class:`Reason`, so that one look shows all of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from collab_llm_nodes.engine.engine import grows_trees
from collab_llm_nodes.engine.static import StaticBackend
from collab_llm_nodes.errors import CollabError, within
from collab_llm_nodes.models.adapters import NAME as ADAPTERS
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import (
    architecture_of,
    check_eager,
    context_length,
    decoder_parts,
)
from collab_llm_nodes.models.checkpoint import (
    check_quantiser,
    check_tensors,
    load_head,
    quantisation_of,
    stored_tensors,
    weight_files,
)
from collab_llm_nodes.models.footprint import footprint
from collab_llm_nodes.models.loading import (
    DTYPES,
    LoadedModel,
    ModelConfig,
    TargetConfig,
    architecture_in,
    generation_in,
    load_errors,
    load_image_processor,
    load_tokenizer,
    model_folder,
    model_type_of,
)
from collab_llm_nodes.models.partial import empty_model
from collab_llm_nodes.models.processor import load_processor
from collab_llm_nodes.models.prompt import Prompt, encode, try_prompts
from collab_llm_nodes.models.quantised import quantization_package, quantized_bytes
from collab_llm_nodes.models.trained import holds_trained
from collab_llm_nodes.models.vocabulary import check_rows, shared_sizes, vocabulary_size

PICTURE = (640, 480)
"""Width and height of the picture whose tokens are counted."""
QUESTION = "What is in front of you?"
_PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Reason:
    """A fault for which a model, or a pair, cannot be used: a typed error as data."""

    code: str
    field: str
    message: str
    remedy: str

    @classmethod
    def of(cls, error: CollabError) -> Reason:
        return cls(error.code, error.field, str(error.args[0]), error.remedy)


@dataclass(frozen=True)
class Memory:
    """Memory of a model in one type of numbers [bytes].

    Attributes:
        weights: None for a checkpoint that is stored quantised.
        kv_per_1000: keys and values of 1,000 tokens of one session.
        largest_pass: activations of 512 tokens, and of a full HD picture if it sees.
    """

    weights: int | None
    kv_per_1000: int
    largest_pass: int


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a model.

    Attributes:
        hash: by which draft and target compare them.
        tokens: ids in use.
        rows: of the LM head, padding included.
    """

    hash: str
    tokens: int
    rows: int


@dataclass(frozen=True)
class Capabilities:
    """The code that would run a model, and what it can do.

    Attributes:
        name: ``layer loop`` or ``eager``.
        batches: one pass takes many sessions; else they come one by one.
        trees: it reads several continuations in one pass.
        stages: its layers can be divided over several devices.
    """

    name: str
    batches: bool
    trees: bool
    stages: bool


@dataclass(frozen=True)
class Exits:
    """Early exits trained for a model: layers after which they fire, and their bottleneck."""

    layers: tuple[int, ...]
    width: int


@dataclass
class Inspection:
    """What is known of one model; None where its files do not say.

    Attributes:
        chat: a question in the form of its chat template.
        sees: it reads pictures.
        picture_tokens: of a picture of 640 x 480.
        stored: bytes of the weight files that are here; 0 if there are none.
        quantised: method by which the weights are stored.
        memory: by type of numbers; int8 and int4 with all else in bfloat16.
        reasons: faults, each with its remedy.
        notes: what a user should know besides.
        tokens: ids of the tokens in use.
        shared: ``vocabulary.shared_sizes``, by which drafts are compared with this model.
    """

    config: ModelConfig
    model_type: str | None = None
    layers: int | None = None
    context: int | None = None
    parameters: int | None = None
    vocabulary: Vocabulary | None = None
    chat: str | None = None
    sees: bool | None = None
    picture_tokens: int | None = None
    backend: Capabilities | None = None
    exits: Exits | None = None
    quantised: str | None = None
    stored: int = 0
    memory: Mapping[str, Memory] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tokens: Mapping[str, int] = field(default_factory=dict, repr=False)
    shared: Mapping[str, int] = field(default_factory=dict, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the findings for JSON, without the tokens themselves."""
        found = asdict(replace(self, tokens={}, shared={}))
        del found["tokens"], found["shared"]
        return found


def inspect_model(config: ModelConfig, side: str) -> Inspection:
    """Inspect the model that ``config`` names; of a hub id only small files are downloaded.

    Args:
        side: ``target`` or ``draft``: begins the field of each reason.
    """
    found = Inspection(config)
    _Inspector(found, side).run()
    return found


class _Inspector:
    """Fills an :class:`Inspection` in, step by step; a step that fails adds its reason."""

    def __init__(self, found: Inspection, side: str) -> None:
        self._found = found
        self._config = found.config
        self._side = side

    def run(self) -> None:
        with self._noted():
            self._open()
            for step in (self._quantisation, self._memories, self._vocabulary, self._files):
                with self._noted():
                    step()
            if self._found.vocabulary is not None:  # without its tokenizer it has no prompts
                self._try_prompts()

    def _open(self) -> None:
        """Find the model, and refuse one that is built differently."""
        found = self._found
        self._folder = model_folder(self._config, weights=False)
        found.model_type = model_type_of(self._folder)
        self._kind = architecture_of(found.model_type)
        found.sees = self._kind.vision
        self._architecture = architecture_in(self._folder)
        half = replace(self._config, dtype="bfloat16")  # what is read of it takes little memory
        self._empty = empty_model(self._architecture, half)
        check_eager(self._empty)
        self._text = self._architecture.get_text_config()
        found.layers, found.context = self._text.num_hidden_layers, context_length(self._text)
        found.parameters = sum(weight.numel() for weight in self._empty.parameters())

    def _try_prompts(self) -> None:
        image_processor = processor = None
        if self._found.sees and self._kind.known:
            image_processor = load_image_processor(self._folder)
        elif self._found.sees:
            model_type = str(self._architecture.model_type)
            processor = load_processor(self._folder, model_type, self._tokenizer)
        loaded = LoadedModel(
            self._empty, self._tokenizer, image_processor, None, self._config, processor
        )
        for examine in (self._capabilities, self._prompts, self._exits):
            with self._noted():
                examine(loaded)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Turn an error inside into a reason."""
        try:
            with within(self._side), load_errors(Path(self._config.path)):
                yield
        except CollabError as error:
            self._found.reasons.append(Reason.of(error))

    def _quantisation(self) -> None:
        """Find how the weights are stored, and the package that reads or quantises them."""
        dtype, device = DTYPES[self._config.dtype], torch.device(self._config.device)
        found = quantisation_of(self._architecture)
        if found is not None:
            method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
            self._found.quantised = str(getattr(method, "value", method))
            check_quantiser(found, dtype, device)
        elif self._config.quantization != "none":
            quantization_package(self._config.quantization, dtype, device)

    def _vocabulary(self) -> None:
        self._tokenizer = load_tokenizer(self._folder, bool(self._found.sees))
        rows = self._text.vocab_size
        size = vocabulary_size(self._tokenizer, rows)
        tokens = self._tokenizer.get_vocab()
        self._found.tokens = {token: i for token, i in tokens.items() if i < size}
        self._found.shared = shared_sizes(self._tokenizer, size)
        *_, own = self._found.shared
        self._found.vocabulary = Vocabulary(own, size, rows)
        check_rows(self._tokenizer, rows)
        generation_in(self._folder, self._architecture)  # it names end tokens

    def _memories(self) -> None:
        memory = {name: self._memory(dtype) for name, dtype in DTYPES.items()}
        if not self._found.quantised:
            memory |= {kind: self._memory(torch.bfloat16, kind) for kind in ("int8", "int4")}
        self._found.memory = memory

    def _memory(self, dtype: torch.dtype, kind: str | None = None) -> Memory:
        """Return the memory in ``dtype``, with maps quantised to ``kind`` by torchao."""

        def bytes_of(name: str, dimensions: int) -> float:
            if kind is None:
                return dtype.itemsize
            return quantized_bytes(kind, "torchao", name, dimensions, dtype)

        weights = sum(
            weight.numel() * bytes_of(name, weight.ndim)
            for name, weight in self._empty.named_parameters()
        )
        beside = footprint(self._architecture, dtype)
        stored = self._found.quantised is not None
        return Memory(None if stored else round(weights), 1000 * beside.column, beside.largest_pass)

    def _capabilities(self, loaded: LoadedModel) -> None:
        own_loop = StaticBackend.supports(loaded)
        self._found.backend = Capabilities(
            "layer loop" if own_loop else "eager",
            own_loop,
            grows_trees(loaded, eager=not own_loop),
            own_loop and self._kind.divided,
        )

    def _prompts(self, loaded: LoadedModel) -> None:
        try_prompts(loaded)
        if not loaded.tokenizer.chat_template:
            self._found.notes.append("no chat template: it reads raw text only")
            return
        question = encode(Prompt(QUESTION), loaded).ids
        self._found.chat = str(loaded.tokenizer.decode(list(question)))
        if loaded.sees:
            seen = encode(Prompt(QUESTION, (picture(),)), loaded).ids
            self._found.picture_tokens = len(seen) - len(question)

    def _files(self) -> None:
        """Check the weight files by their headers, if any of them is here."""
        named = weight_files(self._folder)
        files = [file for file in named if file.exists()]
        pickled = [file for pattern in _PICKLED for file in self._folder.glob(pattern)]
        lost = named and Path(self._config.path).is_dir()  # of a hub's model they are still to come
        if not files and not pickled and not lost:
            self._found.notes.append("its weights are not here: sizes are of config.json")
            return
        self._found.stored = sum(file.stat().st_size for file in files)
        if self._found.quantised:
            stored_tensors(self._folder)  # its weights have other names, but must be here
        else:
            check_tensors(self._empty, self._folder)

    def _exits(self, loaded: LoadedModel) -> None:
        """Find a target's trained exits: those that its configuration names, or those beside it.

        Exits are known by their model's head, which is read for this, if it is here.
        """
        config = self._config
        named, layers = (
            (config.exits, config.exit_layers) if isinstance(config, TargetConfig) else (None, ())
        )
        if self._side != "target":
            return
        if named is None and not holds_trained(self._folder, ADAPTERS, "exits"):
            return
        if self._found.quantised or not self._found.stored:
            self._found.notes.append("whether its early exits fit shows when it is loaded")
            return
        load_head(loaded.model, self._folder)
        folder = self._folder if named in (None, "beside") else Path(str(named)).expanduser()
        exits = ExitAdapters.load(folder, decoder_parts(loaded.model), layers)
        self._found.exits = Exits(exits.layers, exits.width)


def picture() -> bytes:
    """Return a JPEG of 640 x 480."""
    file = io.BytesIO()
    Image.effect_mandelbrot(PICTURE, (-2.0, -1.2, 1.0, 1.2), 100).convert("RGB").save(file, "JPEG")
    return file.getvalue()
