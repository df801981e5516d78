"""Logits at early exits: adapter, final norm, LM head; over all tokens or over candidates.

An exit is a preview; nothing here can change a verdict. With a large vocabulary a full head at each
exit would cost more than the layers between them (Qwen2-VL-7B: three times the weights read per
pass), so exits may score candidates only:

- the first exit: the vocabulary's first ``SHORTLIST`` tokens, the fed tokens (so every drafted
  one), and those of the prompt, which answers repeat. A BPE vocabulary lists its tokens in the
  order of their merges, the most frequent pieces first (FR-Spec, arXiv 2502.14856, drafts with
  such a part of the vocabulary). They are one slice of the head: nothing is gathered;
- each later exit: the fed tokens, and per position the best ``candidates`` of the first exit.

All other logits are -inf, so a confidence is the probability among the candidates. A token that is
none cannot be previewed; the verdict brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from collab_llm_nodes.engine.device import OnDevice, Upload
from collab_llm_nodes.engine.kernels import Head, as_linear
from collab_llm_nodes.models.adapters import ExitAdapters

SHORTLIST = 8192


class ExitScorer:
    """Turns hidden states of running forward passes into exit logits.

    Args:
        candidates: kept per position from exit to exit; 0 scores the whole vocabulary.
        shortlist: tokens the first exit scores, where ``candidates`` is not 0.
    """

    def __init__(
        self,
        head: Head,
        adapters: ExitAdapters,
        candidates: int,
        shortlist: int = SHORTLIST,
    ) -> None:
        self.head = head
        self.candidates = min(candidates, head.vocab_size)
        self.shortlist = min(shortlist, head.vocab_size)
        self._corrections = {
            layer: _correction(adapters.corrections[str(layer)]) for layer in adapters.layers
        }

    def correct(self, layer: int, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] after ``layer`` -> input of the head's matrix."""
        return self.head.norm(self._corrections[layer](hidden))


class PassExits:
    """The exits of one pass over several feeds; each has candidates of its own.

    Args:
        fed: token ids of each feed, in the order of the pass's rows.
        keeps: of each feed, the last tokens whose exit logits are wanted; 0: none.
        prompts: token ids of each feed's prompt.
        upload: of the pass, which has not been sent yet.
    """

    def __init__(
        self,
        scorer: ExitScorer,
        fed: Sequence[Sequence[int]],
        keeps: Sequence[int],
        prompts: Sequence[Sequence[int]],
        upload: Upload,
    ) -> None:
        self._scorer = scorer
        self._rows: list[slice] = []
        end = 0
        for ids, keep in zip(fed, keeps, strict=True):
            end += len(ids)
            self._rows.append(slice(end - keep, end))
        # By feed: the fed tokens, and those that the first exit scores beside the shortlist.
        self._own: list[tuple[OnDevice, OnDevice]] = []
        for ids, prompt in zip(fed, prompts, strict=True) if scorer.candidates else ():
            others = sorted({i for i in (*ids, *prompt) if i >= scorer.shortlist})
            self._own.append((upload.add(list(ids)), upload.add(others)))
        self._candidates: dict[
            int, tuple[Tensor, Callable[[Tensor], Tensor]]
        ] = {}  # by feed, after the first exit

    def logits(self, layer: int, hidden: Tensor, feeds: Sequence[int]) -> list[Tensor]:
        """Return exit logits [keep, vocabulary] of some ``feeds``, from the rows of all.

        Args:
            hidden: [rows, hidden_size] after ``layer``.
        """
        scorer, rows = self._scorer, [self._rows[feed] for feed in feeds]
        counts = [r.stop - r.start for r in rows]
        wanted = hidden
        if sum(counts) < hidden.shape[0]:
            wanted = torch.cat([hidden[r] for r in rows])
        states = scorer.correct(layer, wanted)
        if not scorer.candidates:
            return list(scorer.head(states).split(counts))
        own = states.split(counts)
        if self._candidates:
            return [self._later(feed, states) for feed, states in zip(feeds, own, strict=True)]
        common = scorer.head(states, scorer.shortlist).split(counts)
        return [
            self._first(feed, states, scores)
            for feed, states, scores in zip(feeds, own, common, strict=True)
        ]

    def _first(self, feed: int, states: Tensor, common: Tensor) -> Tensor:
        head, shortlist = self._scorer.head, common.shape[1]
        fed, others = (on_device() for on_device in self._own[feed])
        scores = torch.cat([common, head.some(others)(states)], dim=1)
        ids = torch.cat([torch.arange(shortlist, device=states.device), others])
        best = ids[scores.topk(min(self._scorer.candidates, len(ids)), dim=-1).indices]
        kept = torch.cat([best.flatten(), fed])  # some twice: finding them would be a wait
        self._candidates[feed] = kept, head.some(kept)
        return self._spread(scores, ids)

    def _later(self, feed: int, states: Tensor) -> Tensor:
        ids, logits_of = self._candidates[feed]
        return self._spread(logits_of(states), ids)

    def _spread(self, scores: Tensor, ids: Tensor) -> Tensor:
        """[rows, ids] -> [rows, vocabulary]."""
        size = self._scorer.head.vocab_size
        return scores.new_full((scores.shape[0], size), -torch.inf).index_copy_(1, ids, scores)


def _correction(adapter: nn.Module) -> Callable[[Tensor], Tensor]:
    """[rows, hidden_size] -> the same plus its correction."""
    if isinstance(adapter, nn.Linear):
        linear = as_linear(adapter)
        return lambda hidden: linear.add_to(hidden, hidden)
    return lambda hidden: hidden + adapter(hidden)
