"""``collab-llm train heads``: Medusa heads of a frozen target, for Jupiter's workers.

Head ``i`` learns the law that the target has ``i + 1`` tokens later (paper 004): the law by which
its guess is judged.
"""

from __future__ import annotations

import json
import math
import random
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.pair.data import Data, Sample, Target, read_data
from collab_llm_lab.training.pair.laws import Law
from collab_llm_lab.training.pair.states import HiddenStates
from collab_llm_lab.training.run import make_stages
from collab_llm_lab.training.text.evaluate import head_matches, medusa_rounds
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import HEADS, MedusaHeads, head_fingerprint
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load

STAGE, REPORT = "heads", "report.json"
_JUDGED = 256
"""Held-out answers that are judged, at most."""
_BEST = 3
"""Guesses of a head that count in the report; ``medusa_tree`` drafts as many."""


@dataclass(frozen=True)
class HeadsConfig:
    """Training of Medusa heads.

    Attributes:
        out: of the heads, the state and the cache.
    """

    target: ModelConfig
    data: Path
    out: Path
    heads: int = setting(HEADS, "Tokens guessed beyond the next one.", low=1, high=16)
    epochs: float = setting(3.0, "Times that each answer is learnt from.", low=0.01, high=1e4)
    batch: int = setting(8, "Answers of a step.", low=1, high=4096)
    learning_rate: float = setting(1e-3, "At its peak.", low=1e-7, high=1.0)
    cache_gb: float = setting(
        8.0, "Hidden states kept on disk [GB]; the others are computed again.", low=0.0, high=1e5
    )
    hours: float = setting(0.0, "Stop after this long; 0: at the end.", low=0.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self)


class HeadsLearner(ModelLearner):
    """Medusa heads of a target that stays as it is. The loss is the sum of all heads', in nats."""

    def __init__(self, target: LoadedModel, count: int, recipe: Recipe) -> None:
        self.parts = decoder_parts(target.model)
        self._vocabulary = target.vocab_size
        self.heads = MedusaHeads(self.parts.hidden_size, count, head_fingerprint(self.parts))
        super().__init__(self.heads.to(target.device), recipe, target.device)

    def losses(self, states: Tensor, left: Tensor) -> dict[str, Tensor]:
        """Compare each head with the target's later laws.

        Args:
            states: input of the LM head at the tokens of some answers, [n, hidden].
            left: int64 [n], tokens of the same answer after each of them.
        """
        with torch.no_grad():
            law = Law.of(self._logits(states))
        guesses = self.heads(states.float()).unbind(-2)
        result: dict[str, Tensor] = {}
        loss = torch.zeros((), device=states.device)
        for later, guess in enumerate(guesses, 1):
            at = (left >= later).nonzero()[:, 0]
            if not len(at):
                continue
            # Each head's logits are computed again for its gradient, and never held all at once.
            pair = checkpoint(self._compare, guess[at], law.at(at + later), use_reentrant=False)
            loss = loss + pair[0]
            result[f"head_{later}"] = pair[1]
        return {"loss": loss, **result}

    @torch.no_grad()
    def best(self, states: Tensor) -> Tensor:
        """Return the best guesses of each head, int64 [n, heads, 3]."""
        parts = [self._logits(part) for part in self.heads(states.float()).unbind(-2)]
        return torch.stack([logits.topk(_BEST).indices for logits in parts], dim=1)

    def _compare(self, states: Tensor, law: Law) -> Tensor:
        """Return the mean distance from ``law``, and the share of equal best tokens."""
        logits = self._logits(states)
        same = (logits.argmax(-1) == law.ids[:, 0]).float()
        return torch.stack([law.distance(logits).mean(), same.mean()])

    def _logits(self, states: Tensor) -> Tensor:
        logits = self.parts.head(states.to(self.parts.head.weight.dtype))
        return logits[:, : self._vocabulary].float()


def train_heads(config: HeadsConfig, stop: loop.Stop = lambda: False) -> dict[str, Any] | None:
    """Train heads and write them to ``config.out``, from where an earlier call stopped.

    Returns:
        The report, which ``report.json`` holds, too: on held-out answers, each head's share of
        right tokens, and tokens per round. None if the call was stopped.

    Raises:
        InvalidInput: the data is another target's, empty or damaged, or its answers are too short.
        ConfigError: the folder is in use, or belongs to another training.
        ModelError: the target cannot be loaded, or a loss is not finite.
    """
    data = read_data(config.data)
    _check_lengths(data)
    target = load(config.target)
    identity = Target.of(target)
    data.check_target(identity)
    with closing(_Training(config, target, data)) as training:
        finished = make_stages(
            config.out,
            {STAGE: training.train},
            options={
                "target": identity.fingerprint,
                "dtype": config.target.dtype,
                "quantization": config.target.quantization,
                "heads": config.heads,
                "epochs": config.epochs,
                "batch": config.batch,
                "learning-rate": config.learning_rate,
                "seed": config.seed,
            },
            hours=config.hours,
            shown=("loss", *(f"head_{n}" for n in range(1, config.heads + 1))),
            stop=stop,
        )
        return training.write() if finished else None


def _check_lengths(data: Data) -> None:
    for samples in data.parts():
        if max(len(sample.answer) for sample in samples) < 2:
            raise InvalidInput(
                f"the answers in {data.folder} have one token each",
                field="--data",
                remedy="collect longer ones: heads guess the tokens after the first",
            )


class _Training:
    """One call: the learner, the states that it learns from, and the report."""

    def __init__(self, config: HeadsConfig, target: LoadedModel, data: Data) -> None:
        self._config = config
        self._samples, held_out = data.parts()
        self._held_out = held_out[:_JUDGED]
        count = len(decoder_parts(target.model).layers)
        budget = int(config.cache_gb * 1e9)
        self._states = HiddenStates(target, data, (count,), config.out / "states", budget)
        self._epoch = math.ceil(len(self._samples) / config.batch)
        steps = math.ceil(config.epochs * self._epoch)
        recipe = Recipe(
            config.batch,
            config.learning_rate,
            steps=steps,
            warmup=min(20, steps // 10),
            decay=0.0,
            beta2=0.999,
            measure_every=self._epoch,
        )
        torch.manual_seed(config.seed)
        self._learner = HeadsLearner(target, config.heads, recipe)

    def close(self) -> None:
        """Leave the target as it was found."""
        self._states.close()

    def train(self, report: loop.Progress, stop: loop.Stop) -> bool:
        """Train to the end, or until ``stop``; return True at the end."""
        run, learner = self._config.out / STAGE, self._learner
        loop.restore(learner, run, learner.device)
        return loop.train(
            learner, run, self._advance, measure=self._measure, report=report, stop=stop
        )

    def write(self) -> dict[str, Any]:
        """Write the heads and the report; return the report."""
        out, learner = self._config.out, self._learner
        loop.restore(learner, out / STAGE, learner.device)
        learner.heads.save(out)
        report = {
            "answers": {"learnt": len(self._samples), "held_out": len(self._held_out)},
            **self._figures(),
        }
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    def _advance(self) -> dict[str, float]:
        """Learn from the next answers; each epoch has an order of its own."""
        epoch, place = divmod(self._learner.step, self._epoch)
        order = list(self._samples)
        random.Random(f"{self._config.seed} {epoch}").shuffle(order)
        first = place * self._config.batch
        states = [self._read(each) for each in order[first : first + self._config.batch]]
        left = [torch.arange(len(each) - 1, -1, -1) for each in states]
        return self._learner.learn(torch.cat(states), torch.cat(left))

    @torch.no_grad()
    def _read(self, sample: Sample) -> Tensor:
        """Return the input of the LM head at the tokens of an answer, [n, hidden]."""
        states: Tensor = self._learner.parts.norm(self._states.of(sample)[-1])
        return states

    def _measure(self) -> dict[str, float]:
        figures = self._figures()
        shares = {f"held_out_{n}": share[0] for n, share in figures["heads"].items()}
        return {**shares, "tokens_per_round": figures["tokens_per_round"]}

    def _figures(self) -> dict[str, Any]:
        """Return, on held-out answers, tokens per round and each head's share of right tokens.

        The share is that of the best guess, of the two best, of the three best.
        """
        count = self._learner.heads.heads
        right = torch.zeros(count, _BEST)
        places = torch.zeros(count, 1)
        tokens = rounds = 0
        for sample in self._held_out:
            answer = torch.tensor(sample.answer)
            guesses = self._learner.best(self._read(sample)).cpu()
            for rank in range(_BEST):
                found = head_matches(guesses[..., rank], answer)
                right[:, rank] += torch.tensor([float(sum(each)) for each in found])
                if rank == 0:
                    places[:, 0] += torch.tensor([float(len(each)) for each in found])
                    rounds += medusa_rounds(found, len(answer))
            tokens += len(answer)
        shares = (right.cumsum(1) / places.clamp(min=1)).tolist()
        return {
            "heads": {str(n): share for n, share in enumerate(shares, 1)},
            "tokens_per_round": tokens / rounds,
        }
