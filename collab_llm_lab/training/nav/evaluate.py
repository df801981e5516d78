"""``collab-llm eval nav``: perception on held-out pictures, success in fresh rooms, tau."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from collab_llm_lab.training import loop
from collab_llm_lab.training.loop import Progress, report_counts
from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.batches import ask
from collab_llm_lab.training.nav.models import answers, read
from collab_llm_lab.training.nav.wording import (
    HELD_OUT,
    TRAINED,
    VERBS,
    Wording,
    Wordings,
    action_said,
    direction_said,
)
from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.jpeg import from_jpeg, to_jpeg
from collab_llm_nodes.sim.renderer import Renderer
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room, make_room

HELD_OUT_SEEDS = 500_000
"""Rooms of the held-out pictures; below the training rooms, above the evaluation rooms."""

_HELD_OUT_ROOMS = 200
"""Rooms whose pictures measure perception."""
_WORDING_ROOMS = 100
"""Rooms driven per set of wordings: the trained one, and each of those held out."""
_GAMMA = 4
"""Tokens drafted per round."""

Answer = Callable[[np.ndarray, Sequence[str]], list[str]]
"""Pictures uint8 [B, 84, 168, 3] and user texts to answers."""


def held_out_pictures(
    folder: Path, rooms: int, seed: int = 0, report: Progress = loop.ignore_progress
) -> data.Pictures:
    """Return pictures of rooms that no training shard has; rendered on first use."""
    shard = folder / f"held-out-{seed}-{rooms}"
    if not shard.exists():
        renderer = Renderer()
        visited: list[data.Snapshot] = []
        for number in range(rooms):
            visited += data.room_snapshots(renderer, HELD_OUT_SEEDS + seed + number)
            report("rendering held-out pictures", number + 1, rooms, {})
        renderer.close()
        data.write_shard(shard, visited)
    return data.Pictures([shard])


def held_out_figures(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rooms: int,
    seed: int = 0,
    wordings: Wordings | None = None,
    report: Progress = loop.ignore_progress,
    batch: int = 128,
) -> dict[str, float]:
    """Return shares of held-out questions answered right, from freely generated greedy answers.

    ``in_view_direction``: the direction word, over things in view. ``not_in_view``: said not to
    be in view, over things that are not. ``exact``: the whole answer. ``action``: the action.
    ``refused``: how many answers the action grammar does not read.
    Rooms and questions follow from ``seed``; they are asked in ``wordings``, or plainly.
    """
    pictures = held_out_pictures(folder, rooms, seed, report)
    rng = np.random.default_rng(seed)
    reworded = 0.0 if wordings is None else 1.0
    asked = [
        q
        for i in range(len(pictures))
        for q in ask(pictures, i, 1, rng, reworded=reworded, wordings=wordings or TRAINED)
    ]
    said: list[str] = []
    for first in range(0, len(asked), batch):
        chunk = np.arange(first, min(first + batch, len(asked)))
        prompts = [asked[i].prompt for i in chunk]
        said += answers(model, tokenizer, pictures.images(chunk), prompts)
        report("held-out questions", len(said), len(asked), {})
    seen = [q.sight is not None and q.sight.in_view for q in asked]
    wanted = [q.answer for q in asked]
    pairs = list(zip(said, wanted, seen, strict=True))
    return {
        "in_view_direction": _share(
            direction_said(s) == direction_said(w) for s, w, v in pairs if v
        ),
        "not_in_view": _share(direction_said(s) == "unseen" for s, _, v in pairs if not v),
        "exact": _share(s == w for s, w, _ in pairs),
        "action": _share(action_said(s) == action_said(w) for s, w, _ in pairs),
        "questions": len(pairs),
        "refused": refused(said),
    }


def refused(said: Iterable[str]) -> int:
    """Return the number of answers that the action grammar refuses in its default form."""
    return sum(parse(text).code is not Code.OK for text in said)


def _share(values: Iterable[bool]) -> float:
    kept = list(values)
    return sum(kept) / max(1, len(kept))


@dataclass(frozen=True)
class Asked:
    """One step's question as it was asked, and the answer to it."""

    jpeg: bytes
    text: str
    answer: str


@dataclass
class Episode:
    """One room being solved."""

    room: Room
    base: Base
    history: list[str]
    instruction: str
    outcome: str = ""
    """Empty while running; reached | wrong place | step limit | invalid."""
    asked: list[Asked] = field(default_factory=list)


def start(seed: int, wordings: Wordings | None = None) -> Episode:
    """Return a fresh episode of room ``seed``, asked for in one of ``wordings`` or plainly.

    The words of the instruction follow from the seed too.
    """
    room = make_room(seed)
    wording = Wording(VERBS[seed % len(VERBS)])
    if wordings is not None:
        wording = wordings.draw(np.random.default_rng([seed, 0x3015]))
    return Episode(room, Base(room, seed=2), [], wording.text(room.goal.name))


def advance(episode: Episode, text: str) -> None:
    """Carry out the action in ``text`` and settle the outcome if the episode is over."""
    action = action_said(text)
    if action is None:
        episode.outcome = "invalid"
    elif action == "stop":
        good = expert.reached(episode.room, episode.base.pose)
        episode.outcome = "reached" if good else "wrong place"
    else:
        episode.base.execute(action)
        episode.history.append(action)
        if len(episode.history) >= expert.MAX_STEPS:
            episode.outcome = "step limit"


def closed_loop(
    answer: Answer,
    seeds: Sequence[int],
    report: Callable[[int, int], None],
    wordings: Wordings | None = None,
    together: int = 64,
) -> list[Episode]:
    """Solve the rooms of ``seeds``, ``together`` at a time in lockstep; return every episode."""
    renderer = Renderer()
    waiting, running, done = list(seeds), list[Episode](), list[Episode]()
    while waiting or running:
        while waiting and len(running) < together:
            running.append(start(waiting.pop(0), wordings))
        jpegs = []
        for episode in running:
            renderer.enter(episode.room)
            jpegs.append(to_jpeg(renderer.picture(episode.base.pose)))
        texts = [user_text(e.instruction, e.history) for e in running]
        said = answer(np.stack([from_jpeg(j) for j in jpegs]), texts)
        for episode, jpeg, text, reply in zip(running, jpegs, texts, said, strict=True):
            episode.asked.append(Asked(jpeg, text, reply))
            advance(episode, reply)
        done += [e for e in running if e.outcome]
        running = [e for e in running if not e.outcome]
        report(len(done), len(seeds))
    renderer.close()
    return done


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the success rate, the mean steps and the share of each outcome."""
    outcomes = [e.outcome for e in episodes]
    kinds = ("reached", "wrong place", "step limit", "invalid")
    shares = {kind: outcomes.count(kind) / len(outcomes) for kind in kinds}
    return {
        "success_rate": shares["reached"],
        "rooms": len(outcomes),
        "steps": sum(len(e.history) for e in episodes) / len(episodes),
        "wrong_place": shares["wrong place"],
        "step_limit": shares["step limit"],
        "invalid_actions": outcomes.count("invalid"),
    }


def eval_nav(rooms: int, seed: int, report: Progress = loop.ignore_progress) -> dict[str, Any]:
    """Measure the shipped pair: success, perception, validity, losslessness, tau.

    Args:
        rooms: fresh rooms that are driven; every step of the target is also answered by the
            edge-cloud path.
        seed: first room, and of the perception questions.

    Raises:
        ConfigError: not all rooms are fresh.
    """
    if rooms < 1 or seed < 0 or seed + rooms > HELD_OUT_SEEDS:
        raise ConfigError(
            f"rooms {seed} to {seed + rooms - 1} are not all fresh",
            field="seed",
            remedy=f"stay within 0 to {HELD_OUT_SEEDS - 1}: the others were trained on",
        )
    torch.set_num_threads(1)  # models this small are slower on more
    transformers_logging.disable_progress_bar()
    seeds = range(seed, seed + rooms)
    draft = partial(answers, *read(shipped_model("nav-draft")))
    model, tokenizer = read(shipped_model("nav-target"))
    target = partial(answers, model, tokenizer)
    alone = closed_loop(draft, seeds, report_counts(report, "draft alone"))
    episodes = closed_loop(target, seeds, report_counts(report, "target alone"))
    wording = wording_figures(target, seed, _WORDING_ROOMS, report)
    with tempfile.TemporaryDirectory() as pictures:
        perception = held_out_figures(
            model, tokenizer, Path(pictures), _HELD_OUT_ROOMS, seed=seed, report=report
        )
    speculation = compare_edge_cloud(episodes, report)
    figures = summary(episodes)
    driven = [asked.answer for episode in episodes for asked in episode.asked]
    grammar = {
        "answers": len(driven) + int(perception["questions"]),
        "refused": refused(driven) + int(perception.pop("refused")),
    }
    return {
        "grammar": grammar,
        "target": figures,
        "draft": summary(alone),
        **perception,
        "invalid_actions": figures["invalid_actions"],
        "wording": wording,
        **speculation,
    }


def wording_figures(answer: Answer, seed: int, rooms: int, report: Progress) -> dict[str, float]:
    """Return shares of rooms solved when the instruction has other words than the plain ones.

    ``trained``: verbs and frames of the training. ``held_out``: over ``rooms`` rooms each with
    an unseen verb, an unseen frame and both, whose own shares are beside it.
    """
    seeds = range(seed, seed + rooms)

    def solved(name: str, wordings: Wordings) -> float:
        driven = closed_loop(answer, seeds, report_counts(report, f"wording, {name}"), wordings)
        return _share(e.outcome == "reached" for e in driven)

    shares = {f"held_out_{part}": solved(f"unseen {part}", w) for part, w in HELD_OUT.items()}
    return {
        "trained": solved("trained", TRAINED),
        "held_out": sum(shares.values()) / len(shares),
        **shares,
        "rooms": rooms * (1 + len(shares)),
    }


_DECISION = re.compile(
    r"\b(far|left|right|ahead|very|close|near|some|off|distant|cannot|not|no|turn|move|stop|\d+)\b"
)
"""Words that carry a perception or a decision; the other words follow from them."""


def compare_edge_cloud(episodes: Sequence[Episode], report: Progress) -> dict[str, float]:
    """Ask every step of ``episodes`` again through draft and target together, greedily.

    ``tau``: tokens per verification, short last rounds of answers included. ``tau_decision``: the
    tau of an endless answer whose every token is as hard to guess as the decision words, from
    their acceptance rate. ``tau_any``: the same from that of all tokens, for comparison.
    """
    from collab_llm_nodes.engine.engine import Engine
    from collab_llm_nodes.models.loading import ModelConfig, load
    from collab_llm_nodes.models.prompt import Prompt
    from collab_llm_nodes.protocols.edge_cloud.client import Source
    from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

    draft = Engine(load(ModelConfig("nav-draft")))
    target = Engine(load(ModelConfig("nav-target")))
    runner = InProcessRunner(draft, target, gamma=_GAMMA)
    steps = [asked for episode in episodes for asked in episode.asked]
    tokens = rounds = different = 0
    judged = {"any": [0, 0], "decision": [0, 0]}  # drafted tokens judged, accepted
    for number, asked in enumerate(steps):
        made = runner.generate(Prompt(asked.text, (asked.jpeg,)))
        tokens += made.metrics.tokens
        rounds += made.metrics.rounds
        different += action_said(made.text) != action_said(asked.answer)
        for token, source in zip(made.tokens, made.sources, strict=True):
            if source in (Source.ACCEPTED, Source.RECOVERED):
                decision = _DECISION.search(target.decode([token]))
                for kind in ("any", "decision") if decision else ("any",):
                    judged[kind][0] += 1
                    judged[kind][1] += source == Source.ACCEPTED
        report("edge and cloud", number + 1, len(steps), {})
    rate = {kind: right / max(1, of) for kind, (of, right) in judged.items()}
    return {
        "action_mismatches": different,
        "steps_compared": len(steps),
        "tau": tokens / max(1, rounds),
        "tau_any": _tau(rate["any"], _GAMMA),
        "tau_decision": _tau(rate["decision"], _GAMMA),
        "acceptance": rate["any"],
        "acceptance_decision": rate["decision"],
    }


def _tau(acceptance: float, gamma: int) -> float:
    """Return the tokens expected per round, 1 + a + ... + a^gamma (Leviathan et al. 2023)."""
    return sum(acceptance**k for k in range(gamma + 1))
