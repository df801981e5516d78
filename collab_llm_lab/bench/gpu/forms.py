"""The two sizes of everything: true configurations for a GPU, tiny ones for any processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""The last tokens of Qwen2-VL's vocabulary, in their order."""


@dataclass(frozen=True)
class Sizes:
    """A Qwen2-VL model.

    Attributes:
        rows: of embedding and head; those beyond the tokenizer's only pad them.
        rotary: positions of a head's pairs by time, height and width (M-RoPE).
        exits: layers with an early exit.
        spread: standard deviation of the random weights.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    rows: int
    tied: bool
    rotary: tuple[int, int, int]
    vision_layers: int
    vision_width: int
    vision_heads: int
    exits: tuple[int, ...]
    spread: float = 0.02


@dataclass(frozen=True)
class Form:
    """Sizes of a run.

    Attributes:
        tokens: the tokenizer's.
        context: longest session.
        filled: cached tokens before a timed pass.
        answer: tokens of an answer.
        product: [out, in] of the timed products.
        copied_bytes: copied to measure the bandwidth.
        serve_s: seconds of each load of the verifier.
    """

    small: Sizes
    large: Sizes
    tokens: int
    context: int
    filled: int
    answer: int
    repeats: int
    product: tuple[int, int]
    copied_bytes: int
    prefills: tuple[int, ...]
    sessions: tuple[int, ...]
    robots: tuple[int, ...]
    serve_s: float
    opened: int


# Qwen/Qwen2-VL-2B-Instruct and Qwen/Qwen2-VL-7B-Instruct, config.json
_QWEN_2B = Sizes(
    hidden=1536,
    layers=28,
    heads=12,
    key_heads=2,
    intermediate=8960,
    rows=151_936,
    tied=True,
    rotary=(16, 24, 24),
    vision_layers=32,
    vision_width=1280,
    vision_heads=16,
    exits=(7, 14, 21),
)
TRUE = Form(
    small=_QWEN_2B,
    large=replace(
        _QWEN_2B,
        hidden=3584,
        heads=28,
        key_heads=4,
        intermediate=18_944,
        rows=152_064,
        tied=False,
        exits=(4, 8, 12, 16, 20, 24),
    ),
    tokens=151_657,
    context=32_768,
    filled=512,
    answer=64,
    repeats=20,
    product=(18_944, 3584),
    copied_bytes=4 << 30,
    prefills=(256, 512, 2048),
    sessions=(1, 8, 32, 64),
    robots=(1, 8, 32),
    serve_s=5.0,
    opened=200,
)

_TINY = Sizes(
    hidden=64,
    layers=4,
    heads=4,
    key_heads=2,
    intermediate=128,
    rows=544,
    tied=True,
    rotary=(2, 3, 3),
    vision_layers=2,
    vision_width=32,
    vision_heads=2,
    exits=(1, 3),
    spread=0.1,
)
TINY = Form(
    small=_TINY,
    large=replace(
        _TINY, hidden=96, heads=6, intermediate=192, rows=576, tied=False, exits=(1, 2, 3)
    ),
    tokens=512,
    context=2048,
    filled=64,
    answer=16,
    repeats=3,
    product=(192, 96),
    copied_bytes=4 << 20,
    prefills=(32, 256),
    sessions=(1, 8, 64),
    robots=(1, 8),
    serve_s=0.5,
    opened=20,
)
