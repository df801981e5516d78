"""Plans of a training: the stages of the pair, for a CPU and for a GPU.

The target's vision first learns what image tokens show, alone: a picture costs less than a third of
one with texts. Then the model learns to say where named things are, and how far the way is free;
then to answer all requests, from the expert's states and from its own (DAgger). The draft learns to
see likewise, and then the law of the target's answers, half of them where the target drives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collab_llm_lab.training.learner import Recipe
from collab_llm_lab.training.nav.batches import Ask, Lengths
from collab_llm_lab.training.nav.dagger import Dagger
from collab_llm_lab.training.nav.questions import Answering, seeing_questions
from collab_llm_lab.training.nav.sources import POSES, WAYS, Source


@dataclass(frozen=True)
class Stage:
    """One stage of one model; with equal values it gives equal models on one CPU."""

    recipe: Recipe
    role: str
    """A key of ``models.SIZES``."""
    pictures: Mapping[Source, int]
    """Pictures of each source in a batch."""
    shards: int = 40
    """Number of shards of each source, in the end."""
    first_shards: int = 2
    """Shards that are rendered before the first step ..."""
    steps_per_shard: int = 60
    """... and the steps after which one more is used; other processes render them meanwhile."""
    initial: str = ""
    """Stage whose model this one begins with; none: fresh weights."""
    teacher: str = ""
    """Stage whose model's law of each answer token is learnt; none: the expert's answers."""
    ask: Ask | None = seeing_questions
    """None: vision alone is trained, by the words of image tokens."""
    lengths: Lengths = Lengths(text=18, answer=8)
    dagger: Dagger = field(default_factory=Dagger)

    def used(self, step: int) -> int:
        """Return the number of shards of each source that ``step`` draws from."""
        return min(self.shards, self.first_shards + step // self.steps_per_shard)


@dataclass(frozen=True)
class Plan:
    """The stages in their order, and the processes beside them."""

    stages: Mapping[str, Stage]
    exits: Stage
    """Of the early exits of the stage ``target``."""
    renderers: int = 1
    """Processes that render shards."""
    makers: int = 0
    """Processes that make batches; 0: the training itself."""


_SIGHT = Recipe(
    64,
    1e-3,
    steps=6_000,
    warmup=300,
    beta2=0.98,
    muon=7e-3,
    compile=True,
    bfloat16=True,
    measure_every=500,
)
_SEEING = replace(_SIGHT, batch=32, steps=3_000)
_ANSWERING = replace(_SEEING, muon=5e-3, steps=9_000, measure_every=1_000)
_TARGET = Stage(
    _ANSWERING,
    "target",
    {POSES: 12, WAYS: 20},
    shards=24,
    initial="seeing",
    ask=Answering(2, reworded=0.7),
    lengths=Lengths(text=84, answer=50),
    dagger=Dagger((2_000, 3_500, 5_000, 6_500)),
)
_DRAFT = replace(
    _TARGET,
    recipe=replace(_ANSWERING, steps=4_000),
    role="draft",
    initial="draft-seeing",
    teacher="target",
    dagger=Dagger((0, 500, 1_000)),
)
_EXITS = replace(
    _TARGET,
    recipe=Recipe(32, 2e-3, steps=1_000, warmup=0, decay=0.0, beta2=0.999),
    shards=5,
    first_shards=5,
    dagger=Dagger(),
)
CPU = Plan(
    {
        "sight": Stage(_SIGHT, "target", {POSES: 64}, ask=None),
        "seeing": Stage(_SEEING, "target", {POSES: 32}, initial="sight"),
        "target": _TARGET,
        "draft-sight": Stage(replace(_SIGHT, steps=9_000), "draft", {POSES: 64}, ask=None),
        "draft-seeing": Stage(_SEEING, "draft", {POSES: 32}, initial="draft-sight"),
        "draft": _DRAFT,
    },
    _EXITS,
)
"""For one core, with another one that renders."""


def _on_gpu(stage: Stage, minutes: float) -> Stage:
    """Return a stage with as many steps of 128 pictures as ``minutes`` hold."""
    recipe = replace(
        stage.recipe,
        batch=128,
        learning_rate=1.5 * stage.recipe.learning_rate,
        steps=0,
        minutes=minutes,
        measure_every=2_000,
    )
    share = recipe.batch // stage.recipe.batch
    pictures = {source: share * count for source, count in stage.pictures.items()}
    return replace(
        stage, recipe=recipe, pictures=pictures, shards=32, first_shards=8, steps_per_shard=200
    )


_ROUNDS = tuple(step for step in (2_000, 4_000, 6_000) for _ in range(8))
"""Eight processes drive side by side, each in rooms of its own."""
GPU = Plan(
    {
        "sight": _on_gpu(CPU.stages["sight"], 4.0),
        "seeing": _on_gpu(CPU.stages["seeing"], 3.0),
        "target": replace(_on_gpu(_TARGET, 10.0), dagger=Dagger(_ROUNDS, lag=1_500, rooms=50)),
        "draft-sight": _on_gpu(CPU.stages["draft-sight"], 2.0),
        "draft-seeing": _on_gpu(CPU.stages["draft-seeing"], 1.0),
        "draft": replace(_on_gpu(_DRAFT, 3.0), dagger=Dagger((0,) * 8, lag=1_500, rooms=50)),
    },
    _EXITS,
    renderers=15,
    makers=12,
)
"""For one GPU with 16 cores: some three calls of nine minutes. It has never run on a card."""
PLANS = {"cpu": CPU, "cuda": GPU}
"""By the type of device."""
