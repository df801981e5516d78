"""``collab-llm eval text``: held-out figures of the text family."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from collab_llm_lab.training.learner import pick_device
from collab_llm_lab.training.loop import Progress, ignore_progress
from collab_llm_lab.training.text.checker import check
from collab_llm_lab.training.text.distillation import Question, questions
from collab_llm_lab.training.text.forward import TextForward
from collab_llm_lab.training.text.held_out import pad_documents, token_nats
from collab_llm_lab.training.text.models import CONTEXT, answers, engine_of, read
from collab_llm_lab.training.text.ngram import NGram
from collab_llm_lab.training.text.plans import MODELS
from collab_llm_lab.training.text.rendering import Renderer, prompt_text
from collab_llm_lab.training.text.samples import (
    DEFAULT_MIX,
    SUB_DOMAINS,
    Sample,
    make_sample,
)
from collab_llm_lab.training.text.shards import LENGTH, RAW_SHARE, draw_documents
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models.adapters import ExitAdapters
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import MedusaHeads
from collab_llm_nodes.models.loading import LOCAL
from collab_llm_nodes.models.vocabulary import check_one_vocabulary, vocabulary_hash

S = 4
"""Tokens drafted per round in the acceptance figures."""
NGRAM_ORDER = 4
DISTANCES = (50, 100, 200, 400)
DISTRACTORS = (0, 3, 8, 15)
COPIED = (8, 16, 32, 64)
"""Upper ends of the groups, inclusive; one more group is above the last."""


@dataclass(frozen=True)
class EvalText:
    """One evaluation."""

    models: Path = Path("runs/text/models")
    seed: int = 0
    device: str = "auto"
    documents: int = 100
    """Per sub-domain, for the perplexities."""
    ngram_documents: int = 6_000
    extractions: int = 200
    """Per sub-domain."""
    copies: int = 60
    """Per sub-domain."""
    answers: int = 80
    """Prompts per sub-domain for the acceptance figures."""
    tokens: int = 128
    """Most tokens of an answer there."""
    prompts: int = 1_000
    """Prompts for the number of distinct answers."""


QUICK = {
    "documents": 24,
    "ngram_documents": 1_200,
    "extractions": 32,
    "copies": 10,
    "answers": 16,
    "tokens": 96,
    "prompts": 200,
}
"""Settings that ``--quick`` changes."""


def eval_text(config: EvalText, report: Progress = ignore_progress) -> dict[str, Any]:
    """Measure the family in ``config.models`` on samples that training never shows.

    Raises:
        ModelError: a model is missing or unreadable.
        ConfigError: the models' tokenizers differ.
    """
    transformers_logging.disable_progress_bar()
    evaluation = _Evaluation(config, pick_device(config.device))
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("parameters", evaluation.parameters),
        ("perplexity", evaluation.perplexity),
        ("extraction", evaluation.extraction),
        ("copy", evaluation.copying),
        ("acceptance", evaluation.acceptance),
        ("guesses", evaluation.guesses),
        ("distinct", evaluation.distinct),
    ]
    found: dict[str, Any] = {}
    for number, (name, measure) in enumerate(parts):
        report(name, number, len(parts), {})
        found[name] = measure()
    report("done", len(parts), len(parts), {})
    return found


def accepted_in_rounds(matches: Sequence[bool], s: int = S) -> tuple[int, int]:
    """Return (accepted, drafted) tokens of an answer that is drafted ``s`` tokens at a time.

    Args:
        matches: for each token of the target's answer, whether the draft chooses it, too, given
            all tokens before it.

    Each round accepts the draft up to its first wrong token; the target gives the next one. The
    tokens that a draft gives after a wrong one do not matter: one pass over the answer is enough.
    """
    accepted = drafted = place = 0
    while place < len(matches):
        most = min(s, len(matches) - place)
        good = next((k for k in range(most) if not matches[place + k]), most)
        accepted += good
        drafted += most
        place += good + 1
    return accepted, drafted


class _Evaluation:
    def __init__(self, config: EvalText, device: torch.device) -> None:
        self._config, self._device = config, device
        tokenizers, self._models = {}, {}
        for name in MODELS:
            folder = config.models / name
            if not folder.is_dir():  # else transformers asks its hub for a model of that name
                raise ModelError(
                    f"{folder} is not there",
                    field="--models",
                    remedy="give the folder models/ of a finished `collab-llm train text`",
                )
            try:
                tokenizers[name] = AutoTokenizer.from_pretrained(folder, **LOCAL)
                self._models[name] = TextForward(read(folder, device), CONTEXT)
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelError(
                    f"cannot read {folder}: {error}",
                    field="--models",
                    remedy="give the folder that holds " + ", ".join(MODELS),
                ) from error
        first, *others = ((name, vocabulary_hash(own)) for name, own in tokenizers.items())
        check_one_vocabulary(first, others, "--models")
        self._tokenizer: PreTrainedTokenizerBase = tokenizers[MODELS[0]]
        self._renderer = Renderer(self._tokenizer)
        self._target = self._models["text-target"]
        self._engines: dict[str, Engine] = {}
        self._answered: dict[str, list[tuple[tuple[int, ...], list[int]]]] = {}

    # ------------------------------------------------------------ figures

    def parameters(self) -> dict[str, int]:
        return {
            name: sum(p.numel() for p in forward.model.parameters())
            for name, forward in self._models.items()
        }

    def perplexity(self) -> dict[str, Any]:
        """Return perplexities per sub-domain, over the answered tokens of plain samples."""
        config = self._config
        studied = draw_documents(
            self._tokenizer, f"n-gram {config.seed}", DEFAULT_MIX, config.ngram_documents, False
        )
        ngram = NGram([ids for ids, *_ in studied], len(self._tokenizer), NGRAM_ORDER)
        found: dict[str, Any] = {
            "ngram_order": NGRAM_ORDER,
            "ngram_tokens": sum(len(ids) for ids, *_ in studied),
        }
        for sub_domain in SUB_DOMAINS:
            seed, mix = f"perplexity {config.seed}", {(sub_domain, "plain"): 1.0}
            documents = draw_documents(self._tokenizer, seed, mix, config.documents, True)
            ids, kinds = pad_documents(documents, CONTEXT)
            found[sub_domain] = {}
            for name in ("text-target", "text-worker"):
                nats, real = token_nats(
                    self._models[name], ids.to(self._device), kinds.to(self._device)
                )
                found[sub_domain][name] = float(nats[real].mean().exp())
            surprise = np.concatenate(
                [
                    -np.log(ngram.probabilities(tokens)[1:])[classes[1:] > 1]
                    for tokens, classes, _ in documents
                ]
            )
            found[sub_domain]["ngram"] = float(np.exp(surprise.mean()))
        return found

    def extraction(self) -> dict[str, Any]:
        """Return the share of right answers, and precision and recall of None.

        The groups by distance and by distractors hold the samples whose passage has the answer.
        """
        samples = self._samples("extract", self._config.extractions)
        found = {}
        for name in ("text-target", "text-worker"):
            texts = self._say(name, samples, most=160)
            right = [not check(s, text) for s, text in zip(samples, texts, strict=True)]
            absent = [is_absent(sample) for sample in samples]
            said = [says_absent(text) for text in texts]
            both = sum(a and b for a, b in zip(absent, said, strict=True))
            found[name] = {
                "right": _share(right),
                "by_wording": _by(cycle(("trained", "new")), right),
                "by_distance": _by_fact(samples, right, "distance_words", DISTANCES),
                "by_distractors": _by_fact(samples, right, "distractors", DISTRACTORS),
                "by_sub_domain": _by((s.sub_domain for s in samples), right),
                "none_precision": both / max(1, sum(said)),
                "none_recall": both / max(1, sum(absent)),
                "samples": len(samples),
            }
        return found

    def copying(self) -> dict[str, Any]:
        """Return the share of exact copies, by the number of words."""
        samples = self._samples("copy", self._config.copies)
        lengths = [len(sample.turns[-1].content.split()) for sample in samples]
        found = {}
        for name in ("text-target", "text-worker"):
            texts = self._say(name, samples, most=320)
            right = [not check(s, text) for s, text in zip(samples, texts, strict=True)]
            found[name] = {
                "right": _share(right),
                "by_wording": _by(cycle(("trained", "new")), right),
                "by_words": _by_size(lengths, right, COPIED),
            }
        return found

    def acceptance(self) -> dict[str, dict[str, float]]:
        """Return the share of drafted tokens accepted, per sub-domain and draft; greedy, s = 4."""
        found: dict[str, dict[str, float]] = {}
        for sub_domain in SUB_DOMAINS:
            found[sub_domain] = {}
            for name in MODELS[2:]:
                accepted = drafted = 0
                for ids, first, answer in self._passes(sub_domain):
                    hidden = self._models[name](ids)[-1]
                    best = self._models[name].logits(hidden)[0, first - 1 : -1].argmax(-1)
                    good, of = accepted_in_rounds((best == answer).tolist())
                    accepted, drafted = accepted + good, drafted + of
                found[sub_domain][name] = accepted / max(1, drafted)
        return found

    def guesses(self) -> dict[str, Any]:
        """Return how often Medusa heads and early exits agree with the target's own answers."""
        folder = self._config.models / "text-target"
        parts = decoder_parts(self._target.model)
        exits = ExitAdapters.load(folder, parts).to(self._device)
        heads = MedusaHeads.load(folder, parts).to(self._device)
        exit_right = dict.fromkeys(exits.layers, 0)
        head_right, head_total = [0] * heads.heads, [0] * heads.heads
        tokens = rounds = 0
        for sub_domain in SUB_DOMAINS:
            for ids, first, answer in self._passes(sub_domain):
                layers = self._target(ids)
                tokens += len(answer)
                for layer in exits.layers:
                    logits = self._target.logits(exits(layer, layers[layer - 1]))
                    best = logits[0, first - 1 : -1].argmax(-1)
                    exit_right[layer] += int((best == answer).sum())
                read_by_heads = self._target.normed(layers[-1])[0, first - 1 : -1]
                drafts = heads.draft(read_by_heads, parts.head)
                right = head_matches(drafts, answer)
                for head, row in enumerate(right):
                    head_right[head] += int(sum(row))
                    head_total[head] += len(row)
                rounds += medusa_rounds(right, len(answer))
        return {
            "exits": {str(layer): n / max(1, tokens) for layer, n in exit_right.items()},
            "medusa": {
                **{
                    f"head_{head + 1}": head_right[head] / max(1, head_total[head])
                    for head in range(heads.heads)
                },
                "tokens_per_round": tokens / max(1, rounds),
            },
        }

    def distinct(self) -> dict[str, int]:
        """Return how many of the greedy answers to plain prompts differ."""
        count = self._config.prompts // len(SUB_DOMAINS)
        samples = self._samples("plain", count)
        texts = self._say("text-target", samples, most=64)
        return {"prompts": len(texts), "answers": len(set(texts))}

    # ------------------------------------------------------------ material

    def _samples(self, skill: str, count: int) -> list[Sample]:
        rng = random.Random(f"eval {skill} {self._config.seed}")
        return [
            make_sample(rng, sub_domain, skill, held_out=True, new_wordings=bool(number % 2))
            for number, sub_domain in enumerate(np.repeat(SUB_DOMAINS, count).tolist())
        ]

    def _say(self, name: str, samples: Sequence[Sample], most: int) -> list[str]:
        """Return the model's greedy answers, in the order of ``samples``."""
        prompts = self._renderer.encode([prompt_text(sample.turns[:-1]) for sample in samples])
        texts: list[str] = self._tokenizer.batch_decode(
            answers(self._engine(name), prompts, most), skip_special_tokens=True
        )
        return texts

    def _engine(self, name: str) -> Engine:
        """Return the model to answer with."""
        if name not in self._engines:
            self._engines[name] = engine_of(self._config.models / name, self._device)
        return self._engines[name]

    def _passes(self, sub_domain: str) -> list[tuple[Tensor, int, Tensor]]:
        """Return (ids [1, T], length of the prompt, answer) of the target's greedy answers."""
        if sub_domain not in self._answered:
            rng = random.Random(f"acceptance {sub_domain} {self._config.seed}")
            asked: list[Question] = questions(
                self._tokenizer,
                rng,
                sub_domain,
                self._config.answers,
                LENGTH // 2,
                raw_share=RAW_SHARE,
                held_out=True,
                skills=(("plain", 1.0),),
            )
            prompts = [question.ids for question in asked]
            said = answers(self._engine("text-target"), prompts, self._config.tokens)
            self._answered[sub_domain] = list(zip(prompts, said, strict=True))
        return [
            (
                torch.tensor([[*prompt, *answer]], device=self._device),
                len(prompt),
                torch.tensor(answer, device=self._device),
            )
            for prompt, answer in self._answered[sub_domain]
        ]


def head_matches(drafts: Tensor, answer: Tensor) -> list[list[bool]]:
    """Return, for each head, whether its guess at each place of the answer was right.

    Args:
        drafts: int64 [len(answer), heads]; row ``p`` was read before token ``p`` was known, and
            its head ``h`` guesses token ``p + 1 + h``.
    """
    found = []
    for head in range(drafts.shape[1]):
        places = max(0, len(answer) - 1 - head)
        guessed = drafts[:places, head]
        found.append((guessed == answer[head + 1 :][:places]).tolist())
    return found


def medusa_rounds(right: Sequence[Sequence[bool]], length: int) -> int:
    """Return the rounds in which the heads draft an answer of ``length`` tokens.

    A round gives the model's own next token and the guesses after it up to the first wrong one.
    """
    place = rounds = 0
    while place < length:
        good = 0
        while good < len(right) and place < len(right[good]) and right[good][place]:
            good += 1
        place += 1 + good
        rounds += 1
    return rounds


def is_absent(sample: Sample) -> bool:
    """Return True if the passage of an extraction does not hold the answer."""
    return sample.facts.get("answer") in (None, "None")


def says_absent(text: str) -> bool:
    """Return True for an answer that says ``None``, or null in the worker's JSON form."""
    squeezed = text.strip().rstrip(".").replace(" ", "")
    return squeezed == "None" or '"answer":null' in squeezed


def _share(right: Sequence[bool]) -> float:
    return sum(right) / max(1, len(right))


def _by(groups: Iterable[str], right: Iterable[bool]) -> dict[str, float]:
    """Return the share of right ones in each group."""
    found: dict[str, list[bool]] = {}
    for group, good in zip(groups, right, strict=False):
        found.setdefault(group, []).append(good)
    return {group: _share(values) for group, values in found.items()}


def _by_fact(
    samples: Sequence[Sample], right: Sequence[bool], fact: str, ends: Sequence[int]
) -> dict[str, float]:
    """Return the shares by a number among the facts, of samples whose passage has the answer."""
    present = [
        (sample.facts[fact], good)
        for sample, good in zip(samples, right, strict=True)
        if not is_absent(sample) and fact in sample.facts
    ]
    return _by_size([value for value, _ in present], [good for _, good in present], ends)


def _by_size(values: Sequence[int], right: Sequence[bool], ends: Sequence[int]) -> dict[str, float]:
    """Return the shares by values up to each of ``ends``, and above the last."""
    groups = (
        next((f"<= {end}" for end in ends if value <= end), f"> {ends[-1]}") for value in values
    )
    return dict(sorted(_by(groups, right).items()))
