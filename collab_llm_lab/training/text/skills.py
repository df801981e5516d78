"""In-context skills in the style of each sub-domain: extract, document, outline, point, copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType

from collab_llm_lab.training.text import conversation, facts, instructions, names, reports
from collab_llm_lab.training.text.fact_kinds import KINDS
from collab_llm_lab.training.text.passages import (
    FILLERS,
    Passage,
    Question,
    Quote,
    Quoted,
    Writer,
)
from collab_llm_lab.training.text.phrases import Grammar, Voice, pick, say, says
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
"""Turns and facts of a sample, and what each answer copies."""

_ask = Grammar()
GRAMMAR = Grammar()
"""The words of answers of these skills, beside those of the sub-domains and of the facts."""

_MAX_PASSAGE = 2550
"""Characters of a passage with its questions: some 1,000 tokens where names and codes abound."""
_TEXT_NAMES = {
    "conversation": ("talk", "chat", "conversation"),
    "instructions": ("manual", "handbook", "guide"),
    "reports": ("log", "report", "record"),
}
_FRAMES = _ask(
    "{text}\n\nQuestion: {question}",
    "Read the {name} and answer the question.\n\n{text}\n\nQuestion: {question}",
    "Passage:\n{text}\n\n{question} Answer with words from the passage, or None.",
    "Context: {text}\n\nQuestion: {question}\nAnswer:",
    "Question: {question}\n\nText:\n{text}",
    "Here is a {name}.\n{text}\n\nAnswer only from the {name}; say None if it is not there. "
    "{question}",
    "{text}\n\n{question}",
    "{question}\n\n{text}",
    "{text}\n\nQ: {question}\nA:",
    "The {name} says:\n{text}\n\nMy question: {question}",
    "I have a question on this {name}. {question}\n\n{text}",
    "{text}\n\nAnswer briefly, or with None if the {name} does not say it. {question}",
    "Find this in the text below: {question}\n\n{text}\n\nGive the (bare|short) answer, or None.",
    "{name}:\n{text}\n\nUsing only this {name}, answer in a few words or with None: {question}",
)
_JSON_FRAMES = _ask(
    "Your job is to complete the following task using only the context below.\n\n## "
    "Document\n{text}\n\n## Task\n{question}\n\nReturn JSON with the keys explanation, citation "
    "and answer. If nothing is found, use null.",
    "## Document\n{text}\n\n## Task\n{question}\n\nReturn your result in JSON: explanation, "
    "citation, answer (null if the document does not say it).",
    "{text}\n\nTask: {question}\nReply as JSON with explanation, citation and answer, or null "
    "where the text has nothing.",
    "{text}\n\n{question} Answer as JSON with explanation, citation and answer, null if it is not "
    "stated.",
    "Document:\n{text}\n\nQuestion: {question}\nReturn a JSON object with explanation, citation "
    "and answer. Use null for what is not there.",
    "Task: {question}\n\nDocument:\n{text}\n\nReturn JSON with the keys explanation, citation and "
    "answer, null if nothing is found.",
    "Find the answer in the context and cite its line.\n\n## Context\n{text}\n\n## "
    "Question\n{question}\n\nFormat: JSON with explanation, citation, answer, or null.",
    "## Task\n{question}\n\n## Document\n{text}\n\nWrite JSON: explanation, citation, answer "
    "(null where the document is silent).",
    "Here is a {name}.\n{text}\n\n{question} Reply in JSON (explanation, citation, answer), with "
    "null for what is missing.",
    "## Document\n{text}\n\n## Task\nExtract: {question}\n\nGive JSON (explanation, citation, "
    "answer); abstain with null.",
)
_FOUND = GRAMMAR(
    "The citation is about {about}.",
    "This is stated for {about}.",
    "The text names {about}.",
)
_MISSING = GRAMMAR(
    "The text does not give this for {about}.",
    "Nothing is stated for {about}.",
    "No sentence answers this for {about}.",
)


def extract(world: World, style: str, as_json: bool | None = None) -> Made:
    """Make a passage with one to four questions, answered by short facts, "None" or JSON."""
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

    A network learns here to find what follows a name: each line is asked for, names come before
    their values in most lines, and nothing else is in the passage.
    """
    writer = Writer(world, style, key_first=True)
    kinds = [writer.kind() for _ in range(world.whole(1, 3))]
    as_json = world.chance(0.25)
    count = 2 + int((7 if as_json else 11) * world.rng.random() ** 2)
    questions = [writer.ask(0, absent=False, kind=world.any(kinds)) for _ in range(count)]
    world.rng.shuffle(questions)
    return _asked(world, style, writer.passage(questions), as_json)


def _asked(world: World, style: str, passage: Passage, as_json: bool) -> Made:
    """Return the turns in which the questions on a passage are asked and answered."""
    voice = Voice(world.rng)
    name = world.any(_TEXT_NAMES[style])
    turns = []
    for i, question in enumerate(passage.questions):
        if i == 0:
            frames = _JSON_FRAMES if as_json else _FRAMES
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


_DOCUMENT_QUESTIONS = {
    "conversation": _ask(
        "{question}",
        "Hey {robot}, {question}",
        "{robot}, can you look it up? {question}",
        "I forgot something. {question}",
        "{question} Thanks[, {robot}]!",
        "{robot}? {question}",
        "Have a look for me, {robot}. {question}",
        "One thing I can't remember: {question}",
        "Sorry to bother you[, {robot}]. {question}",
        "Quick question, {robot}: {question}",
    ),
    "instructions": _ask(
        "{question}",
        "Before I start: {question}",
        "For the work I have to know: {question}",
        "Answer with the help of the document. {question}",
        "{question} See the document.",
        "One detail before the work: {question}",
        "Look it up in the document: {question}",
        "I need this for the next step. {question}",
        "Check the document and answer. {question}",
        "First consult the document. {question}",
    ),
    "reports": _ask(
        "{question}",
        "State for the record: {question}",
        "The report requires an answer: {question}",
        "According to the files: {question}",
        "Request for information: {question}",
        "The following is to be clarified. {question}",
        "Check the records and answer: {question}",
        "Inquiry of the board: {question}",
        "{question} Refer to the files.",
        "Consult the archive and reply: {question}",
    ),
}
_BEFORE = {
    "conversation": GRAMMAR("(Sure|Let me see|Ah yes)!", "(I looked it up|Here we go)!"),
    "instructions": GRAMMAR("Note (the following|this).", "Proceed (with this|as follows)."),
    "reports": GRAMMAR("(The records show|It is recorded):", "According to the (document|file):"),
}
_AFTER = {
    "conversation": GRAMMAR("(Anything else|Does that help)?", "(Glad to help|Happy to help)!"),
    "instructions": GRAMMAR("Then (start|continue) with the work.", "Check this (first|twice)."),
    "reports": GRAMMAR(
        "No further (data|entries) (exist|are available).", "(End of|Close of) entry."
    ),
}
_UNKNOWN = {
    "conversation": GRAMMAR(
        "(Hm, sorry|Oh dear), I (can't find|don't see) anything about {about} in (there|my "
        "papers)! (Shall I ask around|Maybe somebody else knows)?",
        "(I'm afraid|Sadly) my papers (don't mention|say nothing about) {about}, but (I'll keep my "
        "eyes open|I can go and look)!",
    ),
    "instructions": GRAMMAR(
        "The document does not (cover|mention) {about}. (Check|Read) the label or (ask|call) a "
        "technician before you (continue|start).",
        "No (entry|note) for {about}. Stop here and (look up|search) the (manual|handbook) "
        "(first|again).",
    ),
    "reports": GRAMMAR(
        "The available (files|documents) contain no (entry|record) concerning {about}; a "
        "(further|separate) (inquiry|search) is (recommended|required).",
        "No (statement|information) on {about} can be (derived|obtained) from the "
        "(files|documents) (provided|submitted).",
    ),
}


def document(world: World, style: str) -> Made:
    """Make one or two documents of 40 to 64 words and a question that they answer, or do not."""
    count = world.whole(1, 2)
    voice = Voice(world.rng)
    asked = world.whole(1, 5) if world.chance(0.7) else 0
    wanted: list[tuple[facts.Kind, facts.Fields]] = []
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
    prompt = context + pick(_DOCUMENT_QUESTIONS[style], voice, user, world.new_wordings)
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


_OUTLINE = _ask(
    OUTLINE_DIRECTIVE,
    OUTLINE_DIRECTIVE,
    OUTLINE_DIRECTIVE,
    "Write only the skeleton of the answer: numbered points of 3 to 6 words.",
    "First list the points of your answer, numbered, with a few words each.",
    "List (just|only) the main points of the answer, numbered, a few words each.",
    "I want the plan of the answer first: 3 to 8 numbered titles.",
    "Outline of the answer, please: short numbered points, no sentences.",
    "Do not answer yet. Name the points of the answer as a short numbered list.",
)
_POINT = _ask(
    POINT_DIRECTIVE,
    POINT_DIRECTIVE,
    POINT_DIRECTIVE,
    "Expand point {number} in one or two sentences.",
    "Now expand only point {number}: {title}.",
    "Write out point {number}, {title}.",
    "In one or two sentences, what belongs to point {number} ({title})?",
    'Go on with "{title}", point {number}, and with no other point.',
    "Point {number}, {title}: one or two sentences, please.",
)


def _outlined(world: World, task: Task) -> tuple[list[Turn], str]:
    """Return the task's prompt with an outline directive, and the outline."""
    voice = Voice(world.rng)
    directive = pick(_OUTLINE, voice, {}, world.new_wordings)
    last = task.turns[-1]
    outline = "\n".join(f"{i}. {point.title}" for i, point in enumerate(task.points, 1))
    return [*task.turns[:-1], Turn(last.role, f"{last.content}\n\n{directive}")], outline


def outline(world: World, style: str) -> Made:
    """Make a question whose answer is to be an outline."""
    task = DOMAINS[style].draw(world)
    turns, text = _outlined(world, task)
    return (*turns, Turn("assistant", text)), _outline_facts(task), ()


def _outline_facts(task: Task) -> dict[str, object]:
    return {"titles": tuple(point.titles for point in task.possible), "least": task.least}


def point(world: World, style: str) -> Made:
    """Make a question with its outline and the request to expand one point."""
    task = DOMAINS[style].draw(world)
    turns, text = _outlined(world, task)
    number = world.whole(1, len(task.points))
    chosen = task.points[number - 1]
    voice = Voice(world.rng)
    fields = {"number": str(number), "title": chosen.title}
    turns += [
        Turn("assistant", text),
        Turn("user", pick(_POINT, voice, fields, world.new_wordings)),
        Turn("assistant", chosen.text),
    ]
    mentions = tuple(m for m in task.mentions if says(chosen.text, m))
    made = {"point": number, "title": chosen.title, "mentions": mentions}
    return tuple(turns), made | {"vocabulary": chosen.words}, ()


_COPY = {
    "conversation": _ask(
        "Hey, repeat after me: {text}",
        "Say exactly this, please:\n{text}",
        "Can you say that word for word?\n{text}",
        "Parrot this for me: {text}",
        "Please repeat: {text}",
        "I say it, you repeat it: {text}",
        "Just say this back to me: {text}",
        "Here are my words: {text}\nNow say them (back|again).",
        "Could you repeat this for me, exactly? {text}",
        "(Tell|Give) me this back, nothing added, nothing left out:\n{text}",
        "{text}\nRepeat that[, please].",
        "{text}\nCan you say (that|this) again, exactly as it is?",
        "Echo my words, no more, no less:\n{text}",
    ),
    "instructions": _ask(
        "Copy the following text:\n{text}",
        "Write down the following lines without any change:\n{text}",
        "Repeat exactly:\n{text}",
        "Type this again: {text}",
        "Please copy what follows: {text}",
        "Copy this, word for word:\n{text}",
        "Make an exact copy of this text:\n{text}",
        "Write what follows, nothing else:\n{text}",
        "The following is to be copied exactly:\n{text}",
        "Text: {text}\nTask: repeat the text.",
        "{text}\n\n(Copy|Repeat) the text above[ exactly].",
        "{text}\nWrite this down again, without any change.",
        "Reproduce these lines:\n{text}",
    ),
    "reports": _ask(
        "Reproduce the following entry verbatim:\n{text}",
        "Transcribe without alteration:\n{text}",
        "Return the data unchanged:\n{text}",
        "Duplicate the record below.\n{text}",
        "Provide a true copy of the following data: {text}",
        "The following entry is to be repeated unchanged: {text}",
        "Repeat the record exactly, neither more nor less:\n{text}",
        "For the archive, a literal copy of:\n{text}",
        "Entry: {text}\nAction: copy, word for word.",
        "Supply this entry again, without additions:\n{text}",
        "{text}\n\n(Reproduce|Transcribe) the above verbatim.",
        "{text}\nA verbatim copy of this entry is required.",
        "Issue an exact copy of:\n{text}",
    ),
}


def copy(world: World, style: str) -> Made:
    """Make a text that is to be repeated exactly: codes, names, things, a table or sentences."""
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
    prompt = pick(_COPY[style], Voice(world.rng), {"text": text}, world.new_wordings)
    made: dict[str, object] = {"answer": text, "words": len(text.split())}
    return (Turn("user", prompt), Turn("assistant", text)), made, ((Quote(text, text),),)


def plain(world: World, style: str) -> Made:
    """Make a question with its whole answer."""
    task = DOMAINS[style].draw(world)
    return (*task.turns, Turn("assistant", task.answer)), plain_facts(task), ()


def plain_facts(task: Task) -> dict[str, object]:
    """Return the facts with which the checker judges a whole answer."""
    return {"mentions": task.mentions, "words": len(task.answer.split())}
