"""The model that a stock server is to serve, as its files describe it: all but the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.loading import (
    ModelConfig,
    architecture_in,
    generation_in,
    load_tokenizer,
    model_folder,
)
from collab_llm_nodes.models.prompt import (
    Prompt,
    PromptLimits,
    check_prompt,
    encode_text,
    refuse_control_tokens,
    takes_system,
)
from collab_llm_nodes.models.tokenizer import token_id
from collab_llm_nodes.models.vocabulary import (
    control_tokens,
    end_tokens,
    vocabulary_hash,
    vocabulary_size,
)

if TYPE_CHECKING:
    from collab_llm_nodes.models.guided_text import Guides

PROBE = 'Turn 30° left, go 0.75 m; stop at the chair\'s "red" leg.\n\n\tÉtat: naïve 你好 1234567.'
"""A text of many kinds of tokens: two tokenizers that agree on it are taken to be the same."""
_LIMITS = PromptLimits(max_characters=1 << 21)
"""The server refuses what its model cannot read."""


@dataclass(frozen=True)
class Reference:
    """Tokenizer, template and end tokens of a model; a ``prompt.ChatForm``.

    Attributes:
        vocab_size: token ids are below this.
        eos: end tokens.
        image_token: placeholder of an image in prompts; None for a model that reads text only.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos: frozenset[int]
    image_token: int | None

    @classmethod
    def load(cls, path: str) -> Reference:
        """Read the files in the folder, or of the hub id or shipped model, ``path``.

        Raises:
            ModelError: there are none, or they cannot be read.
        """
        folder = model_folder(ModelConfig(path), weights=False)
        architecture = architecture_in(folder)
        image_token = getattr(architecture, "image_token_id", None)
        tokenizer = load_tokenizer(folder, image_token is not None)
        size = vocabulary_size(tokenizer, architecture.get_text_config().vocab_size)
        eos = end_tokens(generation_in(folder, architecture), tokenizer, size)
        return cls(tokenizer, size, eos, image_token)

    @property
    def sees(self) -> bool:
        """True if prompts may hold pictures."""
        return self.image_token is not None

    @cached_property
    def takes_system(self) -> bool:
        """True if chats may begin with a system turn."""
        return takes_system(self)

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Tokens that no prompt may spell out."""
        return control_tokens(self.tokenizer, self.vocab_size)

    @cached_property
    def guides(self) -> Guides:
        """The guides of this model's answers; raises ModelError if its tokenizer cannot be used."""
        from collab_llm_nodes.models.guided_text import Guides  # llguidance: loaded where used

        control = [token_id(self.tokenizer, token) for token in self.control_tokens]
        return Guides(self.tokenizer, self.vocab_size, self.eos, control)

    @cached_property
    def vocabulary(self) -> str:
        """Hash of the vocabulary."""
        return vocabulary_hash(self.tokenizer, self.vocab_size)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of ``prompt`` with one placeholder for each image.

        Raises:
            InvalidInput: text, turns or pictures that the model does not take.
        """
        check_prompt(prompt, _LIMITS)
        if prompt.images and not self.sees:
            raise InvalidInput(
                f"{len(prompt.images)} images", field="images", remedy="this model reads text only"
            )
        refuse_control_tokens(prompt, self)
        return encode_text(prompt, self)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Return the text of ``tokens``, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def unexpanded(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``ids`` with one placeholder in place of each run of them."""
        pad = self.image_token
        return tuple(x for i, x in enumerate(ids) if x != pad or not i or ids[i - 1] != pad)
