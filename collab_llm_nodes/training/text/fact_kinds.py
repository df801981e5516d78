"""The kinds of facts, each with its statements, questions and reply."""

from __future__ import annotations

from collab_llm_nodes.training.text.facts import Kind, fields_of
from collab_llm_nodes.training.text.phrases import Grammar

GRAMMAR = Grammar()
"""The words of replies in whole sentences."""
_ask = Grammar()


def _kind(
    name: str,
    fields: str,
    key: str,
    value: str,
    conversation: tuple[str, ...],
    instructions: tuple[str, ...],
    reports: tuple[str, ...],
    questions: tuple[str, ...],
    reply: tuple[str, ...],
) -> Kind:
    statements = {
        "conversation": _ask(*conversation),
        "instructions": _ask(*instructions),
        "reports": _ask(*reports),
    }
    questions_ = _ask(*questions)
    draw = fields_of(*fields.split())
    return Kind(name, draw, tuple(key.split()), value, statements, questions_, GRAMMAR(*reply))


_EPISODES = (
    "At {time} on {day}, seen from {spot}: the {thing} is {direction} and {distance}.",
    "At {time} on {day}, seen from {spot}: i see the {thing} {direction}, {distance}.",
    "At {time} on {day}, seen from {spot}: {distance} and {direction} there is the {thing}.",
    "At {time} on {day}, seen from {spot}: {direction} stands the {thing}, {distance}.",
)
"""Sentences of the robot's memory (``robot.episodes``) about what its model sees."""

KINDS = (
    _kind(
        "where",
        "thing room place weekday",
        "thing",
        "room",
        (
            "I (left|put|saw) the {thing} {place} in the {room}.",
            "The {thing}? It's in the {room} now, {place}.",
            "By the way, the {thing} is {place} in the {room}.",
        ),
        (
            "Keep the {thing} {place} in the {room}.",
            "The {thing} (is stored|has its place) in the {room}, {place}.",
            "Take the {thing}, which lies {place} in the {room}.",
        ),
        (
            "Item {thing} located in {room}, {place}.",
            "The {thing} was (found|registered) in the {room} ({place}).",
            "{thing} | {room} | {place}",
        ),
        (
            "Where is the {thing}?",
            "In which room is the {thing}?",
            "Which room is the {thing} in?",
            "Where can I find the {thing}?",
            "Do you know where the {thing} is?",
            "What room holds the {thing}?",
            "Name the room of the {thing}.",
            "Where should I look for the {thing}?",
        ),
        ("The {thing} is in the {room}.", "You will find the {thing} in the {room}."),
    ),
    _kind(
        "spot",
        "thing room place",
        "thing room",
        "place",
        (
            "In the {room} the {thing} is {place}.",
            "I always keep the {thing} of the {room} {place}.",
            "Look, the {thing} in the {room} lies {place}!",
        ),
        (
            "In the {room}, the {thing} belongs {place}.",
            "Return the {thing} of the {room} to its place {place}.",
        ),
        (
            "{room}: {thing} stored {place}.",
            "In the {room}, the {thing} was observed {place}.",
        ),
        (
            "Where in the {room} is the {thing}?",
            "At which place in the {room} is the {thing}?",
            "Where exactly does the {thing} in the {room} lie?",
            "On or in what is the {thing} in the {room}?",
            "What is the exact place of the {thing} of the {room}?",
            "I am in the {room}. Where is the {thing}?",
        ),
        ("In the {room}, the {thing} is {place}.", "The {thing} in the {room} lies {place}."),
    ),
    _kind(
        "who",
        "thing person weekday",
        "thing",
        "person",
        (
            "{person} (borrowed|took) the {thing} on {weekday}.",
            "{person}: I've got the {thing} since {weekday}.",
            "Ask {person}, the {thing} went there on {weekday}.",
        ),
        (
            "The {thing} (was lent to|is kept by) {person}[ until {weekday}].",
            "Get the {thing} from {person} first.",
        ),
        (
            "{weekday}: {thing} issued to {person}.",
            "Recipient of the {thing}: {person}.",
            "{thing} | {person} | {weekday}",
        ),
        (
            "Who has the {thing}?",
            "Who took the {thing}?",
            "Whom did the {thing} go to?",
            "With whom is the {thing}?",
            "Which person has the {thing}?",
            "Who got the {thing}?",
            "Tell me who has the {thing} now.",
            "In whose hands is the {thing}?",
        ),
        ("{person} has the {thing}.", "The {thing} is with {person}."),
    ),
    _kind(
        "when",
        "person event time room",
        "person event",
        "time",
        (
            "{person} has the {event} at {time} in the {room}.",
            "{person}: My {event} is at {time}.",
            "Don't forget, {person}'s {event} starts at {time}!",
        ),
        (
            "Prepare the {room} for {person}'s {event} at {time}.",
            "The {event} of {person} begins at {time}; (be early|open the {room}).",
        ),
        (
            "{time} {event} of {person}, {room}.",
            "The {event} of {person} was scheduled for {time}.",
            "{event} | {person} | {time}",
        ),
        (
            "When is the {event} of {person}?",
            "At what time is {person}'s {event}?",
            "What time does {person}'s {event} start?",
            "When does the {event} of {person} begin?",
            "Please give the time of {person}'s {event}.",
            "{person} has one {event}. When?",
            "What is the hour of the {event} that {person} has?",
        ),
        ("The {event} of {person} is at {time}.", "{person}'s {event} starts at {time}."),
    ),
    _kind(
        "day",
        "person machine weekday",
        "person machine",
        "weekday",
        (
            "{person} looked after the {machine} on {weekday}.",
            "{person}: I checked the {machine} on {weekday}.",
            "On {weekday} {person} finally checked the {machine}.",
        ),
        (
            "{person} checks the {machine} every {weekday}.",
            "The {machine} is checked on {weekday} by {person}.",
        ),
        (
            "{weekday}: check of the {machine} by {person}.",
            "On {weekday}, {person} inspected the {machine}.",
        ),
        (
            "On which day did {person} check the {machine}?",
            "Which day did {person} look at the {machine}?",
            "What day is {person}'s check of the {machine}?",
            "On what weekday was the {machine} checked by {person}?",
            "{person} and the {machine}: which day?",
            "Name the day on which {person} dealt with the {machine}.",
        ),
        ("{person} checked the {machine} on {weekday}.",),
    ),
    _kind(
        "how many",
        "items room number",
        "items room",
        "number",
        (
            "There are {number} {items} [left ]in the {room}.",
            "I counted {number} {items} in the {room}.",
            "We've still got {number} {items} in the {room}!",
        ),
        (
            "Keep {number} {items} in the {room}.",
            "Bring {number} {items} to the {room}.",
        ),
        (
            "Stock of {items} in the {room}: {number}.",
            "{room} | {items} | {number}",
            "{number} {items} were counted in the {room}.",
        ),
        (
            "How many {items} are in the {room}?",
            "What is the number of {items} in the {room}?",
            "How many {items} does the {room} have?",
            "What is the count of {items} for the {room}?",
            "In the {room}, how many {items} are there?",
            "Give the number of {items} in the {room}.",
            "Count of {items} in the {room}?",
        ),
        ("There are {number} {items} in the {room}.", "The {room} has {number} {items}."),
    ),
    _kind(
        "price",
        "thing price",
        "thing",
        "price",
        (
            "The {thing} costs {price}.",
            "They want {price} for the {thing}!",
            "I saw the {thing} for {price}.",
        ),
        (
            "In the shop, the {thing} costs {price}.",
            "Replace the {thing} if needed; the price is {price}.",
        ),
        (
            "Unit price of the {thing}: {price}.",
            "{thing} | {price}",
            "The {thing} was priced at {price}.",
        ),
        (
            "How much is the {thing}?",
            "What does the {thing} cost?",
            "What is the price of the {thing}?",
            "How much does the {thing} cost?",
            "Price of the {thing}?",
            "How much do they want for the {thing}?",
            "What would I have to pay for the {thing}?",
        ),
        ("The {thing} costs {price}.", "The price of the {thing} is {price}."),
    ),
    _kind(
        "paid",
        "person items price",
        "person items",
        "price",
        (
            "{person} paid {price} for the {items}.",
            "{person}: I spent {price} on {items}.",
            "{person} bought {items} for {price}.",
        ),
        (
            "Refund {price} to {person} for the {items}.",
            "{person} orders the {items} for {price}.",
        ),
        (
            "Expense of {person}, {items}: {price}.",
            "{price} was paid to {person} for {items}.",
            "{person} | {items} | {price}",
        ),
        (
            "How much did {person} pay for the {items}?",
            "What did {person} spend on {items}?",
            "What was the amount for {person}'s {items}?",
            "How much were the {items} of {person}?",
            "What is the sum for {person} and the {items}?",
            "For the {items}, how much money did {person} need?",
        ),
        ("{person} paid {price} for the {items}.", "The {items} of {person} cost {price}."),
    ),
    _kind(
        "door code",
        "room code",
        "room",
        "code",
        (
            "The code for the {room} is {code}, don't tell anyone!",
            "You need {code} to get into the {room}.",
            "They changed the {room} door to {code}.",
        ),
        (
            "Enter {code} to open the door of the {room}.",
            "To unlock the {room}, type {code}.",
        ),
        (
            "Access code {room}: {code}.",
            "The lock of the {room} was set to {code}.",
            "{room} | {code}",
        ),
        (
            "What is the code of the {room}?",
            "Which code opens the {room}?",
            "What must I type at the door of the {room}?",
            "What is the door code for the {room}?",
            "How do I unlock the {room}? Give the code.",
            "Code for the {room}?",
            "With which code do I get into the {room}?",
        ),
        ("The code of the {room} is {code}.", "Use {code} to open the {room}."),
    ),
    _kind(
        "part number",
        "part machine code",
        "part machine",
        "code",
        (
            "The {part} of the {machine} is number {code}, I think.",
            "I ordered {code}, that's the {part} for the {machine}.",
        ),
        (
            "The {part} of the {machine} has the number {code}.",
            "Fit {part} {code} to the {machine}.",
            "Use only {part} {code} for the {machine}.",
        ),
        (
            "{machine}: {part}, number {code}.",
            "{machine} | {part} | {code}",
            "Part {code} ({part}) was fitted to the {machine}.",
        ),
        (
            "What is the number of the {part} for the {machine}?",
            "Which {part} fits the {machine}?",
            "What is the part number of the {machine}'s {part}?",
            "Which number does the {part} of the {machine} have?",
            "I need the {part} for the {machine}. Which one?",
            "Under what number do I order the {part} of the {machine}?",
        ),
        ("The {part} of the {machine} is {code}.", "Order {code}, the {part} of the {machine}."),
    ),
    _kind(
        "colour",
        "person noun colour",
        "person noun",
        "colour",
        (
            "{person}'s {noun} is {colour}.",
            "{person}: My {noun} is the {colour} one.",
            "{person} has a lovely {colour} {noun}.",
        ),
        (
            "{person} uses the {colour} {noun}.",
            "Mark the {colour} {noun} with the name {person}.",
        ),
        (
            "{noun} of {person}: {colour}.",
            "The {noun} of {person} was described as {colour}.",
        ),
        (
            "What colour is {person}'s {noun}?",
            "What colour does the {noun} of {person} have?",
            "What is the colour of {person}'s {noun}?",
            "Of what colour is the {noun} of {person}?",
            "Tell me the colour of {person}'s {noun}.",
            "How would you describe the {noun} of {person}, by colour?",
        ),
        ("The {noun} of {person} is {colour}.",),
    ),
    _kind(
        "job",
        "person job room",
        "job",
        "person",
        (
            "{person} is our new {job}.",
            "{person}: I work as the {job} here.",
            "The {job} is called {person}.",
        ),
        (
            "Ask {person}, the {job}, for help.",
            "Call the {job}, {person}, if unsure.",
        ),
        (
            "{job} on duty: {person}.",
            "{person} served as {job}.",
            "{job} | {person}",
        ),
        (
            "Who is the {job}?",
            "What is the name of the {job}?",
            "What is the {job} called?",
            "Name the {job}.",
            "Who works as the {job}?",
            "Which person has the post of {job}?",
        ),
        ("{person} is the {job}.", "The {job} is {person}."),
    ),
    _kind(
        "work",
        "person job weekday",
        "person",
        "job",
        (
            "{person} works as {a_job}.",
            "{person}: I'm {a_job}, you know.",
        ),
        (
            "{person}, {a_job}, gives advice on {weekday}.",
            "{person} is the {job} in charge.",
        ),
        (
            "{person}, occupation: {job}.",
            "{person} was engaged as {a_job}.",
        ),
        (
            "What is {person}'s job?",
            "What does {person} do?",
            "What does {person} work as?",
            "Which job does {person} have?",
            "What is the occupation of {person}?",
            "How does {person} earn a living?",
        ),
        ("{person} works as {a_job}.",),
    ),
    _kind(
        "charge",
        "robot time number",
        "robot time",
        "number",
        (
            "At {time} {robot} had {number} percent left.",
            "{robot}: I was at {number} percent at {time}.",
        ),
        (
            "{robot} must have {number} percent charge at {time}.",
            "Charge {robot} to {number} percent by {time}.",
        ),
        (
            "{time} {robot}: battery {number} percent.",
            "{robot} | {time} | {number} percent",
            "At {time}, a charge of {number} percent was read from {robot}.",
        ),
        (
            "What was the charge of {robot} at {time}?",
            "How many percent did {robot} have at {time}?",
            "What battery level did {robot} have at {time}?",
            "At {time}, how full was {robot}?",
            "Give the percentage of {robot} at {time}.",
            "How much charge is noted for {robot} at {time}?",
        ),
        ("{robot} was at {number} percent at {time}.",),
    ),
    _kind(
        "serial",
        "robot code",
        "robot",
        "code",
        (
            "{robot} has the serial {code}.",
            "It says {code} on the back of {robot}.",
        ),
        (
            "Register {robot} under serial number {code}.",
            "Type the serial {code} to pair with {robot}.",
        ),
        (
            "Robot {robot}, serial {code}.",
            "{robot} | {code}",
        ),
        (
            "What is the serial number of {robot}?",
            "What serial does {robot} have?",
            "Give me {robot}'s serial.",
            "What number is on {robot}?",
            "Under which serial is {robot} known?",
        ),
        ("The serial number of {robot} is {code}.",),
    ),
    _kind(
        "gift",
        "person other thing",
        "person other",
        "thing",
        (
            "{person} gave {other} the {thing}.",
            "{person}: I handed the {thing} to {other}.",
            "{other} got the {thing} from {person}.",
        ),
        (
            "{person} passes the {thing} to {other}.",
            "{other} receives the {thing} from {person}.",
        ),
        (
            "Transfer from {person} to {other}: {thing}.",
            "The {thing} was handed over by {person} to {other}.",
        ),
        (
            "What did {person} give to {other}?",
            "What did {other} get from {person}?",
            "Which thing went from {person} to {other}?",
            "What was handed to {other} by {person}?",
            "What has {person} passed on to {other}?",
        ),
        ("{person} gave {other} the {thing}.", "The {thing} went from {person} to {other}."),
    ),
    _kind(
        "patrol",
        "robot time room",
        "robot time",
        "room",
        (
            "At {time} I met {robot} in the {room}.",
            "{robot}: I passed the {room} at {time}.",
        ),
        (
            "Send {robot} to the {room} at {time}.",
            "{robot} has to be in the {room} at {time}.",
        ),
        (
            "{time} {robot} entered the {room}.",
            "{robot} | {time} | {room}",
            "{time} {robot}, {room}, all clear.",
        ),
        (
            "Where was {robot} at {time}?",
            "In which room was {robot} at {time}?",
            "At {time}, where was {robot}?",
            "What was the position of {robot} at {time}?",
            "Which room did {robot} visit at {time}?",
            "At {time}, {robot} was in what room?",
        ),
        ("At {time} {robot} was in the {room}.",),
    ),
    _kind(
        "temperature",
        "room time number",
        "room time",
        "number",
        (
            "It was {number} degrees in the {room} at {time}.",
            "At {time} the {room} had {number} degrees, phew!",
        ),
        (
            "Heat the {room} to {number} degrees by {time}.",
            "Set the {room} to {number} degrees at {time}.",
        ),
        (
            "{time} {room}: {number} degrees.",
            "{room} | {time} | {number} degrees",
        ),
        (
            "How many degrees did the {room} have at {time}?",
            "What was the temperature of the {room} at {time}?",
            "How warm was the {room} at {time}?",
            "At {time}, how warm was it in the {room}?",
            "Which temperature is given for the {room} at {time}?",
        ),
        ("The {room} had {number} degrees at {time}.",),
    ),
    _kind(
        "repair",
        "machine room person",
        "machine room",
        "person",
        (
            "{person} fixed the {machine} in the {room}.",
            "{person}: I mended the {machine} in the {room}.",
        ),
        (
            "The {machine} in the {room} is serviced by {person}.",
            "For the {machine} of the {room}, call {person}.",
        ),
        (
            "{room}, {machine}: repaired by {person}.",
            "{person} repaired the {machine} of the {room}.",
            "{machine} | {room} | {person}",
        ),
        (
            "Who fixed the {machine} in the {room}?",
            "Who repaired the {machine} of the {room}?",
            "By whom was the {machine} in the {room} mended?",
            "Who takes care of the {machine} in the {room}?",
            "Whom should I thank for the {machine} in the {room}?",
        ),
        ("{person} repaired the {machine} in the {room}.",),
    ),
    _kind(
        "view",
        "thing direction distance spot time day",
        "thing",
        "spot",
        *(_EPISODES,) * 3,
        (
            "Where did you last see the {thing}?",
            "Where was the {thing} last in view?",
            "From where was the {thing} seen?",
            "From which place did the robot see the {thing}?",
            "At which point did you see the {thing}?",
            "Where were you when you saw the {thing}?",
        ),
        (
            "At {time} on {day} the {thing} was {direction} and {distance}, seen from {spot}.",
            "The {thing} was {direction} and {distance} at {time} on {day}, seen from {spot}.",
        ),
    ),
)
