"""The worker's replies: abstentions by meaning, answers against their citations, forms."""

from __future__ import annotations

import json
import time

import pytest
from minions_world import World, chunk_of, final, found, more, paper, plan, text_of

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import Unavailable
from collab_llm_nodes.models.guide import MAX_GUIDE_BYTES
from collab_llm_nodes.protocols.minions.abstention import says_nothing
from collab_llm_nodes.protocols.minions.examples import EXAMPLES, example_turns
from collab_llm_nodes.protocols.minions.jobs import Dropped, Job, JobManifest, JobOutput
from collab_llm_nodes.protocols.minions.messages import Kind, LocalPrompt, Mark, Outcome
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.outputs import judged, reply_form
from collab_llm_nodes.protocols.minions.plan import Reduction
from collab_llm_nodes.protocols.minions.prompts import NOT_FOUND, STYLES, Form
from collab_llm_nodes.protocols.minions.reading import decision, worker_output
from collab_llm_nodes.protocols.minions.settings import PRESETS, MinionsConfig

GENERAL = STYLES["general"]
SENTENCES = GENERAL.of_sentences()

# ---------------------------------------------------------------- abstentions


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "None.", "none", "N/A", "n.a.", "null", "unknown", "Unspecified", "Nothing"),
        *("Not found", "Not found.", "not mentioned", "not in the text", "*None*", '"None"'),
        "Not provided in the given text.",
        "not explicitly stated in the passage",
        "The document does not say how hot the pump was.",
        "The document does not say ...",
        "The text doesn't mention the price of 3.5 kg.",
        "The log does not contain this information.",
        "The price of the seat is not mentioned in the text.",
        "It is not stated.",
        "The price was not given in the document. It only mentions the wheels.",
        "There is no mention of a price.",
        "No information about the price is provided.",
        "I cannot find the answer in the text.",
        "I don't know.",
        "The weight cannot be determined from the text.",
    ],
)
def test_texts_that_say_nothing(text: str) -> None:
    assert says_nothing(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "No",
            "0",
            "-5",
            "Na",
            "210 Nm",
            "none of the wheels",
            "unknown soldier",
            "not on Sunday",
        ),
        "The alarm was not found.",
        "The filter is not included",
        "The pump does not start",
        "The document is not valid before 2024",
        "Nothing but water",
        "No alarm was sent",
        "The key was not given to Ann",
        "It is unavailable on Mondays",
        "The document does not mention torque. The nuts are tightened to 210 Nm.",
        "not mentioned " + "at all " * 100,
    ],
)
def test_texts_that_say_something(text: str) -> None:
    assert not says_nothing(text)


@pytest.mark.parametrize("part", ["is not ", "the text ", "a. ", "cannot be ", "not in the "])
def test_the_time_of_an_abstention_is_short(part: str) -> None:
    begun = time.process_time()
    for length in range(0, 401, 10):
        says_nothing((part * 400)[:length])
    assert time.process_time() - begun < 1.0


def test_a_remote_may_say_that_it_does_not_know() -> None:
    for answer in ("unknown", "None", "Not found."):
        found_ = decision(final(answer))
        assert found_ is not None
        assert (found_.final, found_.answer) == (True, "unknown")
    assert decision(final("")) is None


# ---------------------------------------------------------------- answers and citations

_TEXT = """\
Serial number 12345 of the pump.
Cellar at 16:35: 55 degrees.
Expense of Ann: 12.50.
Expense of Ann: 30.25.
Total of 1,860 kg on 5 March.
Two bolts hold it.
Expense of Ben: 7.00.
Expense of Ben: 7.00."""


def _judged(answer: object, citation: object, task: str = "Extract it.") -> Job:
    reply = Reply(json.dumps({"citation": citation, "answer": answer}), Finish.STOP)
    return judged(
        JobManifest(_TEXT, task, "", 1, 1),
        reply,
        GENERAL,
        check_citations=True,
        abstain_filter=True,
    )


@pytest.mark.parametrize(
    ("answer", "citation", "kept"),
    [
        ("12345", "Serial number 12345 of the pump.", True),
        ("1234", "Serial number 12345 of the pump.", False),
        ("123456", "Serial number 12345 of the pump.", False),
        ("No. 12345", "Serial number 12346 of the pump.", True),  # a slip of the citation
        ("12346", "Serial number 12346 of the pump.", False),  # mended, and the slip stays
        ("1860 kg", "Total of 1,860 kg on 5 March.", True),
        ("2024-03-05", "Total of 1,860 kg on 5 March.", False),
        ("05.03", "Total of 1,860 kg on 5 March.", False),
        ("3/5", "Total of 1,860 kg on 5 March.", False),
        ("on the 5th of month 3", "Total of 1,860 kg on 5 March.", True),
        ("2 bolts", "Two bolts hold it.", True),
        ("12.5", "Expense of Ann: 12.50.", True),
        ("16:35, 55 degrees", "Cellar at 16:35: 55 degrees.", True),
        ("the pump", "Serial number 12345 of the pump.", True),
    ],
)
def test_numbers_of_an_answer_stand_in_its_citation(answer: str, citation: str, kept: bool) -> None:
    assert _judged(answer, citation).dropped is (Dropped.KEPT if kept else Dropped.UNSUPPORTED)


def test_numbers_of_an_answer_may_come_from_the_task() -> None:
    job = _judged("55 degrees in room 7", "Cellar at 16:35: 55 degrees.", "How warm was room 7?")
    assert job.kept


def test_duplicated_citations_count_once() -> None:
    ann, ben = "Expense of Ann: 12.50.", "Expense of Ben: 7.00."
    job = _judged("12.50; 12.50", f"{ann}; {ann}")
    assert job.output == JobOutput("", ann, "12.50")
    twice = _judged("7.00; 7.00; 7.00", f"{ben}; {ben}; {ben}")
    assert twice.output == JobOutput("", f"{ben}; {ben}", "7.00; 7.00"), "the text has it twice"


@pytest.mark.parametrize("answer", ["12.50; 30.25", "12.50 + 30.25", ["12.50", "30.25"]])
def test_a_sum_takes_all_numbers_of_an_answer(answer: object) -> None:
    both = "Expense of Ann: 12.50.; Expense of Ann: 30.25."
    job = _judged(answer, both)
    assert Reduction("sum", ("Extract it.",)).of([job]) == 42.75
    assert Reduction("count", ("Extract it.",)).of([job]) == 2
    assert Reduction("max", ("Extract it.",)).of([job]) == 30.25


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ({"answer": True}, "yes"),
        ({"answer": False}, "no"),
        ({"answer": {"value": 5, "unit": "bar"}}, "value: 5; unit: bar"),
        ({"answer": [{"day": 1}, {"day": 2}]}, "day: 1; day: 2"),
        ({"result": {"answer": "5 bar"}}, "5 bar"),
        ({"answer": {}}, None),
        ({"answer": "The text does not say."}, None),
    ],
)
def test_unusual_objects_are_read(reply: object, answer: str | None) -> None:
    output = worker_output(json.dumps(reply), quotes=False, max_characters=99)
    assert output is not None
    assert output.answer == answer


# ---------------------------------------------------------------- sentences

_MANUAL = "The wheel nuts are tightened to 210 Nm; check them. Yes.\nThe tank holds 30 litres."


@pytest.mark.parametrize(
    ("reply", "dropped", "answer"),
    [
        ("The tank holds 30 litres.", Dropped.KEPT, "The tank holds 30 litres."),
        (' "The tank holds 30 litres."\n', Dropped.KEPT, "The tank holds 30 litres."),
        (
            "The wheel nuts are tightened to 210 Nm; check them.",
            Dropped.KEPT,
            "The wheel nuts are tightened to 210 Nm; check them.",
        ),
        (NOT_FOUND, Dropped.ABSTAINED, None),
        ("The text does not say.", Dropped.ABSTAINED, None),
        ("I would say 30 litres of water.", Dropped.UNSUPPORTED, None),
        ("", Dropped.UNREADABLE, None),
    ],
)
def test_a_sentence_is_an_output(reply: str, dropped: Dropped, answer: str | None) -> None:
    manifest = JobManifest(_MANUAL, "", "", 1, 1)
    said = Reply(reply, Finish.STOP)
    job = judged(manifest, said, SENTENCES, check_citations=True, abstain_filter=True)
    assert job.dropped is dropped
    assert not job.kept or (job.output.answer, job.output.citation) == (answer, None)


@pytest.mark.parametrize(
    ("task", "kept"),
    [
        ("How many litres does the tank hold?", True),
        ("What is the volume of tanks?", True),
        ("What is 30?", True),
        ("Which colour has the seat?", False),
        ("What is it?", True),
    ],
)
def test_a_sentence_without_a_word_of_its_task_is_no_answer(task: str, kept: bool) -> None:
    manifest = JobManifest(_MANUAL, task, "", 1, 1)
    reply = Reply("The tank holds 30 litres.", Finish.STOP)
    job = judged(manifest, reply, SENTENCES, check_citations=True, abstain_filter=True)
    assert job.dropped is (Dropped.KEPT if kept else Dropped.ABSTAINED)


def test_sentences_are_chosen_from_the_text() -> None:
    guide = reply_form(SENTENCES, _MANUAL)
    assert guide is not None
    assert guide.kind == "choice"
    assert guide.source.splitlines() == [
        "The wheel nuts are tightened to 210 Nm; check them.",
        "The tank holds 30 litres.",
        NOT_FOUND,
    ]
    long = "\n".join(f"A line with the number {i}." for i in range(MAX_GUIDE_BYTES // 20))
    assert reply_form(SENTENCES, long) is None


def test_times_and_bullets_before_a_sentence_are_not_the_models_to_choose() -> None:
    left = ("2026-11-02 06:10 Hedy left bay 3.", "2026-11-03 06:12 Hedy left bay 3.")
    log = "\n- 24 boxes stood in it.\n".join(left)
    guide = reply_form(SENTENCES, log)
    assert guide is not None
    assert guide.source.splitlines() == ["Hedy left bay 3.", "boxes stood in it.", NOT_FOUND]
    manifest = JobManifest(log, "", "", 1, 1)
    for said, answer in (
        ("boxes stood in it.", "- 24 boxes stood in it."),
        (
            "Hedy left bay 3.",
            "2026-11-02 06:10 Hedy left bay 3.; 2026-11-03 06:12 Hedy left bay 3.",
        ),
    ):
        reply = Reply(said, Finish.STOP)
        job = judged(manifest, reply, SENTENCES, check_citations=True, abstain_filter=True)
        assert (job.kept, job.output.answer) == (True, answer)


@pytest.mark.parametrize("name", sorted(set(STYLES) - {"general", "financebench"}))
def test_styles_with_a_form_of_their_own_keep_it(name: str) -> None:
    assert STYLES[name].of_sentences() is STYLES[name]
    assert example_turns(STYLES[name], 2) == ()


@pytest.mark.parametrize("style", [GENERAL, SENTENCES])
def test_examples_are_outputs_that_would_be_kept(style: object) -> None:
    assert style in (GENERAL, SENTENCES)
    chosen = GENERAL if style == GENERAL else SENTENCES
    turns = example_turns(chosen, len(EXAMPLES))
    assert [turn.role for turn in turns] == ["user", "assistant"] * len(EXAMPLES)
    for example, turn in zip(EXAMPLES, turns[1::2], strict=True):
        manifest = JobManifest(example.text, example.task, "", 1, 1)
        reply = Reply(turn.content, Finish.STOP)
        job = judged(manifest, reply, chosen, check_citations=True, abstain_filter=True)
        assert job.dropped is (Dropped.KEPT if example.citation else Dropped.ABSTAINED)
        if chosen.form is Form.FIELDS:
            assert job.output.answer == (example.answer or None)


# ---------------------------------------------------------------- in the protocol

_ASKED = plan("How much water?", chunker="chunk_by_paragraph", size=100)
_PARAGRAPHS = "\n\n".join(
    f"Tank {i} holds {i}0 litres of water, and no more than that." for i in range(1, 6)
)


def _answer(world: World, config: MinionsConfig) -> Outcome:
    return world.drive(minions("How much?", [_PARAGRAPHS], config))


def test_the_worker_sees_examples_and_the_text_it_may_choose_from() -> None:
    config = MinionsConfig(worker_form="sentence", examples=2)
    world = World([_ASKED, final()], worker=lambda prompt: chunk_of_last(prompt).split("\n")[0])
    assert _answer(world, config).answer == "42"
    (prompt, *_) = world.prompts[0]
    assert [turn.role for turn in prompt.turns] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert prompt.guide is not None
    assert prompt.guide.kind == "choice"
    assert {job.dropped for job in world.rounds[0].jobs} == {Dropped.KEPT}
    assert EXAMPLES[0].text not in world.wire


def chunk_of_last(prompt: LocalPrompt) -> str:
    """Return the piece of text in the last turn, after the examples."""
    return prompt.turns[-1].content.split("## Text\n", 1)[1].split("\n\n## ", 1)[0]


def test_an_unreadable_reply_is_asked_for_once_more() -> None:
    def worker(prompt: LocalPrompt) -> str:
        return found("10 litres") if "not the form" in text_of(prompt) else "It holds a lot."

    world = World([_ASKED, final()], worker=worker)
    outcome = _answer(world, paper(planner="plan"))
    assert len(world.prompts) == 2
    assert [turn.role for turn in world.prompts[1][0].turns] == ["user", "assistant", "user"]
    assert {job.dropped for job in world.rounds[0].jobs} == {Dropped.KEPT}
    assert not outcome.marks


@pytest.mark.parametrize("second", ["It holds a lot.", Unavailable("it is gone")])
def test_a_repair_may_fail(second: str | Unavailable) -> None:
    def worker(prompt: LocalPrompt) -> str | Unavailable:
        return second if "not the form" in text_of(prompt) else "It holds a lot."

    world = World([_ASKED, final()], worker=worker)
    outcome = _answer(world, paper(planner="plan"))
    assert len(world.prompts) == 2
    assert {job.dropped for job in world.rounds[0].jobs} == {Dropped.UNREADABLE}
    assert outcome.marks == {Mark.UNUSABLE}


def test_a_trained_worker_is_not_asked_again() -> None:
    world = World([_ASKED, final()], worker=lambda prompt: "prose")
    _answer(world, PRESETS["embedded"])
    assert len(world.prompts) == 1


@pytest.mark.parametrize(("bad", "marked"), [(2, False), (3, True)])
def test_most_outputs_of_a_round_are_unusable(bad: int, marked: bool) -> None:
    def worker(prompt: LocalPrompt) -> str:
        number = int(chunk_of(prompt).split()[1])
        return "" if number <= bad else found(None)

    world = World([_ASKED, final()], worker=worker)
    assert (Mark.UNUSABLE in _answer(world, paper(planner="plan")).marks) == marked


# ---------------------------------------------------------------- advice and aggregation


def test_advice_is_the_remotes_own_words() -> None:
    world = World(["Look for litres.", _ASKED, more(), _ASKED, final()], lambda p: found("1"))
    _answer(world, paper(planner="plan", advice=True, rounds=2))
    assert [ask.stage for ask in world.sent] == ["advice", *["decompose", "synthesize"] * 2]
    for place in (1, 3):
        kinds = [part.kind for part in world.sent[place].messages[0].parts if "litres" in part.text]
        assert kinds == ["remote"]


def test_the_outputs_most_like_their_task_are_sent_and_no_task_takes_all_room() -> None:
    """A worker that finds something in each piece must not crowd out the right one."""
    pump, valve = "When was the pump repaired?", "Who closed the valve?"
    pieces = [f"In week {n} nothing at all happened in the hall of engines." for n in range(40)]
    pieces[30] = "The pump was repaired in May, and ran again on the same day."
    pieces[35] = "Ann closed the valve of the boiler, and wrote it down."
    world = World(
        [plan(pump, valve), final()],
        worker=lambda prompt: found(chunk_of(prompt), citation=chunk_of(prompt)),
    )
    config = paper(planner="plan", remote_share=0.1)
    outcome = world.drive(minions("?", ["\f".join(pieces)], config))
    (extract,) = (p for p in world.sent[-1].messages[0].parts if p.kind is Kind.EXTRACT)
    assert Mark.PARTIAL in outcome.marks
    sent_for = extract.text.split("Task t")[1:]
    assert [text.partition(": ")[2].partition("\n")[0] for text in sent_for] == [pump, valve]
    assert pieces[30] in sent_for[0]
    assert pieces[35] in sent_for[1]
