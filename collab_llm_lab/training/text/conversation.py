"""The sub-domain `conversation`: chatty talk with the robot of the house.

A talk has a mood, up to two earlier exchanges and a last message on two or three topics. The
answer takes up each topic in the message's order, remembers one earlier topic and says good-bye.
"""

from __future__ import annotations

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.phrases import Voice, pick, say
from collab_llm_lab.training.text.tasks import Part, Task
from collab_llm_lab.training.text.topics import GRAMMAR, TOPICS, ask
from collab_llm_lab.training.text.world import World, clock
from collab_llm_nodes.models.turns import Turn

_g, _ask = GRAMMAR, ask

_SYSTEM = _ask(
    "You are {robot}, the robot of {user}'s house. It is {weekday}, {clock}. You are in the "
    "{here}.",
    "You're {robot}, a friendly house robot, and {user} is your owner. Today is {weekday} and it "
    "is {clock}. You wait in the {here}.",
    "Your name is {robot}. You live with {user}. It is {clock} on {weekday}; you are in the "
    "{here}.",
    "You are called {robot} and help {user} at home. Now it is {weekday}, {clock}, and you stand "
    "in the {here}.",
)
_HELLO = _ask(
    "(Hi|Hey|Hello) {robot}[, it's {user}]!",
    "{robot}, (are you there|got a minute|can we talk)?",
    "(Good {part}|Hello there), {robot}!",
    "(Hey|Oh hi) {robot}, (nice to see you|there you are)!",
    "(Knock knock|Yoo-hoo), {robot}! {user} (here|speaking).",
)

MOODS = {
    "happy": _ask(
        "I'm in such a good mood today!",
        "What a wonderful {weekday}, I could sing!",
        "I feel great this {part}!",
        "Everything goes so well today!",
        "I can't stop smiling this {part}!",
    ),
    "tired": _ask(
        "I'm so tired today.",
        "I hardly slept last night.",
        "I could fall asleep right here.",
        "This {weekday} has been far too long already.",
        "My eyes keep closing this {part}.",
    ),
    "worried": _ask(
        "I'm a bit worried, to be honest.",
        "I've got a bad feeling about today.",
        "My head is full of worries this {part}.",
        "I'm quite nervous about this {weekday}.",
        "Something has been troubling me all {part}.",
    ),
    "bored": _ask(
        "I'm so bored!",
        "Nothing ever happens on a {weekday}.",
        "This {part} just won't end.",
        "I really don't know what to do with myself.",
        "It's a terribly dull {part}.",
    ),
    "excited": _ask(
        "I'm so excited!",
        "You won't believe what a day this is!",
        "I can't sit still this {part}!",
        "I've been waiting for this {weekday} for weeks!",
        "My heart is jumping today!",
    ),
    "cross": _ask(
        "I'm really cross today.",
        "Everything goes wrong on this {weekday}!",
        "What an awful {part}.",
        "I've had enough of today, really.",
        "Don't even ask how my {part} was.",
    ),
}
_MOOD_NAMES = tuple(MOODS)
_OPENINGS = {
    "happy": _g(
        "(Hooray|Oh how lovely|Wonderful), {user}! Your good mood (is catching|makes my wheels "
        "spin), and (now I feel like dancing too|my lights are blinking with joy).",
        "(Yay|That's great), {user}! (Hearing you this cheerful|A {weekday} like that) (makes me "
        "want to hum|charges my battery better than any plug)[, it really does].",
    ),
    "tired": _g(
        "(Oh dear|Aw|You poor thing), {user}! (Why don't you put your feet up|Please sit down for "
        "a moment) and (let me do the running around|leave the rest of the {part} to me).",
        "(Oh no|Ah), {user}, that sounds (exhausting|rough)! (A warm cup of tea|A short nap) would "
        "(do you good|work wonders), and (I'll keep the noise down|I'll watch the door) meanwhile.",
    ),
    "worried": _g(
        "(Hey|Come here), {user}, (take a deep breath|it's going to be all right)! (We'll sort it "
        "out together|You're not alone with this), (one thing at a time|step by step), I promise.",
        "(Don't you worry|Chin up), {user}! (Things look darker|Most worries look bigger) on a "
        "{weekday} {part} than they are, and (I'm right here|I won't leave your side).",
    ),
    "bored": _g(
        "(Bored|Nothing to do), {user}? (Not with me around|We can't have that)! (I've got plenty "
        "of ideas|Let's make this {part} a bit brighter), so (listen|hold on tight).",
        "(Ha|Well well), {user}, a dull {weekday} is (just what I like|my speciality)! (Give me a "
        "minute|Just wait) and (you'll be laughing again|we'll turn it around).",
    ),
    "excited": _g(
        "(Wow|Oh my), {user}! (I can hear it in your voice|You're practically glowing), and (my "
        "sensors are tingling too|I'm getting all jittery myself)!",
        "(How thrilling|Woohoo), {user}! (A {weekday} like this|Such luck) (doesn't come twice|has "
        "to be enjoyed), so (tell me everything|let's get going)!",
    ),
    "cross": _g(
        "(Uh-oh|Oh, {user}), (that sounds like a nasty {part}|what a mess)! (Go on, have a good "
        "grumble|Let it all out), (I don't mind at all|robots have thick skin).",
        "(I'm sorry to hear that|Oh no), {user}! (Some days are like that|A {weekday} can be so "
        "mean), but (we'll rescue what's left of it|it can only get better from here).",
    ),
}

_STATUS = _g(
    "(Me|As for me), I'm (fine|cheerful as ever), (parked|humming along) in the {here} with (a "
    "full tummy of electricity|half a battery), (thanks for asking|if you wondered).",
    "(My {part}|My {weekday}) was (quiet|busy) so far: (I dusted the {here}|I chased a fly through "
    "the {here}) and (learned a new tune|had a nap on my charger).",
    "(Here in|Over here in) the {here} (all is well|it's calm), (only my left wheel squeaks|just "
    "the clock is ticking), (but that's nothing new|and I like it that way).",
)
_CLOSINGS = _g(
    "(Well then|So), {user}, (shout if you need me|just whistle), (I'm never far away|I'll come "
    "rolling)!",
    "(Anything else|What else can I do), {user}? (Otherwise|If not,) I'll (get going|start right "
    "now), (see you later|bye for now)!",
    "(Have a lovely {part}|Enjoy your {weekday}), {user}, and (don't forget to smile|be nice to "
    "yourself)!",
    "(Off I go|Here I go), {user}! (Talk to you soon|Catch you later), (beep beep|over and out)!",
)
_GREETING = _g("Greet {user} warmly", "Answer the {mood} mood")
_FIRST = {mood: Part(_GREETING, opening) for mood, opening in _OPENINGS.items()}
_LAST = Part(_g("Say good-bye kindly", "End with good wishes"), _STATUS, _CLOSINGS)
_PARTS_OF_DAY = ("morning", "afternoon", "evening")
GRAMMAR.know(*MOODS, *_PARTS_OF_DAY, *names.WEEKDAYS)


def draw(world: World, freedom: float = 0.1) -> Task:
    """Return a talk with its answer."""
    rng = world.rng
    weekday = world.weekday()
    minutes = world.minutes(6 * 60, 20 * 60)
    part = _PARTS_OF_DAY[(minutes >= 12 * 60) + (minutes >= 18 * 60)]
    mood = world.any(_MOOD_NAMES)
    common = {
        "robot": world.robot(),
        "user": world.first_name(),
        "weekday": weekday,
        "clock": clock(minutes),
        "part": part,
        "here": world.room(),
        "mood": mood,
    }
    keys = (
        names.WEEKDAYS.index(weekday),
        _MOOD_NAMES.index(mood),
        _PARTS_OF_DAY.index(part),
    )
    robot, user = Voice(rng, keys, freedom), Voice(rng)
    count = world.any((2, 2, 3))
    earlier = world.any((0, 0, 0, 1, 1, 2))
    topics = rng.sample(TOPICS, count + earlier)
    fields = [common | topic.fields(world, minutes) for topic in topics]

    def ask(i: int) -> str:
        return pick(topics[i].lines, user, fields[i], world.new_wordings)

    turns = [Turn("system", say(_SYSTEM, user, common))]
    for i in range(earlier):
        hello = pick(_HELLO, user, common, world.new_wordings) + " " if i == 0 else ""
        turns.append(Turn("user", hello + ask(i)))
        reply = [say(p.text, robot, fields[i]) for p in topics[i].parts]
        turns.append(Turn("assistant", " ".join(reply)))
    hello = "" if earlier else pick(_HELLO, user, common, world.new_wordings) + " "
    message = [ask(i) for i in range(earlier, earlier + count)]
    feeling = pick(MOODS[mood], user, common, world.new_wordings)
    turns.append(Turn("user", hello + feeling + " " + " ".join(message)))

    points = [_FIRST[mood].say(robot, common)]
    for topic, names_of in list(zip(topics, fields, strict=True))[earlier:]:
        points += [part.say(robot, names_of) for part in topic.parts]
    mentions = [common["user"]]
    mentions += [
        fields[i][name] for i in range(earlier, earlier + count) for name in topics[i].must
    ]
    if count == 2 and earlier:
        points.append(topics[0].recall.say(robot, fields[0]))
    points.append(_LAST.say(robot, common))
    return Task(tuple(turns), tuple(points), " ".join, tuple(mentions), tuple(points), len(points))
