"""Sessions of tiny models, and the logits that they should give, for tests of the engine."""

from __future__ import annotations

import torch
from tiny_models import tiny_prompt

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Session
from collab_llm_nodes.models.prompt import EncodedPrompt, encode


def opened(
    engine: Engine, seed: int = 0, images: int | None = None
) -> tuple[Session, EncodedPrompt]:
    """Open a session of a short prompt, with one scene or two where the model sees."""
    asked = tiny_prompt(
        engine.loaded.model.config.model_type, seed, 1 + seed % 2 if images is None else images
    )
    prompt = encode(asked, engine.loaded)
    return engine.open(prompt), prompt


def alone(engine: Engine, prompt: EncodedPrompt, answer: list[int]) -> torch.Tensor:
    """Return the logits after the last of ``answer``, in a fresh session."""
    return engine.open(prompt).feed([*prompt.ids, *answer], last=1)[0]


def near(found: torch.Tensor | Exception, expected: torch.Tensor | Exception) -> None:
    """Logits spread by about 2; float32 sums in another order differ by less than 5e-5."""
    assert isinstance(found, torch.Tensor), found
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)
