"""The router of outlines, the reader of outlines and points, and the joined answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collab_llm_lab.training.text.samples import SUB_DOMAINS, make_sample
from collab_llm_nodes.protocols.jupiter.outline import (
    MOST_POINTS,
    Point,
    join_points,
    outline_question,
    read_outline,
    read_point,
)
from collab_llm_nodes.protocols.jupiter.route import (
    CHAINED,
    CODE,
    LEAST_TOKENS,
    MATHEMATICS,
    ORDER,
    RECORDS,
    SHORT,
    route,
)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("What are the benefits of regular exercise?", ""),
        ("Explain how a diesel engine works.", ""),
        ("What if people lived for two hundred years?", ""),
        ("How do I prune an apple tree?", ""),
        ("Write a report on the state of the bees in 2024.", ""),
        ("Write a report on the patrol of 24 October.\n18:55 office: in order", RECORDS),
        ("Summarise the stock: bolts 40; nuts 12; washers none.", RECORDS),
        ("Evaluate these ideas:\n1. more light\n2. less noise\n3. better chairs", ""),
        ("How do I get from gate 4 to gate 9;\nand what do I do if 2 trains are late?", ""),
        ("Implement quicksort as a function.", CODE),
        ("Why does this fail?\n```\nx = 1 +\n```", CODE),
        ("How do I read a CSV file in Python?", CODE),
        ("What is 12 + 30?", MATHEMATICS),
        ("Compute the perimeter of a square with side 3.", MATHEMATICS),
        ("Pat has 3 boxes with 7 pens each. How many pens has Pat?", MATHEMATICS),
        ("Ben is older than Cy, and Cy is older than Di. Who is the youngest?", CHAINED),
        ("If all cats are animals, is Tom an animal?", CHAINED),
        ("Where is the red box?", SHORT),
        ("Yes or no: do penguins fly?", SHORT),
        ("Repeat after me: the quick brown fox", SHORT),
        ("Describe in one sentence how tides arise.", SHORT),
        ("Some notes on a house.\n\nWho keeps the key? Where is the lamp?", SHORT),
        ("", SHORT),
    ],
)
def test_questions_are_routed_by_their_wording(question: str, reason: str) -> None:
    assert route(question).reason == reason
    assert route(question).outline == (not reason)


BRIEF = """
Convert 3 miles to km | Convert 72 F to Celsius | How many cm are in an inch? | 5 kg in pounds
How do I convert miles to kilometres? | What's 15% of 80? | Change 10 dollars into euros
What do you see? | Tell me what you see. | Is there anybody in the hall? | Count the chairs.
Go to the kitchen and tell me what you see. | Go to the kitchen and describe what you see.
Turn left and explain what is there. | Drive to the door, then come back. | Stop | Bring me the cup.
Could you please follow me and describe the room? | Find the red chair and stop in front of it.
Pick up the ball and put it into the box. | Open the door. | Patrol the corridor and report.
Go to the lab. Look around. Tell me why the alarm rings. | Wait here until I come back.
Hello! | Thanks, that's all. | Hi there, how are you? | Continue. | Battery status? | Who are you?
What is the capital of France? | Define photosynthesis. | Name the planets. | Spell necessary.
How do you say hello in French? | Give me a synonym for happy. | Correct the grammar: I has a dog.
Rewrite this sentence: he go home. | Set a timer for 5 minutes | Tell me a joke. | What time is it?
List the days of the week. | Write a haiku about autumn. | Choose a number between 1 and 10.
Which is larger, 9.11 or 9.9? | Where did you last see the red ball? | What's the weather like?
Check the hallway for obstacles and explain what you find. | Count the chairs and explain it.
Inspect the pump and tell me the causes of the noise. | Climb the stairs and give me an overview.
Find the red ball and describe the way there. | Look at the sofa and tell me why it is blue.
Could you please check the door, then describe how it is damaged? | Scan the room; list the risks.
Go and look at the pump. Tell me the reasons. | I want you to enter and explain why.
Read the label on the box and explain the risks. | Listen at the door to tell me why it is loud.
Open the cupboard and suggest ways to tidy it. | Watch the cat and describe how it moves.
Examine the bicycle and give me tips to repair it. | Approach the table and compare the two cups.
"""
BROAD = """
What are the pros and cons of remote work? | Compare cats and dogs as pets. | Tell me about whales.
Give me tips for a job interview. | Why did the Roman Empire fall? | What should I pack for a trip?
Walk me through the steps of baking bread. | Come up with ideas for a party. | How is cheese made?
Go through the causes of the war. | What are the differences between tea and coffee?
How do I convert a loft into a bedroom? | What is the best way to get rust off a drawer?
Suggest three strategies for learning a language. | Write an essay on climate change.
Find the main causes of the war and explain them. | Look at the pros of tea and discuss them.
Explore the benefits of yoga and describe them. | Describe how a robot finds a ball and picks it up.
Explain how to inspect a pump and give examples. | Walk me through the steps and give me tips.
Plan a weekend in Rome. | Write the recipe for tomato soup. | What if the moon were closer?
"""


@pytest.mark.parametrize("question", [q.strip() for q in BRIEF.replace("\n", "|").split("|")])
def test_what_is_brief_or_an_order_is_answered_in_sequence(question: str) -> None:
    assert not route(question).outline


@pytest.mark.parametrize(
    "question", [q.strip() for q in BROAD.strip().replace("\n", "|").split("|")]
)
def test_what_asks_for_breadth_is_outlined(question: str) -> None:
    assert route(question).outline


def test_a_low_limit_of_tokens_needs_no_outline() -> None:
    question = "Explain how a diesel engine works."
    assert route(question, max_tokens=LEAST_TOKENS).outline
    assert route(question, max_tokens=LEAST_TOKENS - 1).reason == SHORT


@given(st.text(max_size=400))
def test_any_text_has_a_route(question: str) -> None:
    assert route(question).reason in ("", CODE, MATHEMATICS, CHAINED, RECORDS, ORDER, SHORT)


@pytest.mark.parametrize("text", ["a" * 20000, "1 " * 10000, "who is " * 3000, "\n" * 20000])
@pytest.mark.timeout(20)
def test_long_texts_are_routed_at_once(text: str) -> None:
    route(text)


@pytest.mark.parametrize("sub_domain", SUB_DOMAINS)
def test_outlines_and_points_of_the_text_domain_are_read(sub_domain: str) -> None:
    rng = random.Random(5)
    directed = asked = 0
    for _ in range(40):
        sample = make_sample(rng, sub_domain, "point")
        question, listed, request, said = (turn.content for turn in sample.turns[-4:])
        points = read_outline(listed, complete=True).points
        assert [f"{p.number}. {p.title}" for p in points] == listed.splitlines()
        assert read_outline(listed, complete=True).usable
        number = sample.facts["point"]
        assert isinstance(number, int)
        assert points[number - 1].title == sample.facts["title"]
        assert read_point(said) == (said, False)
        assert read_point(f"{said}\n") == (said, True)
        directed += question == outline_question(question.rpartition("\n\n")[0])
        asked += request == points[number - 1].request
    assert min(directed, asked) > 5, "half of the wordings are those of the protocol"


OUTLINE = "1. Greet the guest\n2. Offer a drink\n3) Ask about the trip\n"


def test_an_outline_grows_line_by_line() -> None:
    complete = 0
    for end in range(len(OUTLINE) + 1):
        found = read_outline(OUTLINE[:end])
        assert not found.ended
        assert len(found.points) == OUTLINE[:end].count("\n")
        complete = len(found.points)
    assert complete == 3
    assert read_outline(OUTLINE).points[2] == Point(3, "Ask about the trip")
    assert read_outline(OUTLINE.rstrip(), complete=True).points == read_outline(OUTLINE).points


@pytest.mark.parametrize(
    "following",
    [
        "Now the answer follows.\n",
        "Now the",
        "5. A number is missing\n",
        "4. offer a DRINK\n",
        "4.\n",
        "I w",
    ],
)
def test_what_is_no_next_point_ends_the_outline(following: str) -> None:
    found = read_outline(OUTLINE + following)
    assert found.ended
    assert len(found.points) == 3


LISTED = {
    "an introduction": "Sure! Here's an outline:\n{1. }\n{2. }\n{3. }\n",
    "a heading": "**Outline**\n\n{1. }\n{2. }\n{3. }\n",
    "both": "Certainly.\n\n## Outline: the trip\n\n{1. }\n{2. }\n{3. }\n",
    "figures in brackets": "{(1) }\n{(2) }\n{(3) }\n",
    "figures with a colon": "{1: }\n{2: }\n{3: }\n",
    "words": "{Step 1: }\n{Step 2: }\n{Step 3: }\n",
    "letters": "{A. }\n{B. }\n{C. }\n",
    "Roman figures": "{I. }\n{II. }\n{III. }\n",
    "headings": "{### 1. }\n{### 2. }\n{### 3. }\n",
    "bold figures": "**{1. }**\n**{2. }**\n**{3. }**\n",
    "bold titles": "1. **{}**\n2. **{}**:\n3. __{}__\n",
    "bullets": "{- }\n{- }\n{- }\n",
    "stars": "Points:\n{* }\n\n{* }\n\n{* }\n",
    "dots": "{\u2022 }\n{\u2022 }\n{\u2022 }\n",
    "numbers in bullets": "{- 1. }\n{- 2. }\n{- 3. }\n",
    "sub-bullets": "{1. }\n   - a\n   - b\n{2. }\n\t* c\n{3. }\n  d\n",
    "sub-bullets at the margin": "{1. }\n- a\n{2. }\n- b\n{3. }\n",
    "bullets in bullets": "{- }\n  - a\n{- }\n  1. b\n{- }\n",
    "parts": "{1. }\n1.1 a\n{2. }\n  2.1. b\n{3. }\n",
    "a text under each": "{1. }\nSome text.\n{2. }\nMore text.\nAnd more.\n\n{3. }\nA last one.\n",
    "a text under the first": "{1. }\nSome text.\n{2. }\n{3. }\n",
    "a text under a bullet": "{- }\nSome text.\n{- }\n{- }\n",
    "dashes": "{1 - }\n{2 - }\n{3 \u2013 }\n",
    "square brackets": "{[1] }\n{[2] }\n{[3] }\n",
    "emphasised figures": "**1.** {}\n**2**. {}\n*3.* {}\n",
    "emphasised figures with a colon": "**1:** {}\n__2:__ {}\n**Step 3:** {}\n",
    "emphasised letters": "**A.** {}\n**B)** {}\n**C**. {}\n",
    "circled digits": "{\u2460 }\n{\u2461}\n{\u2462. }\n",
    "other circled digits": "{\u2776 }\n{\u24f6 }\n{\u278c }\n",
    "digits in brackets": "{\u2474 }\n{\u2475 }\n{\u2476 }\n",
    "keycaps": "{1\ufe0f\u20e3 }\n**{2\ufe0f\u20e3 }**\n{3\u20e3 }\n",
    "headings alone": "{### }\n{### }\n{### }\n",
    "headings with texts": "# Tea\n\n{## }\nSome text.\n\n{## }\n- a\n- b\n### c\n{## }\n1. d\n",
    "lines in bold": "Sure.\n\n**{}**\nSome text.\n\n**{}**\nMore text.\n\n__{}__\n",
    "a table": "| No. | Point |\n|---|:-:|\n{| 1 | } |\n{| 2. | } |\n{| **3** | } |\n",
    "a table without numbers": "| Point | Text |\n|:--|--|\n{| } | a |\n{| } | b |\n| **{}** | |\n",
    "rules and fences": "```markdown\n{1. }\n---\n{2. }\n***\n{3. }\n```\n",
    "a thought": "<think>\n1. hm\n2. no\n</think>\n\n{1. }\n{2. }\n{3. }\n",
}


@pytest.mark.parametrize("form", LISTED.values(), ids=LISTED)
def test_lists_are_read_in_any_usual_form(form: str) -> None:
    titles = ["Greet the guest", "Offer a drink", "Ask"]
    text = form
    for title in titles:
        start = text.index("{")
        end = text.index("}", start)
        text = f"{text[:start]}{text[start + 1 : end]}{title}{text[end + 1 :]}"
    assert [point.title for point in read_outline(text, complete=True).points] == titles
    assert not any(read_outline(text[:end]).ended for end in range(len(text) + 1))
    following = "Now the answer." + "z" * (
        240 if "text" in form or "#" in form or "bold" in form else 0
    )
    assert read_outline(f"{text}\n{following}").ended


@pytest.mark.parametrize(
    "text",
    [
        "1. Greet the guest\n" + "Tea is brewed with hot water.\n" * 20,
        "1. Greet\nA text.\n2. Offer\n3. Ask\n" + "Tea is brewed with hot water.\n" * 20,
        "### Greet\n" + "Tea is brewed with hot water.\n" * 20,
        "| a | b |\n" + "Tea is brewed with hot water.\n" * 20,
    ],
)
def test_a_text_under_a_point_is_short(text: str) -> None:
    ended = next(end for end in range(len(text)) if read_outline(text[:end]).ended)
    assert ended < 320


def test_headings_around_a_list_are_no_points() -> None:
    found = read_outline("## Outline\n1. A\n2. B\n3. C\n## Answer\n", complete=True)
    assert [point.title for point in found.points] == ["A", "B", "C"]


@pytest.mark.parametrize(
    "piece", ["|", "|-", "-", "*", "**a", "# ", "#", "1", "1 ", "\u2460", " ", "[(", "_", "1. **"]
)
@pytest.mark.timeout(20)
def test_long_lines_are_read_at_once(piece: str) -> None:
    for text in (piece * 3000, f"|{piece * 3000}x", f"1. A\n{piece * 3000}x\n"):
        read_outline(text)
        read_outline(text, complete=True)


@given(st.text(alphabet="1234.)-|#*_ \n\u2460\u2461ab\ufe0f\u20e3", max_size=120))
def test_any_text_is_read_as_an_outline(text: str) -> None:
    points = read_outline(text, complete=True).points
    assert [point.number for point in points] == [*range(1, len(points) + 1)]
    assert all(point.title for point in points)


def test_prose_is_given_up_soon() -> None:
    prose = "Tea is brewed with hot water, and it takes some minutes.\n" * 20
    ended = next(end for end in range(len(prose)) if read_outline(prose[:end]).ended)
    assert ended < 300
    assert read_outline(prose).points == ()


def test_the_number_of_points_is_bounded() -> None:
    many = "".join(f"{i}. point {i}\n" for i in range(1, 20))
    found = read_outline(many)
    assert found.ended
    assert len(found.points) == MOST_POINTS
    assert read_outline("1. one\n2. two\n", complete=True).usable is False
    assert read_outline("No list at all", complete=True).points == ()


@pytest.mark.parametrize(
    ("text", "said", "stop"),
    [
        ("", "", False),
        ("\n", "", False),
        ("  Offer tea.", "Offer tea.", False),
        ("Offer tea. \nAsk", "Offer tea.", True),
        ("2. Offer tea.\n3. Ask", "Offer tea.", True),
        ("2.", "2.", False),
        ("2.\nOffer tea.", "Offer tea.", False),
    ],
)
def test_a_point_is_one_paragraph(text: str, said: str, stop: bool) -> None:
    assert read_point(text) == (said, stop)


def test_points_are_joined_in_order() -> None:
    assert join_points(["One.", " ", "Two. "]) == "1. One.\n2. Two."
    assert join_points([]) == ""
