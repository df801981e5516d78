"""Tokens per verification: of a draft that sees, of the same one without sight, of a blind 8-gram.

A round of greedy speculation accepts the draft's tokens up to the first that is not the target's,
and adds one of the target's. So the target's answers, and what the draft would say after each of
their tokens, tell every round: one pass instead of decoding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.home import expert
from collab_llm_lab.home.wording import TRAINED
from collab_llm_lab.training.nav.encoding import Encoder
from collab_llm_lab.training.nav.forward import FastForward, gathered
from collab_llm_lab.training.nav.models import prefix_ids
from collab_llm_lab.training.nav.sources import WAYS, draw_way
from collab_llm_nodes.models.tokenizer import token_id
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text

GAMMA = 4
"""Tokens drafted per round."""
Asked = Sequence[tuple[str, str]]
"""Prompts, and the target's greedy answers."""

_BATCH = 64
_GREY = 128
_BLIND_ROOMS = 400
"""Training rooms whose answers the 8-gram counts: some 200,000 tokens."""


def compare_sight(
    draft: Any,
    tokenizer: PreTrainedTokenizerBase,
    images: np.ndarray,
    asked: Asked,
    blind: BlindDraft,
    gamma: int = GAMMA,
) -> dict[str, float]:
    """Return ``tau``, ``tau_grey`` and ``tau_blind``.

    ``tau_grey``: the draft sees one even grey. ``tau_blind``: ``blind`` drafts.

    Args:
        images: uint8 [B, 112, 224, 3], one for each of ``asked``.
    """
    return {
        "tau": tau(draft, tokenizer, images, asked, gamma),
        "tau_grey": tau(draft, tokenizer, np.full_like(images, _GREY), asked, gamma),
        "tau_blind": blind.tau(asked, gamma),
    }


@torch.no_grad()
def tau(
    draft: Any,
    tokenizer: PreTrainedTokenizerBase,
    images: np.ndarray,
    asked: Asked,
    gamma: int = GAMMA,
) -> float:
    """Return tokens per verification of a greedy draft, given the target's greedy answers."""
    encoder = Encoder(tokenizer)
    fast = FastForward(draft.eval(), prefix_ids(tokenizer))
    rows: list[list[bool]] = []
    for first in range(0, len(asked), _BATCH):
        part = asked[first : first + _BATCH]
        longest = max(len(encoder.ids(said)) for _, said in part) + 1
        texts, at, labels = encoder.pairs(part, 0, longest)
        pictures = torch.from_numpy(images[first : first + _BATCH])
        hidden = fast(pictures, texts, 1).layers[-1]
        agree = fast.logits(gathered(hidden, at)).argmax(-1) == labels
        lengths = (labels >= 0).sum(-1).tolist()
        rows += [row[:length] for row, length in zip(agree.tolist(), lengths, strict=True)]
    return _tokens_per_round(rows, gamma)


class BlindDraft:
    """A greedy n-gram: the token that most often followed the longest known context.

    Args:
        asked: prompts, and the answers to them that it learns to say.
        order: of the longest grams; contexts reach into the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        asked: Iterable[tuple[str, str]],
        order: int = 8,
    ) -> None:
        self._encoder, self._order = Encoder(tokenizer), order
        self._end = token_id(tokenizer, "<|im_end|>")
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for prompt, said in asked:
            ids, start = self._ids(prompt, said)
            for at in range(start, len(ids)):
                for length in range(order):
                    counts[ids[at - length : at]][ids[at]] += 1
        self._next = {context: c.most_common(1)[0][0] for context, c in counts.items()}

    @classmethod
    def of_expert(cls, tokenizer: PreTrainedTokenizerBase, rooms: int = _BLIND_ROOMS) -> BlindDraft:
        """Return the 8-gram of the expert's answers in rooms of the training."""
        return cls(tokenizer, _expert_answers(rooms))

    def tau(self, asked: Asked, gamma: int = GAMMA) -> float:
        """Return tokens per verification, given the target's greedy answers."""
        rows = []
        for prompt, said in asked:
            ids, start = self._ids(prompt, said)
            rows.append([self._guess(ids[:at]) == ids[at] for at in range(start, len(ids))])
        return _tokens_per_round(rows, gamma)

    def _ids(self, prompt: str, said: str) -> tuple[tuple[int, ...], int]:
        """Return the ids of both, and where the answer starts."""
        question = self._encoder.question_ids(prompt)
        return (*question, *self._encoder.ids(said), self._end), len(question)

    def _guess(self, before: tuple[int, ...]) -> int | None:
        for length in range(self._order - 1, -1, -1):
            if (best := self._next.get(before[len(before) - length :])) is not None:
                return best
        return None


def _expert_answers(rooms: int) -> Iterable[tuple[str, str]]:
    """Yield prompts and answers of the expert's drives."""
    for seed in range(WAYS.first_seed, WAYS.first_seed + rooms):
        room, request = draw_way(seed, TRAINED)
        history: list[str] = []
        for step in expert.drive(room, request).steps:
            prompt = user_text(request.text, history, SEARCH_TEMPLATE, search=step.memory)
            yield prompt, step.answer
            history.append(step.decision.action)


def _tokens_per_round(rows: Sequence[Sequence[bool]], gamma: int) -> float:
    """Return tokens per verification of answers whose drafted tokens agree or not, one by one."""
    rounds = sum(count_rounds(row, gamma) for row in rows)
    return sum(map(len, rows)) / max(1, rounds)


def count_rounds(agree: Sequence[bool], gamma: int) -> int:
    """Return the verifications of one answer."""
    done = rounds = 0
    while done < len(agree):
        accepted = 0
        while accepted < gamma and done + accepted < len(agree) and agree[done + accepted]:
            accepted += 1
        done += accepted + 1
        rounds += 1
    return rounds
