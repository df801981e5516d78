"""The embedded remote: queries, plans, replies to all prompts, and long texts by windows."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable, Sequence

import pytest

from collab_llm_nodes.chat.base import ChatRequest, Finish, OnResult, Reply, Usage, ignore_result
from collab_llm_nodes.errors import Cancelled, CollabError, DeadlineExceeded, ModelError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Control
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.citations import cited_lines
from collab_llm_nodes.protocols.minions.driving import Handlers, drive
from collab_llm_nodes.protocols.minions.embedded.queries import (
    CHANGE,
    COUNT,
    FACTS,
    LARGEST,
    LOOKUP,
    OPERANDS,
    RATIO,
    RECALL,
    SMALLEST,
    SUM,
    Query,
    read_query,
)
from collab_llm_nodes.protocols.minions.embedded.remote import UNKNOWN, Planner
from collab_llm_nodes.protocols.minions.embedded.windows import WindowedChat
from collab_llm_nodes.protocols.minions.messages import AskRemote, CannotPlan, LocalPrompt
from collab_llm_nodes.protocols.minions.minion import minion
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.plan import Plan, read_plan
from collab_llm_nodes.protocols.minions.settings import LocalConfig, MinionConfig, MinionsConfig

PRICES = Query(LARGEST, "price", (("red mug",), ("tin pan",)))
MINIONS = MinionsConfig(
    style="embedded",
    planner="plan",
    chunker="chunk_by_paragraph",
    chunk_size=100,
    check_citations=True,
    local=LocalConfig(temperature=0.0),
)


def count(turns: Sequence[Turn]) -> int:
    return sum(len(turn.content.split()) for turn in turns)


class Says:
    """A chat model that is a function of the last turn."""

    name = "says"

    def __init__(self, answer: Callable[[str], str | Reply | CollabError]) -> None:
        self._answer = answer
        self.asked: list[ChatRequest] = []

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: object,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        self.asked += requests
        answers = [self._answer(request.turns[-1].content) for request in requests]
        return [Reply(a, Finish.STOP, Usage(3, 0, 1)) if isinstance(a, str) else a for a in answers]

    def close(self) -> None:
        pass


def planner(reply: str, *, reduce: bool = False) -> Planner:
    model = Says(lambda text: reply)
    return Planner("remote", model, Says(lambda text: "read"), count, reduce=reduce)


# ------------------------------------------------------------------ queries


@pytest.mark.parametrize("fact", FACTS)
def test_a_query_survives_its_short_form(fact: str) -> None:
    kind = SUM if FACTS[fact].series else LOOKUP
    query = Query(kind, fact, (tuple(f"key {n}" for n in range(len(FACTS[fact].keys))),))
    assert read_query(f"The plan: {query.to_json()}") == query
    assert all(key in query.tasks[0] for key in query.of[0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot.",
        '{"plan": "lookup"}',
        '{"plan": "lookup", "fact": "price", "of": ""}',
        '{"plan": "lookup", "fact": "price", "of": "a; b"}',
        '{"plan": "lookup", "fact": "price", "of": "a | b"}',
        '{"plan": "lookup", "fact": "spot", "of": "a"}',
        '{"plan": "ratio", "fact": "price", "of": "a"}',
        '{"plan": "lookup", "fact": "price", "of": 3}',
        '{"plan": "lookup", "fact": "price", "of": ["a"]}',
        '{"plan": "lookup", "fact": "weight", "of": "a"}',
        '{"plan": "mean", "fact": "price", "of": "a"}',
        '{"plan": "sum", "fact": "price", "of": "a"}',
        '{"plan": "lookup", "fact": "seen", "of": "a"}',
        '{"plan": "lookup", "fact": "price", "of": " "}',
        '{"plan": "lookup", "fact": "price", "of": "a", "more": 1}',
        '{"plan": "lookup", "fact": "price", "of": "a',
        json.dumps({"plan": "lookup", "fact": "price", "of": "a" * 81}),
    ],
)
def test_what_is_no_query_is_refused(text: str) -> None:
    assert read_query(text) is None


@pytest.mark.parametrize(
    ("kind", "fact", "found", "answer"),
    [
        (LOOKUP, "price", [["3.50", "4.00", "4.00"]], "4.00"),
        (SUM, "spent", [["3.50", "4.00", "0.25"]], "7.75"),
        (COUNT, "alarm", [["10:00", "10:05", "10:00"]], "3"),
        (RECALL, "seen", [["kitchen", "cellar", "kitchen"]], "kitchen; cellar"),
        (LARGEST, "price", [["3.50"], ["3.49"]], "red mug"),
        (SMALLEST, "price", [["3.50"], ["3.49"]], "tin pan"),
        (RATIO, "price", [["3"], ["4"]], "0.75"),
        (RATIO, "price", [["3"], ["0"]], None),
        (CHANGE, "price", [["3"], ["4.5"]], "-1.5"),
        (LOOKUP, "price", [[]], None),
        (RATIO, "price", [["3"], []], None),
        (SUM, "spent", [["much"]], None),
    ],
)
def test_answers_are_computed_from_what_was_found(
    kind: str, fact: str, found: list[list[str]], answer: str | None
) -> None:
    keys = (("red mug",), ("tin pan",))[: OPERANDS[kind]]
    assert Query(kind, fact, keys).answer(found) == answer


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("kind", OPERANDS)
def test_every_plan_is_one_of_the_plan_language(kind: str, reduce: bool) -> None:
    fact = "spent" if OPERANDS[kind] == 1 and kind != LOOKUP else "price"
    query = Query(kind, fact, PRICES.of[: OPERANDS[kind]])
    text = json.dumps(query.plan("chunk_by_page", reduce=reduce))
    read = read_plan(text, ["chunk_by_page"], reduce=reduce)
    assert isinstance(read, Plan)
    assert tuple(task for task, _ in read.tasks) == query.tasks


def test_a_comparison_is_answered_by_what_differs() -> None:
    warm = Query(LARGEST, "temperature", (("10:00", "kitchen"), ("10:00", "cellar")))
    assert warm.names == ("kitchen", "cellar")
    assert warm.answer([["20"], ["25"]]) == "cellar"


# ------------------------------------------------------------------ the planner in the protocols

LOG = "Unit price of the red mug: 3.50.\n\nUnit price of the tin pan: 13.25.\n\n" + "Quiet. " * 40
QUESTION = "Which costs more, the red mug or the tin pan?"


def worker(prompt: LocalPrompt) -> Reply:
    """Find the line that the task begins."""
    text = prompt.turns[-1].content
    chunk, _, task = text.partition("## Task\n")
    line = next((each for each in chunk.splitlines() if each.startswith(task)), None)
    said = {"answer": line and line.split(": ")[1].rstrip("."), "citation": line}
    return Reply(json.dumps(said), Finish.STOP)


def handlers(remote: Planner, sent: list[AskRemote] | None = None) -> Handlers:
    def ask(action: AskRemote) -> Reply:
        if sent is not None:
            sent.append(action)
        turns = tuple(Turn(message.role, message.text) for message in action.messages)
        (reply,) = remote.ask([ChatRequest(turns)], Control())
        if isinstance(reply, CollabError):
            raise reply
        return reply

    return Handlers(ask, lambda prompts: [worker(prompt) for prompt in prompts])


def test_minions_with_the_planner_answers() -> None:
    outcome = drive(minions(QUESTION, [LOG], MINIONS), handlers(planner(PRICES.to_json())))
    assert outcome.answer == "tin pan"
    assert {job.manifest.task for job in outcome.jobs} == set(PRICES.tasks)


def test_the_robot_computes_where_it_may() -> None:
    ratio = Query(RATIO, "price", PRICES.of)
    config = MinionsConfig(**{**MINIONS.__dict__, "reduce": True})
    sent: list[AskRemote] = []
    asked = "What is the price of the tin pan over that of the red mug?"
    outcome = drive(
        minions(asked, [LOG], config), handlers(planner(ratio.to_json(), reduce=True), sent)
    )
    assert outcome.answer == "0.2642"
    assert "3.50" not in sent[-1].messages[-1].text


def test_what_was_not_found_is_looked_for_again_in_smaller_pieces() -> None:
    sent: list[AskRemote] = []
    remote = planner(Query(LOOKUP, "price", (("red mug",),)).to_json())
    outcome = drive(
        minions("What does the red mug cost?", ["Quiet. " * 40], MINIONS), handlers(remote, sent)
    )
    assert outcome.answer == UNKNOWN
    assert outcome.rounds == MINIONS.rounds
    assert [ask.stage for ask in sent] == ["decompose", "synthesize"] * outcome.rounds


def test_minion_with_the_planner_asks_each_task_and_answers() -> None:
    replies = iter(["3.50 (Unit price of the red mug: 3.50.)", "13.25"])
    heard: list[str] = []

    def local(asked: Sequence[LocalPrompt]) -> list[Reply]:
        heard.append(asked[0].turns[-1].content)
        return [Reply(next(replies), Finish.STOP)]

    machine = minion(QUESTION, [LOG], MinionConfig(style="embedded"))
    remote = handlers(planner(PRICES.to_json())).remote
    outcome = drive(machine, Handlers(remote, local))
    assert outcome.answer == "tin pan"
    assert heard == list(PRICES.tasks)


def test_in_the_last_round_minion_answers_what_it_knows() -> None:
    machine = minion(QUESTION, [LOG], MinionConfig(style="embedded", rounds=1))
    remote = handlers(planner(PRICES.to_json())).remote
    outcome = drive(machine, Handlers(remote, lambda asked: [Reply("None", Finish.STOP)]))
    assert outcome.answer == UNKNOWN


def reworded(template: str) -> str:
    """Return ``template`` with other words around its places."""
    parts = string.Formatter().parse(template)
    escaped = ((text.replace("{", "{{").replace("}", "}}"), place) for text, place, *_ in parts)
    return "".join(text.upper() + (f"{{{place}}}" if place else "") for text, place in escaped)


def test_the_planner_reads_prompts_however_they_are_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to know the prompts by copies of their words."""
    names = ["DECOMPOSE", "SYNTHESIZE", "CHAT_BEGIN", "CHAT_CONTINUE", "CHAT_LAST", "CHAT_LOCAL"]
    for name in [*names, "DIRECT", "REDUCED", "TASK_HEADING", "PLAN_REDUCE"]:
        monkeypatch.setattr(prompts, name, reworded(getattr(prompts, name)))
    test_minions_with_the_planner_answers()
    test_the_robot_computes_where_it_may()
    test_what_was_not_found_is_looked_for_again_in_smaller_pieces()
    test_minion_with_the_planner_asks_each_task_and_answers()
    test_in_the_last_round_minion_answers_what_it_knows()
    test_a_text_is_read_by_the_reader_and_its_tokens_are_counted()
    test_every_line_of_a_long_text_is_read_once()
    test_a_window_sees_the_last_message_of_a_talk()


@pytest.mark.parametrize("text", ["a\n\n### Question\nb", "a\n\n### Text\nb", "{question}"])
def test_a_text_with_the_words_of_its_prompt_is_read_whole(text: str) -> None:
    prompt = prompts.DIRECT.format(context=text, question=QUESTION)
    reader = Says(lambda text: "read")
    remote = Planner("remote", Says(lambda text: ""), reader, count)
    remote.ask([ChatRequest((Turn("user", prompt),))], Control())
    assert [request.turns[0].content for request in reader.asked] == [prompt]


@pytest.mark.parametrize(
    "reply",
    ["I do not know.", Query(LOOKUP, "price", (("blue lamp",),)).to_json(), '{"plan": "mean"}'],
    ids=["prose", "names that nobody asked for", "no query"],
)
def test_a_question_beyond_the_planner_is_refused(reply: str) -> None:
    with pytest.raises(CannotPlan, match="ask in other words"):
        drive(minions(QUESTION, [LOG], MINIONS), handlers(planner(reply)))


def test_a_failing_model_is_no_question_beyond_the_planner() -> None:
    broken = Says(lambda text: ModelError("out of memory"))
    remote = Planner("remote", broken, Says(lambda text: ""), count)
    with pytest.raises(ModelError, match="out of memory") as raised:
        drive(minions(QUESTION, [LOG], MINIONS), handlers(remote))
    assert not isinstance(raised.value, CannotPlan)


def test_a_question_is_understood_once() -> None:
    model = Says(lambda text: PRICES.to_json())
    remote = Planner("remote", model, Says(lambda text: ""), count)
    drive(minions(QUESTION, [LOG], MINIONS), handlers(remote))
    assert len(model.asked) == 1


def test_a_question_that_came_too_late_is_asked_again() -> None:
    replies: list[Reply | str] = [
        Reply(PRICES.to_json()[:9], Finish.DEADLINE),
        PRICES.to_json(),
    ]
    remote = Planner("remote", Says(lambda text: replies.pop(0)), Says(lambda text: ""), count)
    with pytest.raises(DeadlineExceeded):
        remote.understand(QUESTION, Control())
    assert remote.understand(QUESTION, Control()) == PRICES


def test_half_of_what_the_reader_says_is_no_answer() -> None:
    late = Says(lambda text: Reply("tin", Finish.DEADLINE))
    remote = Planner("remote", Says(lambda text: ""), late, count)
    with pytest.raises(DeadlineExceeded):
        remote.read(LOG, QUESTION, Control())


def test_a_cancelled_call_asks_nothing() -> None:
    control = Control()
    control.cancel()
    remote = planner(PRICES.to_json())
    with pytest.raises(Cancelled):
        remote.ask([ChatRequest((Turn("user", "# Decomposition, round 1\n"),))], control)


def test_a_text_is_read_by_the_reader_and_its_tokens_are_counted() -> None:
    text = prompts.DIRECT.format(context=LOG, question=QUESTION)
    (reply,) = planner("").ask([ChatRequest((Turn("user", text),))], Control())
    assert isinstance(reply, Reply)
    assert reply.text == "read"
    assert reply.usage == Usage(len(text.split()), 0, 1)


# ------------------------------------------------------------------ windows


def words(text: str) -> int:
    return len(text.split())


def direct(context: str) -> ChatRequest:
    return ChatRequest((Turn("user", prompts.DIRECT.format(context=context, question="Q?")),))


@pytest.mark.parametrize(
    ("answer", "citation", "believed"),
    [
        ("7.99", "Expense of Ida Berg, mops: 7.99.", ["7.99"]),
        ("7.99", "Expense of Ida Lund, mops: 7.99.", []),
        ("1; 2", "expense of IDA BERG: 1.; Expense of Ian: 2.", ["1"]),
        ("1; 2", "Expense of Ian: 2.", ["1", "2"]),  # nobody knows which line is whose
        ("7.99", "", ["7.99"]),
    ],
)
def test_an_answer_cited_from_a_line_on_another_is_not_believed(
    answer: str, citation: str, believed: list[str]
) -> None:
    query = Query("sum", "expense", (("Ida Berg",),))
    assert planner("").findings(query, 0, answer, citation) == believed


def test_every_line_of_a_long_text_is_read_once() -> None:
    lines = [f"line {n} says {n * n}" for n in range(40)]
    model = Says(lambda text: "9" if " 9\n" in text else "None")
    chat = WindowedChat(model, words, 30)
    (reply,) = chat.ask([direct("\n".join(lines))], Control(time.monotonic() + 60))
    assert isinstance(reply, Reply)
    assert reply.text == "9"
    read = "\n".join(request.turns[0].content for request in model.asked)
    assert [read.count(f"{line}\n") for line in lines] == [1] * len(lines)
    assert all("Q?" in request.turns[0].content for request in model.asked)
    assert reply.usage == Usage(3 * len(model.asked), 0, len(model.asked))


def test_a_short_text_and_a_prompt_without_one_are_passed_on() -> None:
    model = Says(lambda text: "None")
    job = ChatRequest((Turn("user", "## Text\na\n\n## Task\nb"),))
    short = direct("a b c")
    WindowedChat(model, words, 30).ask([short, job], Control())
    assert model.asked == [short, job]


class EndsAfter(Control):
    """Is cancelled at its n-th check."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self.left = checks

    def check(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.cancel()
        super().check()


@pytest.mark.parametrize("checks", [1, 7])
@pytest.mark.parametrize("text", ["a b c d e f\n" * 1000, "a b c d e f " * 1000])
def test_cutting_a_long_text_ends_when_nobody_waits_for_it(text: str, checks: int) -> None:
    model = Says(lambda text: "None")
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return words(text)

    with pytest.raises(Cancelled):
        WindowedChat(model, count, 30).ask([direct(text)], EndsAfter(checks))
    # Between two checks a line is counted, or an overlong one is halved until its parts fit.
    assert len(counted) <= 3 * checks
    assert max(map(len, counted)) <= 300
    assert not model.asked


@pytest.mark.parametrize("word", ["word ", "word"], ids=["words", "one word"])
def test_an_overlong_line_is_read_in_parts(word: str) -> None:
    """Four megabytes in one line; the text around it is read as well."""
    model = Says(lambda text: "None")
    line = word * (4_000_000 // len(word))

    def count(text: str) -> int:
        assert len(text) < 10_000, "a long text is counted at once"
        return len(text) // 4 + 1

    request = direct(f"before\n{line}\nbehind")
    (reply,) = WindowedChat(model, count, 640).ask([request], Control(time.monotonic() + 60))
    assert isinstance(reply, Reply)
    prompts_read = [request.turns[0].content for request in model.asked]
    values = [prompts.read_back(prompts.DIRECT, text, "context") for text in prompts_read]
    read = [each["context"] for each in values if each is not None]
    assert len(read) == len(prompts_read)
    assert all(count(text) <= 640 for text in read)
    assert "".join(read).replace("\n", "").replace(" ", "") == (
        f"before{line}behind".replace(" ", "")
    )


def test_a_window_sees_the_last_message_of_a_talk() -> None:
    model = Says(lambda text: "None")
    system = prompts.CHAT_LOCAL.format(
        document="a log", context="\n".join("abcdef" * 9), question="Q?"
    )
    talk = (Turn("system", system), Turn("user", "1"), Turn("assistant", "x"), Turn("user", "2"))
    (reply,) = WindowedChat(model, words, 30).ask([ChatRequest(talk)], Control())
    assert isinstance(reply, Reply)
    assert reply.text == "None"
    assert len(model.asked) > 1
    assert all([t.role for t in r.turns] == ["system", "user"] for r in model.asked)
    assert {r.turns[-1].content for r in model.asked} == {"2"}


def test_an_error_of_one_window_is_that_of_the_request() -> None:
    model = Says(lambda text: ModelError("broken") if "line 3 " in text else "None")
    lines = "\n".join(f"line {n} of ten words and no more than that" for n in range(9))
    (reply, other) = WindowedChat(model, words, 30).ask([direct(lines), direct("a")], Control())
    assert isinstance(reply, ModelError)
    assert isinstance(other, Reply)


def test_a_citation_with_a_slip_stands_for_the_line_that_is_meant() -> None:
    lines = (
        "Expense of Tilda Hopkins, batteries: 36.00.",
        "Expense of Tilda Hopkins, pencils: 36.50.",
        "Alarm in the archive: 10:25.",
    )
    chunk = "\n".join(lines)
    assert cited_lines(lines[0], chunk) == lines[0]
    slip = "Expense of Tilda Hop anyone, batteries: 36.00."
    assert cited_lines(slip, chunk) == lines[0]
    assert cited_lines(f"{slip}; {lines[2]}", chunk) == f"{lines[0]}; {lines[2]}"
    assert cited_lines("Expense of Tilda Hopkins, brushes: 36.00.", chunk) == lines[0]
    for wrong in ("", None, "Alarm in the cellar: 19:40.", f"{lines[0]}; Nothing of that kind."):
        assert cited_lines(wrong, chunk) is None
    twins = "Expense of Ada Lo, pens: 1.00.\nExpense of Ada Li, pens: 1.00."
    assert cited_lines("Expense of Ada L, pens: 1.00.", twins) is None
    assert cited_lines("10:25", chunk) is None, "it stands there, as anything short may"
    assert cited_lines("in the archive", chunk) == "in the archive"
    assert cited_lines("10:25", "Alarm.\n 10:25 ") == "10:25"
    long = "a" * 2000
    begun = time.monotonic()
    assert cited_lines("; ".join(["ab"] * 600), "\n".join([long] * 50)) is None
    assert time.monotonic() - begun < 5
