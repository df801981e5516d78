"""Device and cloud in this process, with a link that delays and passes that take a stated time.

EMULATION: a pass takes at least the time that is asked for, and the link the stated round trip.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collab_llm_lab.bench.dragon.baselines import Baselines, Pace, baselines
from collab_llm_lab.bench.dragon.material import make_house
from collab_llm_lab.bench.dragon.served import Audit, Served, served
from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_nodes.decoding.aggregation import Pair
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import Cancelled
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.dragon.device import AnswerSoFar, DeviceAnswer, Question, Rules
from collab_llm_nodes.protocols.dragon.generation import DocumentsDecoder, ModelSide
from collab_llm_nodes.protocols.dragon.index import Index
from collab_llm_nodes.protocols.dragon.machine import SideMachine
from collab_llm_nodes.protocols.dragon.profiler import UNKNOWN
from collab_llm_nodes.protocols.dragon.side import SideInfo
from collab_llm_nodes.protocols.dragon.side_settings import SideConfig

JITTER = 0.2
"""Largest deviation of the link's delay, as a share of it (figures 6 to 8)."""
_ANSWER_S = 300.0


class PacedDecoder:
    """A decoder whose passes take at least ``pass_s``, and can be ended while they wait.

    Args:
        begun: told when the first pass is over.
    """

    def __init__(self, decoder: DocumentsDecoder, pass_s: float, begun: Callable[[], None]) -> None:
        self._decoder, self._pass_s = decoder, pass_s
        self._begun: Callable[[], None] | None = begun
        self._ended = threading.Event()
        self.open, self.push = decoder.open, decoder.push
        self.rollback, self.close = decoder.rollback, decoder.close
        self.read_on = decoder.read_on

    def next(self) -> tuple[NDArray[np.float32], float]:
        """Return what the decoder gives, at its pace."""
        self._ended.clear()
        due = time.monotonic() + self._pass_s
        found = self._decoder.next()
        if self._ended.wait(max(0.0, due - time.monotonic())):
            raise Cancelled("the draft is not wanted any more")
        if self._begun is not None:
            self._begun()
            self._begun = None
        return found

    def cancel(self) -> None:
        """End the pass."""
        self._ended.set()
        self._decoder.cancel()


class PacedSide:
    """A side with paced decoders.

    Attributes:
        begun_s: times that finding the documents and the first pass have taken.
    """

    def __init__(self, side: ModelSide, pass_s: float) -> None:
        self.side, self.pass_s = side, pass_s
        self.begun_s: list[float] = []

    @property
    def info(self) -> SideInfo:
        """Facts of the side."""
        return self.side.info

    @property
    def pieces(self) -> int:
        """Pieces of documents of the side."""
        return self.side.pieces

    def decoder(self, query: str, max_tokens: int) -> PacedDecoder:
        """Return a paced decoder for ``query``."""
        begun = time.monotonic()
        return PacedDecoder(
            self.side.decoder(query, max_tokens),
            self.pass_s,
            lambda: self.begun_s.append(time.monotonic() - begun),
        )


@dataclass(frozen=True)
class Answered:
    """One answer.

    Attributes:
        told: tokens and figures.
        fates: of both sides' drafts, by position.
        sent: messages that left the device, as they stand on the wire.
        wire: all bytes that left the device.
    """

    question: str
    told: AnswerSoFar
    fates: tuple[tuple[bool, bool], ...]
    sent: tuple[bytes, ...]
    wire: bytes


class Sites:
    """Both sides around one model; made by :func:`sites`.

    Attributes:
        baselines: other ways to answer, over a link of the same kind.
        private: texts of the device's documents.
        document_tokens: mean length of a document of either side.
    """

    def __init__(
        self,
        device: PacedSide,
        cloud: PacedSide,
        served: Served,
        baselines: Baselines,
        private: Sequence[str],
        document_tokens: int,
    ) -> None:
        self.device, self.cloud, self._served = device, cloud, served
        self.baselines = baselines
        self.private, self.document_tokens = private, document_tokens
        self._compute = ThreadPoolExecutor(1, "bench-device")
        self._acceptance: dict[Rules, Pair] = {}  # what a device with these rules remembers

    def set(
        self, decode_s: Pair, rtt_s: float, *, mbit_s: float = 0.0, prefill_s: float = 0.0
    ) -> None:
        """Have passes and links take so long from now on; the jitter is a fifth of the delay.

        Args:
            mbit_s: of the links; 0: unlimited.
            prefill_s: for the device to read one token of a document's text.
        """
        self.device.pass_s, self.cloud.pass_s = decode_s
        profile = LinkProfile(rtt_s / 2, JITTER * rtt_s / 2, 1e6 * mbit_s)
        self._served.link.change(profile)
        self.baselines.set(Pace(decode_s[0], prefill_s), Pace(decode_s[1]), profile)
        self._served.client.rtt_s = 0.0
        self._acceptance.clear()

    def ask(
        self,
        query: str,
        rules: Rules,
        *,
        tokens: int,
        seed: int,
        cloud: bool,
        watch: Callable[[SideMachine], None] = lambda machine: None,
    ) -> Answered:
        """Return one answer of ``tokens`` tokens at most, sampled at temperature 1.

        Args:
            watch: told the device's machine whenever the answer has grown.
        """
        answer = DeviceAnswer(
            self.device,
            self._compute,
            self._served.client if cloud else None,
            rules,
            Question(query, tokens, 1.0, seed),
            acceptance=self._acceptance.get(rules, UNKNOWN),
        )
        audit = Audit(self._served)
        begun = time.monotonic()
        told = answer.run(lambda so_far: watch(answer.machine), Control(begun + _ANSWER_S), begun)
        self._acceptance[rules] = answer.machine.profiler.acceptance
        wire, sent = audit.end()
        return Answered(query, told, tuple(answer.machine.figures.fates), sent, wire)

    def close(self) -> None:
        """End the compute thread."""
        self._compute.shutdown()


@contextlib.contextmanager
def sites(engine: Engine, config: SideConfig, seed: int) -> Iterator[tuple[Sites, Sequence[str]]]:
    """Serve a cloud, and yield both sides with questions about the documents of both.

    Every other document is the device's. The sides share the engine's weights, not its sessions.
    """
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(None, config.limits)) for _ in range(2)]
        engines = (engine, Engine(engine.loaded))
        sides = [ModelSide(own, store, config) for own, store in zip(engines, stores, strict=True)]
        layout = sides[0].layout
        house = make_house(
            f"latency {seed}",
            documents=8,
            exchanges=24,
            fits=lambda text: len(layout.document(text)) <= config.document_tokens,
        )
        for number, side in enumerate(sides):
            index = Index(stores[number], side.layout, side.encoder, config, side.caches)
            for place, text in enumerate(house.documents[number::2]):
                index.add(f"document {place}", text)
        questions = [exchange.question for exchange in house.talk]
        random.Random(seed).shuffle(questions)
        device, cloud = PacedSide(sides[0], 0.0), PacedSide(sides[1], 0.0)
        way = stack.enter_context(served(cloud, "bench"))
        others = stack.enter_context(baselines(engines, (sides[0], sides[1])))
        lengths = [len(layout.document(text)) for text in house.documents]
        made = Sites(
            device,
            cloud,
            way,
            others,
            house.documents[0::2],
            round(statistics.fmean(lengths)),
        )
        stack.callback(made.close)
        yield made, questions
