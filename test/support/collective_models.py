"""Collective speculation over tiny models: a target, drafts that agree with it in part, callers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from tiny_models import tiny_folder, tiny_model

from collab_llm_lab import reference
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Control, Progress, Request, Resources
from collab_llm_nodes.protocols.collective.running import Collective
from collab_llm_nodes.protocols.collective.settings import CollectiveConfig, DraftsConfig

ARCHITECTURE = "llama"
MAX_TOKENS = 24
GREEDY = SamplingConfig()
PROMPTS = tuple(f"the {colour} ball is {i} m" for i, colour in enumerate(["red", "blue"] * 5))


def config(**fields: Any) -> CollectiveConfig:
    """A configuration over tiny models, in sequence; draft folders do for processes."""
    plain = CollectiveConfig(
        target=ModelConfig(path=str(tiny_folder(ARCHITECTURE))),
        drafts=DraftsConfig(
            tuple(str(tiny_folder(ARCHITECTURE, seed)) for seed in (0, 1)), workers=2
        ),
        pipeline="off",
        max_tokens=MAX_TOKENS,
    )
    return replace(plain, **fields)


@cache
def target() -> Engine:
    """The target, without its answers' end: random models seldom end by themselves."""
    return Engine(tiny_model(ARCHITECTURE))


@cache
def drafts() -> tuple[Engine, ...]:
    """Two noisy copies of the target, and a model that has nothing to do with it."""
    noisy = [tiny_model(ARCHITECTURE, head_noise=scale) for scale in (0.3, 0.6)]
    return (*map(Engine, noisy), Engine(tiny_model(ARCHITECTURE, seed=1)))


def request(number: int, **fields: Any) -> Request:
    """A request for the answer to one of ``PROMPTS``."""
    turn = Turn("user", PROMPTS[number % len(PROMPTS)])
    plain = Request(f"r{number}", config(), (turn,), asked_at=time.monotonic())
    return replace(plain, **fields)


@cache
def alone(
    prompt: str, sampling: SamplingConfig = GREEDY, count: int = MAX_TOKENS
) -> tuple[int, ...]:
    """The target's own answer, by one pass per token over all tokens, without a KV cache.

    Under the coupled law, and greedy: there the answer does not depend on drafts.
    """
    engine = target()
    encoded = encode(Prompt(prompt), engine.loaded)
    return tuple(reference.generate(engine.loaded, encoded, sampling, count, engine.eos))


@contextmanager
def running(
    made: CollectiveConfig, engines: Sequence[Engine] | None = None, **resources: Any
) -> Iterator[Collective]:
    """A running protocol; ``engines``: draft models other than ``drafts()``."""
    used = drafts() if engines is None else engines
    collective = Collective(target(), used, made, Resources(**resources))
    try:
        yield collective
    finally:
        collective.close()


def in_time() -> Control:
    """A control with a generous deadline."""
    return Control(time.monotonic() + 60.0)


def ask_all(collective: Collective, asked: Sequence[Request]) -> list[Answer]:
    """All answers, asked for at the same time."""

    def ask(one: Request) -> Answer:
        return collective.run(one, ignore, in_time())

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def ignore(progress: Progress) -> None:
    """Take an answer so far, and forget it."""
