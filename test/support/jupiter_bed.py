"""Stage workers in this process around tiny models, and the single-device result beside them."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import tiny_folder, tiny_model

from collab_llm_lab.bench.jupiter.local_workers import LocalWorker
from collab_llm_lab.reference import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import MedusaHeads, head_fingerprint
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.jupiter.generation import OnTokens, answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.link import LinkConfig
from collab_llm_nodes.protocols.jupiter.pipeline import Pipeline, PipelineConfig, Plan, equal_parts
from collab_llm_nodes.protocols.jupiter.worker import StageWorker
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
from collab_llm_nodes.transport.server import ServerHandle

WAIT_S = 100.0
"""Upper bound of waits for what takes a second on an idle machine."""
PATIENT = LinkConfig(silence_s=60.0, connect_s=20.0)
"""A machine that stalls must not lose a worker where none is meant to be lost."""
LAYERS = 4
ARCHITECTURE = "llama"


def folder(seed: int = 0) -> Path:
    """Folder of the model that all workers hold, with Medusa heads beside it."""
    plain = tiny_folder(ARCHITECTURE, seed, layers=LAYERS)
    found = plain.with_name(f"{plain.name}-heads")  # others use the plain one without heads
    if not found.exists():
        shutil.copytree(plain, found)
        _write_heads(found, seed)
    return found


def _write_heads(found: Path, seed: int) -> None:
    """Write heads that know some answers by heart: some guesses stand, others do not."""
    loaded = tiny_model(ARCHITECTURE, seed, layers=LAYERS)
    parts = decoder_parts(loaded.model)
    heads = MedusaHeads(parts.hidden_size, fingerprint=head_fingerprint(parts))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    texts = [[*ids, *_generate(loaded, ids, 40)] for ids in (prompt(30) * 2, prompt(20, 1))]
    for _ in range(60):
        optimizer.zero_grad()
        for text in texts:
            with torch.no_grad():
                out = loaded.model(torch.tensor([text]), output_hidden_states=True)
            logits = parts.head(heads(out.hidden_states[-1][0]))  # [tokens, heads, V]
            for i in range(heads.heads):
                right = torch.tensor(text[i + 2 :])
                loss = torch.nn.functional.cross_entropy(logits[: len(right), i], right)
                loss.backward(retain_graph=True)
        optimizer.step()
    heads.save(found)


def settings(**changed: Any) -> WorkerConfig:
    """Settings of a worker on a free port."""
    return WorkerConfig(
        **{
            "address": "127.0.0.1:0",
            "model": ModelConfig(str(folder())),
            "next": PATIENT,
            **changed,
        }
    )


@contextmanager
def workers(
    count: int, **changed: Any
) -> Iterator[tuple[list[ServerHandle[StageWorker]], list[str]]]:
    """Run workers in this process; yields them, and their addresses."""
    with ExitStack() as stack:
        handles = [
            stack.enter_context(ServerHandle(StageWorker(settings(**changed))))
            for _ in range(count)
        ]
        yield handles, [f"127.0.0.1:{handle.port}" for handle in handles]


@contextmanager
def in_this_process(
    count: int, model: str, *, emulated_slowdown: float = 1.0, **_: Any
) -> Iterator[list[LocalWorker]]:
    """Run workers as ``local_workers`` does, but without processes."""
    config = {"model": ModelConfig(model), "emulated_slowdown": emulated_slowdown}
    process: Any = SimpleNamespace(pid=os.getpid())
    with workers(count, **config) as (_handles, addresses):
        yield [LocalWorker(process, address) for address in addresses]


@contextmanager
def pipeline(count: int, plan: Plan = equal_parts, **changed: Any) -> Iterator[Pipeline]:
    """Run workers and a pipeline over them; ``changed`` are settings of the pipeline."""
    with workers(count) as (_, addresses):
        config = PipelineConfig(**{"workers": tuple(addresses), "link": PATIENT, **changed})
        with Pipeline(config, plan) as made:
            yield made


def assert_exact(
    made: Pipeline,
    ids: Sequence[int],
    tokens: int,
    on_tokens: OnTokens = lambda lanes: None,
) -> None:
    """Check that an answer of so many tokens is the single device's."""
    found = answer(made, ids, DecodeConfig(tokens), control(), on_tokens)
    assert found.tokens == alone(ids, tokens)


def expand(
    made: Pipeline,
    shared: Sequence[int],
    requests: Sequence[Sequence[int]],
    config: DecodeConfig,
    on_tokens: OnTokens = lambda lanes: None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the answers in lanes that share a prompt, and those of the single device."""
    outline, lanes = answer_in_points(
        made,
        shared,
        DecodeConfig(1),
        lambda tokens: requests,
        config,
        control(),
        most=len(requests),
        on_tokens=on_tokens,
    )
    texts = [[*shared, *outline.tokens, *request] for request in requests]
    return [lane.tokens for lane in lanes], [alone(text, config.max_tokens) for text in texts]


def control() -> Control:
    """A deadline that only what hangs exceeds."""
    return Control(time.monotonic() + WAIT_S)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    size = len(tiny_model(ARCHITECTURE, layers=LAYERS).tokenizer)
    drawn = random.Random(seed)
    return [drawn.randrange(size - 4) for _ in range(length)]


def alone(ids: Sequence[int], max_tokens: int, sampling: SamplingConfig | None = None) -> list[int]:
    """Return what the whole model says on one device, by the slow reference loop."""
    return _generate(tiny_model(ARCHITECTURE, layers=LAYERS), ids, max_tokens, sampling)


def _generate(
    loaded: LoadedModel,
    ids: Sequence[int],
    max_tokens: int,
    sampling: SamplingConfig | None = None,
) -> list[int]:
    eos = read_facts(loaded.config).eos
    encoded = EncodedPrompt(tuple(ids))
    return generate(loaded, encoded, sampling or SamplingConfig(), max_tokens, eos)
