"""Drafts by the verifier's own draft model: co-located speculation (arXiv 2606.25091).

One thread drafts for all sessions that ask for it, in batched passes. To the compute thread such a
session is a robot without a network: its turn comes when its draft is there, or after
``PATIENCE_S``. So neither a pass of the target nor another session waits for the draft model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from collab_llm_nodes.decoding.rejection import propose
from collab_llm_nodes.decoding.sampling import (
    Distribution,
    SparseDistribution,
    distributions_of,
    masked,
)
from collab_llm_nodes.decoding.vote import proposal
from collab_llm_nodes.engine.interface import Feed, ServingEngine
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.prompt import EncodedPrompt
from collab_llm_nodes.protocols.contexts import common_length
from collab_llm_nodes.protocols.edge_cloud.drafter import MAX_SUPPORT
from collab_llm_nodes.protocols.edge_cloud.messages import Open
from collab_llm_nodes.protocols.edge_cloud.server import Proposal, Wanted

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Longest wait for a draft. Then the target decodes alone until the draft model has caught up."""

Deliver = Callable[[Proposal], None]


class OwnDrafts:
    """The draft model's side of one session, which the drafting thread works for.

    Its first three methods are for any thread, the rest for the drafting thread.

    Attributes:
        deliver: delivers a draft to the session, from any thread.
    """

    def __init__(
        self,
        thread: DraftingThread,
        engine: ServingEngine,
        prompt: EncodedPrompt,
        opened: Open,
        deliver: Deliver,
    ) -> None:
        self.sampling = opened.sampling
        self.deliver = deliver
        self._thread = thread
        self._prompt_ids = tuple(prompt.ids)
        self._context = engine.context - len(prompt.ids)
        self._kv = engine.open(prompt, len(prompt.ids) + min(opened.max_tokens, self._context))
        self._guide = engine.loaded.guides.open(opened.guide) if opened.guide is not None else None
        self._eos = engine.eos
        self._draft: _Draft | None = None
        self._read: tuple[int, ...] = ()  # the answer that the cache was fed with
        self.round = -1  # of the draft that was wanted last

    def want(self, wanted: Wanted) -> None:
        """Ask for a round's draft, which is delivered once; does not wait for it."""
        if wanted.round > self.round:
            self.round = wanted.round
            self._thread.want(self, wanted)

    def close(self) -> None:
        """Free the cache. A draft that is still wanted is delivered without tokens."""
        self._thread.post(partial(self._thread.end, self))

    def encode_images(self) -> None:
        """Encode the prompt's images, so that no pass need do it."""
        self._kv.encode_images()

    # Everything below runs in the drafting thread.

    def begin(self, wanted: Wanted, asked_at: float) -> None:
        """Begin the draft."""
        room = max(0, min(wanted.room, self._context - len(wanted.answer)))
        self._draft = _Draft(wanted, room, asked_at)
        kept = min(common_length(wanted.answer, self._read), len(wanted.answer) - 1)
        self._kv.length = min(self._kv.length, len(self._prompt_ids) + kept)
        self._extend(self._draft)

    @property
    def complete(self) -> bool:
        """True if the draft needs no further pass."""
        draft = self._draft
        assert draft is not None
        ended = bool(draft.tokens) and draft.tokens[-1] in self._eos
        return ended or draft.chosen >= draft.wanted.gamma or len(draft.tokens) >= draft.room

    def feed(self) -> Feed:
        """Return the unread tokens, the last of which the next one follows."""
        assert self._draft is not None
        self._read = self._draft.answer
        ids = (*self._prompt_ids, *self._read)[self._kv.length :]
        return Feed(self._kv, ids, last=1)

    def limited(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [1, V] over the tokens that the guide allows, if there is one."""
        if self._guide is None:
            return logits
        return masked(logits, self._guide.allowed(self._read)[None])

    def take(self, law: Distribution) -> None:
        """Append the next token, drawn from ``law``, and those that the guide forces after it."""
        draft = self._draft
        assert draft is not None
        token, q = propose(law, self.sampling, len(draft.answer), MAX_SUPPORT)
        draft.tokens.append(token)
        draft.chosen += 1
        if q is not None:
            draft.probs.append(q)
        self._extend(draft)

    def _extend(self, draft: _Draft) -> None:
        if self._guide is not None and draft.wanted.gamma:
            forced = self._guide.forced(draft.answer, draft.room - len(draft.tokens))
            draft.tokens += forced
            draft.probs += proposal(forced, self.sampling) or ()

    def finish(self) -> Proposal:
        """Return the complete draft."""
        draft, self._draft = self._draft, None
        assert draft is not None
        probs = tuple(draft.probs) if self.sampling.sends_probabilities else None
        took_s = time.monotonic() - draft.asked_at
        return Proposal(draft.wanted.round, tuple(draft.tokens), probs, took_s)

    def free(self) -> None:
        """Free the cache."""
        self._kv.close()


class _Draft:
    """A partial draft; ``chosen`` counts the tokens that the model chose, not the guide."""

    def __init__(self, wanted: Wanted, room: int, asked_at: float) -> None:
        self.asked_at = asked_at
        self.wanted = wanted
        self.room = room
        self.tokens: list[int] = []
        self.probs: list[SparseDistribution] = []
        self.chosen = 0

    @property
    def answer(self) -> tuple[int, ...]:
        """The answer with what is drafted so far."""
        return (*self.wanted.answer, *self.tokens)


class DraftingThread:
    """Owns the draft model, and drafts for all sessions side by side.

    What fails here costs speed only: the session's drafts have no tokens then, and the target
    decodes alone.

    Args:
        engine: the draft model.
        max_batch: sessions in a pass.
        emulated_pass_s: EMULATION of a larger model: a pass takes at least this long.

    Attributes:
        warm: set after the first passes, which are slow, or their failure.
    """

    def __init__(self, engine: ServingEngine, max_batch: int, emulated_pass_s: float = 0.0) -> None:
        self.engine = engine
        self._max_batch = max_batch
        self._emulated_s = emulated_pass_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._awaited: dict[tuple[OwnDrafts, int], float] = {}  # rounds, since; of all threads
        self._behind = False
        self._drafting: dict[OwnDrafts, None] = {}  # in order of arrival
        self._stopping = False
        self._failed = False
        self.warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifier-drafting", daemon=True)
        self._thread.start()

    def open(self, prompt: EncodedPrompt, opened: Open, deliver: Deliver) -> OwnDrafts:
        """Start a session, in any thread; nothing is computed before its first draft.

        Args:
            prompt: in the draft model's encoding.
            deliver: called in the drafting thread; must not block.

        Raises:
            InvalidInput: the guide cannot be used.
        """
        return OwnDrafts(self, self.engine, prompt, opened, deliver)

    def post(self, event: Callable[[], None]) -> None:
        """Have the thread handle ``event``."""
        self._inbox.put(event)

    def want(self, drafts: OwnDrafts, wanted: Wanted) -> None:
        """Have the thread draft for a session, or deliver a draft without tokens if it is behind.

        Called by the compute thread.
        """
        if self._behind:
            drafts.deliver(Proposal(wanted.round))
            return
        since = time.monotonic()
        self._awaited[drafts, wanted.round] = since
        self.post(partial(self.begin, drafts, wanted, since))

    def end_overdue(self, now: float) -> None:
        """Deliver drafts without tokens to sessions that have waited for ``PATIENCE_S``.

        Called by any thread, now and then: the drafting thread may be stuck in a pass, or dead.
        """
        for (drafts, round_), since in [*self._awaited.items()]:
            if now >= since + PATIENCE_S:
                if not self._behind:
                    log.warning("the draft model is behind: the target decodes alone meanwhile")
                self._behind = True
                self._deliver(drafts, Proposal(round_, took_s=now - since))

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return False if a pass runs beyond ``timeout_s``."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs in the thread.

    def begin(self, drafts: OwnDrafts, wanted: Wanted, asked_at: float) -> None:
        """Begin the draft that is wanted, unless the session has gone on without it."""
        if (drafts, wanted.round) not in self._awaited:
            return
        if self._failed:
            self._deliver(drafts, Proposal(wanted.round))
            return
        try:
            drafts.begin(wanted, asked_at)
        except Exception as error:  # noqa: BLE001  it must not end the other sessions
            self._give_up(drafts, error)
            return
        self._drafting[drafts] = None
        self._deliver_complete([drafts])

    def end(self, drafts: OwnDrafts) -> None:
        """Forget a session. A draft that it waits for is delivered without tokens."""
        self._drafting.pop(drafts, None)
        self._deliver(drafts, Proposal(drafts.round))
        drafts.free()

    def _deliver(self, drafts: OwnDrafts, proposal: Proposal) -> None:
        """Deliver a draft, in any thread, unless that round's has been delivered."""
        if self._awaited.pop((drafts, proposal.round), None) is not None:
            drafts.deliver(proposal)

    def _run(self) -> None:
        try:
            self.engine.warm_up(lambda layer, logits: None)
            self.warm.set()
            self._serve()
        except Exception:
            # A fault of this code or of the device: the target decodes alone from now on.
            log.exception("the verifier drafts no more")
            self._failed = True
            self.warm.set()
            self._drafting.clear()
            for drafts, round_ in [*self._awaited]:
                self._deliver(drafts, Proposal(round_))
        while not self._stopping:
            try:
                self._inbox.get()()
            except Exception:
                log.exception("a session of the draft model was not freed")

    def _serve(self) -> None:
        while not self._stopping:
            self._take_in()
            if self._drafting and not self._stopping:
                self._step()

    def _take_in(self) -> None:
        """Handle all events; wait for one if there is nothing to draft."""
        if not self._drafting:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        self._behind = False

    def _step(self) -> None:
        """Make one pass, in which each session's draft gets its next token."""
        due = time.monotonic() + self._emulated_s
        batch = [*self._drafting][: self._max_batch]
        for drafts, law in zip(batch, self._laws(batch), strict=True):
            if isinstance(law, Exception):
                self._give_up(drafts, law)
                continue
            try:
                drafts.take(law)
            except Exception as error:  # noqa: BLE001  it must not end the other sessions
                self._give_up(drafts, error)
        time.sleep(max(0.0, due - time.monotonic()))
        self._deliver_complete(batch)

    def _deliver_complete(self, batch: Sequence[OwnDrafts]) -> None:
        for drafts in batch:
            if drafts in self._drafting and drafts.complete:
                del self._drafting[drafts]
                self._deliver(drafts, drafts.finish())

    def _laws(self, batch: Sequence[OwnDrafts]) -> Sequence[Distribution | Exception]:
        """Return the distribution of each session's next token, or its error."""
        try:
            results = self.engine.run([drafts.feed() for drafts in batch])
            limited = [_limited(*each) for each in zip(batch, results, strict=True)]
            sound = [(d, r) for d, r in zip(batch, limited, strict=True) if isinstance(r, Tensor)]
            laws = iter(distributions_of([r for _, r in sound], [d.sampling for d, _ in sound]))
        except Exception as error:  # noqa: BLE001  such as no memory: it ends these drafts only
            return [error] * len(batch)
        found = [next(laws) if isinstance(each, Tensor) else each for each in limited]
        return [law[0] if isinstance(law, list) else law for law in found]

    def _give_up(self, drafts: OwnDrafts, error: Exception) -> None:
        log.warning("the target decodes a round alone: %s", error)
        self._drafting.pop(drafts, None)
        self._deliver(drafts, Proposal(drafts.round))


def _limited(drafts: OwnDrafts, result: Tensor | Exception) -> Tensor | Exception:
    """Return the logits over what the session's guide allows, or the error."""
    if isinstance(result, Exception):
        return result
    try:
        return drafts.limited(result)
    except CollabError as error:  # the guide takes too much work
        return error
