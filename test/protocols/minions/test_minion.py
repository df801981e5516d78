"""Minion, the chat, and the baselines in which one model answers alone."""

from __future__ import annotations

import pytest
from minions_world import World, final, paper, text_of

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import ConfigError, DeadlineExceeded, InvalidInput, ModelError
from collab_llm_nodes.protocols.minions.baselines import local_only, rag, remote_only
from collab_llm_nodes.protocols.minions.driving import Handlers, drive
from collab_llm_nodes.protocols.minions.messages import AskLocal, Kind, Mark, Outcome
from collab_llm_nodes.protocols.minions.minion import minion
from collab_llm_nodes.protocols.minions.minions import minions
from collab_llm_nodes.protocols.minions.settings import (
    CHAT_PRESETS,
    DirectConfig,
    LocalConfig,
    MinionConfig,
    RemoteConfig,
)

_HELLO = 'Let me see.\n```json\n{"message": "How much was it?"}\n```'
_ASK = '{"decision": "request_additional_info", "message": "In which year?"}'
_TEXT = "It was 42 kg in 2015."


def _answer(world: World, config: MinionConfig | None = None) -> Outcome:
    return world.drive(minion("How heavy?", [_TEXT], config or MinionConfig()))


def test_only_the_local_model_reads_the_text() -> None:
    world = World([_HELLO, _ASK, final("42 kg")], worker=lambda prompt: "In 2015.")
    outcome = _answer(world)
    assert (outcome.answer, outcome.rounds, outcome.marks) == ("42 kg", 2, frozenset())
    assert _TEXT not in world.wire
    assert _TEXT in world.prompts[0][0].turns[0].content


def test_both_remember_the_chat() -> None:
    answers = iter(["first answer", "second answer"])
    world = World([_HELLO, _ASK, final()], worker=lambda prompt: next(answers))
    _answer(world)
    local = [turn.content for turn in world.prompts[1][0].turns[1:]]
    assert local == ["How much was it?", "first answer", "In which year?"]
    remote = world.sent[-1].messages
    assert [message.role for message in remote] == ["user", "assistant"] * 2 + ["user"]
    assert "first answer" in remote[2].text
    assert "second answer" in remote[4].text


def test_thoughts_are_neither_sent_nor_remembered() -> None:
    answers = iter(["<think>\nsecret?\n</think>\n\nfirst answer", "<think>secret, cut off"])
    replies = [f'<think>{{"message": "secret"}}</think>{_HELLO}', _ASK, final("42 kg")]
    world = World(replies, worker=lambda prompt: next(answers))
    assert _answer(world).answer == "42 kg"
    heard = [turn.content for prompts in world.prompts for turn in prompts[0].turns]
    sent = [message.text for ask in world.sent for message in ask.messages]
    assert not [text for text in (*heard, *sent) if "secret" in text]
    assert "first answer" in heard


def test_the_local_models_words_are_counted_as_such() -> None:
    world = World([_HELLO, final()], worker=lambda prompt: "the words")
    _answer(world)
    messages = world.sent[-1].messages
    assert [p.text for m in messages for p in m.parts if p.kind is Kind.MESSAGE] == ["the words"]


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_last_round_forces_an_answer(rounds: int) -> None:
    world = World([_HELLO, *[_ASK] * (rounds - 1), final("41")])
    outcome = _answer(world, MinionConfig(rounds=rounds))
    assert (outcome.answer, outcome.marks) == ("41", frozenset({Mark.FORCED}))
    assert len(world.prompts) == rounds
    assert "This was its last answer" in world.sent[-1].messages[-1].text


def test_without_force_the_local_models_last_answer_stands() -> None:
    world = World([_HELLO, _ASK], worker=lambda prompt: "about 42")
    outcome = _answer(world, MinionConfig(rounds=1, force_final=False))
    assert (outcome.answer, outcome.marks) == ("about 42", frozenset({Mark.UNDECIDED}))


def test_temperatures_lengths_and_wording() -> None:
    config = MinionConfig(
        RemoteConfig(temperature=0.7, max_tokens=70),
        LocalConfig(temperature=0.3, max_tokens=30),
        style="financebench",
    )
    world = World([_HELLO, final()])
    _answer(world, config)
    assert {(ask.temperature, ask.max_tokens) for ask in world.sent} == {(0.7, 70)}
    assert {(p.temperature, p.max_tokens) for p in world.prompts[0]} == {(0.3, 30)}
    assert "financial report" in world.wire
    assert CHAT_PRESETS["longhealth"].local.temperature == 1e-5


def test_prose_is_asked_for_again() -> None:
    world = World(["Hm.", _HELLO, "Hm.", final()])
    assert _answer(world).answer == "42"
    assert world.wire.count("had not the form asked for") >= 2


def test_the_remote_may_not_answer_before_anybody_has_read() -> None:
    world = World([final("a guess"), _HELLO, final("42 kg")])
    assert _answer(world).answer == "42 kg"
    assert world.prompts[0][0].turns[-1].content == "How much was it?"


def test_a_remote_without_a_message() -> None:
    with pytest.raises(ModelError):
        _answer(World(["Hm."] * 3))


def test_a_remote_that_falls_silent_leaves_the_local_models_answer() -> None:
    world = World([_HELLO, *["Hm."] * 3], worker=lambda prompt: "42 kg")
    outcome = _answer(world)
    assert outcome.answer == "42 kg"
    assert isinstance(outcome.error, ModelError)


def test_a_local_model_that_says_nothing() -> None:
    world = World([_HELLO, final()], worker=lambda prompt: " ")
    _answer(world)
    assert "gave no answer" in world.sent[-1].messages[-1].text


def test_a_deadline_gives_the_best_answer_so_far() -> None:
    late = DeadlineExceeded("too late")
    outcome = _answer(World([_HELLO, late], worker=lambda prompt: "42 kg"))
    assert (outcome.answer, outcome.error) == ("42 kg", late)
    with pytest.raises(DeadlineExceeded):
        _answer(World([late]))


# ---------------------------------------------------------------- baselines


def test_remote_only_sends_the_documents() -> None:
    world = World([" 42 kg\n"])
    outcome = world.drive(remote_only("How heavy?", [_TEXT, "Another."], DirectConfig()))
    assert outcome.answer == "42 kg"
    kinds = {part.kind: part.text for part in world.sent[0].messages[0].parts}
    assert kinds[Kind.DOCUMENT] == f"{_TEXT}\n\nAnother."
    assert kinds[Kind.QUESTION] == "How heavy?"
    assert world.sent[0].temperature == 0.2
    assert world.prompts == []


def test_local_only_sends_nothing() -> None:
    world = World([], worker=lambda prompt: "42 kg" if _TEXT in text_of(prompt) else "")
    assert world.drive(local_only("How heavy?", [_TEXT], DirectConfig())).answer == "42 kg"
    assert world.sent == []


def test_a_model_that_has_only_thought_has_not_answered() -> None:
    world = World(["<think>42, or 43?"], worker=lambda prompt: "<think>42, or 43?</think>")
    for machine, field in (
        (remote_only("How heavy?", [_TEXT], DirectConfig()), "remote.max_tokens"),
        (local_only("How heavy?", [_TEXT], DirectConfig()), "local.max_tokens"),
    ):
        with pytest.raises(ModelError, match="no answer") as caught:
            world.drive(machine)
        assert caught.value.field == field


def test_rag_sends_the_best_passages() -> None:
    world = World(["42 kg"], passages=["first", "second", "third"])
    world.drive(rag("How heavy?", [_TEXT], DirectConfig(retrieve=2)))
    (message,) = world.sent[0].messages
    assert [p.text for p in message.parts if p.kind is Kind.PASSAGE] == ["first\n\nsecond"]
    assert _TEXT not in world.wire


def test_rag_without_a_passage_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="no passage"):
        World([]).drive(rag("How heavy?", [_TEXT], DirectConfig()))


def test_retrieval_without_a_retriever_is_an_error() -> None:
    handlers = Handlers(lambda ask: Reply("", Finish.STOP), lambda prompts: [])
    with pytest.raises(ConfigError, match="retrieve"):
        drive(rag("How heavy?", [_TEXT], DirectConfig()), handlers)


def test_programs_without_a_sandbox_are_an_error() -> None:
    machine = minions("How heavy?", [_TEXT], paper())
    with pytest.raises(ConfigError, match="planner"):
        drive(machine, Handlers(lambda ask: Reply("a = 1", Finish.STOP), lambda prompts: []))


def test_a_machine_that_is_given_up_ends() -> None:
    machine = minion("How heavy?", [_TEXT], MinionConfig())
    next(machine)
    assert isinstance(machine.send(Reply(_HELLO, Finish.STOP)), AskLocal)
    machine.close()
    assert machine.gi_frame is None  # type: ignore[attr-defined]
