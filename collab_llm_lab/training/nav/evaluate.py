"""Abilities of the models: perception on held-out pictures, success in fresh rooms, tau."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TaskID, TimeElapsedColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2VLForConditionalGeneration
from transformers.utils import logging as transformers_logging

from collab_llm_lab.training.nav import data
from collab_llm_lab.training.nav.answering import answers
from collab_llm_lab.training.nav.batches import Question, ask
from collab_llm_lab.training.nav.wording import (
    HELD_OUT,
    TRAINED,
    VERBS,
    Wish,
    Wishes,
    action_said,
    direction_said,
)
from collab_llm_nodes.assets import shipped_model
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.robot.grammar import Code, parse
from collab_llm_nodes.robot.prompt import user_text
from collab_llm_nodes.sim import expert
from collab_llm_nodes.sim.renderer import Renderer, from_jpeg, to_jpeg
from collab_llm_nodes.sim.robot import Base
from collab_llm_nodes.sim.rooms import Room, make_room

HELD_OUT_SEEDS = 500_000
"""Rooms of the held-out pictures; below the training rooms, above the evaluation rooms."""

Answer = Callable[[np.ndarray, Sequence[str]], list[str]]
"""Pictures uint8 [B, 84, 168, 3] and user texts to answers."""


Tell = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


def held_out_pictures(
    folder: Path, rooms: int = 40, seed: int = 0, tell: Tell | None = None
) -> data.Pictures:
    """Pictures of rooms that no training shard has; rendered on first use."""
    shard = folder / f"held-out-{seed}-{rooms}"
    if not shard.exists():
        renderer = Renderer()
        visited: list[data.Snapshot] = []
        for number in range(rooms):
            visited += data.room_snapshots(renderer, HELD_OUT_SEEDS + seed + number)
            if tell is not None:
                tell("rendering held-out pictures", number + 1, rooms)
        renderer.close()
        data.write_shard(shard, visited)
    return data.Pictures([shard])


def held_out_figures(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rooms: int = 40,
    batch: int = 128,
    seed: int = 0,
    wishes: Wishes | None = None,
    tell: Tell | None = None,
) -> dict[str, float]:
    """Shares of held-out questions answered right, from freely generated greedy answers.

    ``in_view_direction``: the direction word, over things in view. ``not_in_view``: said not to
    be in view, over things that are not. ``exact``: the whole answer. ``action``: the action.
    ``refused``: how many answers the action grammar does not read.
    Rooms and questions follow from ``seed``; they are asked in ``wishes``, or plainly.
    """
    pictures = held_out_pictures(folder, rooms, seed, tell)
    rng = np.random.default_rng(seed)
    indices: list[int] = []
    asked: list[Question] = []
    for i in range(len(pictures)):
        if wishes is None:
            asked += ask(pictures, i, 1, rng)
        else:
            asked += ask(pictures, i, 1, rng, reworded=1.0, wishes=wishes)
        indices.append(i)
    said: list[str] = []
    for at in range(0, len(asked), batch):
        chunk = slice(at, at + batch)
        images = pictures.images(np.array(indices[chunk]))
        said += answers(model, tokenizer, images, [q.prompt for q in asked[chunk]])
        if tell is not None:
            tell("held-out questions", len(said), len(asked))
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
    """Number of answers that the action grammar refuses in its default form."""
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


def start(seed: int, wishes: Wishes | None = None) -> Episode:
    """A fresh episode of room ``seed``, asked for in one of ``wishes`` or plainly.

    The words of the instruction follow from the seed too.
    """
    room = make_room(seed)
    wish = Wish(VERBS[seed % len(VERBS)])
    if wishes is not None:
        wish = wishes.draw(np.random.default_rng([seed, 0x3015]))
    return Episode(room, Base(room, seed=2), [], wish.text(room.goal.name))


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
    progress: Callable[[int, int], None] | None = None,
    together: int = 64,
    wishes: Wishes | None = None,
) -> list[Episode]:
    """Solve the rooms of ``seeds``, ``together`` at a time in lockstep; returns every episode."""
    renderer = Renderer()
    waiting, running, done = list(seeds), list[Episode](), list[Episode]()
    while waiting or running:
        while waiting and len(running) < together:
            running.append(start(waiting.pop(0), wishes))
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
        if progress is not None:
            progress(len(done), len(seeds))
    renderer.close()
    return done


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success rate, mean steps and the share of each outcome."""
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


@dataclass(frozen=True)
class EvalConfig:
    """Settings of ``collab-llm eval nav``."""

    target: str = "nav-target"
    """A shipped model, or the folder of a checkpoint."""
    draft: str = "nav-draft"
    rooms: int = 200
    seed: int = 0
    """First room, and of the perception questions; the first ``HELD_OUT_SEEDS`` rooms are fresh."""
    edge_cloud_rooms: int = -1
    """Rooms whose every step is also answered by the edge-cloud path; -1 = all."""
    gamma: int = 4
    """Tokens drafted per round."""
    held_out_rooms: int = 200
    """Rooms whose pictures measure perception."""
    wording_rooms: int = 100
    """Rooms driven per set of wordings: the trained one, and each of those held out."""

    def __post_init__(self) -> None:
        if self.rooms < 1 or self.seed < 0 or self.seed + self.rooms > HELD_OUT_SEEDS:
            raise ConfigError(
                f"rooms {self.seed} to {self.seed + self.rooms - 1} are not all fresh",
                field="seed",
                remedy=f"stay within 0 to {HELD_OUT_SEEDS - 1}: the others were trained on",
            )


def eval_nav(config: EvalConfig, progress: Tell | None = None) -> dict[str, Any]:
    """Every gate of the embedded pair: success, perception, validity, losslessness, tau."""
    torch.set_num_threads(1)  # models this small are slower on more
    transformers_logging.disable_progress_bar()
    with _bars(progress) as tell:
        return _eval_nav(config, tell)


@contextlib.contextmanager
def _bars(given: Tell | None) -> Iterator[Tell]:
    """``given``, or progress bars on the terminal."""
    if given is not None:
        yield given
        return
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield tell


def _eval_nav(config: EvalConfig, tell: Tell) -> dict[str, Any]:
    seeds = range(config.seed, config.seed + config.rooms)
    episodes: dict[str, list[Episode]] = {}
    for role, name in (("target", config.target), ("draft", config.draft)):
        folder = name if Path(name).is_dir() else shipped_model(name)
        model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        answer = partial(answers, model, tokenizer)
        episodes[role] = closed_loop(answer, seeds, partial(tell, f"{role} alone"))
        if role == "target":
            wording = wording_figures(answer, config.seed, config.wording_rooms, tell)
            with tempfile.TemporaryDirectory() as pictures:
                perception = held_out_figures(
                    model,
                    tokenizer,
                    Path(pictures),
                    config.held_out_rooms,
                    seed=config.seed,
                    tell=tell,
                )
    count = config.rooms if config.edge_cloud_rooms < 0 else config.edge_cloud_rooms
    chosen = [e for e in episodes["target"] if e.room.seed < config.seed + count]
    speculation = compare_edge_cloud(config, chosen, tell)
    target = summary(episodes["target"])
    driven = [asked.answer for episode in episodes["target"] for asked in episode.asked]
    grammar = {
        "answers": len(driven) + int(perception["questions"]),
        "refused": refused(driven) + int(perception.pop("refused")),
    }
    return {
        "grammar": grammar,
        "target": target,
        "draft": summary(episodes["draft"]),
        **perception,
        "invalid_actions": target["invalid_actions"],
        "wording": wording,
        **speculation,
    }


def wording_figures(answer: Answer, seed: int, rooms: int, tell: Tell) -> dict[str, float]:
    """Shares of rooms solved when the instruction has other words than the plain ones.

    ``trained``: verbs and frames of the training. ``held_out``: over ``rooms`` rooms each with
    an unseen verb, an unseen frame and both, whose own shares are beside it.
    """
    seeds = range(seed, seed + rooms)

    def solved(name: str, wishes: Wishes) -> float:
        driven = closed_loop(answer, seeds, partial(tell, f"wording, {name}"), wishes=wishes)
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
"""Words that carry what was seen or decided; the rest follows from them."""


def compare_edge_cloud(
    config: EvalConfig, episodes: Sequence[Episode], tell: Tell
) -> dict[str, float]:
    """Ask every step of ``episodes`` again through draft and target together, greedily.

    ``tau``: tokens per verification, short last rounds of answers included. ``tau_decision``:
    what it would be in an endless answer whose every token is as hard to guess as the decision
    words, (1 - a^(gamma+1)) / (1 - a) for their acceptance rate ``a``; ``tau_any`` is the same
    for all tokens, to compare it with.
    """
    from collab_llm_nodes.engine.engine import Engine
    from collab_llm_nodes.models.loading import ModelConfig, load
    from collab_llm_nodes.models.prompt import Prompt
    from collab_llm_nodes.protocols.edge_cloud.client import Source
    from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner

    draft = Engine(load(ModelConfig(config.draft)))
    target = Engine(load(ModelConfig(config.target)))
    runner = InProcessRunner(draft, target, gamma=config.gamma)
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
        tell("edge and cloud", number + 1, len(steps))
    rate = {kind: right / max(1, of) for kind, (of, right) in judged.items()}
    return {
        "action_mismatches": different,
        "steps_compared": len(steps),
        "tau": tokens / max(1, rounds),
        "tau_any": _tau(rate["any"], config.gamma),
        "tau_decision": _tau(rate["decision"], config.gamma),
        "acceptance": rate["any"],
        "acceptance_decision": rate["decision"],
    }


def _tau(acceptance: float, gamma: int) -> float:
    """Expected tokens per round: 1 + a + ... + a^gamma (Leviathan et al. 2023, eq. 1)."""
    return sum(acceptance**k for k in range(gamma + 1))
