"""A pretrained model as worker, which was never trained for the protocol: it is shown examples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collab_llm_nodes.bench.minions.material import make_cases
from collab_llm_nodes.bench.minions.measure import Bench
from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    Reply,
    Told,
    tell_nobody,
)
from collab_llm_nodes.chat.batch import BatchConfig
from collab_llm_nodes.chat.in_process import InProcessChat, InProcessConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions.embedded.windows import OPENING, WindowedChat
from collab_llm_nodes.training.minions.chats import worker_group

WAYS = ("local_only", "rag_bm25", "minions")
_LINES = 6
"""Lines of the log of an example."""
_EXAMPLES = 4
_LIMITS = BatchConfig(max_batch=16, prefill_tokens=1024, kept_tokens=1 << 15)


@dataclass(frozen=True)
class RealitySizes:
    """Questions, and length of their logs in tokens of the text family."""

    questions: int = 24
    tokens: int = 4096
    per_log: int = 12


class ShownExamples:
    """A ``chat.base.ChatModel`` that has solved examples before each request.

    Args:
        model: closed with this.
        jobs, questions: chats of examples: jobs of MinionS, and questions about a text.
    """

    def __init__(self, model: ChatModel, jobs: Sequence[Turn], questions: Sequence[Turn]) -> None:
        self._model, self._jobs, self._questions = model, tuple(jobs), tuple(questions)

    @property
    def name(self) -> str:
        return self._model.name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        shown = [
            replace(
                each,
                turns=(
                    *(self._questions if OPENING in each.turns[-1].content else self._jobs),
                    *each.turns,
                ),
            )
            for each in requests
        ]
        return self._model.ask(shown, control, told)

    def close(self) -> None:
        """Close the model."""
        self._model.close()


def examples(role: str, count: int, seed: str) -> tuple[Turn, ...]:
    """Return chats of ``role`` ("job" or "direct") one after the other; the last finds nothing."""
    turns: list[Turn] = []
    found = 0
    rng = random.Random(seed)
    while found < count:
        group = worker_group(rng, _LINES, 4, role=role)
        for chat, sources in zip(group.chats, group.sources, strict=True):
            if bool(sources) != (found == count - 1):
                turns += chat
                found += 1
                break
    return tuple(turns)


def reality(bench: Bench, folder: Path, sizes: RealitySizes) -> Mapping[str, Any]:
    """Return the rows of MinionS and its baselines with the model in ``folder`` as worker.

    Raises:
        ModelError: the model cannot be loaded.
    """
    engine = Engine(load(ModelConfig(path=str(folder), local_files_only=True)))
    limits = InProcessConfig(_LIMITS, max_jobs=1 << 16)
    shown = ShownExamples(
        InProcessChat(engine, limits, folder.name),
        examples("job", _EXAMPLES, f"jobs {bench.seed}"),
        examples("direct", _EXAMPLES, f"direct {bench.seed}"),
    )
    worker = WindowedChat(shown, bench.count)
    cases = make_cases(
        f"reality {bench.seed}", sizes.tokens, sizes.questions, sizes.per_log, bench.count
    )
    own = replace(bench, models=replace(bench.models, local=worker))
    rows, _ = own.protocols(cases, WAYS)
    worker.close()
    engine.close()
    return {"model": folder.name, "examples": _EXAMPLES, "protocols": rows}
