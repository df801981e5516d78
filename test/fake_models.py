"""A language model of a few lines for protocol tests: deterministic, and it can be held up."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt

VOCAB = 24
EOS = 0
PROMPT_IDS = (3, 1, 2)
VOCABULARY = "vocabulary-of-the-fakes"


def encode(prompt: Prompt) -> EncodedPrompt:
    """Any text becomes ids that depend on it."""
    digest = hashlib.sha256(prompt.text.encode()).digest()
    return EncodedPrompt((*PROMPT_IDS, *(1 + b % (VOCAB - 1) for b in digest[:4])))


class FakeEngine:
    """Logits are a keyed hash of the last three tokens.

    Args:
        noise: how far this model is from the one with the same seed and no noise.
        exits: layers with an early exit, each nearer to the model than the one before.
        before_layer: called with each exit's layer (and ``num_layers`` before the end) during a
            forward pass that computes logits: tests block here.

    Attributes:
        freed: gets an item whenever a session's cache is freed.
    """

    vocab_size = VOCAB
    eos = frozenset({EOS})
    vocabulary = VOCABULARY
    num_layers = 4
    context = 512

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.0,
        exits: Sequence[int] = (1, 2, 3),
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> None:
        self.seed = seed
        self.noise = noise
        self.exit_layers = tuple(exits)
        self.before_layer = before_layer
        self.loaded = SimpleNamespace(config=SimpleNamespace(path="/models/fake"))
        self.alive = 0  # sessions with a cache
        self.freed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def open(self, prompt: EncodedPrompt) -> FakeSession:
        return FakeSession(self)

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(str(t) for t in tokens)

    def logits(self, context: Sequence[int], layer: int | None = None) -> Tensor:
        """[vocab] after ``context``; ``layer`` adds the noise of an early exit."""
        own = _normal(f"{self.seed} {tuple(context[-3:])}")
        own[EOS] -= 1.5  # answers of some length
        if self.noise:
            own = own + self.noise * _normal(f"noise {self.seed} {tuple(context[-3:])}")
        if layer is not None:
            depth = layer / self.num_layers
            own = own + (1 - depth) * _normal(f"exit {layer} {tuple(context[-3:])}")
        return own

    def answer(
        self, prompt: EncodedPrompt, sampling: SamplingConfig, max_tokens: int
    ) -> tuple[int, ...]:
        """What this model alone says (greedy and coupled laws)."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] not in self.eos):
            p = distribution(self.logits((*prompt.ids, *tokens)), sampling)
            tokens.append(own_token(p, sampling, len(tokens)))
        return tuple(tokens)


def as_engine(fake: FakeEngine) -> Engine:
    """The fake in the place of a real engine, of which it has what the protocol uses."""
    return cast(Engine, fake)


class FakeSession:
    """As decoding.engine.Session."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._ids: list[int] = []
        self._open = False

    @property
    def length(self) -> int:
        return len(self._ids)

    @length.setter
    def length(self, n: int) -> None:
        assert 0 <= n <= len(self._ids), "a rollback forwards"
        del self._ids[n:]

    def feed(
        self,
        ids: Sequence[int],
        on_exit: Callable[[int, Tensor], None] | None = None,
        last: int | None = None,
    ) -> Tensor:
        assert ids, "nothing to feed"
        if not self._open:
            self._open = True
            with self._engine._lock:
                self._engine.alive += 1
        keep = len(ids) if last is None else last
        before = len(self._ids)
        self._ids += ids
        ends = range(len(self._ids) - keep + 1, len(self._ids) + 1)
        if not keep:
            return torch.empty(0, VOCAB)
        try:
            for layer in self._engine.exit_layers if on_exit else ():
                self._engine.before_layer(layer)
                assert on_exit is not None
                on_exit(layer, torch.stack([self._logits(end, layer) for end in ends]))
            self._engine.before_layer(self._engine.num_layers)
        except BaseException:
            del self._ids[before:]
            raise
        return torch.stack([self._logits(end) for end in ends])

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._engine._lock:
                self._engine.alive -= 1
            self._engine.freed.put(None)

    def _logits(self, end: int, layer: int | None = None) -> Tensor:
        return self._engine.logits(self._ids[:end], layer)


def _normal(key: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
