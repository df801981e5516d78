"""The things that a question names, and the sentences that name them."""

from __future__ import annotations

import time

import pytest

from collab_llm_lab.training.nav.wording import FRAMES, HELD_OUT_FRAMES, VERBS
from collab_llm_nodes.knowledge.naming import Named

RED = "At 10:33 on 2026-11-23, the red ball was last seen from (1.0, 2.0): the red ball is near."
BLUE = "At 10:34 on 2026-11-23, the blue ball was last seen from (1.0, 2.0): it is on the left."
OPPOSITE = "At 10:35 on 2026-11-23, seen from (1.0, 2.0): the red box is left of the blue ball."
# The forms in which text-target was taught to be asked about a sighting, and others.
QUESTIONS = (
    "Where did you last see the {thing}?",
    "where did i last see the {thing}",
    "WHERE DID I LAST SEE THE {THING}?",
    "Where was the {thing} last in view?",
    "From where was the {thing} seen?",
    "From which place did the robot see the {thing}?",
    "At which point did you see the {thing}?",
    "Tell me from where you saw the {thing}.",
    "Place from which the {thing} was seen?",
    "Please name the point from which the {thing} was seen.",
    "The {thing}, please: seen from where?",
    "For the {thing}: seen from which place?",
    "In which room was the {thing} at the end?",
    "What was the last room of the {thing}?",
    "Could you tell me in which room the {thing} was last seen?",
    "Which room comes last for the {thing}?",
    "Time of the last sighting of the {thing}?",
    "What is the last time given for the {thing}?",
    "At what time does the {thing} appear last?",
    "Could you tell me when somebody last saw the {thing}?",
    "Robot, where's my {thing}?",
    "Where is the last {thing} that you saw?",
    "Have you seen a {thing} today?",
    "Did you see any {thing}s?",
    "How many {thing}s did you see?",
    "Is there a {thing}?",
    "where is {thing}",
    "{thing}?",
    "the {thing}'s place",
    "Where did I last see {thing}s?",
    "Where did I last see my\n{thing}, please?",
    "What about the \N{LEFT DOUBLE QUOTATION MARK}{thing}\N{RIGHT DOUBLE QUOTATION MARK}?",
)


def asked(form: str, thing: str) -> Named:
    return Named(form.replace("{THING}", thing.upper()).replace("{thing}", thing))


@pytest.mark.parametrize("form", QUESTIONS)
def test_a_sentence_answers_if_it_names_the_whole_thing(form: str) -> None:
    assert asked(form, "red ball").by(RED)
    assert asked(form, "ball").by(RED)
    assert asked(form, "ball").by(BLUE)
    for other in ("green umbrella", "umbrella", "red umbrella", "green ball", "ball pen"):
        assert not asked(form, other).by(RED), other
    for sentence in (BLUE, OPPOSITE):
        assert not asked(form, "red ball").by(sentence)


@pytest.mark.parametrize("frame", FRAMES + HELD_OUT_FRAMES)
def test_the_navigators_question_names_the_thing_of_the_instruction(frame: str) -> None:
    for verb in (*VERBS, "approach", "hunt down", "make your way to", "get near"):
        for article in ("the ", "a ", "that ", ""):
            wish = frame.format(verb=verb, thing=f"{article}red ball")
            named = Named(f"Where did you last see what this is about: {wish}")
            assert named.by(RED), wish
            assert not named.by(BLUE), wish


@pytest.mark.parametrize(
    ("question", "sentence", "answers"),
    [
        ("Where is the key of the cellar?", "The key of the cellar hangs beside the fridge.", True),
        ("Where is the key of the cellar?", "The key of the garage hangs beside it.", False),
        ("What is the capital of France?", "The capital of Norway is Oslo.", False),
        ("Where are the boxes?", "A box stands here.", True),
        ("Where is a box?", "The boxes stand here.", True),
        ("Where is the glass?", "Two glasses and three berries.", True),
        ("Where is a berry?", "Two glasses and three berries.", True),
        ("Where is Anna's house?", "Anna\N{RIGHT SINGLE QUOTATION MARK}s house is red.", True),
        ("Where is Anna's house?", "Tom's house is red.", False),
        ("Where is the black and white cat?", "The black and white cat sleeps.", True),
        ("Where is the black and white cat?", "The black dog sleeps.", False),
        ("Where are the red ball and the blue box?", "The blue box is here.", True),
        ("Where are the red ball and the blue box?", "The red box is here.", False),
        ("Find the ball and go to the cone", "The cone is here.", True),
        ("Where is the last red ball in the kitchen?", "The blue ball in the kitchen.", False),
        ("What did you see at 10:33?", RED, True),
        ("What did you see at 10:33?", BLUE, False),
        ("What did you see?", RED, True),
        ("What happened?", RED, True),
        ("?!", RED, True),
        (
            "Where is the \N{LATIN CAPITAL LETTER E WITH ACUTE}tag\u00e8re?",
            "The \u00e9tag\u00e8re",
            True,
        ),
        ("Where is the dining room?", "The dining table is set.", False),
        ("Where is the front door?", "The back door is open.", False),
        ("Where is the color printer?", "The laser printer is here.", False),
        ("Where is the washing machine?", "The machine is here.", False),
        ("What is the price of the lamp?", "The lamp costs 12 euros.", True),
        ("lamp location?", "The lamp is here.", True),
        ("Where is the t-shirt?", "The T-shirt is here.", True),
        ("Where was the red ball during the drive?", RED, True),
        ("Where was the red ball within the last hour?", RED, True),
        ("Where is the red ball gone?", RED, True),
        ("Did you see a red ball anywhere?", RED, True),
        ("Where are both red balls?", RED, True),
        ("Where are all red balls usually?", RED, True),
        ("Where is the ball between the boxes?", "The ball lies between two boxes.", True),
        ("Where is the ball between the boxes?", "The ball is here.", False),
    ],
)
def test_names_that_belong_together(question: str, sentence: str, answers: bool) -> None:
    assert Named(question).by(sentence) == answers


@pytest.mark.parametrize(
    "text",
    [
        "a" * 100_000,
        "the " * 25_000,
        "the " + "place " * 25_000,
        "'s" * 50_000,
        "a'a" * 30_000,
        "-:" * 50_000,
        "\n" * 9,
    ],
)
def test_long_and_strange_texts_take_linear_time(text: str) -> None:
    begun = time.process_time()
    assert Named(text).by(text) in (True, False)
    assert Named("Where is the red ball?").by(text) is False
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("ball", "balls"),
        ("cookie", "cookies"),
        ("berry", "berries"),
        ("tie", "ties"),
        ("headache", "headaches"),
        ("bench", "benches"),
        ("bus", "buses"),
        ("house", "houses"),
        ("glass", "glasses"),
        ("box", "boxes"),
        ("prize", "prizes"),
        ("shoe", "shoes"),
        ("potato", "potatoes"),
    ],
)
def test_one_of_a_kind_and_many_are_the_same_name(one: str, many: str) -> None:
    for asked_for, told in ((one, many), (many, one)):
        assert Named(f"Where did I last see the {asked_for}?").by(f"The {told} were seen here.")
        assert Named(f"Where did I see the {asked_for}?").things == (((asked_for,),),)
    assert not Named(f"Where is the {one}?").by("The umbrella is here.")
