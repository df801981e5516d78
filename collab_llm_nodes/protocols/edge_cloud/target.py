"""The target model of one verifier session: Verify of Algorithm 2.

A session returns the next feed and receives its logits; the caller runs passes for one session (the
in-process runner: :meth:`TargetSession.verify_next`) or for many (the verifier, where a
:class:`TargetSession` is a job of ``serving/compute.py`` with a :class:`TargetJudge`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from collab_llm_nodes.decoding.sampling import SamplingConfig, distributions_of, previews_of
from collab_llm_nodes.engine.interface import DecodingEngine, Feed, OnExit
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.edge_cloud.co_located import OwnDrafts
from collab_llm_nodes.protocols.edge_cloud.messages import Draft, EarlyExit, Open, Opened, Verdict
from collab_llm_nodes.protocols.edge_cloud.server import (
    ExitConfig,
    Laws,
    Proposal,
    VerifierSession,
)
from collab_llm_nodes.serving.compute import Judge

log = logging.getLogger(__name__)

Emit = Callable[[EarlyExit], None]
Found = TypeVar("Found")


class TargetSession:
    """One session's protocol state and its KV cache. Not thread-safe.

    Args:
        shared: ids that draft and target share are below it; None: all of the target's.
        drafts: what the verifier's own draft model proposes, for co-located speculation.

    Attributes:
        most_tokens: largest number of tokens in the cache: prompt and answer.

    Raises:
        InvalidInput: the guide cannot be used, or the replayed tokens are none of this session.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        prompt: EncodedPrompt,
        opened: Open,
        exits: ExitConfig | None = None,
        *,
        shared: int | None = None,
        drafts: OwnDrafts | None = None,
    ) -> None:
        self._drafts = drafts
        self._guided = opened.guide is not None
        self._prompt_ids = tuple(prompt.ids)
        room = engine.context - len(prompt.ids)
        self._state = VerifierSession(
            replace(opened, text="", images=()),  # not needed once they are encoded
            eos=engine.eos,
            vocab_size=engine.vocab_size if shared is None else shared,
            exits=exits,
            room=room,
            guide=engine.loaded.guides.open(opened.guide) if opened.guide is not None else None,
            co_located=opened.co_located if drafts is not None else 0,
        )
        self.most_tokens = len(prompt.ids) + min(opened.max_tokens, room)
        self._kv = engine.open(prompt, self.most_tokens)
        self._dropped = False  # an early exit was invalid

    @property
    def prompt_tokens(self) -> int:
        """Length of the encoded prompt."""
        return len(self._prompt_ids)

    @property
    def finished(self) -> bool:
        """True if the answer is complete."""
        return self._state.finished

    @property
    def due(self) -> bool:
        """True if a draft waits for :meth:`begin`."""
        return self._state.due

    @property
    def unread(self) -> int:
        """Number of prompt and replayed tokens to feed before the first draft: all but the last.

        The last confirmed token is always fed together with the next draft: its logits judge the
        draft's first token, and its exits preview the outcome.
        """
        return len(self._prompt_ids) + len(self._state.generated) - 1 - self._kv.length

    def prefill(self) -> None:
        """Read all unread tokens in one pass."""
        if self.unread:
            self._kv.feed(self.read_on(self.unread).ids, last=0)

    def read_on(self, count: int) -> Feed:
        """Return the feed of the next ``count`` unread tokens."""
        start = self._kv.length
        ids = (*self._prompt_ids, *self._state.generated)[start : start + count]
        return Feed(self._kv, ids, last=0)

    def offer(self, draft: Draft | Proposal) -> bool:
        """Accept ``draft``; see ``VerifierSession.offer`` and ``propose``."""
        if isinstance(draft, Proposal):
            return self._state.propose(draft)
        taken = self._state.offer(draft)
        if not self.unread:  # else the session may have no memory yet
            self._want_draft()
        return taken

    def _want_draft(self) -> None:
        if self._drafts is not None and (wanted := self._state.wanted) is not None:
            self._drafts.want(wanted)

    def opened(self, session_id: str) -> Opened:
        """Return the answer to Open, once the prompt is read."""
        self._want_draft()
        return Opened(session_id, self.prompt_tokens, self._guided)

    def encode_images(self) -> None:
        """Encode the prompt's images, in any thread, so that :meth:`read_on` need not."""
        self._kv.encode_images()
        if self._drafts is not None:
            self._drafts.encode_images()

    def begin(self, on_exit: OnExit | None = None) -> Feed | None:
        """Start verifying the draft that is due; ``on_exit`` as in ``session.Feed``."""
        tokens = self._state.begin()
        if tokens is None:
            return None
        pending = self._state.generated[-1] if self._state.generated else self._prompt_ids[-1]
        heard = on_exit if self._drafts is None else None  # else the client drafts for no outcome
        return Feed(self._kv, (pending, *tokens), heard)

    def preview(
        self,
        layer: int,
        logits: Tensor,
        seen: tuple[Laws, Sequence[float]] | None = None,
    ) -> EarlyExit | None:
        """Return the outcome by an exit's logits; None if they are invalid.

        An adapter's logits may exceed fp16 while the verdict's are sound. This is logged once per
        session.
        """
        try:
            return self._state.preview(layer, logits, seen)
        except Exception as error:  # only the verdict matters
            if not self._dropped:
                fault = None if isinstance(error, CollabError) else error
                log.warning("early exits are dropped: layer %d: %s", layer, error, exc_info=fault)
            self._dropped = True
            return None

    @property
    def sampling(self) -> SamplingConfig:
        """The law of the answer."""
        return self._state.sampling

    def limited(self, logits: Tensor) -> Tensor:
        """Return the logits of a feed over the tokens that the guide allows."""
        return self._state.limited(logits)

    def conclude(
        self,
        logits: Tensor,
        compute_s: float,
        queue_s: float = 0.0,
        laws: Laws | None = None,
    ) -> Verdict:
        """Return the verdict by the logits of the feed of :meth:`begin`.

        Args:
            laws: as for ``VerifierSession.conclude``.
        """
        verdict = self._state.conclude(logits, compute_s, queue_s, laws)
        # Keep all confirmed tokens but the newest, which the next pass feeds.
        self._kv.length = len(self._prompt_ids) + len(self._state.generated) - 1
        self._want_draft()
        return verdict

    def verify(self, draft: Draft, emit: Emit) -> Verdict | None:
        """Verify ``draft`` in a pass of its own; return None for a stale one.

        Raises what ``VerifierSession.offer`` raises.
        """
        self.offer(draft)
        return self.verify_next(emit)

    def verify_next(self, emit: Emit) -> Verdict | None:
        """Verify the draft that is due, if any, in a pass of its own."""

        def on_exit(layer: int, logits: Tensor) -> None:
            preview = self.preview(layer, logits)
            if preview is not None:
                emit(preview)

        feed = self.begin(on_exit)
        if feed is None:
            return None
        started = time.perf_counter()
        logits = self._kv.feed(feed.ids, feed.on_exit)
        (laws,) = distributions_of([self.limited(logits)], [self.sampling])  # waits for the device
        return self.conclude(logits, time.perf_counter() - started, laws=laws)

    def close(self) -> None:
        """Free the KV caches."""
        if self._drafts is not None:
            self._drafts.close()
        self._kv.close()


class TargetJudge(Judge):
    """Judges the sessions of a pass together, with one transfer of their logits from the device.

    Args:
        on_verdicts: called with the verdicts of each pass.
    """

    def __init__(
        self,
        exits: ExitConfig,
        on_verdicts: Callable[[Sequence[Verdict]], None] = lambda verdicts: None,
    ) -> None:
        self.min_lead_s = exits.min_lead_s
        self._on_verdicts = on_verdicts

    def warm_up(self, layer: int, logits: Tensor) -> None:
        """Find the distributions of ``logits`` by two laws."""
        laws = [SamplingConfig(), SamplingConfig(1.0, top_p=0.9)]
        previews_of([logits] * len(laws), laws)

    def find(self, results: Sequence[tuple[TargetSession, Tensor]]) -> Sequence[Laws | None]:
        """Return the target's distributions for each session."""
        return _together(distributions_of, results)

    def preview(
        self, layer: int, exits: Sequence[tuple[TargetSession, Tensor]]
    ) -> list[EarlyExit | None]:
        """Return the outcome of each session by an early exit's logits."""
        every = _together(previews_of, exits)
        return [
            session.preview(layer, logits, seen)
            for (session, logits), seen in zip(exits, every, strict=True)
        ]

    def count(self, concluded: Sequence[Verdict]) -> None:
        """Pass the verdicts of one pass on."""
        self._on_verdicts(concluded)


def _together(
    find: Callable[[Sequence[Tensor], Sequence[SamplingConfig]], Sequence[Found]],
    results: Sequence[tuple[TargetSession, Tensor]],
) -> Sequence[Found | None]:
    """Return the result of ``find``, or None for each session if it fails, as for want of memory.

    Each session is then judged alone, so that an error is its own.
    """
    try:
        logits = [session.limited(logits) for session, logits in results]
        return find(logits, [session.sampling for session, _ in results])
    except Exception as error:  # noqa: BLE001  reported by the session that causes it
        log.warning("sessions are judged one by one: %s", error)
        return [None] * len(results)
