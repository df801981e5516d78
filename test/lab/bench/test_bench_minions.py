"""The benchmark of Minion and MinionS: honest oracle, strict figures, the whole command."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from text_family import write_family
from tiny_encoder import write_tiny_encoder
from typer.testing import CliRunner

from collab_llm_lab.bench.minions import PARTS, measure, plots, report
from collab_llm_lab.bench.minions.answering import (
    Counter,
    ModelCache,
    ModelSpec,
    Task,
    answering,
    read,
)
from collab_llm_lab.bench.minions.figures import break_even, interval, paired, row
from collab_llm_lab.bench.minions.material import make_case, make_cases, passages_of
from collab_llm_lab.bench.minions.methods import METHODS, Answered, Models, answer_all
from collab_llm_lab.bench.minions.oracle import Oracle
from collab_llm_lab.bench.minions.shown import ShownExamples, examples, teach_plain_chat
from collab_llm_nodes.assets import config_file
from collab_llm_nodes.chat.base import ChatRequest, Finish, Reply, Usage
from collab_llm_nodes.chat.ledger import PriceTable
from collab_llm_nodes.cli import app
from collab_llm_nodes.config import from_yaml
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError, InvalidInput, Unavailable
from collab_llm_nodes.knowledge.encoders import WordHashes
from collab_llm_nodes.models.architectures import decoder_parts
from collab_llm_nodes.models.heads import head_fingerprint
from collab_llm_nodes.models.low_rank import LowRank
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.embedded.queries import Query
from collab_llm_nodes.protocols.minions.embedded.remote import UNKNOWN

PRICES = from_yaml(PriceTable, config_file("prices.yaml"))


def words(text: str) -> int:
    return len(text.split())


def counted(turns: Sequence[Turn]) -> int:
    return sum(words(turn.content) for turn in turns)


class Grep:
    """A perfect worker: it cites the lines that begin as the task does."""

    name = "grep"

    def ask(self, requests: list[ChatRequest], control: object, told: object = None) -> list[Reply]:
        return [Reply(self._reply(r), Finish.STOP, Usage(5, 2, 1)) for r in requests]

    def close(self) -> None:
        pass

    def _reply(self, request: ChatRequest) -> str:
        text = request.turns[0].content
        if "## Task\n" not in text:
            return "None"
        chunk, _, task = text.partition("## Task\n")
        lines = [line for line in chunk.splitlines() if line.startswith(task)]
        values = [
            line[len(task) :].strip(" :.").split(", ")[-1 if task[:7] == "Expense" else 0]
            for line in lines
        ]
        values = [value.removesuffix(" percent").removesuffix(" degrees") for value in values]
        cited = {"citation": "; ".join(lines), "answer": "; ".join(values)}
        spent = task[:7] == "Expense" and "," not in task
        cited["answer"] = "; ".join(v.split(": ")[-1] for v in values) if spent else cited["answer"]
        return json.dumps(cited if lines else {"answer": None})


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(Oracle("gpt-4o", counted), Grep(), PRICES.of("gpt-4o"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["remote_only", "minions"])
def test_with_a_perfect_worker_all_answers_are_right(models: Models, name: str) -> None:
    cases = make_cases("perfect", 1500, 28, 14, words)
    answered = answer_all(METHODS[name], cases, models)
    assert [each.asked.text for each in answered if not each.right] == []
    figures = row(answered, 1500, PRICES)
    assert figures["accuracy"] == 1.0
    assert figures["questions"] == 28
    assert figures["cost_usd"] == pytest.approx(
        2.5e-6 * figures["remote_prefill_tokens"] + 1e-5 * figures["remote_decode_tokens"]
    )


def test_the_oracle_knows_no_more_than_it_is_shown(models: Models) -> None:
    case = make_case("honest", 1500, 14, words)
    for asked in case.asked:
        planted = {entry.text for entry in asked.planted[0]}
        without = "\n".join(line for line in case.text.splitlines() if line not in planted)
        prompt = prompts.DIRECT.format(context=without, question=asked.text)
        (reply,) = models.remote.ask([ChatRequest((Turn("user", prompt),))], Control())
        assert isinstance(reply, Reply)
        assert reply.text == UNKNOWN


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        ("19", ["19"]),
        ("19 degrees", ["19"]),
        ("190 degrees", []),
        ("none of it", []),
        ("bathroom", []),
    ],
)
def test_the_oracle_takes_a_number_with_its_unit(said: str, believed: list[str]) -> None:
    query = Query("lookup", "temperature", (("20:45", "bathroom"),))
    line = "20:45 bathroom: 19 degrees."
    assert Oracle("gpt-4o", counted).findings(query, 0, said, line) == believed
    assert Oracle("gpt-4o", counted).findings(query, 0, said, "20:45 bath: 19 degrees.") == []


def test_minions_sends_less_than_the_log(models: Models) -> None:
    cases = make_cases("short", 3000, 7, 7, words)
    for each in answer_all(METHODS["minions"], cases, models):
        wire = "\n".join(each.wire)
        lines = [line for line in cases[0].text.splitlines() if line and line in wire]
        assert len(lines) <= len(each.asked.planted[0]) + len(each.asked.planted[1])


def test_local_only_asks_nobody_else(models: Models) -> None:
    answered = answer_all(METHODS["local_only"], make_cases("local", 800, 7, 7, words), models)
    assert not any(each.wire for each in answered)
    assert all(each.cost.usage(remote=False).prefill == 5 for each in answered)


@pytest.mark.parametrize("method", ["bm25", "dense"])
def test_passages_are_found(method: str) -> None:
    text = "\n".join(f"Day {n}: the {'heron' if 60 < n < 90 else 'crow'} flew." for n in range(400))
    with passages_of(text, WordHashes()) as passages:
        (found,) = passages.find(method, "When did the heron fly?", 1)
        assert "heron" in found
        assert len(passages.find(method, "crow", 5)) == 5


def test_a_perfect_worker_does_chunks_and_tasks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SEPARATE_CHUNKS", (1, 3))
    cache = ModelCache()
    with answering(cache, 1) as answer:
        spec = ModelSpec(Path("none"), Path("none"))
        bench = measure.Bench(spec, cache, answer, PRICES, words, 0, lambda text: None)
        found = measure.chunks_and_tasks(bench, Grep(), 3)  # type: ignore[arg-type]
    assert found["separate"] == {"1": 1.0, "3": 1.0}
    assert set(found["chunks_in_one_request"].values()) == {1.0}
    assert set(found["separate_sub_tasks"].values()) == {1.0}
    assert found["sub_tasks"] == {"1": 1.0, "2": 0.0, "3": 0.0, "4": 0.0}  # no line begins so


def answered_as(*right: bool) -> list[Answered]:
    asked = make_case("x", 300, 1, words).asked[0]
    return [Answered(asked, asked.answer if each else UNKNOWN) for each in right]


def test_paired_gains() -> None:
    none, half, all_ = (answered_as(*[i % 4 < k for i in range(40)]) for k in (0, 2, 4))
    gain = paired(none, half, 0)
    assert gain["gain"] == 0.5
    assert gain["interval"][0] > 0.2
    assert gain["share_not_better"] == 0
    assert paired(all_, half, 0)["interval"][1] < 0
    assert paired(half, half, 0)["share_not_better"] == 1


def test_intervals_hold_the_share() -> None:
    for share in (0.0, 0.3, 1.0):
        low, high = interval(share, 50)
        assert 0 <= low <= share <= high <= 1
        assert high - low < 0.3


def test_break_even_is_where_both_read_the_same() -> None:
    def rows(context: int, minions: float, remote: float) -> dict[str, dict[str, float]]:
        read = "remote_prefill_tokens"
        return {
            "minions": {"context": context, read: minions},
            "remote_only": {"context": context, read: remote},
        }

    assert break_even(rows(1000, 700, 1050), rows(2000, 800, 2050)) == pytest.approx(611.1, 0.01)
    assert break_even(rows(1000, 700, 1050), rows(2000, 1700, 2050)) is None


def test_a_pretrained_worker_is_shown_solved_examples() -> None:
    class Parrot:
        """Keeps what it is asked, and says what it is told."""

        name = "parrot"
        says: tuple[str, ...] = ("None", "None", "None")

        def ask(
            self, requests: Sequence[ChatRequest], control: object, told: object = None
        ) -> list[Reply | CollabError]:
            self.seen = requests
            return [Reply(text, Finish.STOP) for text in self.says]

        def close(self) -> None:
            pass

    shown = {role: examples(role, 4, "a") for role in ("job", "talk", "direct")}
    nothing = [json.loads(turn.content)["answer"] is None for turn in shown["job"][1::2]]
    assert nothing == [False, False, True, False]
    for role in ("talk", "direct"):
        replies = [turn.content for turn in shown[role] if turn.role == "assistant"]
        assert [reply == "None" for reply in replies] == nothing
    parrot = Parrot()
    system = Turn("system", prompts.CHAT_LOCAL.format(document="a log", context="a", question="q"))
    asked = {
        "job": (Turn("user", prompts.WORKER_BRIEF.format(chunk="a", task="b")),),
        "talk": (system, Turn("user", "b")),
        "direct": (Turn("user", prompts.DIRECT.format(context="a", question="b?")),),
    }
    requests = [ChatRequest(turns) for turns in asked.values()]
    ShownExamples(parrot, shown).ask(requests, Control())
    assert [request.turns for request in parrot.seen] == [
        (*shown[role], *turns) for role, turns in asked.items()
    ]
    ShownExamples(parrot, shown, plain=True).ask(requests, Control())
    read = dict(zip(asked, (request.turns for request in parrot.seen), strict=True))
    assert [turns[-1].content for turns in read.values()] == [
        'Text:\na\n\nQuestion: Which line begins with "b"?',
        'Text:\na\n\nQuestion: What follows "b"?',
        "Text:\na\n\nQuestion: b?",
    ]
    for turns in read.values():
        assert [turn.role for turn in turns] == ["user", "assistant"] * 4 + ["user"]
    solved = [json.loads(turn.content) for turn in shown["job"][1::2]]
    parrot.says = tuple(turn.content for turn in read["job"][1:6:2])
    assert parrot.says[2] == '"citation": none'
    told: list[object] = []
    said = ShownExamples(parrot, shown, plain=True).ask(
        [requests[0]] * 3, Control(), lambda place, result: told.append(result)
    )
    assert told == said
    for reply, right in zip(said, solved, strict=False):
        assert isinstance(reply, Reply)
        right.pop("explanation", None)
        assert json.loads(reply.text) == right
    parrot.says = ("in no form", "None", '"citation": none')
    said = ShownExamples(parrot, shown, plain=True).ask(requests, Control())
    assert [reply.text for reply in said if isinstance(reply, Reply)] == [*parrot.says]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_that_was_ended_goes_on_with_the_answers_it_has(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = write_family(tmp_path / "family")
    count = Counter(read(family / "text-worker")).text
    cases = make_cases("kept", 400, 2, 1, count)
    tasks = [
        (ModelSpec(family, family / "text-worker"), METHODS["local_only"], case) for case in cases
    ]
    kept = tmp_path / "answers"

    def answered(tasks: Sequence[Task]) -> list[list[Answered]]:
        with answering(ModelCache(), processes, kept) as answer:
            return [*answer(tasks)]

    first = answered(tasks[:1])
    (file,) = kept.iterdir()
    written = file.stat().st_mtime_ns
    both = answered(tasks)
    assert both[0] == first[0]
    assert [each.asked for answers in both for each in answers] == [c.asked[0] for c in cases]
    assert file.stat().st_mtime_ns == written
    assert len([*kept.iterdir()]) == 2


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_answers_of_a_stranger_are_data(tmp_path: Path) -> None:
    """A folder of answers may come from anybody; it used to hold pickles, which are programs."""
    family = write_family(tmp_path / "family")
    count = Counter(read(family / "text-worker")).text
    (case,) = make_cases("kept", 400, 1, 1, count)
    task = (ModelSpec(family, family / "text-worker"), METHODS["local_only"], case)

    def answered() -> list[Answered]:
        with answering(ModelCache(), 1, tmp_path / "answers") as answer:
            return [each for answers in answer([task]) for each in answers]

    answered()
    (file,) = (tmp_path / "answers").iterdir()
    entry = json.loads(file.read_text())["answers"][0]
    for content in (
        pickle.dumps([Touch(tmp_path / "touched")]),
        b"",
        b"[]",
        b'{"answers": []}',
        *(
            json.dumps({"answers": [entry | change]}).encode()
            for change in ({"wall_s": "x"}, {"dropped": {"x": 1}}, {"calls": [1]}, {"wire": 1})
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="holds no answers"):
            answered()
    assert not (tmp_path / "touched").exists()


def test_a_base_model_reads_examples_as_text_and_ends_with_its_line(tmp_path: Path) -> None:
    folder = write_family(tmp_path) / "text-worker"
    chatty = Engine(read(folder))
    eos, template = chatty.eos, chatty.loaded.tokenizer.chat_template
    assert not teach_plain_chat(chatty)
    assert (chatty.eos, chatty.loaded.tokenizer.chat_template) == (eos, template)

    for file in folder.glob("chat_template*"):
        file.unlink()
    base = read(folder)
    base.tokenizer.chat_template = None
    engine = Engine(base)
    assert teach_plain_chat(engine)
    chat = (Turn("user", "first"), Turn("assistant", "one"))
    ids = encode(Prompt("second", turns=chat), base).ids
    assert engine.decode(ids).endswith("first\nAnswer: one\n\nsecond\nAnswer:")
    assert eos < engine.eos
    (line_feed,) = base.tokenizer("\n", add_special_tokens=False).input_ids
    assert line_feed in engine.eos
    assert not engine.eos & set(base.tokenizer(" one", add_special_tokens=False).input_ids)


def test_a_part_measured_again_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.json"
    whole = {
        "attacks": {"tried": 1, "escaped": 1, "hung": 0},
        "privacy": {"canaries_seen": 0},
        "sweeps": {"samples": {}},
        "goals": {"no canary seen": True, "no attack escapes or hangs": False},
        "failed": {"attacks": "x", "sweeps": "y"},
        "seconds": {"attacks": 1.0, "privacy": 2.0, "sweeps": 3.0},
        "machine": {"cores": 128},
        "ok": False,
    }
    file.write_text(json.dumps(whole))
    fixed = {"attacks": lambda run: {"attacks": {"tried": 2, "escaped": 0, "hung": 0}}}
    monkeypatch.setattr(report, "_PARTS", fixed)
    command = ["bench", "minions", "--models", str(write_family(tmp_path / "family"))]
    command += ["--json", str(file), "--part", "attacks"]
    drawn = dict[str, Any]()
    monkeypatch.setattr(plots, "plot_all", lambda found, _: drawn.update(found))
    done = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "m.png")])
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    assert results["attacks"] == {"tried": 2, "escaped": 0, "hung": 0}
    assert results["privacy"] == {"canaries_seen": 0}
    assert results["goals"] == {"no canary seen": True, "no attack escapes or hangs": True}
    assert results["failed"] == {"sweeps": "y"}
    assert not results["ok"]
    assert results["machine"] == {"cores": 128}
    assert results["later"]["attacks"]["machine"]["cores"] != 128
    assert drawn == results
    file.write_text("no results")
    assert isinstance(CliRunner().invoke(app, command).exception, InvalidInput)


def test_a_part_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: object) -> dict[str, object]:
        raise Unavailable("no room")

    fine = {"privacy": lambda run: {"privacy": {"canaries_seen": 0}}, "attacks": fails}
    monkeypatch.setattr(report, "_PARTS", fine)
    file = tmp_path / "m.json"
    family = write_family(tmp_path / "family")
    done = CliRunner().invoke(
        app,
        ["bench", "minions", "--quick", "--models", str(family), "--json", str(file)]
        + ["--part", "privacy", "--part", "attacks"],
    )
    assert done.exit_code == 1, done.output
    results = json.loads(file.read_text())
    assert results["failed"] == {"attacks": "Unavailable: no room"}
    assert results["goals"] == {"no canary seen": True, "no attack escapes or hangs": False}
    assert not results["ok"]


def test_an_unknown_part_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "minions", "--part", "privcy"])
    assert isinstance(done.exception, ConfigError)
    assert "did you mean privacy" in str(done.exception)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_measures_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = write_family(tmp_path / "family")
    target = read(family / "text-target").model
    role = LowRank(target, 2, head_fingerprint(decoder_parts(target)))
    role.save(family / "text-target", "planner")
    small = report.Sizes(
        questions=8,
        tokens=600,
        per_log=4,
        trained=1,
        few=2,
        sweep_tokens=500,
        contexts=(400, 800),
        requests=1,
        plans=2,
        shape=report.JobsShape(1, 1, 1, 20, 150, 20, 2),
        repeats=1,
        pretrained=1,
        pretrained_tokens=(400,),
    )
    monkeypatch.setattr(report, "QUICK", small)
    for name in ("SEPARATE_CHUNKS", "CHUNKS_AT_ONCE", "SUB_TASKS", "SAMPLES", "TASKS", "ROUNDS"):
        monkeypatch.setattr(measure, name, (1,))
    monkeypatch.setattr(measure, "CHUNK_SIZES", (800,))
    monkeypatch.setattr(measure, "RETRIEVED", (2, 4, 8))
    file, plot = tmp_path / "m.json", tmp_path / "m.png"
    encoder = write_tiny_encoder(tmp_path / "encoder")
    done = CliRunner().invoke(
        app,
        ["bench", "minions", "--quick", "--processes", "2", "--models", str(family)]
        + ["--json", str(file), "--plot", str(plot)]
        + ["--pretrained", str(family / "text-target"), "--encoder", str(encoder)]
        + [word for part in PARTS if part != "attacks" for word in ("--part", part)],
    )
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    assert results["protocols"]["remote_only"]["accuracy"] == 1.0
    assert results["protocols"]["minions"]["questions"] == 8
    assert results["failed"] == {}
    assert list(results["workers"]) == ["ssm-reports", "text-target", "text-worker"]
    assert results["remotes"]["oracle"]["minions"]["questions"] == 4
    assert set(results["trained"]["protocols"]) == set(results["protocols"]) == set(METHODS)
    assert results["trained"]["protocols"]["minions"]["errors"] == 4  # random weights plan nothing
    assert results["trained"]["plans"]["kinds"] == {"valid": 0.0, "right": 0.0}
    assert set(results["sweeps"]["carry"]) == {"retries", "scratchpad", "history"}
    assert results["privacy"]["canaries_seen"] == 0
    assert results["privacy"]["canaries_planted"] > 3
    assert results["parallel"]["both_s"] > 0
    assert set(results["pretrained"]["protocols"]) == set(METHODS) - {"rag_dense"}
    assert results["pretrained_encoder"]["encoder"] == "encoder"
    assert results["pretrained_encoder"]["protocols"]["rag_dense"]["questions"] == 8
    assert set(results["contexts"]) == {"400", "800"}
    assert results["goals"]["remote only >= 0.8"]
    assert not results["goals"]["Minion < MinionS"]  # random weights find nothing
    assert plot.stat().st_size > 1000
