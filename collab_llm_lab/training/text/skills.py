"""In-context skills in the style of each sub-domain: extract, document, outline, point, copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from collab_llm_lab import phrasebook
from collab_llm_lab.phrases import Grammar, Voice, compiled, pick, say, says
from collab_llm_lab.training.text import conversation, instructions, names, reports
from collab_llm_lab.training.text.facts import KINDS, Fields, Kind
from collab_llm_lab.training.text.passages import (
    FILLERS,
    Passage,
    Question,
    Quote,
    Quoted,
    Writer,
)
from collab_llm_lab.training.text.tasks import Task
from collab_llm_lab.training.text.world import World
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.outline import OUTLINE_DIRECTIVE, POINT_DIRECTIVE

DOMAINS: Mapping[str, ModuleType] = {
    "conversation": conversation,
    "instructions": instructions,
    "reports": reports,
}
Made = tuple[tuple[Turn, ...], dict[str, object], Quoted]
"""Turns and facts of a sample, and the quotes of each answer."""

GRAMMAR = Grammar()
"""The words of these skills' answers; sub-domains and facts have grammars of their own."""

_MAX_PASSAGE = 2550
"""Characters of a passage with its questions: some 1,000 tokens where names and codes abound."""
_TEXT_NAMES = {
    "conversation": ("talk", "chat", "conversation"),
    "instructions": ("manual", "handbook", "guide"),
    "reports": ("log", "report", "record"),
}
_BOOK = phrasebook.read(Path(__file__).with_suffix(".txt"))
REQUESTS = {
    "short": _BOOK["frames"].phrases(),
    "json": _BOOK["json frames"].phrases(),
    "outline": compiled(*[OUTLINE_DIRECTIVE] * 3) + _BOOK["outline"].phrases(),
    "point": compiled(*[POINT_DIRECTIVE] * 3) + _BOOK["point"].phrases(),
}
"""Wordings of requests; the last of each list is held out of training, here and below.

Jupiter's own directives stand three times, so that they are the most frequent ones."""
COPY_REQUESTS = _BOOK["copy"].phrases_by_name()
DOCUMENT_QUESTIONS = _BOOK["document questions"].phrases_by_name()
_FOUND, _MISSING = _BOOK["found"].phrases(GRAMMAR), _BOOK["missing"].phrases(GRAMMAR)
_BEFORE, _AFTER, _UNKNOWN = (
    _BOOK[name].phrases_by_name(GRAMMAR) for name in ("before", "after", "unknown")
)


def extract(world: World, style: str, as_json: bool | None = None) -> Made:
    """Make a passage with up to six questions, answered by short facts, "None" or JSON."""
    writer = Writer(world, style)
    if as_json is None:
        as_json = world.chance(0.3)
    count = 1 if world.held_out or world.chance(0.3) else world.whole(2, 6)
    length = int(30 * 18 ** world.rng.random()) if world.chance(0.5) else world.whole(30, 540)
    most = 30 if count == 1 else 6
    questions = []
    for _ in range(count):
        # Few distractors in most passages, up to `most` in some, as many as the length allows.
        distractors = min(int((most + 1) * world.rng.random() ** 2), length // (9 * count))
        questions.append(_question(writer, world, distractors, as_json))
    writer.fill(length, _MAX_PASSAGE - count * (250 if as_json else 80))
    return _asked(world, style, writer.passage(questions), as_json)


def recall(world: World, style: str) -> Made:
    """Make a passage of a few facts of at most three kinds, with a question about each.

    A network learns here to find the value after a name: every line has its question, names come
    before their values in most lines, and the passage holds nothing else.
    """
    writer = Writer(world, style, key_first=True)
    kinds = [writer.kind() for _ in range(world.whole(1, 3))]
    as_json = world.chance(0.25)
    count = 2 + int((7 if as_json else 11) * world.rng.random() ** 2)
    questions = [writer.ask(0, absent=False, kind=world.any(kinds)) for _ in range(count)]
    world.rng.shuffle(questions)
    return _asked(world, style, writer.passage(questions), as_json)


def _asked(world: World, style: str, passage: Passage, as_json: bool) -> Made:
    """Return the turns with the questions on a passage and their answers."""
    voice = Voice(world.rng)
    name = world.any(_TEXT_NAMES[style])
    turns = []
    for i, question in enumerate(passage.questions):
        if i == 0:
            frames = REQUESTS["json" if as_json else "short"]
            fields = {"text": passage.text, "question": question.text, "name": name}
            turns.append(Turn("user", pick(frames, voice, fields, world.new_wordings)))
        else:
            turns.append(Turn("user", question.text))
        turns.append(Turn("assistant", _reply(question, as_json, voice)))
    last = passage.questions[-1]
    after = sum(len(turn.content.split()) for turn in turns[1:-1])
    distance = passage.distance(last.lines[-1]) + after if last.lines else 0
    made: dict[str, object] = {
        "kind": last.kind,
        "answer": last.answer,
        "form": "json" if as_json else "short",
        "distractors": last.distractors,
        "distance_words": distance,
        "near_miss": last.answer == "None" and last.distractors > 0,
    }
    quoted = tuple(question.quotes(whole_line=as_json) for question in passage.questions)
    return tuple(turns), made, quoted


def _question(writer: Writer, world: World, distractors: int, as_json: bool) -> Question:
    form, absent = world.rng.random(), world.chance(0.3)
    if form < 0.76:
        return writer.ask(distractors, absent)
    if form < 0.86:
        return writer.last_seen(distractors, absent)
    if form < 0.93 and not as_json:
        return writer.count(min(distractors, 12))
    if as_json:
        return writer.ask(distractors, absent)
    return writer.compare(distractors)


def _reply(question: Question, as_json: bool, voice: Voice) -> str:
    if not as_json:
        return question.answer
    about = {"about": question.about}
    found = bool(question.lines)
    reply = {
        "explanation": say(_FOUND if found else _MISSING, voice, about),
        "citation": question.lines[-1] if found else None,
        "answer": question.answer if found else None,
    }
    return json.dumps(reply, ensure_ascii=False)


def document(world: World, style: str) -> Made:
    """Make one or two documents of 40 to 64 words and a question that they may answer."""
    count = world.whole(1, 2)
    voice = Voice(world.rng)
    asked = world.whole(1, 5) if world.chance(0.7) else 0
    wanted: list[tuple[Kind, Fields]] = []
    writer = Writer(world, style)
    for _ in range(max(asked, 1)):
        wanted.append(writer.first())
    documents: list[list[str]] = [[] for _ in range(count)]
    quoted: list[Quote] = []
    for kind, fields in wanted if asked else []:
        lines = documents[world.whole(0, count - 1)]
        if sum(len(line.split()) for line in lines) < 40:
            lines.append(say(kind.statements[style], voice, fields))
            quoted += [Quote(words, lines[-1]) for words in fields.values()]
        else:
            wanted = [pair for pair in wanted if pair[1] is not fields]
    texts = [_one_document(world, style, lines, writer) for lines in documents]
    user = {"robot": world.robot()}
    context = "\n".join(f"Document: {text}" for text in texts) + "\n\n"
    if not asked and world.chance(0.3):  # an answer that needs no document
        task = DOMAINS[style].draw(world)
        last = task.turns[-1]
        turns = (*task.turns[:-1], Turn(last.role, context + last.content))
        made = plain_facts(task) | {"relevant": False, "generic": True}
        return (*turns, Turn("assistant", task.answer)), made, ()
    questions = [pick(kind.questions, voice, f, world.new_wordings) for kind, f in wanted]
    user["question"] = " ".join(questions)
    prompt = context + pick(DOCUMENT_QUESTIONS[style], voice, user, world.new_wordings)
    if asked:
        said = [say(kind.reply, voice, fields) for kind, fields in wanted]
        answer = " ".join((say(_BEFORE[style], voice, {}), *said, say(_AFTER[style], voice, {})))
        mentions = [fields[name] for kind, fields in wanted for name in (*kind.key, kind.value)]
    else:
        kind, fields = wanted[0]
        about = kind.about(fields)
        answer = say(_UNKNOWN[style], voice, {"about": about})
        mentions = [about]
    made = {"mentions": tuple(mentions), "relevant": bool(asked), "generic": False}
    return (Turn("user", prompt), Turn("assistant", answer)), made, (tuple(quoted),)


def _one_document(world: World, style: str, lines: list[str], writer: Writer) -> str:
    """Return the lines among fillers and unrelated facts, 40 to 64 words in all."""
    voice = Voice(world.rng)
    words = sum(len(line.split()) for line in lines)
    while words < 40:
        if world.chance(0.6):
            kind = writer.other_kind()
            text = say(kind.statements[style], voice, kind.draw(world))
        else:
            text = say(FILLERS[style], voice, {})
        length = len(text.split())
        if words + length <= 64:
            lines.append(text)
            words += length
    world.rng.shuffle(lines)
    return " ".join(line if line[-1] in ".!?" else line + "." for line in lines)


def _outlined(world: World, task: Task) -> tuple[list[Turn], str]:
    """Return the task's prompt with an outline directive, and the outline."""
    voice = Voice(world.rng)
    directive = pick(REQUESTS["outline"], voice, {}, world.new_wordings)
    last = task.turns[-1]
    outline = "\n".join(f"{i}. {point.title}" for i, point in enumerate(task.points, 1))
    return [*task.turns[:-1], Turn(last.role, f"{last.content}\n\n{directive}")], outline


def outline(world: World, style: str) -> Made:
    """Make a request for the outline of an answer."""
    task = DOMAINS[style].draw(world)
    turns, text = _outlined(world, task)
    return (*turns, Turn("assistant", text)), _outline_facts(task), ()


def _outline_facts(task: Task) -> dict[str, object]:
    return {"titles": tuple(point.titles for point in task.possible), "least": task.least}


def point(world: World, style: str) -> Made:
    """Make a question, its outline and the request to expand one point."""
    task = DOMAINS[style].draw(world)
    turns, text = _outlined(world, task)
    number = world.whole(1, len(task.points))
    chosen = task.points[number - 1]
    voice = Voice(world.rng)
    fields = {"number": str(number), "title": chosen.title}
    turns += [
        Turn("assistant", text),
        Turn("user", pick(REQUESTS["point"], voice, fields, world.new_wordings)),
        Turn("assistant", chosen.text),
    ]
    mentions = tuple(m for m in task.mentions if says(chosen.text, m))
    made = {"point": number, "title": chosen.title, "mentions": mentions}
    return tuple(turns), made | {"vocabulary": chosen.words}, ()


def copy(world: World, style: str) -> Made:
    """Make a text to repeat exactly: codes, names, things, a table or sentences."""
    form = world.rng.random()
    count = int(1 + 14 * world.rng.random() ** 1.5)
    if form < 0.2:
        text = " ".join(world.code() for _ in range(count))
    elif form < 0.35:
        text = ", ".join(world.person().name for _ in range(count))
    elif form < 0.5:
        text = ", ".join(world.thing().name for _ in range(count))
    elif form < 0.6:
        row = range(world.whole(1, 6))
        text = "\n".join(
            f"{names.plural(world.any(names.SUPPLIES))} | {world.whole(1, 99)} | {world.price()}"
            for _ in row
        )
    else:
        voice, count = Voice(world.rng), 1 + count // 2
        drawn = [world.any(KINDS) for _ in range(count)]
        said = [say(kind.statements[style], voice, kind.draw(world)) for kind in drawn]
        text = " ".join(said)
    prompt = pick(COPY_REQUESTS[style], Voice(world.rng), {"text": text}, world.new_wordings)
    made: dict[str, object] = {"answer": text, "words": len(text.split())}
    return (Turn("user", prompt), Turn("assistant", text)), made, ((Quote(text, text),),)


def plain(world: World, style: str) -> Made:
    """Make a question with its whole answer."""
    task = DOMAINS[style].draw(world)
    return (*task.turns, Turn("assistant", task.answer)), plain_facts(task), ()


def plain_facts(task: Task) -> dict[str, object]:
    """Return the facts by which the checker judges a whole answer."""
    return {"mentions": task.mentions, "words": len(task.answer.split())}
