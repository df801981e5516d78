"""The models and prompts of the benchmark, and the target's own answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from collab_llm_lab import reference
from collab_llm_lab.bench.lossless.check import rounding
from collab_llm_lab.training.text.distillation import beginning
from collab_llm_lab.training.text.rendering import Renderer
from collab_llm_lab.training.text.samples import SUB_DOMAINS, make_sample
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.models.vocabulary import check_one_vocabulary
from collab_llm_nodes.protocols.collective.messages import Ids

TARGET = "text-target"
DRAFTS = {f"ssm_{sub_domain}": f"ssm-{sub_domain}" for sub_domain in SUB_DOMAINS}
"""Folders of the small speculative models, by the names that results give them."""
GENERALIST = "text-worker"
"""Folder of a single model that knows all sub-domains: what a vote of specialists must beat."""
MIXED = "mixed"
STREAMS = (*SUB_DOMAINS, MIXED)
"""Streams of prompts; the mixed one takes turns between the sub-domains."""
LONGEST_PROMPT = 512
"""Prompts are cut here [tokens]."""


@dataclass(frozen=True)
class Family:
    """A target with its drafts, for the engine and for transformers.

    The two have weights of their own, for the engine rearranges them.

    Attributes:
        drafts: in the order of ``DRAFTS``.
        folders: of the drafts, for processes of their own.
        generalist: a larger draft model, which takes no part in the vote.
    """

    target: Engine
    drafts: tuple[Engine, ...]
    folders: tuple[Path, ...]
    peer: LoadedModel
    peer_drafts: tuple[LoadedModel, ...]
    generalist: Engine

    def with_generalist(self) -> Family:
        """Return this family with the generalist as its only draft model."""
        return replace(self, drafts=(self.generalist,), folders=(), peer_drafts=())


def load_family(folder: Path) -> Family:
    """Load the models in ``folder``.

    Raises:
        ConfigError: a model is missing, or the tokenizers differ.
        ModelError: a model cannot be loaded.
    """
    names = (TARGET, *DRAFTS.values(), GENERALIST)
    missing = [name for name in names if not (folder / name / "config.json").is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing)}",
            field="--models",
            remedy=f"name the folder that holds {', '.join(names)}",
        )

    def read(name: str) -> LoadedModel:
        return load(ModelConfig(path=str(folder / name)))

    ours = {name: read(name) for name in names}
    target, *drafts, generalist = engines = [Engine(loaded) for loaded in ours.values()]
    first, *others = zip(names, (each.vocabulary for each in engines), strict=True)
    check_one_vocabulary(first, others, "--models")
    peer, *peer_drafts = (read(name) for name in names[:-1])
    folders = tuple(folder / name for name in DRAFTS.values())
    return Family(target, tuple(drafts), folders, peer, tuple(peer_drafts), generalist)


def partial_prompts(family: Family, count: int, seed: int) -> dict[str, list[Ids]]:
    """Return ``count`` prompts of each stream: beginnings of texts that no training has shown."""
    renderer = Renderer(family.target.loaded.tokenizer)
    found: dict[str, list[Ids]] = {}
    for sub_domain in SUB_DOMAINS:
        rng = random.Random(f"bench collective {sub_domain} {seed}")
        texts = [
            beginning(make_sample(rng, sub_domain, "plain", held_out=True), rng)
            for _ in range(count)
        ]
        found[sub_domain] = [tuple(ids[:LONGEST_PROMPT]) for ids in renderer.encode(texts)]
    turns = itertools.chain.from_iterable(zip(*found.values(), strict=True))
    return {**found, MIXED: list(itertools.islice(turns, count))}


@torch.inference_mode()
def transformers_answers(
    family: Family, prompts: Sequence[Ids], max_tokens: int, assistant: LoadedModel | None = None
) -> list[Ids]:
    """Return greedy answers by transformers' generate, all prompts in one batch.

    Args:
        assistant: a draft model for assisted generation, which takes one prompt at a time.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: all answers begin side by side
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    eos = family.target.eos
    options: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
    output: Tensor = family.peer.model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=sorted(eos) or None,
            pad_token_id=family.peer.tokenizer.pad_token_id,
        ),
        **options,
    )
    return [_until_end(answer, eos) for answer in output[:, width:].tolist()]


def _until_end(answer: Sequence[int], eos: frozenset[int]) -> Ids:
    end = next((i for i, token in enumerate(answer) if token in eos), len(answer))
    return tuple(answer[: end + 1])


class TargetAnswers:
    """The target's own greedy answers: transformers' generate, one prompt at a time."""

    def __init__(self, family: Family, max_tokens: int) -> None:
        self._family, self._max_tokens = family, max_tokens
        self._known: dict[Ids, Ids] = {}

    def of(self, prompt: Ids) -> Ids:
        """Return the answer to ``prompt``."""
        if prompt not in self._known:
            (self._known[prompt],) = transformers_answers(self._family, [prompt], self._max_tokens)
        return self._known[prompt]

    def is_near_tie(self, prompt: Ids, answer: Ids) -> bool:
        """Tell whether rounding explains that ``answer`` is not the right one.

        Two tokens whose logits are closer than rounding may swap places between a batched pass and
        one over a single token.
        """
        right = self.of(prompt)
        pairs = enumerate(zip(right, answer, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is None:
            return False
        logits = reference.next_logits(self._family.peer, EncodedPrompt(prompt), right[:first])
        gap = float(logits[right[first]] - logits[answer[first]])
        return gap <= rounding(logits)
