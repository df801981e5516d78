"""Quality of answers from documents on two sides (paper 001, figure 5).

Each window of a talk is predicted token by token, with its first eighth as the query. The best
documents of one store are split: the first half is the cloud's, the second the device's.

    none                 no documents
    crcg_device, -cloud  context aggregation of one side's documents (the paper's CRCG)
    drcg                 context aggregation of both sides' (the paper's DRCG)
    device, cloud        output aggregation of one side's documents
    dragon               output aggregation of both sides', weights fixed by the query
    dragon_likelihood    likewise, with weights that follow the text (ours)

Every method reads ``budget`` tokens at most: documents first, then the end of the text before the
predicted tokens. Context aggregation gets as many documents as leave room for ``own`` tokens of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from collab_llm_lab.bench.dragon.corpus import Corpus, Window, invented_corpus
from collab_llm_lab.bench.harness import save_plot, subplots
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed, Session
from collab_llm_nodes.knowledge.chunking import ChunkPlan
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, Retrieved, retrieve, softmax
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.dragon.document_kv import DocumentCaches
from collab_llm_nodes.protocols.dragon.generation import encoder_of
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.layout import Ids, Layout
from collab_llm_nodes.protocols.dragon.relevance import Relevance
from collab_llm_nodes.protocols.dragon.side_settings import (
    POSTERIOR,
    STATIC,
    RelevanceConfig,
    SideConfig,
)

NONE, CRCG_DEVICE, CRCG_CLOUD, DRCG = "none", "crcg_device", "crcg_cloud", "drcg"
DEVICE, CLOUD, DRAGON, DRAGON_LIKELIHOOD = "device", "cloud", "dragon", "dragon_likelihood"
METHODS = (NONE, CRCG_DEVICE, CRCG_CLOUD, DRCG, DEVICE, CLOUD, DRAGON, DRAGON_LIKELIHOOD)
BASELINES = (CRCG_DEVICE, CRCG_CLOUD, DRCG)
"""The methods among which the paper finds the second best."""
RIVALS = (*BASELINES, DEVICE, CLOUD)
"""The methods among which the second best is: output aggregation by one side is often better."""
_BATCH = 8
"""Sequences of one pass."""
_LEAST = 1e-30
"""Probability of a token at least, so that its logarithm is a number."""


@dataclass(frozen=True)
class QualityPlan:
    """Sizes of the measurement.

    Attributes:
        windows: lengths of the rolling windows [tokens].
        documents: per side; each number is one point of the figure.
        budget: tokens that a sequence may have, the document included.
        own: tokens of the text in a sequence at least.
        stride: tokens that are predicted at a time; it counts to ``own``.
        temperature, memory: of the weights (``RetrievalConfig``, ``RelevanceConfig``).
        retrieval: method of ``RetrievalConfig``.
    """

    houses: int = 8
    windows: tuple[int, ...] = (1024, 512)
    documents: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    document_tokens: int = 64
    budget: int = 256
    own: int = 128
    stride: int = 64
    temperature: float = 0.1
    memory: float = 0.9
    retrieval: str = "rescored"
    held_out: bool = True
    seed: int = 0

    @property
    def most(self) -> int:
        """Documents of both sides at most."""
        return 2 * max(self.documents)


@dataclass
class Score:
    """Sums over predicted tokens; ``fact_...`` over those that only a document tells."""

    nats: float = 0.0
    right: int = 0
    tokens: int = 0
    fact_nats: float = 0.0
    fact_right: int = 0
    facts: int = 0

    def add(self, row: Tensor, wanted: Tensor, facts: Tensor) -> None:
        """Count predictions.

        Args:
            row: float [n, V] probabilities.
            wanted: int64 [n], the tokens that came.
            facts: bool [n].
        """
        nats = -row.gather(1, wanted[:, None])[:, 0].clamp_min(_LEAST).double().log()
        right = row.argmax(1) == wanted
        self.nats += float(nats.sum())
        self.right += int(right.sum())
        self.tokens += len(wanted)
        self.fact_nats += float(nats[facts].sum())
        self.fact_right += int(right[facts].sum())
        self.facts += int(facts.sum())

    def figures(self) -> dict[str, float]:
        """Return perplexity and accuracy, of all tokens and of those of facts (if any)."""
        found = {
            "perplexity": math.exp(self.nats / max(1, self.tokens)),
            "accuracy": self.right / max(1, self.tokens),
            "tokens": self.tokens,
        }
        if self.facts:
            found |= {
                "fact_perplexity": math.exp(self.fact_nats / self.facts),
                "fact_accuracy": self.fact_right / self.facts,
                "facts": self.facts,
            }
        return found


class Quality:
    """A store of documents, and the predictions of every method.

    Args:
        corpus: default: invented houses.
        encoder: scores documents; None: words are counted.
    """

    def __init__(
        self,
        engine: Engine,
        plan: QualityPlan,
        corpus: Corpus | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._engine, self._plan = engine, plan
        self._config = SideConfig(
            plan=ChunkPlan(characters=2000),
            document_tokens=plan.document_tokens,
            retrieval=RetrievalConfig(
                method=plan.retrieval,
                chunks=plan.most,
                candidates=plan.most,
                temperature=plan.temperature,
            ),
        )
        self._encoder = encoder or encoder_of(self._config)
        self._layout = Layout(engine.loaded, plan.document_tokens)
        corpus = corpus or invented_corpus(
            engine.loaded.tokenizer,
            self._layout,
            houses=plan.houses,
            documents=max(1, plan.most),
            tokens=max(plan.windows),
            held_out=plan.held_out,
            seed=plan.seed,
        )
        self._texts = corpus.texts
        self._store = Store(None)
        index = Index(self._store, self._layout, self._encoder, self._config)
        for name, text in corpus.documents.items():
            index.add(name, text)
        self._caches = DocumentCaches(engine, None, self._layout)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def windows(self, size: int) -> Iterator[Window]:
        """Yield the windows of all texts."""
        for text in self._texts:
            yield from text.rolled(size)

    def scores(self, windows: Iterable[Window]) -> dict[int, dict[str, Score]]:
        """Return the score of each method by the number of documents per side."""
        found = {count: {m: Score() for m in METHODS} for count in self._plan.documents}
        for window in windows:
            self._window(window, found)
        return found

    # --- Within ----------------------------------------------------------------------------------

    def _window(self, window: Window, found: Mapping[int, Mapping[str, Score]]) -> None:
        query = self._engine.decode(window.ids[: window.query])
        documents = retrieve(self._store, query, self._config.retrieval, self._encoder)
        plain = [self._reader(self._engine.open(EncodedPrompt(())))]
        read = [self._reader(session) for session in self._caches.open(documents.hits)]
        together = self._contexts(documents)
        weigh = {
            DRAGON: self._relevance(documents, query, STATIC),
            DRAGON_LIKELIHOOD: self._relevance(documents, query, POSTERIOR),
        }
        evidence = weigh[DRAGON].no_evidence
        try:
            for first, last in window.blocks(self._plan.stride):
                wanted = torch.tensor(window.ids[first:last])
                facts = torch.from_numpy(window.facts[first:last])
                (alone,) = self._rows(plain, window, first, last)
                contexts = dict(
                    zip(
                        together,
                        self._rows([*together.values()], window, first, last),
                        strict=True,
                    )
                )
                each = self._rows(read, window, first, last)
                told = each.gather(2, wanted.expand(len(each), -1)[..., None])[..., 0].double()
                logs: dict[str, list[NDArray[np.float64]]] = {DRAGON: [], DRAGON_LIKELIHOOD: []}
                for place, likely in enumerate(told.clamp_min(_LEAST).log().numpy().T):
                    tokens = window.ids[window.query : first + place]
                    for name, relevance in weigh.items():
                        logs[name].append(relevance.log_weights(tokens, evidence))
                    evidence = weigh[DRAGON_LIKELIHOOD].judged(evidence, likely)
                for count, scores in found.items():
                    sides = (slice(count), slice(count, 2 * count), slice(2 * count))
                    for method, score in scores.items():
                        side = sides[_PART[method]]
                        texts = _texts(documents, side)
                        if method == NONE or not texts:
                            row = alone
                        elif method in BASELINES:
                            row = contexts[texts]
                        else:
                            rule = DRAGON_LIKELIHOOD if method == DRAGON_LIKELIHOOD else DRAGON
                            row = _mixed(each[side], logs[rule], side)
                        score.add(row, wanted, facts)
        finally:
            for reader in (*plain, *read, *together.values()):
                reader.session.close()

    def _relevance(self, documents: Retrieved, query: str, update: str) -> Relevance:
        rule = RelevanceConfig(update=update, memory=self._plan.memory)
        config = replace(self._config, relevance=rule)
        return Relevance(documents, query, config, self._encoder, self._engine.decode)

    def _contexts(self, documents: Retrieved) -> dict[tuple[str, ...], _Reader]:
        """Return a reader for each set of documents that context aggregation reads."""
        found: dict[tuple[str, ...], _Reader] = {}
        for count in self._plan.documents:
            for side in (slice(count), slice(count, 2 * count), slice(2 * count)):
                texts = _texts(documents, side)
                if texts and texts not in found:
                    ids = self._fitting(texts)
                    session = self._engine.open(EncodedPrompt(ids))
                    session.feed(ids, last=0)
                    found[texts] = self._reader(session)
        return found

    def _fitting(self, texts: Sequence[str]) -> Ids:
        """Return the ids of as many documents as the budget admits; at least of one."""
        most = 1
        while most < len(texts):
            if len(self._layout.documents(texts[: most + 1])) > self._plan.budget - self._plan.own:
                break
            most += 1
        return self._layout.documents(texts[:most])

    def _reader(self, session: Session) -> _Reader:
        before = self._layout.between if session.length else self._layout.begin
        return _Reader(session, before, self._plan.budget)

    def _rows(self, readers: Sequence[_Reader], window: Window, first: int, last: int) -> Tensor:
        """Return probabilities [readers, last - first, V] of the tokens of a block.

        It has no rows if there are no readers, as for a query that has found nothing.
        """
        rows = torch.empty(len(readers), last - first, self._engine.vocab_size)
        for begin in range(0, len(readers), _BATCH):  # logits of a large vocabulary fill the memory
            batch = readers[begin : begin + _BATCH]
            feeds = [reader.feed(window.ids, first, last) for reader in batch]
            for place, result in enumerate(self._engine.run(feeds), begin):
                if isinstance(result, Exception):
                    raise result
                rows[place] = torch.softmax(result.float(), dim=-1).cpu()
        return rows


class _Reader:
    """A sequence of documents, and as much of a window behind them as the budget admits.

    Args:
        session: holds the documents.
        before: ids between them and the window.
    """

    def __init__(self, session: Session, before: Ids, budget: int) -> None:
        self.session, self._before = session, before
        self._start = session.length
        self._room = budget - session.length - len(before)
        self._from = self._to = 0  # the part of the window that is held

    def feed(self, ids: Ids, first: int, last: int) -> Feed:
        """Return what predicts the tokens ``first`` to ``last`` of a window."""
        start = max(0, last - self._room)
        if start == self._from and self.session.length > self._start and self._to == first - 1:
            new = ids[first - 1 : last - 1]
        else:
            self.session.length = self._start
            new = (*self._before, *ids[start : last - 1])
        self._from, self._to = start, last - 1
        return Feed(self.session, new, last=last - first)


_PART = {
    NONE: 2,
    **{CRCG_CLOUD: 0, CLOUD: 0, CRCG_DEVICE: 1, DEVICE: 1},
    **{DRCG: 2, DRAGON: 2, DRAGON_LIKELIHOOD: 2},
}
"""The documents that a method reads: the first half, the second half, or all."""


def _texts(documents: Retrieved, side: slice) -> tuple[str, ...]:
    return tuple(hit.chunk.text for hit in documents.hits[side])


def _mixed(rows: Tensor, logs: Sequence[NDArray[np.float64]], side: slice) -> Tensor:
    """Return the mixture [n, V] of ``rows`` [documents, n, V]."""
    weights = np.stack([softmax(log[side], 1.0)[0] for log in logs])
    return torch.einsum("nd,dnv->nv", torch.from_numpy(weights).float(), rows)


def gain(
    figures: Mapping[str, Mapping[str, float]], method: str, others: Sequence[str] = BASELINES
) -> float | None:
    """Return (ppl_none - ppl_method) / (ppl_none - ppl_second) of one number of documents.

    Args:
        others: the best of them is the second. As in the paper: the context aggregations.

    Returns:
        None if none of the others is better than no documents.
    """
    none = figures[NONE]["perplexity"]
    second = min(figures[name]["perplexity"] for name in others)
    if second >= none:
        return None
    return (none - figures[method]["perplexity"]) / (none - second)


def second_share(figures: Mapping[str, Mapping[str, float]], method: str) -> float | None:
    """Return the inverse of the gain over the best rival, one-sided aggregation among them.

    Returns:
        What the best rival gains, as a share of what ``method`` does: below 0 if documents make it
        worse. None if ``method`` gains nothing.
    """
    none = figures[NONE]["perplexity"]
    gained = none - figures[method]["perplexity"]
    second = min(figures[name]["perplexity"] for name in RIVALS)
    return (none - second) / gained if gained > 0 else None


def measure_quality(
    engine: Engine, plan: QualityPlan, corpus: Corpus | None = None, encoder: Encoder | None = None
) -> dict[str, Any]:
    """Return the figures of ``Score`` and what the documents of both sides gain.

    Returns:
        ``<window>.<documents>.<method>`` with the figures of ``Score``.
        ``gain.<window>.<documents>.<method>``: :func:`gain` of ``dragon`` and
        ``dragon_likelihood``; ``gain_over_sides``: likewise, where output aggregation of one side
        counts as another method, too; ``second_share``, likewise.
    """
    quality = Quality(engine, plan, corpus, encoder)
    results: dict[str, Any] = {
        "gain": {},
        "gain_over_sides": {},
        "second_share": {},
        "plan": asdict(plan),
    }
    try:
        for size in plan.windows:
            found = {
                str(count): {method: score.figures() for method, score in scores.items()}
                for count, scores in quality.scores(quality.windows(size)).items()
            }
            results[str(size)] = found
            for name, figure in (
                ("gain", gain),
                ("gain_over_sides", partial(gain, others=RIVALS)),
                ("second_share", second_share),
            ):
                results[name][str(size)] = {
                    count: {
                        method: figure(figures, method) for method in (DRAGON, DRAGON_LIKELIHOOD)
                    }
                    for count, figures in found.items()
                    if count != "0"
                }
    finally:
        quality.close()
    return results


def print_quality(results: dict[str, Any], console: Console) -> None:
    """Print the perplexities, and the accuracy of the tokens that only documents tell.

    Without such tokens, the accuracy of all.
    """
    for size in map(str, results["plan"]["windows"]):
        table = Table(title=f"windows of {size} tokens: perplexity (accuracy)")
        table.add_column("documents per side", justify="right")
        for method in METHODS:
            table.add_column(method, justify="right")
        for count, figures in results[size].items():
            table.add_row(
                count,
                *(
                    f"{row['perplexity']:.2f} ({row.get('fact_accuracy', row['accuracy']):.2f})"
                    for row in (figures[method] for method in METHODS)
                ),
            )
        console.print(table)
        last = max(results["gain"][size], key=int, default=None)
        if last is not None:
            console.print(
                f"gain over no documents, against the second best, at {last} per side:"
                f" {results['gain'][size][last]}; one-sided output aggregation counted as well:"
                f" {results['gain_over_sides'][size][last]}"
            )


def plot_quality(results: dict[str, Any], file: Path) -> None:
    """Draw perplexity by documents per side, as figure 5 of the paper."""
    sizes = results["plan"]["windows"]
    figure, axes = subplots(1, len(sizes), figsize=(5.5 * len(sizes), 4), squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        found = results[str(size)]
        for method in METHODS:
            values = [figures[method]["perplexity"] for figures in found.values()]
            ax.plot([*map(int, found)], values, marker="o", label=method)
        ax.set_xlabel("documents per side")
        ax.set_ylabel("perplexity")
        ax.set_title(f"windows of {size} tokens")
    axes[0][0].legend(fontsize=7)
    save_plot(figure, file)
