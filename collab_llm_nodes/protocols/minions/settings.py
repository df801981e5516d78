"""Everything that Minion, MinionS and their baselines can be told."""

from __future__ import annotations

import dataclasses
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
from collab_llm_nodes.protocols.minions.prompts import STYLES
from collab_llm_nodes.protocols.minions.sandbox.limits import SandboxLimits

PROGRAM, PLAN = "program", "plan"
EMBEDDED = "embedded"
RETRIES, SCRATCHPAD, HISTORY = "retries", "scratchpad", "history"
_REPEATS_ITSELF = 0.01
"""Below this temperature samples of one job hardly differ."""


@dataclass(frozen=True)
class RemoteConfig:
    """Settings of the requests to the remote model."""

    temperature: float = setting(0.0, "Temperature.", low=0.0, high=2.0, per_request=ANY)
    max_tokens: int = setting(
        2048, "Length limit of a reply [tokens].", low=1, high=MAX_TOKENS, per_request=ANY
    )
    repairs: int = fixed(
        2, "Times that a reply of the wrong form is asked for again.", low=0, high=10
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
    """The chat of two models (paper 000, section 4)."""

    remote: RemoteConfig = field(default_factory=RemoteConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    style: str = fixed("general", "Wording of the prompts.", choices=tuple(STYLES))
    rounds: int = setting(
        3, "Messages to the local model at most.", low=1, high=50, per_request=LOWER
    )
    force_final: bool = setting(True, "Make the remote answer in the last round.", per_request=ANY)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class MinionsConfig:
    """Decompose, execute, aggregate (paper 000, section 5)."""

    remote: RemoteConfig = field(default_factory=RemoteConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    style: str = fixed(
        "general", "Wording of the prompts and form of the worker's answers.",
        choices=tuple(STYLES),
    )  # fmt: skip
    planner: str = setting(
        PLAN,
        "plan: the remote writes a JSON plan; program: it writes a program, as in the paper, and a"
        " plan if that fails.",
        choices=(PROGRAM, PLAN),
        per_request=ranked((PROGRAM,), (PLAN,)),
    )
    choice_bits: int = setting(
        64,
        "What programs may tell the remote by their choice of jobs, in one answer [bits]. Where a"
        " choice would tell more, all its tasks are done over all pieces; below 8 no program runs.",
        low=0,
        high=1 << 20,
        per_request=LOWER,
    )
    attempts: int = fixed(
        3, "Programs or plans of a round at most, until one works.", low=1, high=20
    )
    rounds: int = setting(5, "Rounds at most.", low=1, high=50, per_request=LOWER)
    tasks: int = setting(
        3, "Different tasks of a round at most; 0: as the remote asks.", low=0, high=64,
        per_request=LIMIT,
    )  # fmt: skip
    samples: int = setting(
        1,
        "Answers of the worker to each task over each chunk, at most `max_samples`; 0: as the"
        " remote asks.",
        low=0, high=64, per_request=LIMIT,
    )  # fmt: skip
    max_samples: int = fixed(16, "Most samples of a task over a chunk.", low=1, high=64)
    chunker: str = setting(
        "",
        "Chunking function that the remote has to use; empty: any.",
        choices=("", *CHUNKERS),
        per_request=GIVEN,
    )
    chunk_size: int = setting(
        0,
        "Size of all chunks, in pages or characters as the function counts; 0: as the remote asks.",
        low=0,
        high=1_000_000,
        per_request=GIVEN,
    )
    abstain_filter: bool = setting(
        True, "Send no outputs in which the worker has found nothing.", per_request=ON
    )
    check_citations: bool = setting(
        True,
        "Send no outputs whose citation does not stand in their piece of text. Not in the paper.",
        per_request=ON,
    )
    carry: str = setting(
        SCRATCHPAD,
        "Memory of the remote between rounds. retries: what was missing; scratchpad: that and its"
        " notes; history: all that was said.",
        choices=(RETRIES, SCRATCHPAD, HISTORY),
        per_request=ranked((HISTORY,), (SCRATCHPAD,), (RETRIES,)),
    )
    force_final: bool = setting(True, "Make the remote answer in the last round.", per_request=ANY)
    retrieve: int = setting(
        0, "Work on this many retrieved passages in place of the documents; 0: off.",
        low=0, high=10_000, per_request=LIMIT,
    )  # fmt: skip
    reduce: bool = setting(
        False, "Let plans compute with the answers here. Not in the paper.", per_request=ANY
    )
    remote_characters: int = fixed(
        60_000, "Length of the outputs that a round may send.", low=1000, high=10_000_000
    )
    remote_share: float = fixed(
        0.25,
        "Outputs of an answer, as a share of the documents' length, and 1000 characters in any"
        " case; the rest is not sent. A worker that repeats its piece, as a document may ask it"
        " to, sends no more.",
        low=0.0,
        high=1e6,
    )
    field_characters: int = fixed(
        2000, "Length of each field of an output; the rest is cut off.", low=50, high=100_000
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def warnings(self) -> list[str]:
        """Return what is allowed and makes little sense, one sentence each."""
        if self.samples > 1 and self.local.temperature < _REPEATS_ITSELF:
            return [
                f"samples is {self.samples} at local.temperature {self.local.temperature:g}: the"
                " samples will hardly differ; raise the temperature, or take one sample"
            ]
        return []


@dataclass(frozen=True)
class DirectConfig:
    """One model answers alone: remote only, local only or RAG (paper 000, appendix B)."""

    remote: RemoteConfig = field(default_factory=lambda: RemoteConfig(temperature=0.2))
    local: LocalConfig = field(default_factory=LocalConfig)
    retrieve: int = setting(
        50, "Retrieved passages that the remote reads in RAG.", low=1, high=10_000
    )

    def __post_init__(self) -> None:
        check_ranges(self)


_ALMOST_GREEDY = LocalConfig(temperature=1e-5)

PRESETS: Mapping[str, MinionsConfig] = {
    "financebench": MinionsConfig(
        style="financebench", planner=PROGRAM, chunker="chunk_on_multiple_pages", chunk_size=5
    ),
    # Its prompt lets the remote do nothing but answer: there is no second round.
    "longhealth": MinionsConfig(
        style="longhealth", planner=PROGRAM, local=_ALMOST_GREEDY, rounds=1
    ),
    "qasper": MinionsConfig(style="qasper", planner=PROGRAM, local=_ALMOST_GREEDY),
    # Logs of a robot, read by the text worker and planned by the text target in its role planner.
    EMBEDDED: MinionsConfig(
        style=EMBEDDED,
        chunker="chunk_by_paragraph",
        chunk_size=400,
        rounds=2,
        tasks=0,
        local=LocalConfig(temperature=0.0, max_tokens=160),
    ),
}
"""The paper's experiments, and the embedded models. The former have the temperatures of appendix B
and prompts after appendix F, in our own words; it gives no numbers of rounds, tasks and samples for
its table 1, so these are the defaults."""

CHAT_PRESETS: Mapping[str, MinionConfig] = {
    name: dataclasses.replace(MinionConfig(), style=name, local=preset.local)
    for name, preset in PRESETS.items()
}
"""The same as a chat."""
