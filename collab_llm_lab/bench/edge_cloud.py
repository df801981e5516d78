"""``collab-llm bench edge-cloud``: the time of each decoding mode at four operating points.

EMULATED, and labelled so: passes of both models are padded to the times of a point, and the link is
a proxy that delays. Real are the acceptance of drafts, the early exits, the outcomes and their
prediction, the protocol over gRPC between two processes, and its overhead. ``as_is`` is the
embedded pair with nothing emulated, beside ``transformers`` generate in one process.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from collab_llm_lab.bench.acceptance import Acceptance
from collab_llm_lab.bench.cost import PROVIDERS, api_cost
from collab_llm_lab.bench.emulation import blur, paced_draft
from collab_llm_lab.bench.harness import stolen_s
from collab_llm_lab.bench.link import LinkProfile, LinkProxy
from collab_llm_lab.bench.lossless.check import transformers_generate
from collab_llm_lab.bench.rendering import Draw, draw_bars, draw_panels, label_axes, show_rows
from collab_llm_lab.bench.scenes import scene_prompts
from collab_llm_lab.bench.vocabulary import widen
from collab_llm_lab.training.pair.shortened import write_checkpoint
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.models.loading import ModelConfig, load, model_folder
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import free_port
from collab_llm_nodes.protocols.edge_cloud.ahead import AheadConfig
from collab_llm_nodes.protocols.edge_cloud.metrics import EdgeCloudMetrics
from collab_llm_nodes.protocols.edge_cloud.planner import (
    Mean,
    Mode,
    Planner,
    PlannerConfig,
    Profile,
    round_seconds,
)
from collab_llm_nodes.protocols.edge_cloud.predraft import PreDraftConfig
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import Generation
from collab_llm_nodes.protocols.edge_cloud.sessions import SessionClient
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

GAMMA = 4
MAX_TOKENS = 64
DEADLINE_S = 300.0
TRIALS = 3
"""Answers before the measured ones: the planner tries three modes, the others warm up."""
MORE = 2
"""So many times more answers at the fast points; half as many in the ablations."""
TAU = 2.9
"""Tokens per verification of paper 003's pair on the Go2 (2.92)."""
SIGHT_ANSWERS = 200
"""Answers on which the draft's tau is measured, with and without sight."""
_CANDIDATES = 64
"""Tokens that exits after the first one are scored over, with a large vocabulary."""
ABLATION_SCALE = 0.1
"""Ablations run with all times of their point divided by ten."""


DRAFT_THERE = 0.25
"""Time of the draft model's pass at the verifier, over that on the robot: an assumption."""
PAPER_MISSES = 0.556
"""Share of the verdicts that nothing had foreseen on the Go2 of paper 003 (Table 8)."""


@dataclass(frozen=True)
class Point:
    """An operating point [s]: a pass of the draft model, of the target, the link one mode."""

    t_p: float
    t_q: float
    t_c: float

    @property
    def t_d(self) -> float:
        """A pass of the draft model at the verifier, by assumption."""
        return DRAFT_THERE * self.t_p

    def scaled(self, factor: float) -> Point:
        """Return the point with all times multiplied."""
        return Point(factor * self.t_p, factor * self.t_q, factor * self.t_c)


POINTS = {
    "go2": Point(0.288 / 4, 0.620, 0.120),  # paper 003, Table 8
    "go2_17ms": Point(0.017, 0.620, 0.120),  # the same with the draft model of an Orin Nano today
    "jetson": Point(0.334 / 4, 0.497, 0.095),  # Table 5, Vicuna-68M / 7B
    "fast_server": Point(0.012, 0.025, 0.020),
    "lan": Point(0.012, 0.025, 0.002),
}
SLOW = ("go2", "go2_17ms", "jetson")
"""Points that mostly sleep, so that they share the machine."""
PAIRS = ("points", "embedded_pair")
"""Results by acceptance process: at most ``TAU`` (``points``), and the embedded pair's own."""


@dataclass(frozen=True)
class Setup:
    """The settings of a decoding mode."""

    gamma: int = GAMMA
    predraft: PreDraftConfig = field(default_factory=lambda: PreDraftConfig(max_predrafts=0))
    ahead: AheadConfig = field(default_factory=lambda: AheadConfig(push_window=0))
    planned: bool = False
    drafts: int = 1
    """Draft models; several vote on each token (``drafts:`` of the draft node)."""
    drafted_by: str = "robot"
    side_by_side: bool = False
    """The passes of all drafts take T_p together, as if each had a processor of its own."""


def fsd(gamma: int = GAMMA, workers: int = 6, queue: str = "priority") -> Setup:
    """Early exits and cache as in the paper: ``workers`` exits are pre-drafted for at a time."""
    return Setup(
        gamma,
        PreDraftConfig(max_predrafts=workers, queue=queue),
        AheadConfig(batch=workers, predictions=0, push_window=0),
    )


MODES = {
    "ar": Setup(gamma=0),
    "sd": Setup(),
    "fsd": fsd(),
    "push_ahead": Setup(GAMMA, PreDraftConfig(), AheadConfig()),
    # Drafts for the likeliest outcome alone: it misses about as many verdicts as the paper's pair.
    "one_outcome": Setup(GAMMA, PreDraftConfig(max_predrafts=1), AheadConfig()),
    "co_located": Setup(drafted_by="verifier"),
    "planner": Setup(GAMMA, PreDraftConfig(), AheadConfig(), planned=True),
}


VOTES = {"1": Setup()} | {
    f"{drafts} {'side by side' if side_by_side else 'in turn'}": Setup(
        drafts=drafts, side_by_side=side_by_side
    )
    for drafts in (2, 3)
    for side_by_side in (False, True)
}
"""Votes of drafts that err independently: the embedded draft, blurred with a seed each."""


def run_edge_cloud(
    *,
    answers: int,
    seed: int,
    ablations: bool,
    embedded: bool,
    vocabulary: int,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Decode ``answers`` answers per point, pair and mode.

    Args:
        embedded: also measure the embedded pair with its own acceptance.
        vocabulary: tokens of both models (``vocabulary.py``); 0: their own.

    Returns:
        ``sight`` (see ``_sight``); ``blur`` (noise on the draft model's head);
        ``points.<point>.<mode>`` (tau about ``TAU``, or the pair's own if that is lower) and
        ``embedded_pair.<point>.<mode>`` with
        ``ms_per_token, answers, spread_ms_per_token`` (of the answers, least and most),
        ``predicted_ms_per_token, tau, hit_rate, miss_rate, mean_exit_layer, rounds, pushed, bytes,
        output_mismatches, drafting_ms_per_round`` (with the verifier idle), ``profile`` (see
        ``_profile``) and ``stolen`` (processors that other virtual machines took meanwhile), and
        with push-ahead ``with_paper_misses_ms_per_token`` (predicted, were as many verdicts
        unforeseen as in paper 003); ``as_is.<mode>`` and ``transformers_ms_per_token``;
        ``speedups``; ``api_cost`` (paper 003, Table 1); ``votes`` (see ``VOTES``; paper 002's vote
        in this protocol); ``ablations`` (Figure 4 and Table 7).
    """
    with tempfile.TemporaryDirectory(prefix="collab_llm_") as folder:
        models = _models(vocabulary, Path(folder))
        pairs = PAIRS if embedded else PAIRS[:1]
        found = _run(models, Path(folder), pairs, answers, seed, ablations, plot, console)
    return found | {"vocabulary": vocabulary}


@dataclass(frozen=True)
class Models:
    """Paths of the pair, how many candidates its exits are scored over, and its trained tokens."""

    draft: str = "nav-draft"
    target: str = "nav-target"
    exit_candidates: int = 0
    tokens: int | None = None


def _models(vocabulary: int, folder: Path) -> Models:
    """Return the embedded pair, with a ``vocabulary`` of that size if it is not zero."""
    if not vocabulary:
        return Models()
    draft = widen("nav-draft", vocabulary, folder / "draft")
    target = widen("nav-target", vocabulary, folder / "target", exits="beside")
    trained = load(ModelConfig(path="nav-draft")).vocab_size
    return Models(str(draft), str(target), _CANDIDATES, trained)


def _run(
    models: Models,
    folder: Path,
    pairs: Sequence[str],
    answers: int,
    seed: int,
    ablations: bool,
    plot: Path | None,
    console: Console,
) -> dict[str, Any]:
    set_threads(ModelConfig(path=models.draft), ModelConfig(path=models.target))
    prompts = scene_prompts(MORE * answers, seed)
    target = Engine(load(ModelConfig(path=models.target)))
    right = [_alone(target, prompt) for prompt in prompts]
    acceptance = Acceptance(SIGHT_ANSWERS, seed, GAMMA)
    noise = acceptance.blur_to(TAU)
    drafts = {
        pair: [_draft(models, noise if pair == "points" else 0.0, folder / pair)] for pair in pairs
    }
    results: dict[str, Any] = {
        "emulated": "model passes padded, link delayed; see points_ms",
        "points_ms": {
            name: {"T_p": 1e3 * p.t_p, "T_q": 1e3 * p.t_q, "T_c": 1e3 * p.t_c}
            for name, p in POINTS.items()
        },
        "answers": answers,
        "gamma": GAMMA,
        "sight": _sight(acceptance),
        "blur": noise,
        **{pair: {} for pair in pairs},
    }

    def measure(pair: str, name: str, n: int) -> None:
        rows = measure_modes(
            POINTS[name],
            drafts[pair],
            prompts[:n],
            right[:n],
            MODES,
            console,
            f"{pair} {name}",
            models=models,
        )
        results[pair][name] = rows

    # The fast points have the machine alone.
    slow = [(pair, name, answers) for pair in pairs for name in SLOW]
    threads = [threading.Thread(target=measure, args=args, daemon=True) for args in slow]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)  # no longer wait: a signal that another thread got is handled after it
    for pair in pairs:
        for name in ("fast_server", "lan"):
            measure(pair, name, MORE * answers)
    results["as_is"] = measure_modes(
        Point(0.0, 0.0, 0.0),
        [_draft(Models(), 0.0, folder)],
        prompts,
        right,
        MODES,
        console,
        "as it is",
    )
    started = time.perf_counter()
    tokens = sum(len(_alone(target, prompt)) for prompt in prompts)
    results["transformers_ms_per_token"] = 1e3 * (time.perf_counter() - started) / tokens
    everywhere = [results["as_is"], *(rows for pair in pairs for rows in results[pair].values())]
    results["output_mismatches"] = sum(
        row["output_mismatches"] for rows in everywhere for row in rows.values()
    )
    results["speedups"] = {
        pair: {name: _speedups(rows) for name, rows in results[pair].items()} for pair in pairs
    }
    tau = results["points"]["go2"]["sd"]["tau"]
    results["api_cost"] = {
        "tau_of_the_paper": {p.pair: api_cost(p, GAMMA, 2.5) for p in PROVIDERS},
        "tau_measured": {p.pair: api_cost(p, GAMMA, tau) for p in PROVIDERS},
    }
    results["votes"] = votes(noise, folder, prompts[:answers], right[:answers], console)
    if ablations:
        n = MORE * answers // 2
        results["ablations"] = _ablations(noise, folder, prompts[:n], right[:n], console)
    _print(results, console)
    _plot(results, plot)
    return results


def _sight(acceptance: Acceptance) -> dict[str, Any]:
    """Return how much of the embedded draft's acceptance needs sight, and what it is worth.

    ``answers, tau, tau_grey, tau_blind`` (see ``compare_sight``), and for each of the three
    ``sd_ms_per_token.<point>``: plain speculation by the formula. The 8-gram drafts in no time.
    """
    found = acceptance.sight()

    def ms(point: Point, key: str) -> float:
        drafting = 0.0 if key == "tau_blind" else GAMMA * point.t_p
        return 1e3 * (drafting + 2 * point.t_c + point.t_q) / found[key]

    return {
        "answers": SIGHT_ANSWERS,
        **found,
        "sd_ms_per_token": {
            name: {key: ms(point, key) for key in _SIGHTS} for name, point in POINTS.items()
        },
    }


def _draft(models: Models, noise: float, folder: Path, seed: int = 0) -> Engine:
    """Return the draft model with noise on its head, written to ``folder`` for verifiers."""
    loaded = load(ModelConfig(path=models.draft))
    if not noise:
        return Engine(loaded)
    blur(loaded, noise, seed, models.tokens)
    config = loaded.model.config
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    written = folder / f"blurred-{seed}"
    write_checkpoint(loaded.model, model_folder(loaded.config), written)
    return Engine(load(ModelConfig(path=str(written))))


def votes(
    noise: float,
    folder: Path,
    prompts: Sequence[Prompt],
    answers: Sequence[tuple[int, ...]],
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Return the rows of ``VOTES`` at the point of the paper's robot, all times divided by ten."""
    drafts = [_draft(Models(), noise, folder, seed) for seed in range(3)]
    point = POINTS["go2"].scaled(ABLATION_SCALE)
    return measure_modes(point, drafts, prompts, answers, VOTES, console, "votes")


@contextmanager
def _link(point: Point, models: Models, draft: str, exit_queue: str) -> Iterator[VerifierClient]:
    """Run a verifier as slow as the point's, over its link, with the draft model ``draft``."""
    address = f"127.0.0.1:{free_port()}"
    settings = yaml.safe_load(config_file("verifier_embedded.yaml").read_text(encoding="utf-8"))
    settings["exits"] = {"queue": exit_queue}
    settings["model"]["path"] = models.target
    settings["exit_candidates"] = models.exit_candidates
    settings["draft"] = {"path": draft, "dtype": "float32", "device": "cpu"}
    settings["emulated_draft_s"] = point.t_d
    with (
        tempfile.TemporaryDirectory(prefix="collab_llm_") as folder,
        verifier_process(
            address,
            compute_s=point.t_q,
            config=write_settings(Path(folder) / "verifier.yaml", settings),
        ) as process,
        LinkProxy(address, LinkProfile(delay_s=point.t_c)) as link,
        VerifierClient(ClientLinkConfig(address=link.address)) as client,
    ):
        wait_for_verifier(client, process)
        yield client


def write_settings(file: Path, settings: Any) -> Path:
    """Write ``settings`` as YAML; return ``file``."""
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


def measure_modes(
    point: Point,
    drafts: Sequence[Engine],
    prompts: Sequence[Prompt],
    answers: Sequence[tuple[int, ...]],
    modes: Mapping[str, Setup],
    console: Console,
    title: str,
    exit_queue: str = "priority",
    models: Models = Models(),
) -> dict[str, dict[str, Any]]:
    """Decode ``prompts`` in each mode at ``point``; ``answers`` are the target's own.

    Args:
        drafts: of which a mode takes the first ``Setup.drafts``; the verifier has the first.

    Returns:
        By mode, its row in what :func:`run_edge_cloud` returns.
    """
    with _link(point, models, drafts[0].loaded.config.path, exit_queue) as client:
        rows = {name: Row(setup, point, drafts, client) for name, setup in modes.items()}
        for number, prompt in enumerate(prompts[:TRIALS]):
            for row in rows.values():
                if number < row.trials:
                    row.warm_up(prompt)
        # In turn: what else the machine does slows all of them down alike.
        for number, (prompt, right) in enumerate(zip(prompts, answers, strict=True), start=1):
            for row in rows.values():
                row.measure(prompt, right)
            console.print(f"{title}: {number} of {len(prompts)} answers")
    results = {name: row.result() for name, row in rows.items()}
    found = ", ".join(f"{name} {row['ms_per_token']:.1f}" for name, row in results.items())
    console.print(f"{title}: {found} ms per token")
    return results


class Row:
    """Figures of a decoding mode; rates leave out the first round, which opens the session.

    Attributes:
        trials: answers before the measured ones.
    """

    def __init__(
        self, setup: Setup, point: Point, drafts: Sequence[Engine], client: SessionClient[Any]
    ) -> None:
        self._setup, self._point = setup, point
        self.trials = TRIALS if setup.planned else 1
        t_p = point.t_p / setup.drafts if setup.side_by_side else point.t_p
        draft, *others = (paced_draft(each, t_p) for each in drafts[: setup.drafts])
        self._runner = RemoteRunner(
            draft,
            client,
            others=others,
            gamma=setup.gamma,
            predraft=setup.predraft,
            ahead=setup.ahead,
            planner=PlannerConfig(enabled=setup.planned),
            drafted_by=setup.drafted_by,
        )
        self._total = EdgeCloudMetrics()
        self._later_s, self._later_tokens, self._predicted_s = 0.0, 0, 0.0
        self._mismatches = 0
        self._modes: set[str] = set()
        self._trials_ms: list[float] = []
        self._answers_ms: list[float] = []
        self._seconds, self._stolen = 0.0, 0.0

    def warm_up(self, prompt: Prompt) -> None:
        """Decode an answer that does not count."""
        answer, _ = _generate(self._runner, prompt)
        self._trials_ms.append(1e3 * answer.metrics.total_s / answer.metrics.tokens)

    def measure(self, prompt: Prompt, right: tuple[int, ...] | None) -> None:
        """Decode an answer that counts, and compare it with ``right``, if that is known."""
        begun, stolen = time.monotonic(), stolen_s()
        answer, first = _generate(self._runner, prompt)
        self._seconds += time.monotonic() - begun
        self._stolen += stolen_s() - stolen
        metrics = answer.metrics
        self._mismatches += right is not None and answer.tokens != right
        assert answer.mode is not None
        self._modes.add(answer.mode.name)
        self._predicted_s += (metrics.rounds - 1) * _predicted(
            self._setup, self._point, self._runner.planner, answer.mode, metrics
        )
        self._total.add(metrics)
        later_s, later = metrics.total_s - metrics.time_to_first_token_s, metrics.tokens - first
        self._answers_ms.append(1e3 * later_s / max(1, later))
        self._later_s += later_s
        self._later_tokens += later

    def result(self) -> dict[str, Any]:
        """Return the figures of one mode at one point, in the form of :func:`run_edge_cloud`."""
        total = self._total
        found = {
            "ms_per_token": 1e3 * self._later_s / self._later_tokens,
            "answers": len(self._answers_ms),
            "spread_ms_per_token": [min(self._answers_ms), max(self._answers_ms)],
            "predicted_ms_per_token": 1e3 * self._predicted_s / self._later_tokens,
            "output_mismatches": self._mismatches,
            "modes": sorted(self._modes),
            "trials_ms_per_token": self._trials_ms,
            "tau": total.tau,
            "hit_rate": total.hit_rate,
            "miss_rate": 1.0 - total.hit_rate,
            "mean_exit_layer": total.mean_exit_layer,
            "drafting_ms_per_round": 1e3 * total.draft_s / total.rounds,
            "rounds": total.rounds,
            "pushed": total.pushed,
            "bytes": total.bytes_up + total.bytes_down,
            "profile": _profile(self._runner.planner.profile),
            "stolen": self._stolen / self._seconds,
        }
        if self._setup.ahead.push_window:
            found["with_paper_misses_ms_per_token"] = 1e3 * self._with_paper_misses() / total.tau
        return found

    def _with_paper_misses(self) -> float:
        """Seconds of a round of push-ahead, were as many verdicts unforeseen as in paper 003."""
        profile = self._runner.planner.profile
        missing = replace(profile, unexpected=Mean(PAPER_MISSES), by_exit=Mean(0.0))
        return round_seconds(missing, Mode(self._setup.gamma, ahead=True), AheadConfig().push_depth)


def _generate(runner: RemoteRunner, prompt: Prompt) -> tuple[Generation, int]:
    """Return an answer, and the number of tokens of its first round."""
    rounds: list[tuple[int, ...]] = []
    answer = runner.generate(
        prompt, max_tokens=MAX_TOKENS, deadline_s=DEADLINE_S, on_tokens=rounds.append
    )
    return answer, len(rounds[0])


def _predicted(
    setup: Setup, point: Point, planner: Planner, mode: Mode, metrics: EdgeCloudMetrics
) -> float:
    """Seconds per round from the point's T_c, passes as long as they were, and the run's shares.

    Passes are a little longer than the point's T_p and T_q: sleeping threads wake late. The link's
    T_c is nominal: what gRPC, loop and scheduling add is not in the prediction. The shares are, for
    FSD, how much of the drafting was still to do when a verdict came (r of paper 003, Table 4), the
    rest of the pass that was under mode included; with push-ahead, how often outcomes were foreseen
    and the planner's other shares.
    """
    profile = planner.profile
    if point.t_c:  # else nothing is emulated
        profile = replace(profile, rtt=Mean(2 * point.t_c))
    if setup.ahead.push_window:
        missed = 1.0 - metrics.hit_rate  # also where the outcome was foreseen, but not drafted for
        missing = max(profile.unexpected.value, missed)
        known = min(profile.by_exit.value, 1.0 - missing)
        profile = replace(profile, unexpected=Mean(missing), by_exit=Mean(known))
    if setup.ahead.push_window or mode.co_located:
        return round_seconds(profile, mode, setup.ahead.push_depth)
    plain = round_seconds(profile, Mode(setup.gamma), 1)
    if not setup.predraft.max_predrafts:
        return plain
    drafting = profile.tokens(setup.gamma) * profile.t_p.value
    left = metrics.draft_s / metrics.rounds + profile.under_way.value
    return plain - max(0.0, drafting - left)


def _profile(profile: Profile) -> dict[str, float]:
    """The planner's measurements by the run's end [s, shares]; see :func:`_predicted`."""
    means = {f.name: getattr(profile, f.name) for f in fields(profile)}
    return {name: mean.value for name, mean in means.items() if isinstance(mean, Mean)}


def _alone(target: Engine, prompt: Prompt) -> tuple[int, ...]:
    """Return the answers of the target alone, by transformers' generate."""
    encoded = encode(prompt, target.loaded)
    made, _ = transformers_generate(
        target.loaded, encoded, SamplingConfig(), MAX_TOKENS, target.eos
    )
    return tuple(made)


def _speedups(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    ms = {mode: row["ms_per_token"] for mode, row in rows.items()}
    best = min(ms[mode] for mode in ms if mode != "planner")
    return {
        "ar_to_sd": ms["ar"] / ms["sd"],
        "sd_to_fsd": ms["sd"] / ms["fsd"],
        "sd_to_push_ahead": ms["sd"] / ms["push_ahead"],
        "ar_to_push_ahead": ms["ar"] / ms["push_ahead"],
        "co_located_to_push_ahead": ms["co_located"] / ms["push_ahead"],
        "planner_over_best_fixed": ms["planner"] / best,
        "planner_over_ar": ms["planner"] / ms["ar"],
    }


def _ablations(
    noise: float,
    folder: Path,
    prompts: Sequence[Prompt],
    answers: Sequence[tuple[int, ...]],
    console: Console,
) -> dict[str, Any]:
    """Figure 4 and Table 7 of paper 003 at the Jetson point, all times divided by ten."""
    point, drafts = POINTS["jetson"].scaled(ABLATION_SCALE), [_draft(Models(), noise, folder)]
    gammas, workers = (1, 2, 3, 4, 5, 6, 8, 10), (1, 2, 3, 4, 6, 10)
    modes = {"ar": Setup(gamma=0)}
    modes |= {f"sd {g}": Setup(gamma=g) for g in gammas}
    modes |= {f"fsd {g}": fsd(gamma=g) for g in gammas}
    modes |= {f"workers {w}": fsd(workers=w) for w in workers}
    rows = measure_modes(point, drafts, prompts, answers, modes, console, "ablation")

    def ms(name: str) -> float:
        return rows[name]["ms_per_token"]

    queues = {}
    for server in ("priority", "fifo"):
        modes = {
            f"{queue} {w}": queue_setup(queue, w)
            for queue in ("priority", "random", "fifo")
            for w in (3, 5, 10)
        }
        measured = measure_modes(
            point, drafts, prompts, answers, modes, console, f"queues, {server}", server
        )
        queues[server] = {name: 100 * row["miss_rate"] for name, row in measured.items()}
    return {
        "time_scale": ABLATION_SCALE,
        "figure_4b": {
            g: {
                "ar_to_sd": ms("ar") / ms(f"sd {g}"),
                "sd_to_fsd": ms(f"sd {g}") / ms(f"fsd {g}"),
                "tau": rows[f"sd {g}"]["tau"],
            }
            for g in gammas
        },
        "figure_4a": {
            w: {
                "sd_to_fsd": ms(f"sd {GAMMA}") / ms(f"workers {w}"),
                "miss_rate": rows[f"workers {w}"]["miss_rate"],
            }
            for w in workers
        },
        "table_7_miss_percent": queues,
    }


def queue_setup(queue: str, workers: int) -> Setup:
    """Table 7: outcomes suggested by exits and by the draft model wait in one queue."""
    return Setup(
        GAMMA,
        PreDraftConfig(max_predrafts=workers, queue=queue),
        AheadConfig(batch=workers, predictions=16, min_probability=0.0, push_window=0),
    )


_SIGHTS = {"tau": "sees", "tau_grey": "sees one grey", "tau_blind": "blind 8-gram"}


def _pairs(results: Mapping[str, Any]) -> list[str]:
    return [pair for pair in PAIRS if pair in results]


def _print(results: Mapping[str, Any], console: Console) -> None:
    sight = results["sight"]
    by_draft: dict[str, dict[str, float]] = {
        title: {"tau": sight[key]} | {p: ms[key] for p, ms in sight["sd_ms_per_token"].items()}
        for key, title in _SIGHTS.items()
    }
    columns = {"tau": "{tau:.2f}"} | {point: f"{{{point}:.1f}}" for point in POINTS}
    title = "what sight is worth: plain speculation by the formula, milliseconds per token"
    show_rows(console, title, ["the draft"], by_draft, columns)
    columns = {
        "measured": "{ms_per_token:.1f}",
        "predicted": "{predicted_ms_per_token:.1f}",
        "tau": "{tau:.2f}",
        "hits": "{hit_rate:.0%}",
        "exit": "{mean_exit_layer:.1f}",
        "bytes": "{bytes}",
    }
    for pair in (*_pairs(results), "as_is"):
        emulated = "emulated points" if pair in PAIRS else "embedded pair on this machine"
        by_point = results[pair] if pair in PAIRS else {pair: results[pair]}
        rows = {
            (point, mode if mode != "planner" else f"planner: {', '.join(row['modes'])}"): row
            for point, modes in by_point.items()
            for mode, row in modes.items()
        }
        title = f"{pair}: milliseconds per token ({emulated})"
        show_rows(console, title, ["point", "mode"], rows, columns)


def _plot(results: Mapping[str, Any], file: Path | None) -> None:
    titles = {"points": f"tau at most {TAU}", "embedded_pair": "embedded pair"}
    sight = results["sight"]

    def draw_sight(axis: Any) -> None:
        named = {f"{title} ({sight[key]:.2f})": key for key, title in _SIGHTS.items()}
        draw_bars(
            axis,
            {
                point.replace("_", "\n"): {title: ms[key] for title, key in named.items()}
                for point, ms in sight["sd_ms_per_token"].items()
            },
        )
        label_axes(axis, y="ms per token (formula)")

    def bars(modes: Mapping[str, Mapping[str, float]]) -> Draw:
        def draw(axis: Any) -> None:
            groups = {
                mode.replace("_", "\n"): {
                    "measured": row["ms_per_token"],
                    "predicted": row["predicted_ms_per_token"],
                }
                for mode, row in modes.items()
            }
            draw_bars(axis, groups)
            label_axes(axis, y="ms per token (emulated)")

        return draw

    panels = {
        f"{point}, {titles[pair]}": bars(modes)
        for pair in _pairs(results)
        for point, modes in results[pair].items()
    }
    panels = {"speculation, by what drafts (tau)": draw_sight} | panels
    draw_panels(panels, file, columns=3, size=(4.5, 3))
