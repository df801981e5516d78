"""``collab-llm train draft``: a draft learns to say what its target says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab_llm_lab.training import loop
from collab_llm_lab.training.learner import ModelLearner, Recipe
from collab_llm_lab.training.loop import Progress, Stop
from collab_llm_lab.training.pair.config import PairConfig
from collab_llm_lab.training.pair.data import Data, Sample, Target, read_data
from collab_llm_lab.training.pair.laws import Law
from collab_llm_lab.training.pair.reports import read_report, write_report
from collab_llm_lab.training.pair.rows import Batch, choose_batch, encode_row
from collab_llm_lab.training.pair.shortened import stored_type, write_checkpoint, write_shortened
from collab_llm_lab.training.pair.speculation import GAMMA, plain_runner
from collab_llm_lab.training.pair.states import read_answer
from collab_llm_lab.training.pair.tensor_files import TensorFiles
from collab_llm_lab.training.run import make_stages
from collab_llm_nodes.config import setting
from collab_llm_nodes.decoding.sampling import masked
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.models.devices import find_device
from collab_llm_nodes.models.loading import DTYPES, LoadedModel, ModelConfig, load, model_folder
from collab_llm_nodes.models.vocabulary import check_same
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics

STAGES = ("beginning", "laws", "training", "report")
_CURVE = 64
"""Held-out answers that are judged for a point of the curve."""
_DECODED = 32
"""Held-out prompts that are decoded before and after the training."""


@dataclass(frozen=True)
class DraftConfig(PairConfig):
    """Training of a draft. It begins as a model of its own or as layers of the target.

    Attributes:
        draft: a model with the target's tokens; empty: ``layers`` of the target.
    """

    learning_rate: float = setting(3e-4, "Peak learning rate.", low=1e-7, high=1.0)
    draft: str = ""
    layers: int = setting(
        0, "First layers of the target to begin with; 0: begin with draft.", low=0
    )
    lora: int = setting(
        0, "Rank of the changes that are trained; 0: all weights of the decoder.", low=0, high=4096
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.draft) == bool(self.layers):
            raise ConfigError(
                "a draft begins as a model or as layers of the target",
                field="--draft",
                remedy="give either --draft MODEL or --layers N",
            )


def train_draft(config: DraftConfig, stop: Stop = lambda: False) -> dict[str, float] | None:
    """Distil the target's answers into a draft, from where an earlier call stopped.

    Returns:
        The report, which ``report.json`` holds, too: tokens per pass of the target on held-out
        prompts, before and after. None if the call was stopped.

    Raises:
        ConfigError: the folder is in use or belongs to another training; or peft is missing.
        InvalidInput: the data is another target's, empty or damaged.
        ModelError: a model cannot be loaded, or a loss is not finite.
        VocabularyMismatch: draft and target have different tokens.
    """
    data = read_data(config.data)
    training = _Training(config, data)
    makers = (training.begin, training.ask_target, training.train, training.judge)
    finished = make_stages(
        config.out,
        dict(zip(STAGES, makers, strict=True)),
        options={
            "out": "train draft",
            "target": data.facts.target.fingerprint,
            **config.lasting(data),
            "draft": config.draft,
            "layers": config.layers,
            "lora": config.lora,
        },
        hours=config.hours,
        shown=("loss", "agreement", "held_out", "tau"),
        stop=stop,
    )
    if not finished:
        return None
    if not (config.out / "model" / "config.json").is_file():
        raise ConfigError(
            f"the draft that was trained, {config.out / 'model'}, is gone",
            field="--out",
            remedy="train it again in another folder",
        )
    return read_report(config.out)


class DraftLearner(ModelLearner):
    """A draft that learns the target's laws of the tokens that the target said.

    Args:
        vocabulary: tokens of both.
    """

    def __init__(self, model: Any, vocabulary: int, recipe: Recipe, device: torch.device) -> None:
        self._vocabulary = vocabulary
        super().__init__(model, recipe, device)

    def losses(self, batch: Batch, law: Law) -> dict[str, Tensor]:
        logits = batch.logits(self.trained, self._vocabulary)
        agreement = (logits.argmax(-1) == law.ids[:, 0]).float().mean()
        return {"loss": law.distance(logits).mean(), "agreement": agreement}

    def state(self) -> dict[str, Any]:
        """Return the trained weights only; the others are those of the beginning."""
        moved = {n: p.data for n, p in self.trained.named_parameters() if p.requires_grad}
        return {**super().state(), "model": moved}

    def load_state(self, state: dict[str, Any]) -> None:
        own = self.trained.state_dict()
        if not state["model"].keys() <= own.keys():
            raise KeyError("weights that this draft does not have")
        super().load_state({**state, "model": {**own, **state["model"]}})


class _Training:
    """The stages of one call, with the files that they share."""

    def __init__(self, config: DraftConfig, data: Data) -> None:
        self._config, self._data = config, data
        self._samples, self._held_out = data.parts()
        self._laws = TensorFiles(config.out / STAGES[1])
        self._shortened = config.out / STAGES[0] / "model"
        self._result = config.out / "model"
        self._device = find_device(config.target.device)

    def begin(self, report: Progress, stop: Stop) -> bool:
        """Cut the draft from the target unless it exists; refuse one that cannot learn from it."""
        self._data.check_weights(self._config.target)
        if self._config.layers:
            write_shortened(self._config.target.path, self._config.layers, self._shortened)
        stored_type(self._begun)
        draft = load(ModelConfig(str(self._begun)))
        known = self._data.facts.target
        check_same(draft.vocabulary, known.vocabulary, draft=str(self._begun), target=known.path)
        if not draft.sees and any(sample.images for sample in self._data.samples):
            raise InvalidInput(
                f"{self._data.folder} holds answers about pictures; {self._begun} reads text only",
                field="--draft",
                remedy="name a draft that sees, or give --layers",
            )
        return True

    def ask_target(self, report: Progress, stop: Stop) -> bool:
        """Write the target's laws of all tokens that it has said."""
        target = load(self._config.target)
        self._data.check_target(Target.of(target))
        with closing(Engine(target)) as engine:
            for number, sample in enumerate(self._data.samples, 1):
                if stop():
                    return False
                if sample not in self._laws:
                    law = Law.of(self._guided(engine, sample))
                    self._laws.write(sample, ids=law.ids, logs=law.logs.half())
                report("asking the target", number, len(self._data.samples), {})
        return True

    def _guided(self, engine: Engine, sample: Sample) -> Tensor:
        """Return the target's logits [tokens of the answer, V] within the answers' guide."""
        logits = read_answer(engine, self._data, sample, len(sample.answer))
        guide = self._data.facts.limit
        if guide is None:
            return logits
        return masked(logits, engine.loaded.guides.open(guide).rows((), sample.answer[:-1]))

    def train(self, report: Progress, stop: Stop) -> bool:
        """Train the draft, and write it as a checkpoint."""
        config, run = self._config, self._config.out / STAGES[2]
        dtype = config.target.dtype if config.lora else "float32"  # of weights that do not move
        draft = load(self._as_target(self._begun, dtype))
        wrapped = prepare(draft.model, config.lora, config.seed)
        learner = DraftLearner(draft.model, draft.vocab_size, self._recipe(), self._device)
        loop.restore(learner, run, self._device)
        sizes = [_size(sample) for sample in self._samples]

        def advance() -> dict[str, float]:
            chosen = choose_batch(sizes, config.batch, learner.step, config.seed)
            return learner.learn(*self._lesson([self._samples[i] for i in chosen], draft))

        measure = partial(self._judge_held_out, learner, draft)
        if not loop.train(learner, run, advance, measure=measure, report=report, stop=stop):
            return False
        model = wrapped.merge_and_unload() if config.lora else draft.model
        write_checkpoint(model.to(DTYPES[stored_type(self._begun)]), self._begun, self._result)
        return True

    def judge(self, report: Progress, stop: Stop) -> bool:
        """Decode held-out prompts with the draft as it was and as it is; write the report."""
        target = Engine(load(self._config.target))
        prompts = [self._data.prompt(sample) for sample in self._held_out[:_DECODED]]
        most, guide = self._data.facts.max_tokens, self._data.facts.limit
        found: dict[str, float] = {"gamma": GAMMA, "prompts": len(prompts)}
        for name, folder in (("before", self._begun), ("after", self._result)):
            draft = Engine(load(self._as_target(folder, self._config.target.dtype)))
            runner, total = plain_runner(draft, target), EdgeCloudMetrics()
            for number, prompt in enumerate(prompts, 1):
                if stop():
                    return False
                total.add(runner.generate(prompt, max_tokens=most, guide=guide).metrics)
                report(f"decoding, {name}", number, len(prompts), {"tau": total.tau})
            found |= {f"tau_{name}": total.tau, f"acceptance_{name}": total.acceptance}
        write_report(self._config.out, found)
        return True

    @property
    def _begun(self) -> Path:
        """Folder of the draft before the training."""
        if self._config.layers:
            return self._shortened
        return model_folder(ModelConfig(self._config.draft))

    def _as_target(self, folder: Path, dtype: str) -> ModelConfig:
        return ModelConfig(str(folder), dtype, self._config.target.device)

    def _recipe(self) -> Recipe:
        config = self._config
        epoch = max(1, len(self._samples) // config.batch)
        steps = math.ceil(config.epochs * epoch)
        return Recipe(
            config.batch,
            config.learning_rate,
            steps=steps,
            warmup=min(50, steps // 10),
            decay=0.0,
            bfloat16=self._device.type == "cuda",
            measure_every=epoch,
        )

    def _lesson(self, samples: Sequence[Sample], draft: LoadedModel) -> tuple[Batch, Law]:
        """Return samples as the draft reads them, and the target's laws of their tokens."""
        rows, laws = [], []
        for sample in samples:
            found = self._laws.read(sample, torch.device("cpu"))
            law = Law(found["ids"], found["logs"].float())
            row = encode_row(self._data, sample, draft)
            tokens = min(len(row.answer), len(law.ids))
            rows.append(row.cut(tokens))
            laws.append(law.at(slice(tokens)))
        return Batch.of(rows), Law.join(laws)

    @torch.inference_mode()
    def _judge_held_out(self, learner: DraftLearner, draft: LoadedModel) -> dict[str, float]:
        samples, size = self._held_out[:_CURVE], self._config.batch
        tokens, sums = 0, {"agreement": 0.0, "loss": 0.0}
        for first in range(0, len(samples), size):
            batch, law = self._lesson(samples[first : first + size], draft)
            found = learner.losses(batch.to(self._device), law.to(self._device))
            tokens += len(law.ids)
            for name in sums:
                sums[name] += len(law.ids) * float(found[name])
        return {"held_out": sums["agreement"] / tokens, "held_out_loss": sums["loss"] / tokens}


def prepare(model: Any, rank: int, seed: int) -> Any:
    """Choose the weights that are trained; with a rank, return the model in peft's wrapping."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    if not rank:  # a vision encoder stays as it is
        model.get_decoder().requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
        return model
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "the package peft is not installed", field="--lora", remedy="pip install peft"
        ) from error
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    maps = [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{prefix}.") and isinstance(module, nn.Linear)
    ]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=maps)
    return peft.get_peft_model(model, config)


def _size(sample: Sample) -> int:
    """Return about how many tokens a sample has, without encoding it."""
    return len(sample.answer) + (len(sample.text) + sum(len(t.content) for t in sample.turns)) // 4
