"""The means of a step: sizes, device, random models, and the report."""

from __future__ import annotations

import gc
import io
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from collab_llm_lab.bench.gpu.forms import SPECIAL, Form, Sizes
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.loading import DTYPES, LoadedModel, ModelConfig
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode
from collab_llm_nodes.models.tokenizer import CHAT_TEMPLATE, vision_tokens

Send = Callable[[dict[str, Any]], None]
PICTURE = (640, 480)


class Lab:
    """Sizes, device, random models and the report of one worker.

    Args:
        send: takes each finding at once, so that a step that is ended has not worked in vain.
    """

    def __init__(self, form: Form, device: torch.device, send: Send) -> None:
        self.form = form
        self.device = device
        self._send = send
        self._held: tuple[tuple[Sizes, str], LoadedModel] | None = None

    @property
    def cuda(self) -> bool:
        """The device is a GPU; else steps that need one run their stand-ins."""
        return self.device.type == "cuda"

    def figure(self, name: str, value: Any) -> None:
        """Report something measured."""
        self._send({"figure": name, "value": value})

    def verdict(self, name: str, ok: bool, **facts: Any) -> None:
        """Report whether something is right, with the facts that say so."""
        self._send({"verdict": name, "facts": {"ok": bool(ok), **facts}})

    def near(self, name: str, found: float, limit: float, **facts: Any) -> None:
        """Report whether an error is within its limit; NaN is not."""
        self.verdict(name, found <= limit, found=found, limit=limit, **facts)

    def spoil(self) -> None:
        """Report that the device is of no use to this process any more."""
        self._send({"spoilt": True})

    def attempt(self, name: str, part: Callable[[], object]) -> None:
        """Run a part of a step; an error is a verdict, and the step's other parts go on."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            traceback.print_exc()
            self.verdict(name, False, exception=f"{type(error).__name__}: {error}"[:500])

    def ids(self, count: int, seed: int = 0) -> tuple[int, ...]:
        """Return random ids of ordinary tokens."""
        ordinary = self.form.tokens - len(SPECIAL)
        return tuple(random.Random(seed).choices(range(ordinary), k=count))

    def text(self, count: int, seed: int = 0) -> EncodedPrompt:
        """Return a prompt of so many tokens without a picture."""
        return EncodedPrompt(self.ids(count, seed))

    def shown(self, loaded: LoadedModel, seed: int = 0) -> EncodedPrompt:
        """Return a prompt with a picture of 640 x 480 and some words."""
        pixels = np.random.default_rng(seed).integers(0, 256, (*PICTURE[::-1], 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        words = " ".join(str(i) for i in self.ids(20, seed))
        return encode(Prompt(words, (file.getvalue(),)), loaded)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Words that are numbers, then Qwen2-VL's special tokens."""
        ordinary = self.form.tokens - len(SPECIAL)
        words = [*(str(i) for i in range(ordinary)), *SPECIAL]
        model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="0")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=list(SPECIAL),
            chat_template=CHAT_TEMPLATE,
        )

    def held(self, sizes: Sizes, dtype: str) -> LoadedModel:
        """Return a model of these sizes, the same for consecutive steps; another is given up."""
        if self._held is None or self._held[0] != (sizes, dtype):
            self.give_up()
            self._held = (sizes, dtype), self.build(sizes, dtype)
        return self._held[1]

    def engine(self, loaded: LoadedModel, candidates: int = 0) -> Engine:
        """Return the engine of GPUs; on a CPU its code runs as well, without kernels and graphs."""
        return Engine(loaded, candidates=candidates, paged=True)

    def give_up(self) -> None:
        """Give up the model that is held."""
        self._held = None
        self.tidy()

    def tidy(self) -> None:
        """Return unused memory to the device."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def build(self, sizes: Sizes, dtype: str, seed: int = 0) -> LoadedModel:
        """Return a random model with early exits, made on the device; equal seeds, equal weights.

        No weight has the value that an implementation might leave out: biases and adapters are not
        zero, and the norms' weights are not one.
        """
        torch.manual_seed(seed)
        with torch.device(self.device):
            model = Qwen2VLForConditionalGeneration._from_config(
                self.configuration(sizes), dtype=DTYPES[dtype]
            )
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight.add_(torch.empty_like(weight).normal_(0, 0.1, generator=generator))
        adapters = ExitAdapters(sizes.hidden, sizes.exits).to(self.device, DTYPES[dtype])
        with torch.no_grad():
            for weight in adapters.parameters():
                weight.normal_(0, sizes.spread, generator=generator)
        config = ModelConfig(path="random", dtype=dtype, device=str(self.device))
        processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        )
        return LoadedModel(
            model.eval().requires_grad_(False),
            self.tokenizer,
            processor,
            adapters.eval().requires_grad_(False),
            config,
        )

    def configuration(self, sizes: Sizes) -> Qwen2VLConfig:
        """Return the configuration of a model of these sizes."""
        ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        text = {
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.key_heads,
            "intermediate_size": sizes.intermediate,
            "vocab_size": sizes.rows,
            "max_position_embeddings": self.form.context,
            "rms_norm_eps": 1e-6,
            "initializer_range": sizes.spread,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": list(sizes.rotary),
            },
            **ends,
        }
        vision = {
            "depth": sizes.vision_layers,
            "embed_dim": sizes.vision_width,
            "hidden_size": sizes.hidden,
            "num_heads": sizes.vision_heads,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": sizes.spread,
        }
        return Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=sizes.tied,
            **vision_tokens(self.tokenizer),
            **ends,
        )


def fewer_layers(sizes: Sizes, layers: int) -> Sizes:
    """Return the same widths with few layers, of the vision encoder too."""
    return replace(
        sizes,
        layers=layers,
        vision_layers=1,
        exits=tuple(layer for layer in sizes.exits if layer < layers),
    )


def weights_read(loaded: LoadedModel) -> int:
    """Return the bytes of weights that one pass of the decoder reads: all layers and the head."""
    layers = sum(p.nbytes for p in loaded.model.get_decoder().layers.parameters())
    head: int = loaded.model.get_output_embeddings().weight.nbytes
    return layers + head
