"""Prompts: an instruction and camera images become token ids and pixels."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput, ModelError, translate_errors
from collab_llm_nodes.models.architectures import context_length
from collab_llm_nodes.models.pictures import MAX_SCANS, Picture, decode
from collab_llm_nodes.models.processor import process
from collab_llm_nodes.models.thoughts import is_thought_tag, opened_thought
from collab_llm_nodes.models.turns import MAX_TURNS, Turn, check_texts, fold_system, texts

if TYPE_CHECKING:  # loading itself tries prompts
    from collab_llm_nodes.models.loading import LoadedModel

log = logging.getLogger(__name__)

_FULL_HD = 1920 * 1080  # of cameras; for small models far more than they keep
_LONGEST_RATIO = 200  # of a picture's sides, as Qwen-VL's
_SAMPLE = "Go on."
_MARK = "Mind the system turn."


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        text: the user turn; the chat template is applied by :func:`encode`.
        images: JPEG (or PNG) bytes, shown before the text.
        decoded: the same images, decoded elsewhere and of :func:`scaled_size`; empty: decode them.
        turns: earlier ones: at most one system turn, then user and assistant alternately.
        raw: the model reads ``text`` as it is, without chat template and turns: base models.
    """

    text: str
    images: tuple[bytes, ...] = ()
    decoded: tuple[Picture, ...] = ()
    turns: tuple[Turn, ...] = ()
    raw: bool = False


class ChatForm(Protocol):
    """Facts that the form of a model's prompts depends on, besides its pictures."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def sees(self) -> bool: ...
    @property
    def takes_system(self) -> bool: ...
    @property
    def control_tokens(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt, which may come from an untrusted client."""

    max_characters: int = setting(8192, "Longest text, all turns together.", low=1)
    max_images: int = setting(
        8, "Most images; each takes the memory and the time of its tokens.", low=0
    )
    max_pixels: int = setting(
        0,
        "Largest image, width times height; 0: what the model can use, full HD at least.",
        low=0,
    )
    max_scans: int = setting(
        MAX_SCANS, "Most scans of a progressive JPEG; each decodes all pixels again.", low=1
    )
    max_turns: int = setting(64, "Most turns before the last one.", low=0, high=MAX_TURNS)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as one model reads it. Holds all that is per session, so the model stays shared.

    Attributes:
        ids: n token ids, one image placeholder id per image feature.
        pixel_values: [patches, channels * 2 * patch * patch], None without images.
        image_grid_thw: int64 [images, 3] patches in time, height and width.
        position_ids: int64 [3, n] M-RoPE positions; None for text-only models.
        position_delta: position of a later token minus its index.
        processed: what the model's own processor made of prompt and images, besides the ids; None
            without images, and for models whose images are encoded here.
        shown: with ``processed``, the tokens up to the last placeholder; else 0.
    """

    ids: tuple[int, ...]
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    position_ids: Tensor | None = None
    position_delta: int = 0
    processed: Mapping[str, Any] | None = None
    shown: int = 0

    def positions(self, start: int, count: int) -> int | Tensor:
        """Return the positions of ``count`` tokens from index ``start``, of the prompt or after.

        That is the first one, where the others follow it, or M-RoPE's int64 [3, count].
        """
        if self.position_ids is None:
            return start + self.position_delta
        if start >= len(self.ids):
            return start + self.position_delta
        own = self.position_ids[:, start : start + count]
        later = torch.arange(start + own.shape[1], start + count) + self.position_delta
        return torch.cat([own, later.expand(3, -1)], dim=1)

    def check_tokens(self, start: int, ids: Sequence[int]) -> None:
        """Check that a session that holds ``start`` tokens may go on with ``ids``.

        Raises:
            InvalidInput: the session's first tokens would not be the prompt's.
        """
        own = self.ids[start : start + len(ids)]
        if tuple(ids[: len(own)]) != own:
            raise InvalidInput(
                "the first tokens of a session are its prompt's",
                field="ids",
                remedy="feed prompt.ids first",
            )


def encode(
    prompt: Prompt, loaded: LoadedModel, limits: PromptLimits | None = None
) -> EncodedPrompt:
    """Apply the chat template and the image processor of ``loaded``.

    Raw text gets the tokens that the tokenizer adds, such as the token that begins OPT's texts.

    Raises:
        InvalidInput: empty, oversized or forbidden text, text that the tokenizer cannot encode or
            the model has no tokens for, turns out of order; too many, corrupt or oversized images;
            images for a text-only model or raw text; a chat for a model without a chat template, or
            turns that its template refuses. ``field`` is ``text``, ``raw``, ``turns``,
            ``turns[i].role``, ``turns[i].content``, ``images`` or ``images[i]``.
        ModelError: the chat template does not place the images.
    """
    limits = limits or PromptLimits()
    check_prompt(prompt, limits)
    refuse_control_tokens(prompt, loaded)
    if len(prompt.images) > (limits.max_images if loaded.sees else 0):
        raise InvalidInput(
            f"{len(prompt.images)} images",
            field="images",
            remedy=f"send at most {limits.max_images}"
            if loaded.sees
            else "this model reads text only",
        )
    encoded = _encoded(prompt, limits, loaded)
    ids = encoded.ids
    if (highest := max(ids, default=0)) >= loaded.vocab_size:
        raise InvalidInput(
            f"contains the token {loaded.tokenizer.convert_ids_to_tokens(highest)!r}, which is"
            " the tokenizer's and not the model's",
            field="text",
            remedy="remove it",
        )
    limit = context_length(loaded.model.config.get_text_config())
    if len(ids) >= limit:
        raise InvalidInput(
            f"{len(ids)} tokens, the model reads {limit} together with its answer",
            field="text",
            remedy="shorten it",
        )
    return encoded


def _encoded(prompt: Prompt, limits: PromptLimits, loaded: LoadedModel) -> EncodedPrompt:
    images = _images(prompt, limits, loaded)
    if images and loaded.processor is not None:
        return _processed(prompt, images, loaded)
    pixels, grid = _pixels(images, loaded) if images else (None, None)
    ids = _ids(prompt, grid, loaded)
    if loaded.image_processor is None:
        return EncodedPrompt(ids)
    positions, delta = _positions(ids, grid, loaded)
    return EncodedPrompt(ids, pixels, grid, positions, delta)


def _processed(prompt: Prompt, images: Sequence[Image.Image], loaded: LoadedModel) -> EncodedPrompt:
    """Return the prompt as the model's own processor encodes it."""
    ids, inputs = process(_chat(prompt, loaded), images, loaded.processor, loaded.model.dtype)
    places = [i for i, token in enumerate(ids) if token == loaded.model.config.image_token_id]
    if not places or places[-1] == len(ids) - 1:
        raise ModelError(
            f"the chat template and the processor write {len(places)} placeholders of images among"
            f" {len(ids)} tokens, which have to end with text",
            field="path",
            remedy="use the chat template and the processor that came with the model",
        )
    return EncodedPrompt(ids, processed=inputs, shown=places[-1] + 1)


def begun_thought(loaded: LoadedModel) -> str:
    """Return the marker of a thought that the chat template has every answer begin in; or ""."""
    if not loaded.tokenizer.chat_template:
        return ""
    return opened_thought(_chat(Prompt(_SAMPLE), loaded))


def try_prompts(loaded: LoadedModel) -> None:
    """Encode a small prompt of each kind that the model takes, and decode it.

    A model that would fail every request is refused at loading.

    Raises:
        ModelError: the tokenizer, the chat template or the image processor cannot do it.
    """
    folder = loaded.config.path
    own = "put the file that came with the model beside the weights"
    with translate_errors(
        ModelError, f"the tokenizer in {folder} cannot encode text", field="path", remedy=own
    ):
        ids = encode(Prompt(_SAMPLE, raw=True), loaded).ids
        loaded.tokenizer.decode(list(ids), skip_special_tokens=True)
    if loaded.tokenizer.chat_template:
        with translate_errors(
            ModelError,
            f"the chat template in {folder} does not take a question",
            field="path",
            remedy=f"{own}; of several templates, one is named default",
        ):
            encode(Prompt(_SAMPLE), loaded)
    if loaded.sees:
        with translate_errors(
            ModelError,
            f"preprocessor_config.json or the chat template in {folder} does not take a picture",
            field="path",
            remedy=own,
        ):
            encode(sample_prompt(), loaded)


def sample_prompt() -> Prompt:
    """Return a question about a small picture."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((56, 56)).convert("RGB").save(file, "PNG")
    return Prompt(_SAMPLE, (file.getvalue(),))


def check_encoded(prompt: EncodedPrompt, loaded: LoadedModel, field: str) -> None:
    """Refuse an encoded prompt, read from somewhere, that ``encode`` cannot have returned.

    Args:
        field: names the prompt in errors.

    Raises:
        InvalidInput: ids, grid and positions contradict each other, or the model sees no images.
    """
    ids, grid, positions = prompt.ids, prompt.image_grid_thw, prompt.position_ids

    def refuse(message: str) -> NoReturn:
        raise InvalidInput(message, field=field, remedy="encode the prompt again")

    if loaded.image_processor is None:
        if grid is not None or positions is not None or prompt.position_delta:
            refuse("images, or their positions, for a model that reads text only")
        return
    placeholder, merge = loaded.model.config.image_token_id, loaded.image_processor.merge_size
    if grid is not None:
        if grid.dtype != torch.int64 or grid.ndim != 2 or grid.shape[1] != 3 or not len(grid):
            refuse("image_grid_thw is not int64 [images, 3]")
        for time, height, width in grid.tolist():
            if min(time, height, width) < 1 or height % merge or width % merge:
                refuse(f"no image has {time} x {height} x {width} patches")
    runs = [len(list(run)) for token, run in groupby(ids) if token == placeholder]
    if runs != ([] if grid is None else _features(grid, merge)):
        refuse("image_grid_thw is not that of the image placeholders")
    if positions is None and grid is None and not prompt.position_delta:
        return  # positions by index, as those of text are
    expected, delta = _positions(ids, grid, loaded)
    if (
        positions is None
        or positions.dtype != torch.int64
        or not torch.equal(positions, expected)
        or prompt.position_delta != delta
    ):
        refuse("position_ids or position_delta is not that of the ids and the images")


def check_prompt(prompt: Prompt, limits: PromptLimits, field: str = "text") -> None:
    """Refuse a prompt that no model could take; ``field`` names ``prompt.text`` in errors.

    Raises:
        InvalidInput: as ``turns.check_texts``, or images with raw text.
    """
    check_texts(
        prompt.text,
        prompt.turns,
        raw=prompt.raw,
        max_characters=limits.max_characters,
        max_turns=limits.max_turns,
        field=field,
    )
    if prompt.raw and prompt.images:
        raise InvalidInput(
            "raw text has no place for images",
            field="images",
            remedy="send none, or do not ask for raw",
        )


def refuse_control_tokens(prompt: Prompt, model: ChatForm) -> None:
    """Raise InvalidInput if a text contains a control token."""
    # In a text, these would end a turn, begin another one, or pose as image features. The tags of a
    # thought do none of that, and an earlier answer may mention them.
    answers = {f"turns[{i}].content" for i, t in enumerate(prompt.turns) if t.role == "assistant"}
    for token in model.control_tokens:
        for field, text in texts(prompt.text, prompt.turns):
            if token in text and not (field in answers and is_thought_tag(token)):
                raise InvalidInput(
                    f"contains the control token {token!r}", field=field, remedy="remove it"
                )


def pixel_limit(max_pixels: int, loaded: LoadedModel) -> int:
    """Return how many pixels an image may have before it is scaled; 0 stands for the default."""
    if max_pixels or not loaded.sees:
        return max_pixels
    processor = loaded.image_processor
    return max(_FULL_HD, 0 if processor is None else processor.size["longest_edge"])


def scaled_size(width: int, height: int, loaded: LoadedModel, field: str) -> tuple[int, int]:
    """Return the size to which the image processor of ``loaded`` scales an image (bicubic).

    The size as it is, where the model's own processor scales it later.

    Raises:
        InvalidInput: one side is more than 200 times the other.
    """
    processor = loaded.image_processor
    if processor is None:
        # Otherwise one that scales the short side could make a long side of millions of pixels.
        if max(width, height) > _LONGEST_RATIO * min(width, height):
            raise InvalidInput(f"{width}x{height} pixels", field=field, remedy="crop the image")
        return width, height
    sides = processor.size["shortest_edge"], processor.size["longest_edge"]
    try:
        scaled = smart_resize(height, width, processor.patch_size * processor.merge_size, *sides)
    except ValueError as error:
        raise InvalidInput(str(error), field=field, remedy="crop the image") from error
    return scaled[1], scaled[0]


def _images(prompt: Prompt, limits: PromptLimits, loaded: LoadedModel) -> list[Image.Image]:
    return [picture.image() for picture in prompt.decoded] or [
        _scaled(data, i, limits, loaded) for i, data in enumerate(prompt.images)
    ]


def _pixels(images: Sequence[Image.Image], loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    processor = loaded.image_processor
    assert processor is not None
    encoded = processor(images=list(images), return_tensors="pt", do_resize=False)
    return encoded["pixel_values"], encoded["image_grid_thw"]


def _scaled(data: bytes, index: int, limits: PromptLimits, loaded: LoadedModel) -> Image.Image:
    field = f"images[{index}]"
    image = decode(data, pixel_limit(limits.max_pixels, loaded), limits.max_scans, field)
    size = scaled_size(*image.size, loaded, field)
    processor, fetch = loaded.image_processor, _qwen_fetch_image()
    if processor is None or fetch is None:
        return image.resize(size, Image.Resampling.BICUBIC)
    sizes = {
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    return fetch({"image": image, **sizes}, processor.patch_size)


@cache
def _qwen_fetch_image() -> Callable[[dict[str, Any], int], Image.Image] | None:
    """Return qwen-vl-utils' resizing where its torchvision loads; Pillow's own is the same."""
    try:
        from qwen_vl_utils import fetch_image
    except Exception as error:  # noqa: BLE001 - one of another torch fails in any way
        # No warning: torchvision is kept out on purpose (docs/dependencies.md).
        log.debug("Pillow scales images, qwen-vl-utils is not used: %s", error)
        return None
    found: Callable[[dict[str, Any], int], Image.Image] = fetch_image
    return found


def encode_text(prompt: Prompt, model: ChatForm) -> tuple[int, ...]:
    """Return the ids of ``prompt`` with one placeholder for each image.

    Raises:
        InvalidInput: as :func:`encode`, for text and turns.
    """
    # With a template, special tokens are its business, so the tokenizer adds none.
    text = prompt.text if prompt.raw else _chat(prompt, model)
    with translate_errors(
        InvalidInput,
        "the tokenizer cannot encode it",
        field="text",
        remedy="leave out characters that this model does not read",
    ):
        ids: list[int] = model.tokenizer(text, add_special_tokens=prompt.raw)["input_ids"]
    return tuple(ids)


def _ids(prompt: Prompt, grid: Tensor | None, loaded: LoadedModel) -> tuple[int, ...]:
    ids = encode_text(prompt, loaded)
    if prompt.raw or loaded.image_processor is None:
        return ids
    placeholder = loaded.model.config.image_token_id
    if ids.count(placeholder) != len(prompt.images):
        raise ModelError(
            f"the chat template places {ids.count(placeholder)} of {len(prompt.images)} images",
            field="path",
            remedy="use the chat template that came with the model",
        )
    if grid is None:
        return ids
    features = iter(_features(grid, loaded.image_processor.merge_size))
    return tuple(x for i in ids for x in [i] * (next(features) if i == placeholder else 1))


def _features(grid: Tensor, merge: int) -> list[int]:
    """Return the number of features of each image, which is that of its placeholder ids."""
    return [math.prod(row) // merge**2 for row in grid.tolist()]


def _chat(prompt: Prompt, model: ChatForm) -> str:
    """Return the turns and the question in the chat form of ``model``."""
    if not model.tokenizer.chat_template:
        raise InvalidInput(
            "this model has no chat template",
            field="raw",
            remedy="ask with raw text, or use an instruction-tuned model",
        )
    turns = (*prompt.turns, Turn("user", prompt.text))
    if turns[0].role == "system" and not model.takes_system:
        turns = fold_system(turns)
    return _rendered(turns, model, len(prompt.images))


def takes_system(model: ChatForm) -> bool:
    """Return True if the chat template keeps system turns; many refuse or drop them."""
    try:
        chat = _rendered((Turn("system", _MARK), Turn("user", _SAMPLE)), model)
    except InvalidInput:
        return False
    return _MARK in chat


def _rendered(turns: Sequence[Turn], model: ChatForm, images: int = 0) -> str:
    """Return ``turns`` in the chat form of ``model``; the images stand before the last one."""

    def content(text: str, images: int) -> Any:
        if not model.sees:
            return text
        return [{"type": "image"}] * images + [{"type": "text", "text": text}]

    shown = (*[0] * (len(turns) - 1), images)
    chat = [
        {"role": turn.role, "content": content(turn.content, count)}
        for turn, count in zip(turns, shown, strict=True)
    ]
    return render(model.tokenizer, chat)


def render(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[dict[str, Any]], *, open_end: bool = True
) -> str:
    """Return a chat in the form of the tokenizer's template.

    Args:
        chat: turns, each with ``role`` and ``content``.
        open_end: an answer begins after the last turn.

    Raises:
        InvalidInput: the template refuses these turns (many refuse system turns), or fails.
    """
    with translate_errors(
        InvalidInput,
        "the model's chat template refuses them",
        field="turns",
        remedy="leave out what the message names",
    ):
        return str(
            tokenizer.apply_chat_template(
                list(chat), add_generation_prompt=open_end, tokenize=False
            )
        )


def _positions(
    ids: tuple[int, ...], grid: Tensor | None, loaded: LoadedModel
) -> tuple[Tensor, int]:
    """Return M-RoPE positions [3, n] and the delta, which is kept by session, not by the model."""
    if grid is None:
        return torch.arange(len(ids)).expand(3, -1), 0
    tokens = torch.tensor([ids])
    is_image = (tokens == loaded.model.config.image_token_id).int()
    positions, delta = loaded.model.model.get_rope_index(tokens, is_image, image_grid_thw=grid)
    return positions[:, 0], int(delta)
