"""Settings of Minion, MinionS and their baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from collab_llm_nodes.config import (
    ANY,
    GIVEN,
    LIMIT,
    LOWER,
    MAX_TOKENS,
    ON,
    check_ranges,
    fixed,
    ranked,
    setting,
)
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS
from collab_llm_nodes.protocols.minions.examples import EXAMPLES
from collab_llm_nodes.protocols.minions.jobs import MAX_SAMPLES
from collab_llm_nodes.protocols.minions.prompts import STYLES
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

PROGRAM, PLAN = "program", "plan"
EMBEDDED = "embedded"
AUTO, FIELDS, SENTENCE = "auto", "fields", "sentence"
RETRIES, SCRATCHPAD, HISTORY = "retries", "scratchpad", "history"
_REPEATS_ITSELF = 0.01
"""Temperature below which samples of one job hardly differ."""


@dataclass(frozen=True)
class RemoteConfig:
    """Settings of the requests to the remote model."""

    temperature: float = setting(0.0, "Temperature.", low=0.0, high=2.0, per_request=ANY)
    max_tokens: int = setting(
        2048, "Length limit of a reply [tokens].", low=1, high=MAX_TOKENS, per_request=ANY
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class LocalConfig:
    """Settings of the requests to the local model."""

    temperature: float = setting(0.2, "Temperature.", low=0.0, high=2.0, per_request=ANY)
    max_tokens: int = setting(
        512, "Length limit of a reply [tokens].", low=1, high=MAX_TOKENS, per_request=LOWER
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class MinionConfig:
    """Settings of Minion, the chat of two models (paper 000, section 4), which MinionS shares."""

    remote: RemoteConfig = field(default_factory=RemoteConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    style: str = fixed(
        "general",
        "Wording of the prompts, and in MinionS the form of the worker's outputs.",
        choices=tuple(STYLES),
    )
    rounds: int = setting(
        3, "Messages to the local model at most.", low=1, high=50, per_request=LOWER
    )
    force_final: bool = setting(True, "Make the remote answer in the last round.", per_request=ANY)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class MinionsConfig(MinionConfig):
    """Settings of MinionS: decompose, execute, aggregate (paper 000, section 5)."""

    rounds: int = setting(5, "Rounds at most.", low=1, high=50, per_request=LOWER)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    planner: str = setting(
        PLAN,
        "plan: the remote writes a JSON plan; program: it writes a program, as in the paper, or a"
        " plan if that fails.",
        choices=(PROGRAM, PLAN),
        per_request=ranked((PROGRAM,), (PLAN,)),
    )
    choice_bits: int = setting(
        64,
        "Information about the documents that programs may disclose by their choice of jobs, per"
        " answer [bits]. Beyond it, all tasks are done over all pieces; below 8 no program runs.",
        low=0,
        high=1 << 20,
        per_request=LOWER,
    )
    attempts: int = fixed(
        3, "Programs or plans of a round at most, until one works.", low=1, high=20
    )
    tasks: int = setting(
        3, "Different tasks of a round at most; 0: as the remote requests.", low=0, high=64,
        per_request=LIMIT,
    )  # fmt: skip
    samples: int = setting(
        1, "Samples of each task over each chunk; 0: as the remote requests.",
        low=0, high=MAX_SAMPLES, per_request=LIMIT,
    )  # fmt: skip
    chunker: str = setting(
        "",
        "Chunking function that the remote must use; empty: any.",
        choices=("", *CHUNKERS),
        per_request=GIVEN,
    )
    chunk_size: int = setting(
        0,
        "Size of all chunks, in the function's unit, pages or characters; 0: as the remote asks.",
        low=0,
        high=1_000_000,
        per_request=GIVEN,
    )
    worker_form: str = setting(
        AUTO,
        "Form of the worker's outputs, where the style asks for fields. fields: an object with"
        " explanation, citation and answer; sentence: a sentence of the piece, word for word,"
        " which small models manage; auto: sentence for a worker in this process of less than a"
        " billion parameters, else fields.",
        choices=(AUTO, FIELDS, SENTENCE),
        per_request=ANY,
    )
    examples: int = setting(
        0,
        "Solved examples before each job, for a worker that misses its form.",
        low=0,
        high=len(EXAMPLES),
        per_request=ANY,
    )
    abstain_filter: bool = setting(
        True, "Send no outputs in which the worker found nothing.", per_request=ON
    )
    check_citations: bool = setting(
        True,
        "Send no outputs whose citation does not occur in their piece of text. Not in the paper.",
        per_request=ON,
    )
    carry: str = setting(
        SCRATCHPAD,
        "Memory of the remote between rounds. retries: the missing information; scratchpad: that"
        " and its notes; history: the whole conversation.",
        choices=(RETRIES, SCRATCHPAD, HISTORY),
        per_request=ranked((HISTORY,), (SCRATCHPAD,), (RETRIES,)),
    )
    retrieve: int = setting(
        0, "Work on this many retrieved passages instead of the documents; 0: off.",
        low=0, high=10_000, per_request=LIMIT,
    )  # fmt: skip
    advice: bool = setting(
        False,
        "Ask the remote for advice before it decomposes the question first, as the authors' code"
        " does.",
        per_request=ANY,
    )
    aggregate: bool = setting(
        False,
        "Let programs put the kept outputs together on the robot (transform_outputs), as the"
        " authors' code does.",
        per_request=ANY,
    )
    reduce: bool = setting(
        False, "Let plans compute with the answers on the robot. Not in the paper.", per_request=ANY
    )
    remote_characters: int = fixed(
        60_000, "Outputs sent per round [characters].", low=1000, high=10_000_000
    )
    remote_share: float = fixed(
        0.25,
        "Outputs sent per answer, as a share of the documents' length but at least 1000 characters:"
        " a bound on a worker that repeats its pieces, as a document may instruct it to.",
        low=0.0,
        high=1e6,
    )

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that is allowed but makes little sense."""
        if self.samples > 1 and self.local.temperature < _REPEATS_ITSELF:
            return [
                f"samples is {self.samples} at local.temperature {self.local.temperature:g}: the"
                " samples will hardly differ; raise the temperature, or take one sample"
            ]
        return []


@dataclass(frozen=True)
class DirectConfig:
    """Settings of one model alone: remote only, local only or RAG (paper 000, appendix B).

    Attributes:
        retrieve: passages that the remote reads in RAG.
    """

    remote: RemoteConfig = field(default_factory=lambda: RemoteConfig(temperature=0.2))
    local: LocalConfig = field(default_factory=LocalConfig)
    retrieve: int = 50


_ALMOST_GREEDY = LocalConfig(temperature=1e-5)

PRESETS: Mapping[str, MinionsConfig] = {
    "financebench": MinionsConfig(
        style="financebench", planner=PROGRAM, chunker="chunk_on_multiple_pages", chunk_size=5
    ),
    # In its prompt the remote can only answer, so there is no second round.
    "longhealth": MinionsConfig(
        style="longhealth", planner=PROGRAM, local=_ALMOST_GREEDY, rounds=1
    ),
    "qasper": MinionsConfig(style="qasper", planner=PROGRAM, local=_ALMOST_GREEDY),
    # Logs of a robot, read by the text worker and planned by the text target as planner.
    EMBEDDED: MinionsConfig(
        style=EMBEDDED,
        chunker="chunk_by_paragraph",
        chunk_size=400,
        rounds=2,
        tasks=0,
        local=LocalConfig(temperature=0.0, max_tokens=160),
    ),
}
"""Settings of the paper's experiments and of the embedded models. The former have the temperatures
of appendix B and prompts after appendix F; the paper gives no numbers of rounds, tasks and samples
for its table 1, so these are the defaults."""

CHAT_PRESETS: Mapping[str, MinionConfig] = {
    name: MinionConfig(style=name, local=preset.local) for name, preset in PRESETS.items()
}
"""The presets of Minion."""
