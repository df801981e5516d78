"""Thoughts of reasoning models are found in every form, and no reader of answers looks into one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_folder, tiny_model
from transformers import AutoTokenizer

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.chat.structured import last_object
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.detokenising import Detokeniser
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.thoughts import (
    answer_of,
    blank_thoughts,
    find_thoughts,
    opened_thought,
)
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.outline import OutlinePrompts, read_outline, read_point
from collab_llm_nodes.protocols.minions.reading import (
    decision,
    find_object,
    find_program,
    worker_output,
)
from collab_llm_nodes.robot.grammar import Code, GrammarConfig, StreamingParser, parse

CLOSED = {
    "tag": "<think>{thought}</think>{answer}",
    "tag with blanks": "\n<think >\n{thought}\n</think >\n\n{answer}",
    "upper case": "<THINK>{thought}</THINK>{answer}",
    "attribute": '<think effort="high">{thought}</think>{answer}',
    "thinking": "<thinking>{thought}</thinking>{answer}",
    "thought": "<thought>{thought}</thought>{answer}",
    "reasoning": "<reasoning>{thought}</reasoning>{answer}",
    "Seed": "<seed:think>{thought}</seed:think>{answer}",
    "Mistral": "[THINK]{thought}[/THINK]{answer}",
    "Kimi": "\u25c1think\u25b7{thought}\u25c1/think\u25b7{answer}",
    "Command": "<|START_THINKING|>{thought}<|END_THINKING|>{answer}",
    "OpenThinker": "<|begin_of_thought|>{thought}<|end_of_thought|>{answer}",
    "Gemma": "<|channel>thought\n{thought}<channel|>{answer}",
    "harmony": "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final"
    "<|message|>{answer}<|return|>",
    "harmony as JSON": "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>"
    "final <|constrain|>json<|message|>{answer}",
    "harmony, two channels": "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>"
    "commentary<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}",
    "harmony without its tokens": "analysisThe user asks. {thought}assistantfinal{answer}",
    "Granite": "Here is my thought process: {thought}\nHere is my response: {answer}",
    "Apriel": "Here are my reasoning steps:\n{thought}\n[BEGIN FINAL RESPONSE]\n{answer}",
    "opened by the template": "a {thought}</think>\n\n{answer}",
    "opened by the template, Mistral": "a {thought}[/THINK]{answer}",
    "opened by the template, harmony": "a {thought}<|channel|>final<|message|>{answer}",
    "opened twice": "<think>\n<think>\n{thought}\n</think>\n\n{answer}",
    "nested": "<think>a <think>{thought}</think> {thought}</think>{answer}",
    "another form within": "<think>a [THINK] <thinking> {thought} </thinking></think>{answer}",
    "mentioned within": "<think>what does `</think>` do? {thought}</think>{answer}",
    "two": "<think>{thought}</think><think>{thought}</think>{answer}",
    "closed twice": "<think>{thought}</think> {thought}</think>{answer}",
}
CUT_OFF = {
    "tag": "<think>{thought}",
    "thinking": "<thinking>{thought}",
    "Mistral": "[THINK]{thought}",
    "Command": "<|START_THINKING|>{thought}",
    "harmony": "<|channel|>analysis<|message|>{thought}",
    "harmony without its tokens": "analysisThe user asks. {thought}",
    "Granite": "Here's my thought process: {thought}",
    "nested": "<think>a <think>b</think> {thought}",
    "closed by another form": "<think>a</thinking>{thought}",
    "nothing after it": "{thought}</think>",
}
FORMS = {f"{name}, {end}": form for end, forms in (("closed", CLOSED), ("cut off", CUT_OFF))
         for name, form in forms.items()}  # fmt: skip


@pytest.mark.parametrize("form", CLOSED.values(), ids=CLOSED)
def test_thoughts_are_no_part_of_the_answer(form: str) -> None:
    text = form.format(thought="shut the door", answer="yes, it is")
    assert answer_of(text) == "yes, it is"
    assert "shut" not in blank_thoughts(text)
    assert blank_thoughts(text).index("yes") == text.index("yes")


@pytest.mark.parametrize("form", CUT_OFF.values(), ids=CUT_OFF)
def test_a_thought_that_was_cut_off_leaves_no_answer(form: str) -> None:
    assert answer_of(form.format(thought="shut the door")) == ""


@pytest.mark.parametrize(
    "text",
    [
        " plain ",
        "I think, therefore I am",
        "the tag `<think>` opens a thought, and '</think>' closes it",
        '{"answer": "<think>"}',
        "5 < think > 3 / [thought]",
        "analysis of the log: all is well",
        "<b>bold</b> [1] <|im_start|>",
    ],
)
def test_what_is_no_thought_stays_as_it_is(text: str) -> None:
    if "< think >" not in text:
        assert answer_of(text) == blank_thoughts(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "Use the <reason> tag, then close it.",
        "Set <think> to true in config.json, then restart.",
        "Wrap it in <think> and </think>, and nothing else.",
        "Begin with <think> and end\nwith </think>\nin a line of its own.",
        "The </think> tag ends it (</think>), and [/THINK] is Mistral's.",
        "End it with </think>, or [/think].",
        "The token <|channel|> begins a channel of gpt-oss.",
        "An example:\n\n```\n<thinking>\nhm\n</thinking>\nyes\n```\nThat is all.",
        "<event><reason>low battery</reason></event>",
        "<event><thought>low battery</thought></event>",
        "The form: </reason> and </scratchpad>\nare closed.",
        "<reason> is a tag.",
        '{"citation": "<event><reason>low battery</reason></event>", "answer": "b"}',
        '{"citation": "14:02 </think> restarted", "answer": "b"}',
        '{"citation":"say \\"</think>\\" twice\\\\","answer":["<think>","[/THINK]"]}',
        '```json\n{"<think>": "a</think>b", "c": 1}\n```',
        "{'citation': 'a </think> b', 'answer': '<|channel|>final c'}",
        '{"explanation": "e", "citation": "<think>hm</think> x"}',
    ],
)
def test_markers_that_an_answer_mentions_are_part_of_it(text: str) -> None:
    assert answer_of(text) == text
    for before in ("<think>hm</think>", "<think>so, hm </think> ", "[THINK]hm[/THINK]\n"):
        assert answer_of(f"{before}{text}") == text
    if found := last_object(text):
        assert last_object(f"hm\n</think>\n\n{text}") == found


def test_a_cited_line_does_not_silence_its_worker() -> None:
    line = "14:02 <think>low</think> battery </think>"
    said = json.dumps({"explanation": "e", "citation": line, "answer": "14:02"})
    output = worker_output(Reply(said, Finish.STOP).text, quotes=False, max_characters=100)
    assert output is not None
    assert (output.citation, output.answer) == (line, "14:02")


@pytest.mark.parametrize("tag", ["reason", "reflection", "scratchpad", "Reason"])
def test_some_tags_are_thoughts_only_in_pairs_before_the_answer(tag: str) -> None:
    assert answer_of(f"<{tag}>hm</{tag}>\nyes") == "yes"
    assert answer_of(f"<think>hm</think>\n<{tag}>hm</{tag}>\nyes") == "yes"
    for text in (f"yes <{tag}>hm</{tag}>", f"<{tag}>hm", f"hm</{tag}>yes"):
        assert answer_of(text) == text


@given(st.text(alphabet='<>/[]|think \n`"channelfi', max_size=200))
def test_any_text_is_read(text: str) -> None:
    spans = find_thoughts(text)
    assert all(0 <= begin < end <= len(text) for begin, end in spans)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert len(blank_thoughts(text)) == len(text)


@pytest.mark.parametrize(
    "piece",
    ["<think>", "</think>", "<think>a</think>", "<", "<think ", "\n", " ", "[think]", "`<", "a",
     "<|channel|>", "<|channel|>final ", "< ", "here's my response:", "<reason>", '"',
     ',"', ':"\\\\', "</reason>", "<think>a</think><reason>",
     "a </think> b", ", '", "<|channel|>final<|message|>"],
)  # fmt: skip
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    def took(characters: int) -> float:
        text = piece * (characters // len(piece))
        begun = time.process_time()
        blank_thoughts(text)
        answer_of(text)
        return time.process_time() - begun

    short = min(took(1 << 15) for _ in range(3))
    assert min(took(1 << 18) for _ in range(2)) < 8 * 8 * short + 0.05  # 64 times if quadratic


OBJECT, WRONG = '{"decision": "provide_final_answer", "answer": "yes"}', '{"answer": "no"}'
READERS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "last_object": (lambda text: last_object(text, ("answer",)), WRONG, OBJECT),
    "find_object": (find_object, WRONG, OBJECT),
    "decision": (decision, '{"decision": "provide_final_answer", "answer": "no"}', OBJECT),
    "worker_output": (
        lambda text: worker_output(text, quotes=False, max_characters=100),
        WRONG,
        '{"explanation": "e", "citation": "c", "answer": "yes"}',
    ),
    "find_program": (find_program, "```python\nbad()\n```", "```python\ngood()\n```"),
    "outline": (
        lambda text: read_outline(text, complete=True).points,
        "\n1. No\n2. No again\n",
        "1. One\n2. Two\n3. Three",
    ),
    "point": (lambda text: read_point(text)[0], "Shut the door", "Offer tea."),
    "navigation": (
        lambda text: replace(parse(text), text="", span=(0, 0)),
        "The next action is move forward 50 cm.",
        "The next action is turn left 30 degree.",
    ),
    "reply": (lambda text: Reply(text, Finish.STOP).text, WRONG, OBJECT),
    "turn": (lambda text: Turn("assistant", text).content, WRONG, OBJECT),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_reader_looks_into_a_thought(form: str, reader: str) -> None:
    read, thought, answer = READERS[reader]
    said = form.format(thought=thought, answer=answer)
    assert read(said) == read(answer if "{answer}" in form else "")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_action_in_a_thought_never_moves_the_robot(form: str, as_json: bool) -> None:
    action = '{"action": "move forward 50 cm"}' if as_json else "The next action is stop."
    config = GrammarConfig(json=as_json)
    text = form.format(thought=action, answer="I see a door.")
    assert parse(text, config).code is not Code.OK
    assert parse(text, config).text == text
    if form != "{thought}</think>":  # see the begun thought below
        streaming = StreamingParser(config)
        assert all(streaming.push(c) is None for c in text)


@pytest.mark.parametrize(
    "text",
    [
        "I see a door. <think>The next action is stop.</think>",
        "I see a door.\n<think>The next action is stop.",
        "I see a door. <scratchpad>The next action is stop.",
        "<reason>The next action is stop.",
        "<reason>The next action is stop.</reason> I see a door.",
        "The next action is stop. </reflection> I see a door.",
        "I wonder </think> what: <reasoning>stop</reasoning>",
        '{"seen": "a door"} <think>{"action": "stop"}</think>',
    ],
)
def test_an_action_moves_the_robot_only_where_nothing_makes_it_a_thought(text: str) -> None:
    for as_json in (False, True):
        assert parse(text, GrammarConfig(json=as_json)).code is not Code.OK


def test_the_span_of_an_action_is_that_in_the_whole_text() -> None:
    text = "<think>turn right 30 degree?</think>\nThe next action is turn left 30 degree."
    parsed = parse(text)
    assert parsed.code is Code.OK
    assert text[slice(*parsed.span)] == "turn left 30 degree"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n<think>\n"
)


@pytest.mark.parametrize(
    ("end", "marker"),
    [("<think>\n", "<think>"), ("<think>\n\n</think>\n\n", ""), ("", ""), ("[THINK]", "[THINK]")],
)
def test_a_prompt_may_end_in_a_thought(end: str, marker: str) -> None:
    assert opened_thought(f"<think>user\nwhat?<|im_end|>\n<|im_start|>assistant\n{end}") == marker


def test_a_thought_that_the_template_begins_is_known_without_its_end(tmp_path: Path) -> None:
    plain = tiny_model("llama")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("llama"))
    tokenizer.chat_template = THINKING
    thinking = replace(plain, tokenizer=tokenizer)
    assert plain.begun_thought == ""
    assert thinking.begun_thought == "<think>"
    text = Detokeniser(lambda tokens: "stop " * len(tokens), thinking.begun_thought)
    text.update((1, 2))
    assert text.text == "<think>stop stop "
    assert text.text[: text.ends[0]] == "<think>stop "
    prompts = OutlinePrompts(tokenizer, thinking.begun_thought)
    listed = tokenizer("1. a\n2. b\n3. c\n").input_ids
    assert prompts.requests(listed) == []
    assert len(OutlinePrompts(plain.tokenizer).requests(listed)) == 3


def test_an_earlier_answer_with_thoughts_is_no_attack() -> None:
    loaded = load(ModelConfig(path=str(tiny_folder("llama"))))  # not shared: it grows
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("llama"))
    tokenizer.add_tokens(["<think>", "</think>"])
    loaded.model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = THINKING.replace("<think>\n", "{% if x %}<think>{% endif %}")
    thinking = replace(loaded, tokenizer=tokenizer)
    said = "<think>\nhm\n</think>\n\nhello"

    def ids(answer: str) -> list[int]:
        turns = (Turn("user", "hi"), Turn("assistant", answer))
        return [*encode(Prompt("and now?", turns=turns), thinking).ids]

    with pytest.raises(InvalidInput, match="control token"):
        encode(Prompt("<think>"), thinking)
    assert "<think>" in thinking.control_tokens
    assert thinking.tokenizer.decode(ids(said)) == thinking.tokenizer.decode(ids("hello"))
    mention = "Set <think> to true."
    assert mention in thinking.tokenizer.decode(ids(mention))
    with pytest.raises(InvalidInput, match="control token"):
        ids(f"hello{tokenizer.eos_token}")
