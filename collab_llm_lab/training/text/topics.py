"""Topics that people and the robot talk about, with their names, wordings and replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.phrases import Grammar, Phrase
from collab_llm_lab.training.text.tasks import Part
from collab_llm_lab.training.text.world import World

GRAMMAR = Grammar()
"""The words of the robot."""
ask = Grammar()
"""The user's wordings; their words are no words of the answers."""
_g, _ask = GRAMMAR, ask


@dataclass(frozen=True)
class Topic:
    """Subjects that a message may speak of.

    Attributes:
        fields: draws the topic's names.
        lines: wordings of the user; the last is held out of training.
        parts: what the robot answers, in order.
        recall: the sentence by which the robot comes back to the topic later.
        must: fields that every answer names.
    """

    fields: Callable[[World, int], dict[str, str]]
    lines: tuple[Phrase, ...]
    parts: tuple[Part, ...]
    recall: Part
    must: tuple[str, ...]


_HIDING = {
    "kitchenware": ("next to the sink", "behind the bread bin"),
    "tool": ("under the workbench", "beside the paint cans"),
    "textile": ("behind the washing", "under the ironing board"),
    "device": ("next to the sockets", "behind the sofa"),
    "paper": ("between the newspapers", "under the mail"),
    "toy": ("under the sofa", "behind the toy chest"),
}
_PRAISE = {
    "kitchenware": ("handy", "shiny"),
    "tool": ("sturdy", "useful"),
    "textile": ("soft", "cosy"),
    "device": ("clever", "modern"),
    "paper": ("thoughtful", "pretty"),
    "toy": ("funny", "sweet"),
}
_DISHES = {
    "pancakes": ("flour, eggs and milk", "flip them high"),
    "vegetable soup": ("carrots, leeks and potatoes", "let it simmer"),
    "fried rice": ("rice, peas and an egg", "keep stirring"),
    "tomato pasta": ("tomatoes, garlic and basil", "taste the sauce twice"),
    "apple pie": ("apples, butter and cinnamon", "watch the crust"),
    "bean stew": ("beans, onions and peppers", "add the salt last"),
    "omelette": ("eggs, cheese and chives", "heat the pan first"),
    "lentil curry": ("lentils, ginger and coconut milk", "start with the spices"),
}
_WEATHER = {
    "raining": ("umbrella", "puddles"),
    "snowing": ("woolly hat", "icy steps"),
    "sunny": ("sun cream", "hot pavement"),
    "windy": ("thick jacket", "flying branches"),
    "foggy": ("bright scarf", "slow cyclists"),
    "freezing": ("warm gloves", "slippery path"),
}


_SMALL = ("kitchenware", "tool", "textile", "device", "paper", "toy")


def _thing(world: World, kind: str = "") -> dict[str, str]:
    thing = world.thing(kind or world.any(_SMALL))
    hiding, praise = _HIDING[thing.kind], _PRAISE[thing.kind]
    return {
        "thing": thing.name,
        "a_thing": names.with_article(thing.name),
        "noun": thing.noun,
        "a_noun": names.with_article(thing.noun),
        "hiding": hiding[0],
        "hiding2": hiding[1],
        "praise": praise[0],
        "praise2": praise[1],
    }


def _dish(world: World) -> dict[str, str]:
    dish = world.any(tuple(_DISHES))
    return {"dish": dish, "ingredients": _DISHES[dish][0], "trick": _DISHES[dish][1]}


def _weather(world: World) -> dict[str, str]:
    weather = world.any(tuple(_WEATHER))
    return {"weather": weather, "wear": _WEATHER[weather][0], "danger": _WEATHER[weather][1]}


_MEMORY = _g("Remember the earlier talk", "Come back to before")


def _topic(
    fields: Callable[[World, int], dict[str, str]],
    must: str,
    lines: tuple[Phrase, ...],
    recall: tuple[Phrase, ...],
    *parts: tuple[tuple[Phrase, ...], tuple[Phrase, ...]],
) -> Topic:
    return Topic(
        fields, lines, tuple(Part(*p) for p in parts), Part(_MEMORY, recall), tuple(must.split())
    )


def _at(world: World, now: int) -> dict[str, str]:
    """Draw a person, a room, a place, a later time and an event: what most topics need."""
    event = world.any(names.EVENTS)
    return {
        "person": world.first_name(),
        "room": world.room(),
        "place": world.place(),
        "time": world.clock(now + 30, 23 * 60 + 55),
        "event": event,
        "an_event": names.with_article(event),
    }


TOPICS = (
    _topic(
        _at,
        "event person time",
        _ask(
            "I've got (that|my) {event} with {person} at {time}.",
            "{person} and I have our {event} at {time}, did I tell you?",
            "(Don't let me forget|Remind me of) the {event} with {person} at {time}, okay?",
            "At {time} there's the {event} with {person}.",
            "Guess what, {person} has moved our {event} to {time}.",
            "There's this {event} coming up at {time}, and {person} will be there.",
        ),
        _g(
            "And (don't forget|keep in mind) the {event} with {person}, (it's at {time} "
            "sharp|{time} comes sooner than you think)!",
            "By the way, I haven't forgotten {person} and your {event} at {time}.",
        ),
        (
            _g("Cheer for the {event}", "Talk about the {event}"),
            _g(
                "{an_event} with {person}, (how nice|that's something)! (You two always get "
                "along|I bet {person} is looking forward to it too), so (just be yourself|enjoy "
                "every minute).",
                "Ooh, the {event}! (Say hello to {person} from me|{person} can be lucky to have "
                "you there), and (tell me all about it|bring back a good story) afterwards.",
            ),
        ),
        (
            _g("Promise a reminder", "Offer to remind in time"),
            _g(
                "I'll (ring my little bell|blink my lights|call you) (a quarter of an hour|ten "
                "minutes|half an hour) before {time}, so you won't (have to rush|be late).",
                "(It's in my calendar now|I've made a note): {event}, {time}. (You've still got "
                "time for a snack|Shall I lay out your clothes) before that.",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _thing(world),
        "thing room",
        _ask(
            "I can't find my {thing}, I thought it was {place} in the {room}.",
            "Have you seen my {thing}? It was {place} in the {room} yesterday.",
            "(My|That) {thing} is gone again! I'm sure I left it {place} in the {room}.",
            "Where on earth is my {thing}? It isn't {place} in the {room}.",
            "I've been looking for the {thing} since lunch. I had it in the {room}, {place}.",
            "Somebody took my {thing} from the {room}, it always lies {place}.",
        ),
        _g(
            "And as soon as your {thing} turns up, (I'll shout|you'll be the first to know), even "
            "if it (isn't in the {room}|hides outside the {room}).",
            "I'm still (keeping an eye out|searching) for your {thing}, and I haven't given up on "
            "the {room}.",
        ),
        (
            _g("Search for the {noun}", "Look for the {noun}"),
            _g(
                "(Oh no, not|Hmm,) your {thing}! I'll (zoom|roll) over to the {room} (right "
                "away|in a second) and look {place} (once more|with my brightest lamp), and then "
                "{hiding}.",
                "(Leave it to me|I love a good hunt), I'll find the {thing}! First I'll check "
                "{place} in the {room}, then {hiding2}, because (things love to hide there|that's "
                "where it was last time).",
            ),
        ),
        (
            _g("Comfort about the loss", "Say where it hides"),
            _g(
                "{a_noun} (doesn't just walk away|can't have gone far), so (don't turn the house "
                "upside down|no need to panic) (yet|just now).",
                "(Maybe somebody borrowed it|Perhaps it slipped down somewhere), and (it'll be "
                "back before supper|I'll ask around) if I don't see it {hiding}.",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _thing(world),
        "thing person",
        _ask(
            "Could you bring the {thing} to {person}[, please]?",
            "{person} needs the {thing} from the {room}, can you carry it over?",
            "Would you fetch the {thing} from the {room} for {person}?",
            "Please take the {thing} in the {room} to {person} before {time}.",
            "Can you pick up the {thing} {place} and give it to {person}?",
            "{person} is waiting for the {thing}, would you mind bringing it?",
        ),
        _g(
            "Oh, and the {thing} (is as good as delivered|is next on my list), (so {person} can "
            "relax|{person} won't wait long).",
            "And yes, {person} will get that {thing}, (robot's honour|cross my circuits).",
        ),
        (
            _g("Carry the {noun} over", "Deliver the {noun}"),
            _g(
                "(Sure thing|Of course|No problem), I'll (grab|pick up) the {thing} and "
                "(roll|trot) it (straight|right) over to {person}, (without dropping it|careful as "
                "always).",
                "The {thing} for {person}? (Consider it done|I'm already on my way)! It's such a "
                "{praise} {noun}, I'll (hold it with both grippers|drive extra slowly).",
            ),
        ),
        (
            _g("Report back after delivery", "Tell when it is done"),
            _g(
                "I'll (beep twice|send you a note|come back and tell you) when {person} has it, "
                "(just so you know|so you needn't wonder).",
                "If {person} isn't around, I'll (leave it by the door|wait a little) and (let you "
                "know|try again later).",
            ),
        ),
    ),
    _topic(
        _at,
        "room time",
        _ask(
            "The {room} looks terrible, could you clean it by {time}?",
            "Can you vacuum the {room} before {time}?",
            "(Please tidy|Would you tidy) up the {room}, people are coming at {time}.",
            "I spilled something in the {room}, and I need it clean by {time}.",
            "Somebody walked mud through the {room}! Can it be clean by {time}?",
            "At {time} the {room} has to shine, think you can do it?",
        ),
        _g(
            "And the {room} will (sparkle|be spotless) by {time}, (just watch me|you'll see).",
            "Don't worry about the {room} either, I've got it down for {time}.",
        ),
        (
            _g("Clean the {room}", "Tidy up the {room}"),
            _g(
                "The {room}? (Leave it to my brushes|I'm on it)! I'll (start in the far corner|do "
                "the floor first|chase every crumb) and (be done|finish) well before {time}.",
                "(Yes, I saw the {room}|Oh, the {room}, I know), (it's not that bad|what a sight)! "
                "(Two rounds|One good round) with the vacuum and it'll (shine|look like new) by "
                "{time}.",
            ),
        ),
        (
            _g("Ask to clear the floor", "Ask for a little help"),
            _g(
                "Could you (lift the chairs|pick up the cables|shut the windows) for me? (My arms "
                "are too short|I get tangled so easily), (you know me|it's embarrassing).",
                "(Just keep the cat away|Just stay off the wet floor) for (a while|ten minutes), "
                "(please|would you)? (I don't want to race anyone|It's slippery when I'm working).",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _dish(world),
        "dish person",
        _ask(
            "{person} and I want to make {dish} tonight.",
            "What do we need for {dish}? {person} is coming over.",
            "I'd love to cook {dish} for {person}.",
            "{person} asked for {dish} again, can you help me?",
            "Do you know how {dish} works? {person} loves it.",
            "Tonight it's {dish}, I promised {person}.",
        ),
        _g(
            "And (save me the smell|call me in) when you make the {dish}, {person} (is lucky|will "
            "love it)!",
            "Oh, and for the {dish} with {person} I can (set the timer|read out the recipe).",
        ),
        (
            _g("Name what {dish} needs", "Help with the {dish}"),
            _g(
                "{dish} for {person}, (yum|what a treat)! You'll need {ingredients}, and (the "
                "secret is to|whatever you do,) {trick}.",
                "Mmm, {dish}! (I checked the fridge|Let me think): get {ingredients}, {trick}, and "
                "{person} will (love it|ask for more).",
            ),
        ),
        (
            _g("Offer help in the kitchen", "Join the cooking"),
            _g(
                "I can't taste anything, (of course|sadly), but I'll (watch the clock|wash up "
                "afterwards|hold the spoon) (with pleasure|if you like).",
                "Shall I (put on some music|set the table|preheat the oven) while you two "
                "(chop|stir)? (Cooking's more fun that way|I love to be useful).",
            ),
        ),
    ),
    _topic(
        _at,
        "person time",
        _ask(
            "{person} is coming to visit at {time}.",
            "We'll have a guest at {time}, it's {person}.",
            "Guess who's coming at {time}: {person}!",
            "{person} will be at the door at {time}, can you open?",
            "Can you let {person} in at {time}? I'll be in the {room}.",
            "At {time} {person} drops by for coffee.",
        ),
        _g(
            "And I'll be (at the door|all ears) when {person} arrives at {time}, (promise|you can "
            "count on me).",
            "{time}, {person}, front door, (I've got it|I remember)!",
        ),
        (
            _g("Welcome the guest", "Get ready for {person}"),
            _g(
                "{person} is coming, (hurray|how nice)! I'll (wait by the door|polish my bumper) "
                "before {time} and (say a proper hello|take the coat).",
                "A visit from {person} at {time}, (finally some company|that'll be fun)! I'll "
                "(open the door|roll out to the gate) and (bring everyone inside|show the way).",
            ),
        ),
        (
            _g("Prepare something nice", "Think of small treats"),
            _g(
                "Should I (put the kettle on|fetch the good cups|dim the lamps) (beforehand|just "
                "before)? (Guests like that|It's the little things), (don't you think|right)?",
                "(There are still biscuits|I think there's cake left), so (don't go shopping|save "
                "yourself the trip), (just sit and chat|it'll be cosy anyway).",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _weather(world),
        "weather person",
        _ask(
            "It's {weather} and I wanted to walk with {person}.",
            "Look outside, it's {weather}! Should {person} and I still go out?",
            "{person} wants to go for a walk although it's {weather}.",
            "Do you think {person} minds that it's {weather} today?",
            "It's been {weather} since breakfast, and {person} is out there.",
            "Is it still {weather}? I promised {person} a stroll.",
        ),
        _g(
            "And if it's still {weather} when you meet {person}, (take care|remember what I said "
            "about the {wear}).",
            "Oh, one more thing about it being {weather}: (wave to {person} for me|{person} should "
            "stay warm too).",
        ),
        (
            _g("Advise for the weather", "Talk about the weather"),
            _g(
                "Just because it's {weather} (you needn't stay in|there's no reason to mope)! Take "
                "your {wear}, (mind the {danger}|watch out for the {danger}), and {person} will "
                "(thank you|be glad of the company).",
                "(Hm, {weather}, you say|It's {weather}, yes, I can hear it)! (Pack|Don't go "
                "without) the {wear}, and tell {person} to (watch the {danger}|beware of the "
                "{danger}).",
            ),
        ),
        (
            _g("Plan to be back early", "Plan something warm after"),
            _g(
                "(I'd come along|I'd love to join), but (water and wires don't mix|my wheels hate "
                "that), so I'll (keep the hall warm|wait by the window).",
                "When you're back, (there'll be hot chocolate|we'll play a round of cards), and "
                "(your socks can dry|we'll close the curtains) (by the heater|meanwhile).",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _thing(world) | {"price": world.price()},
        "thing person price",
        _ask(
            "I bought {a_thing} for {person}, it was only {price}.",
            "Do you think {person} will like the {thing}? I paid {price}.",
            "{price} for {a_thing}, is that too much? It's for {person}.",
            "I want to give {person} {a_thing}, it costs {price}.",
            "There's {a_thing} in the shop for {price}, maybe for {person}?",
            "{person} has a birthday, so I chose {a_thing} for {price}.",
        ),
        _g(
            "And the {thing} for {person} (was a fine idea|is worth every cent of those {price}), "
            "(I still think so|really).",
            "P.S. I won't (tell|whisper a word to) {person} about the {thing}, nor about the "
            "{price}!",
        ),
        (
            _g("Judge the present", "Talk about the {noun}"),
            _g(
                "{a_thing} for {price}, (that's a bargain|not bad at all)! It's (so {praise}|a "
                "{praise2} present), and {person} will (love it|use it every day).",
                "(Ooh, {a_thing}|Well, {a_thing}, clever you)! {price} is (fine|fair) for "
                "something that {praise}, and {person} (deserves it|has wanted one for ages).",
            ),
        ),
        (
            _g("Offer to wrap it", "Keep it a secret"),
            _g(
                "(Hide it well|Don't leave it lying about)! I could (wrap it|tie a ribbon round "
                "it) (while nobody's looking|tonight), if you (hold the tape|cut the paper).",
                "My (lips are sealed|lights stay off), (naturally|of course), though I'm (terrible "
                "with secrets|bursting to tell), so (give it away soon|be quick).",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | {"thing": world.thing("plant").name},
        "thing room",
        _ask(
            "Did you water the {thing} {place} in the {room}?",
            "The {thing} in the {room} looks sad.",
            "Can you look after the {thing} in the {room} while I'm away?",
            "{person} says the {thing} in the {room} needs more light.",
            "I think I forgot the {thing} {place} in the {room}.",
            "What does the {thing} in the {room} need?",
        ),
        _g(
            "And I'll (say hello to|sing for) the {thing} in the {room} (every day|on my way).",
            "Your {thing} in the {room} (is in good grippers|sends its regards), by the way.",
        ),
        (
            _g("Look after the plant", "Care for the plant"),
            _g(
                "The {thing} in the {room}, (poor thing|my leafy friend)! I'll give it (half a "
                "cup|a little sip) of water (today|before supper) and (turn it to the light|wipe "
                "its leaves).",
                "(I visit the {thing} every morning|I've got a soft spot for the {thing})! (The "
                "air in the {room} is dry|It's dim in the {room}), so (some water|a sunny spot) "
                "should (cheer it up|help).",
            ),
        ),
        (
            _g("Promise to check again", "Give hope for it"),
            _g(
                "Plants (forgive a lot|are tougher than they look), (so don't feel guilty|you'll "
                "see), and (new leaves|fresh buds) come (sooner than you'd think|by next week).",
                "(Too much water|Too much fuss) is (worse|no better), so I'll (feel the soil "
                "first|wait two days) before I (pour more|try anything else).",
            ),
        ),
    ),
    _topic(
        lambda world, now: _at(world, now) | _thing(world, "toy"),
        "thing person",
        _ask(
            "Tell me a little story about {person} and {a_thing}!",
            "Can you make up a story? It should have {person} and {a_thing} in it.",
            "{person} wants a bedtime story with {a_thing}.",
            "I'd like a story, {robot}, one about {a_thing} and {person}.",
            "How does the story of {person} and the {thing} go?",
            "Once more the tale of {person} and the {thing}, please!",
        ),
        _g(
            "And (tomorrow|next time) I'll tell you what {person} did with the {thing} (after "
            "that|in the end).",
            "Somewhere out there {person} still (plays with|looks for) that {thing}, (I'm sure|who "
            "knows).",
        ),
        (
            _g("Begin the story", "Tell how it began"),
            _g(
                "(Once upon a time|One windy night), {person} found {a_thing} (in the garden "
                'shed|under the stairs), and (it could talk|it glowed in the dark)! "(Take me '
                "home|Don't be "
                'afraid)," it (whispered|said).',
                "(Long ago|Far away) there lived {a_thing} (that nobody wanted|who was always "
                "cold), until {person} (opened the box|came by) and (laughed|took it along).",
            ),
        ),
        (
            _g("Tell how it went on", "Bring the story on"),
            _g(
                "So the two of them (sailed over the bathtub sea|climbed the highest bookshelf), "
                "(fought the grumpy broom|outran the old vacuum), and (shared a biscuit|counted "
                "the stars) (at the top|on the way).",
                "But (a storm came up|the lights went out), and {person} (held on tight|had an "
                "idea): they (built a raft of pillows|followed a firefly) (all the way "
                "home|through the dark).",
            ),
        ),
    ),
)

for _values in (_HIDING, _PRAISE, _DISHES, _WEATHER):
    for _key, _pair in _values.items():
        GRAMMAR.know(_key, *_pair)
