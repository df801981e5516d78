"""Stores, sides and slow references for tests of DRAGON's one side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_models import tiny_model

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store, StoreLimits
from collab_llm_nodes.protocols.dragon.generation import ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.side_settings import RelevanceConfig, SideConfig

TEXTS = {
    "ball": "The red ball lies under the table in the kitchen.",
    "key": "Ann has the key of the cellar since Monday.",
    "lamp": "The lamp in the kitchen is broken, call Tom.",
    "pump": "The pump needs oil every week.",
}
QUESTION = "Where in the kitchen is the red ball, and who has the key?"


def engine_of(architecture: str = "llama", backend: str = "auto") -> Engine:
    return Engine(tiny_model(architecture), backend=backend)


def config_of(
    update: str = "static", documents: int = 3, temperature: float = 0.3, **rule: float
) -> SideConfig:
    return SideConfig(
        retrieval=RetrievalConfig(method="dense", chunks=documents, temperature=temperature),
        relevance=RelevanceConfig(update=update, **rule),  # type: ignore[arg-type]
    )


def side_with(
    texts: dict[str, str],
    engine: Engine,
    config: SideConfig,
    folder: Path | None = None,
    kv_bytes: int = 1 << 30,
) -> ModelSide:
    """A side whose store holds ``texts``."""
    store = Store(folder, StoreLimits(kv_bytes=kv_bytes))
    side = ModelSide(engine, store, config)
    index = Index(store, side.layout, side.encoder, config)
    for name, text in texts.items():
        if name not in {document.name for document in store.documents()}:
            index.add(name, text)
    return side


def row_of(engine: Engine, ids: Sequence[int]) -> NDArray[np.float64]:
    """p(x | ids) by the transformers forward, without any cache."""
    with torch.inference_mode():
        logits = engine.loaded.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    row = logits[0, -1, : engine.vocab_size].double()
    return torch.softmax(row, 0).numpy()


class Reference:
    """The mixture by its definition: each document's whole context run by itself.

    Args:
        texts: the documents that are found.
    """

    def __init__(self, side: ModelSide, engine: Engine, texts: Sequence[str], config: SideConfig):
        self._engine, self._config, self._texts = engine, config, texts
        self._contexts = [
            (*side.layout.document(text), *side.layout.after(QUESTION)) for text in texts
        ]
        self._rows: dict[tuple[int, ...], list[NDArray[np.float64]]] = {}

    def rows(self, answer: tuple[int, ...]) -> list[NDArray[np.float64]]:
        if answer not in self._rows:
            self._rows[answer] = [
                row_of(self._engine, (*context, *answer)) for context in self._contexts
            ]
        return self._rows[answer]

    def next(self, answer: tuple[int, ...]) -> tuple[NDArray[np.float64], float]:
        raised = [float(np.exp(self._log_weight(i, answer))) for i in range(len(self._texts))]
        mixed = sum(w * row for w, row in zip(raised, self.rows(answer), strict=True))
        return np.asarray(mixed) / sum(raised), float(np.log(sum(raised)))

    def _log_weight(self, document: int, answer: tuple[int, ...]) -> float:
        rule, asked = self._config.relevance, QUESTION
        if rule.update == "encoder":
            scored = answer[: len(answer) // rule.every * rule.every]
            if scored:
                asked = f"{QUESTION} {self._engine.decode(scored)}"
        one, other = WordHashes().encode([self._texts[document], asked])
        found = float(one @ other) / self._config.retrieval.temperature
        if rule.update == "likelihood":
            for i, token in enumerate(answer):
                likely = float(np.log(self.rows(answer[:i])[document][token]))
                found += rule.memory ** (len(answer) - 1 - i) * likely
        return found
