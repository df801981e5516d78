"""Questions about a user's own documents: their file, the judges, the scripted remote, the run."""

from __future__ import annotations

import json
import signal
import string
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from collab_llm_lab.bench.minions import reality
from collab_llm_lab.bench.minions.question_files import (
    Question,
    finds,
    is_right,
    read_questions,
)
from collab_llm_lab.bench.minions.reality import Setup, run_reality
from collab_llm_lab.bench.minions.scripted import ScriptedRemote
from collab_llm_lab.bench.minions.string_search import best_sentence, line_that_begins
from collab_llm_nodes.chat.base import ChatRequest, Finish, Reply
from collab_llm_nodes.cli import app
from collab_llm_nodes.cli.output import console
from collab_llm_nodes.errors import (
    Cancelled,
    CollabError,
    ConfigError,
    InvalidInput,
    ModelError,
    Unavailable,
)
from collab_llm_nodes.knowledge.bm25 import bm25
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS

RULES = """The voting period is 2 weeks.

The committee consists of up to eight members, and should have at least four.

The chair is elected by the committee.

The minimum discussion period is two weeks. The maximum discussion period is 3 weeks.
"""


def line(**changed: Any) -> str:
    fields = {
        "id": "a",
        "documents": ["rules.txt"],
        "question": "How long is the voting period?",
        "answers": ["2 weeks"],
        "kind": "number",
        "cited": ["The voting period is 2 weeks."],
    }
    return json.dumps({**fields, **changed})


def write(folder: Path, *lines: str) -> Path:
    (folder / "rules.txt").write_text(RULES)
    file = folder / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def material(tmp_path: Path) -> Path:
    """A file of questions of all kinds beside their document."""
    difference = "How many weeks lie between the shortest and the longest discussion period?"
    return write(
        tmp_path,
        line(),
        line(
            id="b", question="Who elects the chair?", answers=["committee"], cited=[], kind="name"
        ),
        line(id="c", question="What does a member earn?", answers=[], cited=[], kind="absent"),
        line(
            id="d",
            question=difference,
            answers=["1"],
            kind="two_places",
            cited=[
                "The minimum discussion period is two weeks.",
                "The maximum discussion period is 3 weeks.",
            ],
            tasks=["What is the minimum discussion period?", "And the maximum discussion period?"],
            combine="difference",
        ),
        line(id="e", development=True),
    )


def run(file: Path, **changed: Any) -> dict[str, Any]:
    options = {"setup": Setup(), "judge": "exact", "development": False, "answers": None}
    options |= {"console": console, "questions": file, "documents": file.parent}
    return run_reality(**{**options, **changed})


def test_lines_that_cannot_be_used_are_named_and_skipped(tmp_path: Path) -> None:
    good = [line(id=f"q{number}") for number in range(990)]
    bad = [
        "no JSON",
        "[" * 100_000,
        "[]",
        "{}",
        line(id=""),
        line(id="q3"),
        line(id="x", answers="2 weeks"),
        line(id="y", documents=["../rules.txt"]),
        line(id="z", documents=["absent.pdf"]),
        line(id="w", combine="product"),
    ]
    file = write(tmp_path, *good[:500], *bad, "", *good[500:])
    found = read_questions(file, tmp_path)
    assert [question.id for question in found.questions] == [f"q{n}" for n in range(990)]
    assert [each.split(": ")[0] for each in found.skipped] == [
        f"questions.jsonl:{number}" for number in range(501, 511)
    ]
    assert "a line before has it" in found.skipped[5]
    assert list(found.documents) == ["rules.txt"]


def test_our_questions_about_debian_can_be_asked(tmp_path: Path) -> None:
    file = Path(__file__).parents[3] / "docs/benchmarks/minions_questions.jsonl"
    for entry in file.read_text().splitlines():
        for name in json.loads(entry)["documents"]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("The text is not here.")
    found = read_questions(file, tmp_path)
    assert found.skipped == ()
    asked = [question for question in found.questions if not question.development]
    developed = [question for question in found.questions if question.development]
    assert len(asked) >= 100
    assert len(developed) == 30
    assert not {q.documents for q in asked} & {q.documents for q in developed}
    assert {q.kind for q in asked} == {"number", "name", "yes_no", "two_places", "absent"}
    assert all(bool(q.cited) == bool(q.answers) == (q.kind != "absent") for q in found.questions)
    assert found.without_evidence() == [q.id for q in found.questions if q.cited]


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"questions.jsonl:1.* is no JSON"):
        read_questions(write(tmp_path, "prose"), tmp_path)
    with pytest.raises(InvalidInput, match="it is empty"):
        read_questions(write(tmp_path), tmp_path)
    with pytest.raises(InvalidInput, match="cannot read"):
        read_questions(tmp_path / "none.jsonl", tmp_path)


def test_a_place_that_the_document_lacks_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path, line(), line(id="b", cited=["The voting period is 3 weeks."]))
    assert read_questions(file, tmp_path).without_evidence() == ["b"]


@pytest.mark.parametrize(
    ("answers", "said", "right"),
    [
        (["2 weeks"], "The voting period is two weeks, as a rule.", True),
        (["2 weeks"], "12 weeks", False),
        (["2 weeks"], "2 " + "long " * 40 + "weeks", False),
        (["2 weeks"], "2 weeks" + " or so" * 30, False),
        (["yes"], "Yes, they may.", True),
        (["yes"], "The text says yes.", False),
        (["no"], "Yes; no doubt.", False),
        (["3:1; Chair"], "the chair; 3:1", True),
        (["3:1; Chair"], "3:1", False),
        (["SPI", "Software in the Public Interest"], "software in the public interest", True),
        ([], "unknown", True),
        ([], "None.", True),
        ([], "", True),
        ([], "500 dollars", False),
        (["2 weeks"], "unknown", False),
    ],
)
def test_the_exact_judge(answers: list[str], said: str, right: bool) -> None:
    assert is_right(Question("a", ("d",), "q?", tuple(answers)), said) is right


@pytest.mark.parametrize(
    ("said", "right"),
    [("It is 1,577 million.", True), ("1580", True), ("1600", False), ("1577 of 2000", False)],
)
def test_the_judge_of_numbers_takes_one_number_within_a_percent(said: str, right: bool) -> None:
    assert is_right(Question("a", ("d",), "q?", ("1577",)), said, "number") is right


class Judge:
    """A chat model that says the same to everything, and keeps what it was asked."""

    name = "judge"

    def __init__(self, says: str | CollabError) -> None:
        self.says, self.asked = says, list[str]()

    def ask(self, requests: Sequence[ChatRequest], *_: object) -> list[Reply | CollabError]:
        self.asked += [request.turns[-1].content for request in requests]
        said = self.says if isinstance(self.says, CollabError) else Reply(self.says, Finish.STOP)
        return [said for _ in requests]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("says", "right"), [("Yes.", True), ("no", False), ("maybe", False)])
def test_a_model_judges_what_the_words_do_not_decide(says: str, right: bool) -> None:
    question = Question("a", ("d",), "How long is it?", ("2 weeks",))
    judge = Judge(says)
    assert reality._judged_by(judge, question, "a fortnight") is right
    assert "2 weeks" in judge.asked[0]
    assert "a fortnight" in judge.asked[0]
    assert reality._judged_by(judge, question, "2 weeks") is True
    assert reality._judged_by(judge, Question("b", ("d",), "q?", ()), "500 dollars") is False
    assert len(judge.asked) == 1  # these need no judgement
    with pytest.raises(Unavailable):
        reality._judged_by(Judge(Unavailable("gone")), question, "a fortnight")


def test_a_place_is_found_if_each_citation_is_among_the_outputs() -> None:
    cited = ("The pump is red.", "It weighs 3 kg, with its oil")
    question = Question("a", ("d",), "q?", ("x",), cited=cited)
    assert finds(question, ["so: the pump is red", "It weighs 3 kg"])
    assert not finds(question, ["so: the pump is red", "3 kg"])
    assert not finds(question, ["the pump is red"])
    assert not finds(question, [])


def test_a_worker_and_a_remote_of_rules_answer_all_kinds(material: Path) -> None:
    found = run(material)
    row = found["reality"]["string-search"]
    assert (found["questions"], found["skipped"]) == (4, [])
    assert row["accuracy_by_kind"] == {"absent": 1.0, "name": 1.0, "number": 1.0, "two_places": 1.0}
    assert row["string_search"] == row["accuracy"] == 1.0
    assert row["unreadable_share"] == 0.0
    assert 0 < row["kept"] <= 1
    assert run(material, development=True)["questions"] == 1


def test_the_scripted_remote_knows_no_answer() -> None:
    question = Question("a", ("d",), "How long is the voting period?", ("2 weeks",))
    remote = ScriptedRemote([question])

    def ask(template: str, **values: str) -> Reply | CollabError:
        text = template.format(question=question.question, **values)
        return remote.ask([ChatRequest((Turn("user", text),))], Control())[0]

    for context, said in (("The voting period is 5 days. End.", "5 days"), ("Nothing.", "unknown")):
        reply = ask(prompts.DIRECT, context=context)
        assert isinstance(reply, Reply)
        assert said in reply.text
    other = ChatRequest((Turn("user", prompts.DIRECT.format(question="What?", context="a")),))
    assert isinstance(remote.ask([other], Control())[0], CollabError)


def test_the_scripted_remote_asks_again_only_for_what_it_does_not_remember() -> None:
    tasks = ("How long is the voting period?", "Who elects the chair?")
    cited = ("The voting period is 2 weeks.", "The chair is elected by the committee.")
    question = Question("a", ("d",), " ".join(tasks), ("2 weeks; committee",), "", cited, tasks)
    remote = ScriptedRemote([question])

    def ask(template: str, **values: str) -> dict[str, Any]:
        places = {name: "" for _, name, _, _ in string.Formatter().parse(template) if name}
        text = template.format(**{**places, "question": question.question, **values})
        (reply,) = remote.ask([ChatRequest((Turn("user", text),))], Control())
        assert isinstance(reply, Reply)
        found: dict[str, Any] = json.loads(reply.text)
        return found

    def asked_for(carried: str) -> list[str]:
        form = CHUNKERS["chunk_by_paragraph"].source(1500)
        plan = ask(prompts.DECOMPOSE, round="2", carried=carried, form=form)
        assert plan["size"] == 750
        return [task["task"] for task in plan["tasks"]]

    heading = prompts.TASK_HEADING.format(number=1, task=tasks[0])
    output = f"{heading}\n{json.dumps({'citation': cited[0], 'answer': cited[0]})}"
    more = ask(prompts.SYNTHESIZE, outputs=output, decisions=prompts.MORE)
    assert more["decision"] == prompts.MORE
    assert asked_for("") == [*tasks]
    assert asked_for(f"1. {more['scratchpad']}") == [tasks[1]]


def test_a_run_that_was_ended_asks_only_what_is_missing(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "answers"
    whole = run(material, answers=kept)
    (file,) = kept.iterdir()
    _, first, second, third, _ = file.read_text().split("\n")
    known = {json.loads(entry)["asked"]["id"] for entry in (first, second)}
    file.write_text("\n".join((first, second, third[:20])))  # killed while it wrote
    asked = set[str]()
    ask = reality._ask

    def note(*args: Any) -> reality.Asked:
        asked.add(args[3].id)
        return ask(*args)

    monkeypatch.setattr(reality, "_ask", note)
    again = run(material, answers=kept)
    assert asked == {"a", "b", "c", "d"} - known
    asked.clear()
    run(material, answers=kept)
    assert not asked
    for found in (whole, again):
        found["reality"]["string-search"].pop("wall_s")
    assert again["reality"] == whole["reality"]
    run(material, answers=kept, setup=Setup(config="minions.yaml"))
    assert len(asked) == 4  # other settings are other answers


@pytest.mark.parametrize(
    "changed",
    [
        {"judge": "exactly"},
        {"judge": "llm"},
        {"setup": Setup(protocol="minionz")},
        {"setup": Setup(options=("round=1",))},
        {"setup": Setup(config="no.yaml")},
        {"setup": Setup(worker="no/such/model")},
    ],
)
def test_what_cannot_be_used_is_refused(material: Path, changed: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, InvalidInput, CollabError)):
        run(material, **changed)


DEAD = "http://127.0.0.1:9/v1"


def test_a_remote_that_never_answers_is_an_error(material: Path, tmp_path: Path) -> None:
    """And it is asked again when the run is repeated."""
    config = tmp_path / "once.yaml"
    once = {"at": "server", "server": {"retries": {"max_attempts": 1}}}
    parameters = {"/**/minions_server": {"ros__parameters": {"remote_model": once}}}
    config.write_text(yaml.safe_dump(parameters))
    kept = tmp_path / "answers"
    setup = Setup(DEAD, "x", config=str(config))
    with pytest.raises(ModelError, match="4 of 4 questions failed.*does not answer"):
        run(material, setup=setup, answers=kept)
    assert not kept.exists()


def test_questions_that_failed_are_counted(
    material: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = reality._ask

    def fail_once(*args: Any) -> reality.Asked:
        asked = ask(*args)
        return replace(asked, answer="", error="gone") if asked.id == "a" else asked

    monkeypatch.setattr(reality, "_ask", fail_once)
    row = run(material)["reality"]["string-search"]
    assert (row["errors"], row["accuracy"]) == (1, 0.75)
    shown = " ".join(capsys.readouterr().out.split())
    assert "string-search: 1 of 4 questions failed, the first with gone" in shown


def test_without_a_cited_place_nothing_is_said_about_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = run(write(tmp_path, line(cited=[])))["reality"]["string-search"]
    assert row["found"] is None
    (cells,) = (
        [cell.strip() for cell in text.split("│")[1:-1]]
        for text in capsys.readouterr().out.splitlines()
        if "string-search" in text
    )
    assert cells[:3] == ["string-search", "1.000", "-"]


def test_a_worker_that_does_not_exist_is_refused_before_anything_is_asked(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reality, "_ask", lambda *args: pytest.fail("asked"))
    with pytest.raises(CollabError, match="no such folder"):
        run(material, setup=Setup(worker="/nope"))


def test_a_run_that_is_interrupted_cancels_what_it_asks(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, cancelled = threading.Event(), threading.Event()

    def hang(*args: Any) -> reality.Asked:
        args[-1].on_cancel(cancelled.set)
        asked.set()
        assert cancelled.wait(60)
        raise Cancelled("given up")

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def send() -> None:
        main = threading.main_thread().ident
        assert main is not None
        assert asked.wait(60)
        signal.pthread_kill(main, signal.SIGTERM)

    monkeypatch.setattr(reality, "_ask", hang)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(Interrupted):
            run(material)
        sender.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cancelled.is_set()


def test_the_remote_is_a_server_or_the_shipped_planner() -> None:
    url = "http://127.0.0.1:9/v1"
    remote = Setup(url, "qwen", worker="", config="minions_openai.yaml").settings().remote_model
    assert (remote.at, remote.server.url, remote.server.model) == ("server", url, "qwen")
    remote = Setup(url, config="minions_openai.yaml").settings().remote_model
    assert (remote.server.url, remote.server.model) == (url, "gpt-4o")
    settings = Setup("embedded", worker="some/model", options=("rounds=3",)).settings()
    assert settings.remote_model.role == "planner"
    assert settings.local_model.model.path == "some/model"
    assert settings.rounds == 3


def test_the_command_adds_a_row_to_its_file(material: Path, tmp_path: Path) -> None:
    results = tmp_path / "m.json"
    results.write_text(json.dumps({"goals": {"x": True}, "reality": {"mine": {"accuracy": 0.5}}}))
    command = ["bench", "minions", "--questions", str(material), "--documents", str(tmp_path)]
    plot = tmp_path / "m.png"
    done = CliRunner().invoke(app, [*command, "--json", str(results)])
    assert done.exit_code == 0, done.output
    found = json.loads(results.read_text())
    assert set(found["reality"]) == {"mine", "string-search"}
    assert found["questions"] == 4
    assert found["goals"] == {"x": True}
    assert not plot.exists()


def test_bm25_prefers_rare_words_and_short_texts() -> None:
    texts = ["the cat and the dog", "the cat", "the dog and the mouse and the dog"]
    scores = bm25("cat", texts)
    assert scores[1] > scores[0] > scores[2] == 0
    assert bm25("mouse dog", texts).index(max(bm25("mouse dog", texts))) == 2
    assert bm25("x", []) == []


def test_the_best_sentence_is_quoted_word_for_word() -> None:
    found = best_sentence(RULES, "How many members has the committee?")
    assert found["answer"] == found["citation"]
    assert "up to eight members" in (found["answer"] or "")
    assert best_sentence(RULES, "zebra") == {"citation": None, "answer": None}
    assert best_sentence("", "zebra") == {"citation": None, "answer": None}


def test_a_line_of_a_log_is_found_by_its_beginning() -> None:
    log = "10:05 cellar: 38 degrees.\n10:05 attic: 20 degrees."
    assert line_that_begins(log, "10:05 cellar:") == {
        "citation": "10:05 cellar: 38 degrees.",
        "answer": "38",
    }
    assert line_that_begins(log, "11:00") == {"answer": None}
