"""The tokenizer's texts: every word that answers are made of is one token."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from collab_llm_lab.home.answers import ACTIONS, REPLY, Decision, answer, reply
from collab_llm_lab.home.asking import draw_for_view
from collab_llm_lab.home.wording import HELD_OUT, START_WORDS, Kind
from collab_llm_lab.training.nav.models import tokenizer_in
from collab_llm_nodes.robot.prompt import SEARCH_TEMPLATE, user_text
from collab_llm_nodes.robot.search import EIGHTHS, PLACES, WAYS, Report, SearchMemory
from collab_llm_nodes.sim.rooms import COLOURS, FURNITURE, SHAPES, make_room
from collab_llm_nodes.sim.view import DIRECTIONS, DISTANCES, look


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    out = tmp_path_factory.mktemp("run")
    made = tokenizer_in(out)
    assert tokenizer_in(out).get_vocab() == made.get_vocab()  # kept there
    return made


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def test_dense_words_are_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    spoken = " ".join((*DIRECTIONS, *DISTANCES, *EIGHTHS, *WAYS.values(), *WAYS)).split()
    for word in (*COLOURS, *SHAPES, *FURNITURE, *spoken):
        assert tokens(tokenizer, f" {word}") == [f"Ġ{word}"]
    for word in START_WORDS:
        assert tokens(tokenizer, word) == [word]


def test_every_word_of_an_answer_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    words: set[str] = set()
    ways: tuple[tuple[str, str], ...] = tuple(itertools.product(("", *PLACES), ("", *WAYS)))
    for action, (direction, way) in itertools.product(ACTIONS, ways):
        for distance, in_view in itertools.product(DISTANCES, (True, False)):
            if direction not in (DIRECTIONS if in_view else ("", *EIGHTHS)):
                continue
            if not (direction or way):
                continue
            leg = "left" if direction and way else ""
            report = Report("orange ball", in_view, direction, distance, way, leg)
            for scene in ((), (("white mug", distance),)):
                words.update(answer(Decision(action, report, scene)).split())
    rng = np.random.default_rng(2)
    for seed in range(30):
        room = make_room(seed)
        view = look(room, room.start)
        for _ in range(20):
            request = draw_for_view(room, view, rng)
            words.update(answer(Decision(REPLY, reply=reply(request, view))).split())
    assert len(words) > 50
    for word in words:
        assert len(tokens(tokenizer, " " + word.strip(",."))) == 1, word


def test_every_word_of_a_prompt_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = np.random.default_rng(0)
    moves = [action for action in ACTIONS if action.startswith(("move", "turn"))]
    memory, done = SearchMemory(), list[str]()
    for _ in range(300):
        done.append(str(rng.choice(moves)))
        memory = memory.after(done[-1], "the red ball is not in view, the way is open.")
        prompt = user_text("find the red ball", done, SEARCH_TEMPLATE, search=memory.text)
        for word in re.findall(r"[a-z]+|[0-9]+", prompt):
            assert word in ("find", str(memory.place)) or len(tokens(tokenizer, f" {word}")) == 1


def test_held_out_texts_are_read_without_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = np.random.default_rng(1)
    for wordings in HELD_OUT.values():
        text = wordings.draw(rng, Kind.WHAT_DO_YOU_SEE)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
