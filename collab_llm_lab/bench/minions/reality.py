"""The protocols on a user's own documents, with the models that the user names.

The answers come from the protocol as it is served, so they are those of ``collab-llm ask``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.harness import Keep, forget
from collab_llm_lab.bench.minions.figures import interval
from collab_llm_lab.bench.minions.question_files import (
    EXACT,
    JUDGES,
    LLM,
    Question,
    QuestionFile,
    finds,
    is_right,
    read_questions,
)
from collab_llm_lab.bench.minions.scripted import ScriptedRemote
from collab_llm_lab.bench.minions.string_search import StringSearch, best_sentence
from collab_llm_lab.bench.rendering import show_lines, show_rows
from collab_llm_nodes.chat.base import ChatModel, ChatRequest, Reply
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, ConfigError, ModelError, did_you_mean
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control, Request, Resources
from collab_llm_nodes.protocols.minions.command import PROTOCOLS
from collab_llm_nodes.protocols.minions.equipment import Equipment
from collab_llm_nodes.protocols.minions.jobs import Job
from collab_llm_nodes.protocols.minions.metrics import MinionsMetrics
from collab_llm_nodes.protocols.minions.running import MinionsRunning
from collab_llm_nodes.protocols.minions.served import (
    SERVER,
    ChatModelConfig,
    ServedMinions,
    served_minions,
)
from collab_llm_nodes.protocols.minions.settings import EMBEDDED, LocalConfig
from collab_llm_nodes.protocols.options import named_values, with_options

ORACLE, EMBEDDED_REMOTE = "oracle", "embedded"
STRING_SEARCH = StringSearch.name
DEFAULTS = ServedMinions(
    chunker="chunk_by_paragraph",
    chunk_size=2000,
    rounds=1,
    local=LocalConfig(temperature=0.0, max_tokens=128),
)
"""Settings without ``--config``: pieces of half a page, greedy and short replies."""
_COUNTED = ("jobs", "kept", "abstained", "truncated", "unreadable", "unsupported", "failed")
_JUDGE_PROMPT = """\
Question: {question}
Accepted answers: {answers}
Reply to judge: {reply}

Does the reply give one of the accepted answers? Other words, other units and rounding are fine. \
Reply with "yes" or "no" alone."""
_COLUMNS = {
    "right": "{accuracy:.3f}",
    "found": "{found}",
    "jobs": "{jobs:.1f}",
    "kept": "{kept:.2f}",
    "unreadable": "{unreadable_share:.2f}",
    "sent": "{sent_share:.3f}",
    "s": "{wall_s:.1f}",
}


@dataclass(frozen=True)
class Setup:
    """The models and settings of one run.

    Attributes:
        remote: ``oracle``, ``embedded``, or the URL of a server.
        remote_model: name of the model at that server; empty: that of ``config``.
        worker: folder, hub id or shipped name of the local model; ``string-search`` for none.
        protocol: as of ``collab-llm ask``.
        config: parameter file of ``minions_server``; empty: ``DEFAULTS``.
        options: settings as NAME=VALUE.
        deadline_s: of one question [s].
    """

    remote: str = ORACLE
    remote_model: str = ""
    worker: str = STRING_SEARCH
    protocol: str = "minions"
    config: str = ""
    options: tuple[str, ...] = ()
    deadline_s: float = 600.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the row: the worker, and what differs from the defaults."""
        protocol = "" if self.protocol == "minions" else self.protocol
        config = Path(self.config).name
        return " ".join(filter(None, (Path(self.worker).name, protocol, config, *self.options)))

    def settings(self) -> ServedMinions:
        """Return the settings of the protocol.

        Raises:
            CollabError: an option, file or protocol that does not exist.
        """
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                f"no protocol {self.protocol!r}",
                field="--protocol",
                remedy=did_you_mean(self.protocol, PROTOCOLS, f"one of {', '.join(PROTOCOLS)}"),
            )
        served = served_minions(self.config) if self.config else DEFAULTS
        served = replace(
            served,
            way=PROTOCOLS[self.protocol][1],
            remote_model=self._remote_model(served.remote_model),
        )
        if self.worker == STRING_SEARCH:
            served = replace(served, style=EMBEDDED)  # the prompt that it reads
        elif self.worker:
            model = replace(served.local_model.model, path=self.worker)
            served = replace(served, local_model=replace(served.local_model, model=model))
        return with_options(served, *named_values(self.options), by_operator=True)

    def _remote_model(self, configured: ChatModelConfig) -> ChatModelConfig:
        if self.remote == ORACLE:
            return configured  # and not opened
        if self.remote == EMBEDDED_REMOTE:
            return served_minions("minions.yaml").remote_model
        name = self.remote_model or configured.server.model
        server = replace(configured.server, url=self.remote, model=name)
        return replace(configured, at=SERVER, server=server)


@dataclass(frozen=True)
class Asked:
    """The protocol's answer to one question, as kept on the disk.

    Attributes:
        outputs: kept outputs of the worker in the last round, and what they cite.
        figures: of the protocol, see docs/minions.md.
    """

    id: str
    answer: str
    error: str
    outputs: tuple[str, ...]
    figures: dict[str, float]
    rounds: int
    wall_s: float


def run_reality(
    *,
    questions: Path,
    documents: Path,
    setup: Setup,
    judge: str,
    development: bool,
    answers: Path | None,
    console: Console,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Ask the questions of a file about the documents of a folder.

    Args:
        judge: one of ``JUDGES``; ``llm`` asks the remote.
        development: ask those questions that are kept for development instead of the others.
        answers: folder that keeps the answers, to resume a run.
        keep: called with the results.

    Returns:
        ``reality.<row>`` for the worker and for string search, ``questions``, ``skipped``.

    Raises:
        CollabError: a file, model or setting cannot be used.
    """
    if judge not in JUDGES:
        remedy = did_you_mean(judge, JUDGES, f"one of {', '.join(JUDGES)}")
        raise ConfigError(f"no judge {judge!r}", field="--judge", remedy=remedy)
    if judge == LLM and setup.remote in (ORACLE, EMBEDDED_REMOTE):
        raise ConfigError(
            "a judge llm needs a remote that reads", field="--judge", remedy="--remote URL"
        )
    begun = time.monotonic()
    file = read_questions(questions, documents)
    show_lines(console, (f"SKIPPED  {line}" for line in file.skipped))
    for id in file.without_evidence():
        console.print(f"{id}: its documents do not have what it cites", highlight=False)
    asked = tuple(each for each in file.questions if each.development == development)
    baseline = replace(setup, worker=STRING_SEARCH)
    rows: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as opened:
        # All models are loaded first: a wrong one is refused before the questions are asked.
        runs = [
            (each, opened.enter_context(contextlib.closing(_running(each, asked))))
            for each in dict.fromkeys((baseline, setup))
        ]
        for each, running in runs:
            rows[each.name] = _row(each, running, asked, file, judge, answers, console)
    for row in rows.values():
        row["string_search"] = rows[baseline.name]["accuracy"]
    results = {
        "reality": rows,
        "questions": len(asked),
        "skipped": [*file.skipped],
        "seconds": {"reality": time.monotonic() - begun},
        "failed": {},
        "goals": {},
    }
    shown = {name: {**row, "found": _shown(row["found"])} for name, row in rows.items()}
    show_rows(console, f"remote: {setup.remote}", ["worker"], shown, _COLUMNS)
    keep(results)
    return results


def _row(
    setup: Setup,
    running: MinionsRunning,
    questions: Sequence[Question],
    file: QuestionFile,
    judge: str,
    answers: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Return the figures of one worker.

    Raises:
        ModelError: no question got an answer, not even "unknown".
    """
    kept = None if answers is None else answers / f"{setup.name.replace('/', '_')}.jsonl"
    found = []
    for asked in _all_asked(running, setup, questions, file, kept):
        found.append(asked)
        if len(found) % 10 == 0:
            console.print(f"{setup.name}: {len(found)} of {len(questions)}", highlight=False)
    if failed := [asked.error or "an empty answer" for asked in found if not asked.answer]:
        failures = f"{len(failed)} of {len(found)} questions failed, the first with {failed[0]}"
        if len(failed) == len(found):
            raise ModelError(f"{setup.name}: {failures}", remedy="mend that, and run again")
        console.print(f"{setup.name}: {failures}", highlight=False)
    right = _judged(judge, questions, found, running.equipment.remote)
    return {"remote": setup.remote, "judge": judge, **figures(questions, found, right, file)}


def _running(setup: Setup, questions: Sequence[Question]) -> MinionsRunning:
    remote = ScriptedRemote(questions) if setup.remote == ORACLE else None
    local = StringSearch(best_sentence) if setup.worker == STRING_SEARCH else None
    equipment = Equipment(setup.settings(), Resources(), remote=remote, local=local)
    return MinionsRunning(PROTOCOLS[setup.protocol][0], equipment)


def _all_asked(
    running: MinionsRunning,
    setup: Setup,
    questions: Sequence[Question],
    file: QuestionFile,
    kept: Path | None,
) -> Iterator[Asked]:
    """Yield the answers in order, several at a time; those that are kept are not asked again."""
    settings = setup.settings()
    run = _digest(setup)
    known = _read_kept(kept, run)
    whole = Control()

    def answer(question: Question) -> Asked:
        found = known.get(_key(question))
        if found is None:
            control = Control(time.monotonic() + setup.deadline_s)
            unregister = whole.on_cancel(control.cancel)
            found = _ask(running, setup, settings, question, file, control)
            unregister()
            if found.answer:  # an error may pass until the next run
                _keep(kept, run, question, found)
        return found

    with ThreadPoolExecutor(settings.parallel) as pool:
        try:
            yield from pool.map(answer, questions)
        finally:
            whole.cancel()  # on Ctrl-C and SIGTERM, running requests end


def _ask(
    running: MinionsRunning,
    setup: Setup,
    settings: ServedMinions,
    question: Question,
    file: QuestionFile,
    control: Control,
) -> Asked:
    request = Request(
        question.id,
        settings,
        (Turn("user", question.question),),
        documents=tuple(file.documents[name] for name in question.documents),
        sampling=SamplingConfig(seed=setup.seed),
    )
    begun = time.monotonic()
    answer = running.run(request, lambda progress: None, control)
    metrics = answer.metrics
    assert isinstance(metrics, MinionsMetrics)
    return Asked(
        question.id,
        answer.text,
        str(answer.error or ""),
        tuple(dict.fromkeys(text for job in metrics.jobs if job.kept for text in _texts(job))),
        {name: value for name, value in metrics.figures().items() if "." not in name},
        metrics.rounds,
        time.monotonic() - begun,
    )


def _texts(job: Job) -> list[str]:
    return [text for text in (job.output.answer, job.output.citation) if text]


# -------------------------------------------------------------------- what is kept


def _digest(setup: Setup) -> str:
    """Return a digest of what was asked for, but not of the code that answers."""
    named = asdict(setup)
    if Path(setup.config).is_file():
        named["config"] = Path(setup.config).read_text(encoding="utf-8")
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


def _key(question: Question) -> str:
    named = json.dumps([question.question, question.documents, question.tasks, question.combine])
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def _read_kept(kept: Path | None, digest: str) -> dict[str, Asked]:
    """Return the answers of a run with this digest, by the keys of their questions."""
    found: dict[str, Asked] = {}
    if kept is None or not kept.is_file():
        return found
    for line in kept.read_text(encoding="utf-8", errors="replace").splitlines():
        # A line that a killed run has not finished is asked again.
        with contextlib.suppress(ValueError, TypeError, KeyError, ConfigError):
            entry = json.loads(line)
            if entry["run"] == digest:
                found[str(entry["question"])] = from_mapping(Asked, entry["asked"])
    return found


def _keep(kept: Path | None, digest: str, question: Question, asked: Asked) -> None:
    if kept is None:
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    entry = {"run": digest, "question": _key(question), "asked": asdict(asked)}
    with kept.open("a", encoding="utf-8") as file:
        # On a line of its own, since a run that was killed may have left half of one.
        file.write("\n" + json.dumps(entry, ensure_ascii=False))


# -------------------------------------------------------------------- figures


def _judged(
    judge: str, questions: Sequence[Question], found: Sequence[Asked], remote: ChatModel
) -> list[bool]:
    judges: Mapping[str, Callable[[Question, str], bool]] = {LLM: partial(_judged_by, remote)}
    own = judges.get(judge) or partial(is_right, judge=judge)
    pairs = zip(questions, found, strict=True)
    # An answer "unknown" may come with an error as its explanation; an error alone is no answer.
    return [bool(asked.answer) and own(question, asked.answer) for question, asked in pairs]


def _judged_by(remote: ChatModel, question: Question, answer: str) -> bool:
    """Return the remote's judgement; abstentions are judged without it.

    Raises:
        CollabError: the remote does not reply.
    """
    if not question.answers or is_right(question, answer, EXACT):
        return is_right(question, answer, EXACT)
    prompt = _JUDGE_PROMPT.format(
        question=question.question, answers="; ".join(question.answers), reply=answer
    )
    request = ChatRequest((Turn("user", prompt),), SamplingConfig(0.0), max_tokens=512)
    (reply,) = remote.ask([request], Control(time.monotonic() + 120.0))
    if isinstance(reply, CollabError):
        raise reply
    assert isinstance(reply, Reply)
    return reply.text.strip().lower().startswith("yes")


def figures(
    questions: Sequence[Question],
    found: Sequence[Asked],
    right: Sequence[bool],
    file: QuestionFile,
) -> dict[str, Any]:
    """Return the figures of one worker: shares, and means per question.

    ``found`` is the share of the answerable questions whose places are among the kept outputs: what
    a remote that reads could build on; None if no question names its places. ``errors`` counts the
    questions without any answer.
    """
    count = len(questions)
    total = {name: sum(each.figures.get(name, 0.0) for each in found) for name in _COUNTED}
    jobs = max(1.0, total["jobs"])
    pairs = [*zip(questions, found, strict=True)]
    placed = [(question, asked) for question, asked in pairs if question.cited]
    characters = [
        sum(len(file.documents[name].content.encode()) for name in question.documents)
        for question in questions
    ]
    kinds: dict[str, list[bool]] = {}
    for question, judged in zip(questions, right, strict=True):
        kinds.setdefault(question.kind or "all", []).append(judged)
    return {
        "questions": count,
        "accuracy": sum(right) / count,
        "accuracy_interval": interval(sum(right) / count, count),
        "accuracy_by_kind": {kind: sum(own) / len(own) for kind, own in sorted(kinds.items())},
        "questions_by_kind": {kind: len(own) for kind, own in sorted(kinds.items())},
        "found": sum(finds(question, asked.outputs) for question, asked in placed) / len(placed)
        if placed
        else None,
        "jobs": total["jobs"] / count,
        **{f"{name}_share": total[name] / jobs for name in _COUNTED[2:]},
        "kept": total["kept"] / jobs,
        "rounds": _mean(each.rounds for each in found),
        "sent_share": sum(each.figures.get("sent_bytes", 0.0) for each in found) / sum(characters),
        "local_prefill_tokens": _mean(
            each.figures.get("local_prefill_tokens", 0) for each in found
        ),
        "local_decode_tokens": _mean(each.figures.get("local_decode_tokens", 0) for each in found),
        "remote_prefill_tokens": _mean(
            each.figures.get("remote_prefill_tokens", 0) for each in found
        ),
        "cost_usd": _mean(each.figures.get("cost_usd", 0.0) for each in found),
        "unknown": sum(not each.answer or each.answer == "unknown" for each in found) / count,
        "errors": sum(not each.answer for each in found),
        "wall_s": _mean(each.wall_s for each in found),
    }


def _shown(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _mean(values: Iterable[float]) -> float:
    numbers = [*values]
    return sum(numbers) / max(1, len(numbers))
