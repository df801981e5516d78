"""Training of the embedded target and draft: dense word supervision, then nothing but more of it.

Plain cross-entropy on the answers yields a blind model (the template gives most tokens away).
So each image token also learns to predict, through the language model's own embedding rows, the
words for what it shows: colour, shape, direction, distance; and its row and column. And without
help the language model long ignores WHICH thing is asked for: so, half-way through the layers, the
token that ends the question's name learns to tell where that thing is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration

from collab_llm_lab.training import loop, run_folder
from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.architecture import SIZES, build, prefix_ids
from collab_llm_lab.training.nav.batches import Batch, Batches
from collab_llm_lab.training.nav.forward import FastForward, Output
from collab_llm_lab.training.nav.wording import HELD_OUT, WORDS, corpus
from collab_llm_lab.training.stopping import deaf_processes
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.tokenizer import train_tokenizer
from collab_llm_nodes.sim.expert import DIRECTIONS, DISTANCES


@dataclass(frozen=True)
class TrainConfig:
    """One training run; with equal values it gives equal models on one machine."""

    role: str = "target"
    """A key of ``architecture.SIZES``: target | draft | micro."""
    initial: str = ""
    """Folder of the checkpoint to begin with; none: fresh weights."""
    teacher: str = ""
    """Folder of the checkpoint whose law of each answer token is learnt; none: the expert's."""
    run: str = "runs/nav-target"
    data: str = "data/nav"
    shards: int = 30
    steps: int = 24_000
    batch: int = 32
    questions: int = 2
    learning_rate: float = 2e-3
    warmup: int = 300
    weight_decay: float = 0.05
    dense_weight: float = 4.0
    name_weight: float = 0.3
    reworded: float = 0.0
    """Share of the questions asked in one of ``wording.TRAINED``, not in the plain wording."""
    freeze_vision: bool = False
    seed: int = 0
    dagger_steps: tuple[int, ...] = ()
    """Steps whose model is rolled out in fresh rooms; its visited states join the data ..."""
    dagger_lag: int = 2_000
    """... this many steps later (rolled out in a second process meanwhile)."""
    dagger_rooms: int = 400
    dagger_share: float = 0.5
    """Share of own-trajectory pictures in a batch once there are any."""
    checkpoint_seconds: float = 120.0
    evaluate_every: int = 1_000
    held_out_rooms: int = 40
    compile: bool = True
    bfloat16: bool = True

    def __post_init__(self) -> None:
        if self.role not in SIZES:
            raise ConfigError(f"unknown {self.role!r}", field="role", remedy=" | ".join(SIZES))
        if self.steps < 1 or self.batch < 1 or self.questions < 1 or self.shards < 1:
            raise ConfigError("must be positive", field="steps, batch, questions, shards")

    @property
    def pace(self) -> loop.Pace:
        """The schedule, and when to save and to measure."""
        return loop.Pace(
            steps=self.steps,
            warmup=self.warmup,
            checkpoint_seconds=self.checkpoint_seconds,
            measure_every=self.evaluate_every,
        )


class DenseHead(nn.Module):
    """Word logits of image tokens through the tied embedding rows; row and column beside them."""

    ids: Tensor

    def __init__(self, hidden: int, word_ids: list[int]) -> None:
        super().__init__()
        self.register_buffer("ids", torch.tensor(word_ids), persistent=False)
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.bias = nn.Parameter(torch.full((len(word_ids),), -3.0))
        self.place = nn.Linear(hidden, data.TOKEN_ROWS + data.TOKEN_COLUMNS)
        self.finding = nn.Linear(hidden, len(DIRECTIONS) + len(DISTANCES) + 2)

    def forward(self, vision: Tensor, rows: Tensor, dense: Tensor) -> Tensor:
        """Loss of image tokens [B, T, D] against multi-hot words [B, T, W]."""
        x = F.rms_norm(vision, (vision.shape[-1],))
        logits = F.linear(x, rows[self.ids]).float() * self.scale + self.bias
        words = F.binary_cross_entropy_with_logits(logits, dense)
        cells = torch.arange(data.TOKENS, device=vision.device)
        places = self.place(x).float()
        row = F.cross_entropy(
            places[..., : data.TOKEN_ROWS].flatten(0, 1),
            (cells // data.TOKEN_COLUMNS).repeat(len(x)),
        )
        column = F.cross_entropy(
            places[..., data.TOKEN_ROWS :].flatten(0, 1),
            (cells % data.TOKEN_COLUMNS).repeat(len(x)),
        )
        return words + 0.02 * (row + column)

    def name(self, hidden: Tensor, found: Tensor) -> Tensor:
        """Loss of the asked name's token [N, D]: where the thing is, or that it is not in view."""
        guess = self.finding(F.rms_norm(hidden, (hidden.shape[-1],))).float()
        split = len(DIRECTIONS) + 1
        where = F.cross_entropy(guess[:, :split], found[:, 0])
        return where + F.cross_entropy(guess[:, split:], found[:, 1])


class Learner:
    """Model, dense head, optimiser and schedule: everything that a checkpoint holds."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self.tokenizer: PreTrainedTokenizerBase = train_tokenizer(corpus())
        size = SIZES[config.role]
        self.model: Qwen2VLForConditionalGeneration = (
            self._read(config.initial)
            if config.initial
            else build(size, self.tokenizer, config.seed)
        )
        word_ids = [self.tokenizer(f" {w}", add_special_tokens=False).input_ids for w in WORDS]
        assert all(len(ids) == 1 for ids in word_ids), "every dense word is one token"
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        mover: Any = self.model
        mover.to(self.device)
        self.head = DenseHead(size.hidden, [ids[0] for ids in word_ids]).to(self.device)
        self.fast = FastForward(self.model, prefix_ids(self.tokenizer)).to(self.device)
        if config.freeze_vision:
            self.model.model.visual.requires_grad_(False)
        self.teacher: FastForward | None = None
        if config.teacher:
            teacher = self._read(config.teacher).requires_grad_(False)
            self.teacher = FastForward(teacher, prefix_ids(self.tokenizer)).to(self.device)
        self.batches = Batches(self.tokenizer, config.seed, config.reworded)
        self._name_depth = size.layers // 2 + 1  # half-way: what follows can still read it
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.98),
            fused=True,
        )
        self._loss = torch.compile(self._losses, dynamic=False) if config.compile else self._losses

    def _read(self, folder: str) -> Qwen2VLForConditionalGeneration:
        """The checkpoint in ``folder``, which must have this training's tokenizer."""
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if own.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"{folder} has another tokenizer",
                field="initial, teacher",
                remedy="give a checkpoint of `collab-llm train nav`",
            )
        return Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def parameters(self) -> list[nn.Parameter]:
        both = (*self.model.parameters(), *self.head.parameters())
        return [p for p in both if p.requires_grad]

    def _losses(
        self,
        pictures: Tensor,
        texts: Tensor,
        at: Tensor,
        labels: Tensor,
        dense: Tensor,
        names: Tensor,
        name_at: Tensor,
        found: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = self.fast(pictures, texts, texts.shape[0] // pictures.shape[0])
        logits = _answer_logits(self.fast, out, at)
        if self.teacher is None:
            answer = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        else:
            with torch.no_grad():
                said = self.teacher(pictures, texts, texts.shape[0] // pictures.shape[0])
                law = _answer_logits(self.teacher, said, at).softmax(-1)
            real = (labels >= 0).float()
            answer = -((law * logits.log_softmax(-1)).sum(-1) * real).sum() / real.sum()
        if not self.config.name_weight and not self.config.dense_weight:
            return answer, answer.new_zeros(()), answer.new_zeros(())
        named = self.fast.read(
            out.vision, names, names.shape[0] // pictures.shape[0], self._name_depth
        )[-1].flatten(0, 1)
        named = named[torch.arange(len(named), device=named.device), name_at]
        return (
            answer,
            self.head(out.vision, self.model.lm_head.weight, dense),
            self.head.name(named, found),
        )

    def learn(self, batch: Batch) -> dict[str, float]:
        """Make one optimiser step; return its losses: answer in nats per token, dense, name."""
        rate = self.config.pace.rate(self.config.learning_rate, self.step, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        kind = self.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.config.bfloat16):
            tensors = [getattr(batch, f.name).to(self.device) for f in fields(batch)]
            answer, dense, name = self._loss(*tensors)
            loss = answer + self.config.dense_weight * dense + self.config.name_weight * name
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        losses = {"answer_loss": answer, "dense_loss": dense, "name_loss": name}
        return {key: float(value.detach()) for key, value in losses.items()}

    def state(self) -> dict[str, Any]:
        return {
            "config": json.dumps(asdict(self.config)),
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])


def _answer_logits(fast: FastForward, out: Output, at: Tensor) -> Tensor:
    """float32 [B K, A, V]: logits at the answer positions ``at`` [B K, A]."""
    hidden = out.layers[-1].flatten(0, 1)
    return fast.logits(
        torch.gather(hidden, 1, at[..., None].expand(-1, -1, hidden.shape[-1]))
    ).float()


def train_nav(
    config: TrainConfig,
    progress: loop.Progress = lambda what, done, total, figures: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Render the data, train one model, resume where an earlier call stopped; True when finished.

    The run folder holds ``state.pt`` (everything), ``curve.json`` and, at the end, ``model/``
    (float32 checkpoint in transformers' format). ``stop`` is asked before every shard and step.
    """
    folders = data.make_shards(
        Path(config.data), config.shards, lambda n, of: progress("rendering", n, of, {}), stop
    )
    if len(folders) < config.shards:
        return False
    run = Path(config.run)
    learner = Learner(config)
    loop.restore(learner, run, learner.device)
    pictures = data.Pictures(folders)
    rounds = _Rounds(config, learner)

    def advance() -> dict[str, float]:
        own = rounds.pictures(learner.step)
        from_own = int(config.batch * config.dagger_share) if own is not None else 0
        sources = [(pictures, config.batch - from_own)]
        if own is not None:
            sources.append((own, from_own))
        return learner.learn(learner.batches.make(sources, learner.step, config.questions))

    def measure() -> dict[str, float]:
        return _held_out(config, learner)

    def stopped() -> bool:
        while not stop():
            if (awaited := rounds.awaited(learner.step)) is None:
                return False
            awaited.join(1.0)
        return True

    if config.initial and not learner.curve:
        learner.curve.append({"step": 0, "seconds": learner.seconds, **measure()})
    try:
        finished = loop.train(
            learner,
            run,
            config.pace,
            advance,
            measure=measure,
            save_at=config.dagger_steps,
            tell=progress,
            stop=stopped,
        )
    finally:
        rounds.stop()
    if finished:
        export(learner.model, learner.tokenizer, run / "model", torch.float32)
    return finished


def _held_out(config: TrainConfig, learner: Learner) -> dict[str, float]:
    """Figures on held-out questions; ``held_out_wording`` is ``action`` in words never shown."""
    from collab_llm_lab.training.nav.evaluate import held_out_figures

    model, tokenizer, folder = learner.model, learner.tokenizer, Path(config.data)
    found = held_out_figures(model, tokenizer, folder, config.held_out_rooms)
    if config.reworded:
        other = held_out_figures(
            model, tokenizer, folder, config.held_out_rooms, wishes=HELD_OUT["both"]
        )
        found["held_out_wording"] = other["action"]
    return found


TARGET_PLAN = TrainConfig(
    role="target", steps=17_000, learning_rate=1.5e-3, dagger_steps=(4_000, 7_000, 10_000, 13_000)
)
DRAFT_PLAN = TrainConfig(role="draft", steps=2_600, learning_rate=2e-3)
"""The draft sees far less than the target: it only has to guess well."""
TARGET_WORDING = TrainConfig(
    role="target",
    shards=10,
    steps=180,
    learning_rate=6e-4,
    warmup=20,
    dense_weight=0.0,
    name_weight=0.0,
    reworded=0.7,
    freeze_vision=True,
    dagger_steps=(0,),
    dagger_lag=0,
    dagger_rooms=150,
    evaluate_every=60,
    held_out_rooms=20,
    compile=False,  # its texts differ in length
    bfloat16=False,
)
"""The wording stage: the language model alone, with instructions in many words."""
DRAFT_WORDING = replace(
    TARGET_WORDING, role="draft", steps=120, learning_rate=1e-3, dagger_steps=()
)
"""The same for the draft, which learns the law of the target's answers."""


def train_all(
    out: Path,
    hours: float = 0.0,
    seed: int = 0,
    pair: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train target, draft and early-exit adapters into ``out/models``; resumes from ``out``.

    Each model learns to see and answer in the plain wording, then, in a second stage, to
    understand other words.

    Args:
        out: runs, rendered data and results; one plan per folder.
        hours: stop, to be resumed, after this long; 0 = when the plan is done.
        seed: of initialisation and batches.
        pair: folder of a trained pair; only the wording stage and the adapters are run.
        stop: asked before every step; True ends the call, to be resumed.

    Raises:
        ConfigError: ``out`` belongs to another seed or pair, is in use, or cannot be written.
        ModelError: the state that an earlier call saved is damaged.
    """
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from collab_llm_lab.training.nav.adapters import AdapterConfig, train_adapters
    from collab_llm_lab.training.nav.curves import write_curves

    torch.set_num_threads(1)  # models this small are slower on more
    transformers_logging.disable_progress_bar()
    began = time.monotonic()

    def late() -> bool:
        return stop() or 0 < 3600 * hours < time.monotonic() - began

    stages = _stages(out, pair)
    console = Console()
    options = {"seed": seed, "pair": str(pair.resolve()) if pair else "no pair"}
    shown = loop.shown(("answer_loss", "in_view_direction", "not_in_view"))
    with run_folder.held(out, options), shown as show:
        for name, plan, result in stages:
            config = replace(plan, run=str(out / name), data=str(out / "data"), seed=seed)
            if not train_nav(config, show(name), late):
                console.print(f"stopped in stage {name}; the same command goes on from here")
                return
            learner = Learner(replace(config, compile=False))
            loop.restore(learner, Path(config.run), learner.device)
            export(learner.model, learner.tokenizer, result, torch.float16)
        tell = show("early exits")
        own = sorted(out.glob("target*/dagger-*"))
        shards = [*data.make_shards(out / "data", 5), *own]
        exits = AdapterConfig(
            model=str(out / "models" / "nav-target"),
            shards=tuple(str(s) for s in shards),
            reworded=TARGET_WORDING.reworded,
            bfloat16=TARGET_WORDING.bfloat16,
        )
        if pair is not None:
            exits = replace(exits, initial=str(pair / "nav-target"), steps=80, learning_rate=4e-4)
        agreement = train_adapters(
            exits,
            lambda done, total: tell("adapters", done, total, {}),
            stop,
        )
        if not agreement:
            console.print("stopped in the early exits; the same command begins them again")
            return
    write_curves({name: (plan, out / name) for name, plan, _ in stages}, out / "curves")
    console.print(f"early exits agree with the last layer: {agreement}")
    console.print(f"finished: {out / 'models'}; copy its folders to models/ to ship them")


def _stages(out: Path, pair: Path | None) -> list[tuple[str, TrainConfig, Path]]:
    """Name, plan and resulting checkpoint of every stage, in order."""
    stages = []
    for plan, wording in ((TARGET_PLAN, TARGET_WORDING), (DRAFT_PLAN, DRAFT_WORDING)):
        first = (pair or out / "plain") / f"nav-{plan.role}"
        if pair is None:
            stages.append((plan.role, plan, first))
        teacher = str(out / "models" / "nav-target") if plan.role == "draft" else ""
        wording = replace(wording, initial=str(first), teacher=teacher)
        stages.append((f"{plan.role}-wording", wording, out / "models" / f"nav-{plan.role}"))
    return stages


class _Rounds:
    """DAgger rounds beside the training: rolled out from a snapshot, used ``dagger_lag`` later."""

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
        self._config, self._learner = config, learner
        self._running: dict[int, multiprocessing.process.BaseProcess] = {}
        self._joined: list[Path] = []
        self._pictures: data.Pictures | None = None

    def awaited(self, step: int) -> multiprocessing.process.BaseProcess | None:
        """Begin the rounds that are due at ``step``; return one that has to end before it."""
        from collab_llm_lab.training.nav.dagger import roll_out_round

        for number, due in enumerate(self._config.dagger_steps):
            shard = self._shard(number)
            snapshot = Path(self._config.run) / f"snapshot-{number}"
            if step < due or shard in self._joined:
                continue
            if step == due and not snapshot.exists():
                export(self._learner.model, self._learner.tokenizer, snapshot, torch.float32)
            if not shard.exists() and number not in self._running:
                first = 2 * data.TRAIN_SEEDS + number * self._config.dagger_rooms
                context = multiprocessing.get_context("spawn")
                process = context.Process(
                    target=roll_out_round,
                    args=(str(snapshot), str(shard), first, self._config.dagger_rooms),
                )
                with deaf_processes():
                    process.start()
                self._running[number] = process
            running = self._running.get(number)
            if step >= due + self._config.dagger_lag and running and running.is_alive():
                return running
        return None

    def pictures(self, step: int) -> data.Pictures | None:
        """Return the own-trajectory pictures to use at ``step``, once none is ``awaited``."""
        for number, due in enumerate(self._config.dagger_steps):
            shard = self._shard(number)
            if step >= due + self._config.dagger_lag and shard not in self._joined:
                self._running.pop(number, None)
                self._joined.append(shard)
                self._pictures = data.Pictures(self._joined)
        return self._pictures

    def _shard(self, number: int) -> Path:
        return Path(self._config.run) / f"dagger-{number}"

    def stop(self) -> None:
        """End what still runs: whoever resumes begins that round again, and alone."""
        for process in self._running.values():
            process.terminate()
            process.join()


def export(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write a checkpoint that ``from_pretrained`` reads: weights, tokenizer, picture size.

    Written beside and renamed, so that a reader never sees half of it.
    """
    import copy
    import shutil

    from collab_llm_lab.training.nav.forward import MERGE, PATCH
    from collab_llm_nodes.sim.renderer import HEIGHT_PX, WIDTH

    building = folder.with_name(folder.name + ".part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    copied: Any = copy.deepcopy(model)
    copied.to(dtype).save_pretrained(building)
    tokenizer.save_pretrained(building)
    pixels = HEIGHT_PX * WIDTH
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
    }
    text = json.dumps(processor, indent=2)
    (building / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(building, folder)
