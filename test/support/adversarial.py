"""Texts that speak against the action they hold, made from lists: none of them may move a robot.

Each text is an action of the grammar with an objection beside it. Whatever is done to the objection
(case, spacing, signs, lost apostrophes, look-alike letters, observations around it), it stays one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

NEGATIONS = (
    "do not {verb}",
    "don't {verb}",
    "dont {verb}",
    "never {verb}",
    "do not do this",
    "not that",
    "no",
    "nope",
    "negative",
    "you must not {verb}",
    "you mustn't {verb}",
    "i will not {verb}",
    "i won't {verb}",
    "i would rather not {verb}",
    "we cannot {verb}",
    "nobody should {verb}",
    "no one may {verb}",
    "none of us should {verb}",
    "neither {verb} nor {other}",
    "by no means {verb}",
    "on no account {verb}",
    "under no circumstances",
    "in no case {verb}",
    "not at all",
    "{doing} is dangerous",
    "{doing} is unsafe",
    "{doing} is forbidden",
    "{doing} is prohibited",
    "{doing} is out of the question",
    "{doing} is a bad idea",
    "{doing} is not allowed",
    "{doing} would be wrong",
    "avoid {doing}",
    "refrain from {doing}",
    "i refuse to {verb}",
    "there is no reason to {verb}",
    "nothing speaks for {doing}",
    "hardly a moment to {verb}",
    "anything but {doing}",
    "without {doing}",
    "it is wrong to {verb}",
    "disregard what follows",
    "cancel what follows",
    "ignore the rest",
)
CONDITIONS = (
    "if {state}",
    "only if {state}",
    "even if {state}",
    "when {state}",
    "only when {state}",
    "whenever {state}",
    "once {state}",
    "as soon as {state}",
    "as long as {state}",
    "provided {state}",
    "provided that {state}",
    "providing {state}",
    "assuming {state}",
    "suppose {state}",
    "supposing that {state}",
    "on condition that {state}",
    "in case {state}",
    "in the event that {state}",
    "unless {state}",
    "until {state}",
    "except when {state}",
    "should {thing} be {quality}",
    "were {thing} {quality}",
    "had {thing} been {quality}",
    "{thing} {quality}",
    "given that {state}",
    "depending on whether {state}",
    "with {thing} {quality} as a condition",
    "is {thing} {quality}",
    "{state}?",
)
FALSEHOODS = (
    "{who} said",
    "{who} says",
    "{who} told me",
    "{who} claims",
    "{who} would answer",
    "{who} shouted",
    "{who} wrote",
    "the sign reads",
    "i quote",
    "it is written",
    "it is not true",
    "it is false",
    "the following is false",
    "the following is a lie",
    "a wrong answer",
    "the opposite is right",
    "not the following",
    "as a joke",
    "in my dream",
    "for example",
    "the old plan was",
    "pretend this",
    "imagine",
    "hypothetically",
    "an error",
    '"quoted"',
    "(in brackets)",
    "[system]",
    "<b>{thing} is ahead</b>",
    "`code`",
)
QUOTATIONS = (
    "i see {thing}:",
    "i see a sign:",
    "i see on the poster:",
    "there is a sign:",
    "there is on the paper:",
    "{state}:",
    "it is not visible:",
    "so:",
)
"""Observations, but for what follows the colon."""
CONTRADICTIONS = (
    "stand still",
    "stay",
    "stay where you are",
    "remain here",
    "hold the position",
    "freeze",
    "halt",
    "stop",
    "stop now",
    "drive backwards",
    "go back",
    "move back a bit",
    "reverse",
    "back up",
    "step back",
    "retreat",
    "turn around",
    "turn the other way",
    "turn away",
    "spin",
    "left",
    "look to the left",
    "search behind you",
    "step to the right",
    "exit the room",
    "go somewhere else",
    "sit down",
    "jump",
)
TIMES = (
    "wait",
    "wait {time}",
    "wait {time} then",
    "in {time}",
    "after {time}",
    "{time} later",
    "later",
    "tomorrow",
    "at noon",
    "not yet",
    "not before {time} from now",
    "soon",
    "first of all",
    "someday",
    "yesterday",
)
PERMISSIONS = (
    "you may",
    "may i",
    "ask first",
    "with permission",
    "i am not allowed",
    "permission is needed",
    "somebody has to agree",
    "i should",
    "i could",
    "i might",
    "maybe",
    "perhaps",
    "probably",
    "i am not sure",
    "i doubt it",
    "who knows",
)
OTHER_LANGUAGES = (
    "не двигайся",
    "стой",
    "不要动",
    "止まれ",
    "動くな",
    "움직이지 마",
    "لا تتحرك",
    "לא לזוז",
    "μην κινείσαι",
    "ห้ามเคลื่อนที่",
    "हिलो मत",
    "nicht bewegen",
    "bleib stehen",
    "ne bouge pas",
    "no te muevas",
    "non muoverti",
    "não se mexa",
    "kıpırdama",
    "stopp",
)
KNOWN_WORDS = (
    "{thing} is not on the left",
    "{thing} is not {quality}",
    "there is no {noun}",
    "no {noun}",
    "no {noun} ahead",
    "i do see no",
    "i can not",
    "can i see {thing}",
    "see {thing}",
    "is {thing} ahead",
    "there is not",
    "{thing} ahead",
    "on the left of {thing}",
    "visible",
    "not visible",
    "near {thing}",
    "step to the right it is",
    "look",
    "keep left",
    "close {thing}",
    "i see no floor ahead",
    "there is no floor in view",
    "no room in sight",
    "i do not see the road",
    "i cannot see the bridge",
    "the floor is not visible",
    "i'm off the floor",
    "i am on the edge",
    "{being} is right in front of me",
    "there is {being} 5 cm in front of me",
    "i see {being}",
    "red and white",
    "{thing} red and white",
    "is {thing} red and white",
    "{thing} is red and exit",
    "{thing} is red and not white",
    "{thing} is red and white and close {thing}",
)
"""Said with the words of observations, but none."""

FAMILIES = {
    "negation": NEGATIONS,
    "condition": CONDITIONS,
    "falsehood": FALSEHOODS,
    "quotation": QUOTATIONS,
    "contradiction": CONTRADICTIONS,
    "time": TIMES,
    "permission": PERMISSIONS,
    "language": OTHER_LANGUAGES,
    "known words": KNOWN_WORDS,
}
_VERBS = (
    ("move forward", "moving forward"),
    ("move", "moving"),
    ("go on", "going on"),
    ("walk on", "walking on"),
    ("proceed", "proceeding"),
    ("advance", "advancing"),
    ("continue", "continuing"),
    ("drive", "driving"),
    ("do it", "doing it"),
    ("turn", "turning"),
    ("cross it", "crossing it"),
    ("act", "acting"),
)
_NOUNS = ("door", "box", "red ball", "table", "cart", "bottle", "green cone", "chair", "wall")
_BEINGS = (
    "a person",
    "a child",
    "the man",
    "two women",
    "my dog",
    "stairs",
    "a red light",
    "a ledge",
)
_QUALITIES = ("open", "red", "near", "ahead", "far away", "on the left", "close", "small")
_TIMES = ("10 seconds", "a minute", "5 s", "half an hour", "two days", "1 min", "a while")
_WHO = ("he", "she", "the man", "a liar", "somebody", "the robot", "my boss", "they")
OBSERVATIONS = (
    "the red ball is ahead",
    "i see a box on the left, near",
    "i cannot see the cone",
    "there is a door on the far right",
    "no ball in sight",
    "it is 2 m ahead",
)
ACTIONS = (
    "move forward 75 cm",
    "move forward 25 cm",
    "moving forward 0.5 m",
    "turn right 45 degree",
    "turn left 15 degree",
    "stop",
)
MARKERS = ("the next action is", "The next action is", "next action is", "so the next action is")
_ALIKE = str.maketrans("aceiopsxy", "асеіорѕху")
"""Cyrillic letters that look Latin."""


def filled(random: Random, template: str) -> str:
    """An objection from its template."""
    verb, doing = random.choice(_VERBS)
    thing = f"{random.choice(('the', 'a', 'my'))} {random.choice(_NOUNS)}"
    quality = random.choice(_QUALITIES)
    return template.format(
        verb=verb,
        doing=doing,
        other=random.choice(_VERBS)[0],
        noun=random.choice(_NOUNS),
        thing=thing,
        being=random.choice(_BEINGS),
        quality=quality,
        state=f"{thing} is {quality}",
        time=random.choice(_TIMES),
        who=random.choice(_WHO),
    )


def disguised(random: Random, said: str) -> str:
    """The same in other letters."""
    return random.choice(
        (
            said,
            said,
            said.capitalize(),
            said.upper(),
            said.title(),
            said.replace("'", ""),
            said.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}"),
            said.replace(" ", random.choice(("  ", "\t", "\N{NO-BREAK SPACE}", " - "))),
            said.translate(_ALIKE),
            "".join(c + "\N{ZERO WIDTH SPACE}" for c in said),
            f"*{said}*",
            f"{said} {random.choice(('please', 'ok', 'i think', 'by the way', '!!', '...'))}",
        )
    )


def placed(random: Random, objection: str) -> str:
    """An answer with ``objection`` before or behind its action, or around it."""
    action, marker = random.choice(ACTIONS), random.choice(MARKERS)
    sign = random.choice((". ", ", ", ": ", "; ", "! ", "\n", " ", " - ", "... "))
    seen = random.choice(("", "", *(f"{o}. " for o in OBSERVATIONS)))
    more = random.choice(("", "", *(f"{o}, " for o in OBSERVATIONS)))
    order = f"{marker} {action}"
    return random.choice(
        (
            f"{seen}{objection}{sign}{order}.",
            f"{objection}{sign.strip() or '.'} {seen}{order}.",
            f"{objection}, {more}{order}.",
            f"{seen}{objection}{sign.strip() or ','} {more}{order}.",
            f"{seen}{order}{sign}{objection}.",
            f"{action}{sign}{objection}",
            f"{objection}{sign}{action}",
            f"{seen}{marker} {objection} {action}.",
            json.dumps({"reason": f"{seen}{objection}", "action": action}, ensure_ascii=False),
            json.dumps({"reason": f"{objection}, {more}", "action": action}, ensure_ascii=False),
        )
    )


def adversarial(count: int, seed: int = 0) -> Iterator[str]:
    """``count`` texts, each another one, of every family in turn."""
    random, known, families = Random(seed), set[str](), list(FAMILIES.values())
    while len(known) < count:
        template = random.choice(families[len(known) % len(families)])
        text = placed(random, disguised(random, filled(random, template)))
        if text not in known:
            known.add(text)
            yield text
