"""Start-up check of models that encode pictures by their own code: steps must equal ``generate``.

It takes the place of a list of tested architectures, which new ones would not be in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from collab_llm_nodes.engine.eager import on_device
from collab_llm_nodes.engine.interface import DecodingEngine
from collab_llm_nodes.errors import ModelError, translate_errors
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import EncodedPrompt, encode, sample_prompt

_STEPS = 4
_APART = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Most that two logits may differ, as a share of their spread: passes of other shapes round
otherwise. A mask or a position that is wrong changes them by their spread."""


@torch.inference_mode()
def check_steps(engine: DecodingEngine) -> None:
    """Refuse a model whose logits in steps are not those of its own ``generate``.

    Raises:
        ModelError: they differ, or either fails.
    """
    loaded = engine.loaded
    prompt = encode(sample_prompt(), loaded)
    with translate_errors(
        ModelError,
        f"{loaded.config.path} does not answer a question about a picture",
        field="path",
        remedy="take a model of another family (docs/models.md)",
    ):
        tokens, expected = _generated(loaded, prompt, engine.vocab_size)
        found = _stepped(engine, prompt, tokens)
    spread = expected[expected > -1e4].std()  # some models forbid tokens by the lowest number
    apart = _APART[found.dtype] * float(spread)
    if not torch.allclose(found, expected.to(found), rtol=0, atol=apart):
        raise ModelError(
            f"{loaded.config.path}, a model of type {loaded.model.config.model_type!r}, answers"
            " otherwise in steps than in its own generate",
            field="path",
            remedy="take a model of another family (docs/models.md)",
        )


def _generated(
    loaded: LoadedModel, prompt: EncodedPrompt, vocabulary: int
) -> tuple[list[int], Tensor]:
    """Return the first tokens of the model's own answer, and its logits [steps, V]."""
    config = GenerationConfig(
        max_new_tokens=_STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    ids = torch.tensor([prompt.ids], device=loaded.device)
    inputs = on_device(prompt.processed or {}, loaded.device)
    found = loaded.model.generate(input_ids=ids, **inputs, generation_config=config)
    tokens: list[int] = found.sequences[0, len(prompt.ids) :].tolist()
    return tokens, torch.cat(list(found.logits))[:, :vocabulary]


def _stepped(engine: DecodingEngine, prompt: EncodedPrompt, tokens: list[int]) -> Tensor:
    """Return the logits before each of ``tokens``, with a prompt in pieces and a rollback."""
    session = engine.open(prompt)
    try:
        session.feed(prompt.ids[:3], last=0)
        session.feed(prompt.ids[3:-1], last=0)
        pending = [prompt.ids[-1], *tokens[:-1]]
        session.feed(pending[:2] + pending[:2], last=0)
        session.length = len(prompt.ids) - 1
        first = session.feed(pending[:-1])
        return torch.cat([first, session.feed(pending[-1:])])
    finally:
        session.close()
