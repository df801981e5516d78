"""Drafts by the verifier's own draft model: co-located speculation (arXiv 2606.25091).

One thread drafts for all sessions that ask for it, in batched passes. To the compute thread such a
session is a robot without a network: its turn comes when its draft is there. So neither a pass of
the target nor another session waits for the draft model.
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

Deliver = Callable[[Proposal], None]


class OwnDrafts:
    """The draft model's side of one session, which the drafting thread works for.

    Its first three methods are for any thread, the rest for the drafting thread.
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
        self._thread = thread
        self._deliver = deliver
        self._prompt_ids = tuple(prompt.ids)
        self._context = engine.context - len(prompt.ids)
        self._kv = engine.open(prompt, len(prompt.ids) + min(opened.max_tokens, self._context))
        self._guide = engine.loaded.guides.open(opened.guide) if opened.guide is not None else None
        self._eos = engine.eos
        self._draft: _Draft | None = None
        self._read: tuple[int, ...] = ()  # the answer that the cache was fed with
        self._last_round = -1

    def want(self, wanted: Wanted) -> None:
        """Ask for a draft, which is delivered once; does not wait for it."""
        self._thread.post(partial(self._thread.begin, self, wanted, time.monotonic()))

    def close(self) -> None:
        """Free the cache. A draft that is still wanted is delivered without tokens."""
        self._thread.post(partial(self._thread.end, self))

    def encode_images(self) -> None:
        """Encode the prompt's images, so that no pass need do it."""
        self._kv.encode_images()

    # Everything below runs in the drafting thread.

    def begin(self, wanted: Wanted, asked_at: float) -> bool:
        """Begin the draft; return False if that round's has been asked for already."""
        if wanted.round <= self._last_round:
            return False
        self._last_round = wanted.round
        room = max(0, min(wanted.room, self._context - len(wanted.answer)))
        self._draft = _Draft(wanted, room, asked_at)
        kept = min(common_length(wanted.answer, self._read), len(wanted.answer) - 1)
        self._kv.length = min(self._kv.length, len(self._prompt_ids) + kept)
        self._extend(self._draft)
        return True

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

    def deliver(self, *, whole: bool = True) -> None:
        """Deliver the draft, or one without tokens."""
        draft, self._draft = self._draft, None
        if draft is None:
            return
        tokens = tuple(draft.tokens) if whole else ()
        probs = tuple(draft.probs[: len(tokens)]) if self.sampling.sends_probabilities else None
        took_s = time.monotonic() - draft.asked_at
        self._deliver(Proposal(draft.wanted.round, tokens, probs, took_s))

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
    """

    def __init__(self, engine: ServingEngine, max_batch: int, emulated_pass_s: float = 0.0) -> None:
        self.engine = engine
        self._max_batch = max_batch
        self._emulated_s = emulated_pass_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._drafting: dict[OwnDrafts, None] = {}  # in order of arrival
        self._stopping = False
        self._failed = False
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

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return False if a pass runs beyond ``timeout_s``."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs in the thread.

    def begin(self, drafts: OwnDrafts, wanted: Wanted, asked_at: float) -> None:
        """Begin the draft that is wanted."""
        try:
            if not drafts.begin(wanted, asked_at):
                return
        except Exception as error:  # noqa: BLE001  it must not end the other sessions
            self._give_up(drafts, error)
            return
        if drafts.complete or self._failed:
            drafts.deliver(whole=not self._failed)
        else:
            self._drafting[drafts] = None

    def end(self, drafts: OwnDrafts) -> None:
        """Forget a session."""
        self._drafting.pop(drafts, None)
        drafts.deliver(whole=False)
        drafts.free()

    def _run(self) -> None:
        try:
            self.engine.warm_up(lambda layer, logits: None)
            self._serve()
        except Exception:
            # A fault of this code or of the device: the target decodes alone from now on.
            log.exception("the verifier drafts no more")
            self._failed = True
            for drafts in [*self._drafting]:
                self.end(drafts)
            self._serve()

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
        for drafts in batch:
            if drafts in self._drafting and drafts.complete:
                del self._drafting[drafts]
                drafts.deliver()

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
        drafts.deliver(whole=False)


def _limited(drafts: OwnDrafts, result: Tensor | Exception) -> Tensor | Exception:
    """Return the logits over what the session's guide allows, or the error."""
    if isinstance(result, Exception):
        return result
    try:
        return drafts.limited(result)
    except CollabError as error:  # the guide takes too much work
        return error
