"""A language model of a few lines for protocol tests: deterministic, and it can be held up."""

from __future__ import annotations

import asyncio
import hashlib
import math
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from collab_llm_nodes.decoding.rejection import own_token
from collab_llm_nodes.decoding.sampling import SamplingConfig, distribution
from collab_llm_nodes.engine.interface import AfterExit, Feed, OnExit, ServingEngine
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier import Verifier
from collab_llm_nodes.transport.server import Server, run_until_signal

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
    grows_trees = True
    device = torch.device("cpu")

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
        self.loaded: Any = SimpleNamespace(
            config=SimpleNamespace(path="/models/fake"),
            sees=False,
            processor=None,
            begun_thought="",
            shared_sizes={VOCABULARY: VOCAB},
        )
        self.alive = 0  # sessions with a cache
        self.freed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def open(self, prompt: EncodedPrompt, expected: int = 0) -> FakeSession:
        return FakeSession(self)

    def run(
        self,
        feeds: Sequence[Feed[FakeSession]],
        *,
        exits_until: float = math.inf,
        after_exit: AfterExit = lambda layer, took: None,
    ) -> list[Tensor | Exception]:
        failed: dict[int, Exception] = {}
        fakes = [feed.session for feed in feeds]
        before = [session.length for session in fakes]
        for session, feed in zip(fakes, feeds, strict=True):
            session.append(feed.ids)
        for layer in (*self.exit_layers, self.num_layers):
            on_exits = 0
            for i, (session, feed) in enumerate(zip(fakes, feeds, strict=True)):
                ended = layer == self.num_layers
                if i in failed or not feed.keep or not (feed.on_exit or ended):
                    continue
                try:
                    self.before_layer(layer)
                    if feed.on_exit is not None and layer <= exits_until and not ended:
                        on_exits += 1
                        feed.on_exit(layer, session.logits(feed.keep, layer))
                except Exception as error:  # noqa: BLE001  as the real one: this feed's result
                    failed[i] = error
                    session.length = before[i]
            if on_exits:
                after_exit(layer, lambda: 0.0)
        return [
            failed.get(i) or session.logits(feed.keep)
            for i, (session, feed) in enumerate(zip(fakes, feeds, strict=True))
        ]

    def warm_up(self, on_exit: OnExit) -> None:
        pass

    def close(self) -> None:
        pass

    def cache_bytes(self, tokens: int) -> int:
        return 0

    def cache_room(self, *, rows: int, logits: int, pixels: int, share: float = 1.0) -> float:
        return math.inf

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
        """Return what this model alone says (greedy and coupled laws)."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (not tokens or tokens[-1] not in self.eos):
            p = distribution(self.logits((*prompt.ids, *tokens)), sampling)
            tokens.append(own_token(p, sampling, len(tokens)))
        return tuple(tokens)


def as_engine(fake: FakeEngine) -> ServingEngine:
    """Return the fake as what it stands for, which mypy checks."""
    return fake


class FakeSession:
    """A session of the fake: ids in a list."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._ids: list[int] = []
        self._nodes: list[tuple[int, int]] = []  # (parent's column, token) behind the trunk
        self._open = False

    @property
    def length(self) -> int:
        return len(self._ids)

    @length.setter
    def length(self, n: int) -> None:
        assert 0 <= n <= len(self._ids), "a rollback forwards"
        del self._ids[n:]
        self._nodes.clear()

    @property
    def columns(self) -> int:
        return len(self._ids) + len(self._nodes)

    @property
    def own_bytes(self) -> int:
        return len(self._ids)

    def grow(self, ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        for token, parent in zip(ids, parents, strict=True):
            assert 0 <= parent < self.columns
            self._nodes.append((parent, token))
        self._engine.before_layer(self._engine.num_layers)
        new = range(self.columns - len(ids), self.columns)
        return torch.stack([self._engine.logits(self._context(column)) for column in new])

    def retain(self, column: int) -> dict[int, int]:
        trunk, path = self._context(column), [column]
        while path[-1] >= len(self._ids):
            path.append(self._nodes[path[-1] - len(self._ids)][0])
        moved = {old: len(trunk) - 1 - i for i, old in enumerate(path)}
        moved |= {old: old for old in range(path[-1])}
        kept: list[tuple[int, int]] = []
        for old, (parent, token) in enumerate(self._nodes, len(self._ids)):
            if parent in moved and moved[parent] >= len(trunk) - 1 and old not in moved:
                moved[old] = len(trunk) + len(kept)
                kept.append((moved[parent], token))
        self._ids, self._nodes = trunk, kept
        return moved

    def _context(self, column: int) -> list[int]:
        """Ids from the first to the one in ``column``."""
        path: list[int] = []
        while column >= len(self._ids):
            column, token = self._nodes[column - len(self._ids)]
            path.append(token)
        return [*self._ids[: column + 1], *reversed(path)]

    def feed(
        self, ids: Sequence[int], on_exit: OnExit | None = None, last: int | None = None
    ) -> Tensor:
        (result,) = self._engine.run([Feed(self, ids, on_exit, last)])
        if isinstance(result, Exception):
            raise result
        return result

    def append(self, ids: Sequence[int]) -> None:
        """Begin a pass."""
        assert ids, "nothing to feed"
        if not self._open:
            self._open = True
            with self._engine._lock:
                self._engine.alive += 1
        self._nodes.clear()
        self._ids += ids

    def logits(self, keep: int, layer: int | None = None) -> Tensor:
        """[keep, vocab] after each of the last ``keep`` tokens, as an exit's layer sees them."""
        ends = range(len(self._ids) - keep + 1, len(self._ids) + 1)
        rows = [self._engine.logits(self._ids[:end], layer) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def encode_images(self) -> None:
        pass

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._engine._lock:
                self._engine.alive -= 1
            self._engine.freed.put(None)


class VerifierProcess:
    """A verifier around a fake in a process of its own, which SIGKILL and SIGTERM can end.

    Forked from a server process that has imported everything once; it listens when told to.
    """

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["fake_models", "collab_llm_nodes.protocols.edge_cloud.service"]
        )
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(address, theirs), daemon=True)
        self._process.start()

    def listen(self, timeout_s: float = 90.0) -> None:
        """Returns when clients can connect; imports may take their time on a busy machine."""
        self._ours.send("listen")
        assert self._ours.poll(timeout_s), "the verifier did not come up"
        self._ours.recv()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def exit_code(self, timeout_s: float = 60.0) -> int | None:
        """Wait for the process."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> None:
        """Send SIGKILL and wait."""
        self._process.kill()
        self._process.join(60.0)
        self._ours.close()


def _serve(address: str, connection: Connection) -> None:
    connection.recv()
    server = Server(Verifier(VerifierConfig(address=address), as_engine(FakeEngine(1)), encode))
    asyncio.run(run_until_signal(server, 20.0, connection.send))


def _normal(key: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    return 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
