"""A verifier's answer to Describe, and the limits it enforces."""

from __future__ import annotations

from dataclasses import dataclass

from collab_llm_nodes.config import MAX_TOKENS, setting
from collab_llm_nodes.models.turns import MAX_TURNS
from collab_llm_nodes.transport.settings import StreamLimits


@dataclass(frozen=True)
class Limits(StreamLimits):
    """Bounds on what one client can ask of the verifier."""

    max_sessions: int = setting(8, "Sessions that hold a KV cache at a time.", low=1, high=65536)
    max_streams: int = setting(
        64,
        "Sessions open at a time; those beyond max_sessions wait for a KV cache.",
        low=1,
        high=65536,
    )
    max_message_bytes: int = setting(
        9 << 20,
        "One message, images included. Images that wait to be decoded may take eight times as much,"
        " four times for one address [byte].",
        low=4096,
        high=256 << 20,
    )
    max_prompt_chars: int = setting(
        8192, "Text of a prompt, all turns together [character].", low=1, high=1 << 20
    )
    max_turns: int = setting(64, "Turns before the last one.", low=0, high=MAX_TURNS)
    max_images: int = setting(4, "Images in a prompt.", low=0, high=64)
    max_image_bytes: int = setting(2 << 20, "One encoded image [byte].", low=1024, high=256 << 20)
    max_image_pixels: int = setting(
        0,
        "One image, width times height; 0: as many as the model can use, full HD at least [px].",
        low=0,
        high=1 << 28,
    )
    max_image_scans: int = setting(
        20, "Scans of a progressive JPEG; each decodes all pixels again.", low=1, high=1000
    )
    max_tokens: int = setting(1024, "Generated tokens of one answer.", low=1, high=MAX_TOKENS)


@dataclass(frozen=True)
class ServerInfo:
    """Answer to Describe.

    Attributes:
        model: name of the target model.
        vocabulary: its ``vocabulary_hash``.
        vocab_size: token ids are below this.
        exit_layers: layers with an early exit, ascending.
        version: of this package.
        limits: what it accepts.
        sessions: open now.
        draft: name of the draft model beside the target; empty: there is none.
    """

    model: str
    vocabulary: str
    vocab_size: int
    exit_layers: tuple[int, ...]
    version: str
    limits: Limits
    sessions: int
    draft: str = ""
