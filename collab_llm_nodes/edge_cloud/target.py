"""The target model behind one verifier session: the only place that runs Algorithm 2's Verify.

Used by the gRPC service and by the in-process runner alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from collab_llm_nodes.decoding.engine import Engine
from collab_llm_nodes.edge_cloud.messages import Draft, EarlyExit, Open, Verdict
from collab_llm_nodes.edge_cloud.server import ExitConfig, VerifierSession
from collab_llm_nodes.models.prompt import EncodedPrompt


class TargetSession:
    """One session's protocol state and its KV cache. One caller at a time."""

    def __init__(
        self, engine: Engine, prompt: EncodedPrompt, opened: Open, exits: ExitConfig | None = None
    ) -> None:
        self._kv = engine.open(prompt)
        self._prompt_ids = tuple(prompt.ids)
        self._state = VerifierSession(
            opened, eos=engine.eos, vocab_size=engine.vocab_size, exits=exits
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the encoded prompt."""
        return len(self._prompt_ids)

    @property
    def finished(self) -> bool:
        """The answer is complete."""
        return self._state.finished

    def prefill(self) -> None:
        """Run the prompt and the replayed tokens ahead of the first draft, all but the last id.

        The last confirmed token is always fed together with the next draft: its logits judge the
        draft's first token, and its exits preview the outcome.
        """
        ids = (*self._prompt_ids, *self._state.generated)
        self._kv.feed(ids[:-1], last=0)

    def verify(self, draft: Draft, emit: Callable[[EarlyExit], None]) -> Verdict | None:
        """Verify ``draft`` in one forward pass; ``emit`` is called during it, exit by exit.

        Returns None for a stale draft. Raises what ``VerifierSession.offer`` raises.
        """
        self._state.offer(draft)
        tokens = self._state.begin()
        if tokens is None:
            return None
        started = time.perf_counter()
        pending = (*self._prompt_ids, *self._state.generated)[-1]
        logits = self._kv.feed(
            (pending, *tokens), on_exit=lambda layer, x: emit(self._state.preview(layer, x))
        )
        verdict = self._state.conclude(logits, time.perf_counter() - started)
        # Keep all confirmed tokens but the newest, which the next call feeds.
        self._kv.length = len(self._prompt_ids) + len(self._state.generated) - 1
        return verdict

    def close(self) -> None:
        """Free the KV cache."""
        self._kv.close()
