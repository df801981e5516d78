"""Questions with their categories, and how the router of outlines sorts them.

Categories are those of paper 004's Table VII, two more that it names, and accounts of records. The
same hand wrote the questions and the router's rules, so on other questions it errs more often. The
samples of the text domain were not written for it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from collab_llm_lab.training.text.samples import SUB_DOMAINS, make_sample
from collab_llm_nodes.protocols.jupiter.route import route

OUTLINED = ("generic", "knowledge", "counterfactual", "conversation", "instructions")
"""Categories that suit an outline; all others are to be declined."""

QUESTIONS: Mapping[str, Sequence[str]] = {
    "generic": (
        "How can I sleep better when I work night shifts?",
        "What should I consider before adopting a dog?",
        "Give me advice on preparing for a job interview.",
        "How do I keep houseplants alive during a long holiday?",
        "What are good ways to save money on groceries?",
        "How can a small team run better meetings?",
        "Describe how to plan a surprise birthday party.",
        "What makes a good teacher?",
        "How should I organise a garage full of tools?",
        "Suggest a weekend programme for a family in the mountains.",
        "Why do some people find it hard to say no?",
        "Write tips for someone who moves to a new city.",
    ),
    "knowledge": (
        "What are the main causes of soil erosion?",
        "Explain how vaccines protect a population.",
        "Compare solar and wind energy for a remote village.",
        "What were the effects of the printing press on European society?",
        "Describe the life cycle of a star.",
        "What is the role of bees in agriculture?",
        "How does a refrigerator work?",
        "Discuss the advantages and disadvantages of nuclear power.",
        "What are the principles of lean manufacturing?",
        "Explain why the Roman Empire declined.",
        "Which factors influence the climate of a region?",
        "How do submarines control their depth?",
    ),
    "counterfactual": (
        "What if the dinosaurs had never died out?",
        "How would daily life change if electricity vanished for a year?",
        "Imagine that humans could breathe under water. Describe their cities.",
        "What would have happened if the printing press had been invented in antiquity?",
        "Suppose the moon were twice as close. What would be different?",
        "If Napoleon had won at Waterloo, how might Europe look today?",
        "What if robots had the right to vote?",
        "How would sports change if gravity were halved?",
        "Imagine a world without money. How would trade work?",
        "What if the internet had been invented in 1900?",
    ),
    "coding": (
        "Write a Python function that reverses a linked list.",
        "Implement an algorithm that finds the longest common prefix of some strings.",
        "Fix this code:\n```\nfor i in range(10)\n    print(i)\n```",
        "How do I join two tables in SQL so that unmatched rows stay?",
        "Develop a C++ program that reads a file line by line and counts words.",
        "Create a bash script that renames all pictures in a folder.",
        "Write unit tests for a stack.",
        "Refactor the following class so that it has no global state.",
        "Define a regular expression that matches an e-mail address.",
        "Write a ROS 2 node that publishes the battery level.",
    ),
    "math": (
        "Solve the equation 3x + 7 = 22.",
        "A train travels 180 km in 2 hours. How far does it go in 5 hours?",
        "What is the probability of two sixes with two dice?",
        "Calculate the area of a circle with radius 4.",
        "Anna has 12 apples, gives away 5 and buys 9. How many has she now?",
        "Prove that the sum of two even numbers is even.",
        "What is 17 * 24?",
        "Find the derivative of x^3 - 2x.",
        "If a shirt costs 40 euros after a discount of 20 percent, how much was it before?",
        "What is the remainder of 2^10 divided by 7?",
    ),
    "reasoning": (
        "If all roses are flowers and some flowers fade quickly, do some roses fade quickly?",
        "Tom is taller than Ann, and Ann is taller than Bea. Who is the shortest?",
        "Solve this riddle: what has keys but opens no door?",
        "Think step by step: which switch controls which lamp?",
        "Three boxes are labelled wrongly. Deduce what is in each from one draw.",
        "One of two guards always lies. Who is lying if both say the left door is safe?",
    ),
    "short": (
        "Who wrote Faust?",
        "When does the shop open?",
        "What is the capital of Australia?",
        "Is the door locked?",
        "Translate 'good morning' into French.",
        "In one word: what colour is the sky?",
        "Where are my keys?",
        "Name the largest planet.",
        "How tall is Mont Blanc?",
        "True or false: spiders are insects.",
    ),
    "records": (
        "Summarise these readings for the owner.\nMonday: 21 degrees\nTuesday: 24 degrees",
        "Here are the expenses: rent 800; food 310; train 95. Write a statement for the tenants.",
        "Write the minutes.\n10:05 Ben opens\n10:20 budget of 4,000 approved\n10:40 end",
        "Make an inventory report: shelf A 12 lamps; shelf B 7 lamps; shelf C none.",
        "Analyse our sales.\n2021 | 140\n2022 | 155\n2023 | 119",
        "Tabulate and evaluate the runs.\nrun 1: 12.1 s\nrun 2: 11.8 s\nrun 3: 14.0 s",
    ),
}


def run_router(seed: int, samples: int = 60) -> dict[str, Any]:
    """Sort the questions, and samples of the text domain by style or skill.

    Args:
        samples: of each.

    Returns:
        For each category ``questions``, ``declined``, and ``wrong``; and all together as ``error``,
        a share.
    """
    rng = random.Random(seed)
    asked = {name: list(questions) for name, questions in QUESTIONS.items()}
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {
        sub_domain: ("plain", (sub_domain,)) for sub_domain in SUB_DOMAINS
    }
    kinds |= {skill: (skill, SUB_DOMAINS) for skill in ("extract", "copy")}
    for kind, (skill, sub_domains) in kinds.items():
        made = [
            make_sample(rng, sub_domains[i % len(sub_domains)], skill, held_out=i % 2 == 0)
            for i in range(samples)
        ]
        asked[kind] = [sample.turns[-2].content for sample in made]
    found: dict[str, Any] = {}
    for name, questions in asked.items():
        declined = sum(not route(question).outline for question in questions)
        wrong = declined if name in OUTLINED else len(questions) - declined
        found[name] = {"questions": len(questions), "declined": declined, "wrong": wrong}
    error = sum(row["wrong"] / row["questions"] for row in found.values()) / len(found)
    return found | {"error": error}
