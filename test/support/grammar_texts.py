"""Texts for the action grammar, honest and adversarial."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from collab_llm_nodes.robot.grammar import GrammarConfig, StreamingParser

WIDE = GrammarConfig(max_distance=10.0, max_angle=180.0, reason="lenient")
PLAIN = GrammarConfig(max_distance=10.0, max_angle=180.0, things=("blue unicorn", "path"))


ACTIONS = st.one_of(
    st.sampled_from(["stop", "give up"]),
    st.integers(1, 75).map(lambda n: f"move forward {n} cm"),
    st.tuples(st.sampled_from(["left", "right"]), st.integers(1, 45)).map(
        lambda t: f"turn {t[0]} {t[1]} degree"
    ),
)


OTHER_WORDS = GrammarConfig(
    max_distance=10.0,
    max_angle=180.0,
    markers=("action:", "next action:", "i will now"),
    forward=("go {distance} straight ahead", "walk {distance}", "move forward {distance}"),
    left=("rotate {angle} to the left", "turn left {angle}"),
    right=("rotate {angle} to the right", "turn right {angle}"),
    stop=("stop here", "halt"),
    reason="lenient",
)
"""Another way of speaking: numbers in the middle, markers with a colon."""

ENDS = ["give up", "reply"]
PARTS = {
    WIDE: (
        ["the next action is", "next action is", "The next action is to:", "so, next action is"],
        ["move forward {} cm", "moving forward by {} m", "turn left {} degree", "stop", "STOP"]
        + ENDS,
    ),
    PLAIN: (
        ["the next action is", "so the next action is", "Next action is:"],
        ["move forward {} cm", "turn left {} degree", "turn right {} degree", "stop"] + ENDS,
    ),
    OTHER_WORDS: (
        ["action:", "Next action:", "i will now", "so i will now", "the next action is"],
        ["go {} cm straight ahead", "walk {}m", "rotate {} deg to the left", "halt", "stop here"]
        + ENDS,
    ),
}
NUMBERS = ("25", "0.5", "75", "1000", "0", "-30", "30", "7 5", "1e3", "3.", "1234567890")
REASONS = (
    "the red ball is ahead",
    "i cannot see the box",
    "turn left to face it",
    "do not move",
    "if the door is open",
    "a stop sign is near",
    "no way forward",
    "i don\u2019t go back",
    "walk 25 cm",
)
OBSERVATIONS = (
    "the red ball is on the far left, near",
    "I can see a blue unicorn 2.5 m ahead",
    "there are two boxes in front of me and a cone on the right",
    "i don\u2019t see the ball",
    "i cannot see it, i keep looking to the left",
    "no red ball in sight",
    "no cone is visible on the left",
    "there is no box in view",
    "it's not in my view, so i search to the right",
    "some way off and straight ahead there is the box",
    "the floor is visible and the box is on the path",
    "on the left stands the ball; it is very close!",
    "i am next to the stop sign",
    "the sign is red and white",
    "i see a red and white sign on the far left",
    "the box is round and small and blue, near",
)
NEARLY = (
    "the ball is not on the left",
    "no ball",
    "look to the left",
    "i see no",
    "is the ball ahead",
    "the ball ahead",
    "see the ball",
    "on the left",
    "there is no ball",
    "there is no box on the left",
    "the box is not near",
    "it is not the red cone",
    "no red ball ahead",
    "i do see the ball",
    "the ball is ahead, exit the room",
    "the door is safe",
    "if the ball is visible",
    "i see a sign:",
    "i cannot see the floor",
    "there is no road in view",
    "i am off the path",
    "the sign is red and exit",
    "the sign is red and stop",
    "red and white",
)
REASONS_OF = {PLAIN: OBSERVATIONS * 2 + NEARLY + REASONS}
SIGNS = (".", ",", "!", "?", ":", ";", "\n", " ", "  ", '"', "*", "'", "-", "")
WORDS = [
    "turn",
    "left",
    "right",
    "move",
    "forward",
    "backward",
    "stop",
    "not",
    "do",
    "and",
    "then",
    "if",
    "no",
    "so",
    "to",
    "by",
    "next",
    "is",
    "the",
]
WORDS += [
    "give",
    "up",
    "reply",
    "action",
    "cm",
    "m",
    "degree",
    "rad",
    "30",
    "75",
    "red",
    "until",
    "avoid",
    "go",
    "halt",
    "sign",
    "no",
    "i",
    "see",
    "is",
    "are",
    "there",
    "in view",
    "on",
    "ball",
    "unicorn",
    "some way",
    "2 m",
    "red and white",
    ",",
]
ALIKE = str.maketrans("sk5 ", "\u017f\u212a\u0665\u2009")
"""A long s and a Kelvin sign, which lower-case to Latin letters; a digit; a space."""


def sentence(random: Random, config: GrammarConfig) -> str:
    """A text near the grammar: often in it, often just outside."""
    markers, orders = PARTS[config]
    pieces = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.5:
            pieces.append(random.choice(REASONS_OF.get(config, REASONS)) + random.choice(SIGNS))
        if random.random() < 0.7:
            pieces.append(random.choice(markers))
        if random.random() < 0.9:
            pieces.append(random.choice(orders).format(random.choice(NUMBERS)))
    return " ".join(pieces) + random.choice((".", "", "!", " and", " ."))


def mutated(random: Random, text: str) -> str:
    """``text`` with a few letters or words changed."""
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(text) + 1)
        to = min(len(text), at + random.choice((0, 0, 1, 1, 3, 8)))
        put = random.choice(
            (
                "",
                random.choice(SIGNS),
                f" {random.choice(WORDS)} ",
                text[at:to].swapcase(),
                text[at:to].translate(ALIKE),
                chr(random.randrange(32, 127)),
            )
        )
        text = text[:at] + put + text[to:]
    return text


def stream(text: str, size: int) -> tuple[list[str], StreamingParser]:
    """Feed ``text`` in pieces; the text read so far at each report."""
    parser = StreamingParser()
    seen = []
    for i in range(0, len(text), size):
        if parser.push(text[i : i + size]):
            seen.append(parser.text)
    return seen, parser
