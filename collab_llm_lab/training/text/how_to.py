"""Families of how-to questions: wordings, tools, steps and warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collab_llm_lab.training.text import situations
from collab_llm_lab.training.text.phrases import Grammar, Phrase
from collab_llm_lab.training.text.situations import Situation
from collab_llm_lab.training.text.tasks import Part
from collab_llm_lab.training.text.world import World

GRAMMAR = Grammar()
"""The words of the answers."""
GRAMMAR.know(*situations.WORDS)
ask = Grammar()
"""The wordings of the questions."""
_g, _ask = GRAMMAR, ask


@dataclass(frozen=True)
class HowTo:
    """A family of how-to questions.

    Attributes:
        fields: draws the names and the situation; returns also the numbers that decide choices.
        questions: wordings of the question; the last is held out of training.
        intro, warning, done: lines around the steps.
        steps: all steps; which ones are `optional` depends on the situation.
        must: fields that every answer names.
    """

    fields: Callable[[World], Situation]
    questions: tuple[Phrase, ...]
    intro: tuple[Phrase, ...]
    steps: tuple[Part, ...]
    optional: frozenset[int]
    warning: tuple[Phrase, ...]
    done: tuple[Phrase, ...]
    must: tuple[str, ...]


def _steps(*pairs: tuple[str, str]) -> tuple[Part, ...]:
    return tuple(Part(_g(title), _g(text)) for title, text in pairs)


FAMILIES = (
    HowTo(
        situations.clean,
        _ask(
            "How do I remove {dirt} from the {thing} in the {room}?",
            "What is the best way to get {dirt} off the {thing} in the {room}?",
            "The {thing} in the {room} is covered with {dirt}. How do I clean it?",
            "Please explain how to clean {dirt} from the {thing}. It stands in the {room}.",
            "Steps for cleaning the {thing} in the {room}? The problem is {dirt}.",
            "There is {dirt} on the {thing} in the {room}; describe how to remove it.",
        ),
        _g(
            "You need: {a_tool}, {agent}, rubber gloves and a (bucket|bowl).",
            "Tools: {a_tool}, {agent}, two rags and (gloves|an apron).",
        ),
        _steps(
            (
                "Clear the work area",
                "(Clear|Empty) the area around the {thing} and (open a window in|spread old towels "
                "in) the {room}.",
            ),
            (
                "Test a hidden spot",
                "Test the {agent} on a hidden spot of the {noun} (before going on|first). (Stop|Do "
                "not continue) if the surface (changes colour|turns dull).",
            ),
            (
                "Brush off loose dirt",
                "(Wipe|Brush) off all loose {dirt} with a dry rag, (from top to bottom|from the "
                "edges to the centre).",
            ),
            (
                "Apply the {agent}",
                "Apply the {agent} (evenly|sparingly) to the {dirt} and (leave it|let it act) for "
                "{wait}.",
            ),
            (
                "Work with the {tool}",
                "Work the {dirt} loose with the {tool}. (Move in small circles|Use short strokes) "
                "and (press lightly|rinse the tool often).",
            ),
            (
                "Repeat where needed",
                "Repeat the treatment (where traces remain|on stubborn spots), (but not more than "
                "twice|each time with fresh {agent}).",
            ),
            ("Rinse and dry", "Rinse the {noun} with (clean|cold) water, then {finish}."),
            (
                "Put everything back",
                "Put the {noun} back in (its place|position) and (wash|rinse) the {tool} (at "
                "once|with soap).",
            ),
        ),
        frozenset({1, 2, 5}),
        _g(
            "Warning: (keep|protect) the {thing} (away from|from) {enemy}(|, even for a short "
            "time).",
            "Caution: {enemy} (damages|ruins) this material; (never use it|keep it away).",
        ),
        _g(
            "The work is done when no {dirt} (is visible|can be felt) on the {thing}.",
            "Finished: the {thing} is free of {dirt} and (dry|ready for use).",
        ),
        ("dirt", "thing", "agent"),
    ),
    HowTo(
        situations.replace,
        _ask(
            "How do I replace the {part} of the {machine} in the {room}? The part number is "
            "{code}.",
            "How is the {part} ({code}) in the {machine} changed? The machine is in the {room}.",
            "Describe how to fit a new {part}, number {code}, to the {machine} in the {room}.",
            "The {machine} in the {room} needs {part} {code}. What are the steps?",
            "Give instructions for changing {part} {code} on the {machine} in the {room}.",
            "What must I do to exchange the {part} of the {room} {machine} for a {code}?",
        ),
        _g(
            "You need: {part} {code}, a screwdriver, (pliers|a torch) and a clean cloth.",
            "Parts and tools: one {part} {code}, a spanner, (a tray for screws|work gloves).",
        ),
        _steps(
            (
                "Switch off the power",
                "Switch off the {machine} in the {room} and (pull the plug|lock the main switch).",
            ),
            (
                "Make the {machine} safe",
                "Before (opening anything|you open it), {prepare}. (Wait three minutes|Check "
                "twice) and (put up a sign|tell the others).",
            ),
            (
                "Open the cover",
                "(Loosen|Undo) the screws of the (side|front) cover and (lay them in a tray|keep "
                "them in order).",
            ),
            (
                "Release the old {part}",
                "Release {hold} and take out the old {part}. (Note|Photograph) its position (for "
                "later|before it leaves its seat).",
            ),
            (
                "Compare the numbers",
                "Compare the new {part} with the old one; the number {code} must be "
                "(printed|stamped) on it.",
            ),
            (
                "Clean the seat",
                "Clean the seat of the {part} with (a dry cloth|compressed air) and look for "
                "(cracks|wear).",
            ),
            (
                "Insert the new {part}",
                "Insert the new {part}: {insert}. Then refit {hold} (as before|without force).",
            ),
            (
                "Close and test",
                "Close the cover, (restore the power|plug it in) and run the {machine} for "
                "(two|five) minutes.",
            ),
        ),
        frozenset({4, 5}),
        _g(
            "Warning: never (reach into|open) the {machine} while (it runs|power is on).",
            "Caution: (sharp edges|hot surfaces) inside; (wear gloves|let it cool first).",
        ),
        _g(
            "The {machine} is in order when it shows {sign}.",
            "Result: {sign}. (Write the date on|Log the change of) {part} {code}.",
        ),
        ("machine", "part", "code"),
    ),
    HowTo(
        situations.cook,
        _ask(
            "How do I make {dish} for {guests} people? {person} is hungry.",
            "Write the recipe for {dish}, {guests} portions, so that {person} can follow it.",
            "{person} wants to cook {dish} for {guests} guests. What are the steps?",
            "How is {dish} prepared? It should serve {guests}, and {person} will cook.",
            "Please give {person} steps for {dish}, enough for {guests}.",
            "{dish} for {guests}: how does {person} go about it?",
        ),
        _g(
            "Ingredients for {guests}: {ingredients}, {spice} and salt.",
            "For {guests} portions take {ingredients}, salt and some {spice}.",
        ),
        _steps(
            (
                "Wash and prepare",
                "Wash (your hands|the work top) and prepare {ingredients} for {guests} portions.",
            ),
            (
                "Cut the {first}",
                "Cut or measure the {first} (evenly|into small portions) and (set it aside|put it "
                "in a bowl).",
            ),
            (
                "Prepare the vessel",
                "Take {vessel} and (grease it lightly|warm it slowly), so that nothing sticks.",
            ),
            (
                "Combine the ingredients",
                "Combine {ingredients} (in two batches|bit by bit) and stir (with a wooden "
                "spoon|until smooth).",
            ),
            (
                "Season with {spice}",
                "Season with {spice} and a pinch of salt. (Taste|Let {person} taste) before adding "
                "more.",
            ),
            (
                "{way} the dish",
                "{way} everything at {heat} for {time}, (stirring|checking) (now and then|every "
                "few minutes).",
            ),
            (
                "Check if done",
                "Check whether {sign}. If not, (give it|allow) (three|five) more minutes.",
            ),
            (
                "Serve the {dish}",
                "Divide the {dish} into {guests} portions and serve (hot|with bread) (at "
                "once|after a short rest).",
            ),
        ),
        frozenset({1, 2, 6}),
        _g(
            "Warning: the {vessel_noun} (is hot|stays hot for long); use (oven gloves|a cloth).",
            "Caution: (steam burns|hot fat splashes); keep (children|your face) away.",
        ),
        _g(
            "The {dish} is ready when {sign}.",
            "Leftover {dish} keeps (two|three) days in a (cold|closed) box.",
        ),
        ("dish", "guests", "spice"),
    ),
    HowTo(
        situations.robot,
        _ask(
            "How do I clean the {part} of the robot {robot}? It is {weekday} and it stands in the "
            "{room}.",
            "{robot} reports dirty {part}. What are the steps? Today is {weekday}, service is in "
            "the {room}.",
            "Write the {weekday} service of {robot}'s {part}, done in the {room}.",
            "Explain the care of the {part} of robot {robot} in the {room} on {weekday}.",
            "Service steps for {robot}, {part}, {weekday}, {room}?",
            "It is {weekday}. How should I look after {robot}'s {part} in the {room}?",
        ),
        _g(
            "You need: {a_tool}, a dry cloth and (a torch|ten minutes).",
            "Tools: {a_tool}, (a soft mat|a tray) and a small screwdriver.",
        ),
        _steps(
            (
                "Shut {robot} down",
                "(Send|Drive) {robot} to a free spot in the {room} and (shut it down|switch it "
                "off).",
            ),
            (
                "Secure the robot",
                "Lay {robot} on (a soft mat|its side) and (block the wheels|remove the battery).",
            ),
            (
                "Inspect the {part}",
                "Inspect the {part} with a torch; (look for|note any) {soil}, (cracks|loose "
                "screws).",
            ),
            (
                "Remove {soil}",
                "Remove {soil} with the {tool}. Work (slowly|patiently) and (without force|without "
                "liquids).",
            ),
            (
                "Wipe and let dry",
                "Wipe the {part} with a dry cloth and (wait two minutes|let it air).",
            ),
            (
                "Tighten all screws",
                "(Tighten|Check) the screws around the {part} (by hand|crosswise), (a quarter turn "
                "at most|never to the stop).",
            ),
            (
                "Start and test",
                "Start {robot} again and (run the self-test|drive one round) in the {room}.",
            ),
            (
                "Enter the service",
                "Enter the {weekday} service of the {part} in the log of {robot}.",
            ),
        ),
        frozenset({2, 4, 5}),
        _g(
            "Warning: (remove the battery|press the red button) before touching the {part}.",
            "Caution: do not use (water|alcohol) on the {part}, (it attacks the coating|damage is "
            "likely).",
        ),
        _g(
            "The service is complete when {sign}.",
            "{robot} is ready if {sign}; otherwise repeat (the last two steps|the cleaning).",
        ),
        ("robot", "part", "tool"),
    ),
    HowTo(
        situations.hang,
        _ask(
            "How do I hang the {thing} on the {wall} wall of the {room}?",
            "How is a {noun} fixed to {wall}? It is the {thing} for the {room}.",
            "Describe how to mount the {thing} in the {room}; the wall is {wall}.",
            "I want the {thing} on the wall of the {room}. The wall is made of {wall}.",
            "Mounting steps for the {thing}, {room}, {wall} wall?",
            "What do I need to put up the {thing} on {wall} in the {room}?",
        ),
        _g(
            "You need: {drill}, {plug}, a pencil and a (spirit level|tape measure).",
            "Tools: {drill}, {plug}, (a ladder|a step stool) and a pencil.",
        ),
        _steps(
            (
                "Choose the height",
                "Hold the {thing} against the wall of the {room} and choose the (height|spot).",
            ),
            (
                "Search for cables",
                "Search the {wall} for cables and pipes (with a detector|above sockets) and (keep "
                "clear of|mark) them.",
            ),
            (
                "Mark the holes",
                "Mark (both holes|the upper hole) with a pencil and check them with (the level|a "
                "string).",
            ),
            (
                "Drill the holes",
                "Take {drill}; {how}. (Hold it straight|Catch the dust with an envelope).",
            ),
            (
                "Insert the fixing",
                "Clean the hole and insert {plug} (flush with|level with) the {wall}.",
            ),
            (
                "Drive in the screw",
                "Drive in the screw until (a finger's width|a thumb's width) is left for the "
                "{noun}.",
            ),
            (
                "Hang the {noun}",
                "Hang the {thing} (with two hands|with a helper) and align it (with the level|by "
                "eye).",
            ),
            (
                "Clean the floor",
                "(Sweep|Vacuum) the floor of the {room} and (put the tools away|wipe the wall).",
            ),
        ),
        frozenset({1, 5, 7}),
        _g(
            "Warning: (wear goggles|stand firmly) while drilling into {wall}.",
            "Caution: {wall} (crumbles|cracks) if the hole is too (near the edge|wide).",
        ),
        _g(
            "The work is done when the {thing} hangs level and (does not move|holds a firm pull).",
            "Check after (a day|a week) that the {thing} still sits firmly in the {wall}.",
        ),
        ("thing", "wall", "drill"),
    ),
    HowTo(
        situations.assemble,
        _ask(
            "How do I assemble the {thing} (model {code}) in the {room}? {person} helps me.",
            "Write assembly steps for the {thing}, model {code}. It goes to the {room}, with "
            "{person}.",
            "{person} and I must build the {thing} {code} for the {room}. How?",
            "Steps for building the {thing}, kit {code}, in the {room} with {person}?",
            "The kit {code} of the {thing} has arrived in the {room}. How do {person} and I start?",
            "Explain the assembly of kit {code}, {a_thing} for the {room}; {person} assists.",
        ),
        _g(
            "You need: kit {code}, a hex key, (a rubber mallet|a screwdriver) and a helper.",
            "Tools: a screwdriver, (wood glue|a hex key), a blanket and the kit {code}.",
        ),
        _steps(
            (
                "Unpack and count",
                "Unpack kit {code} in the {room} and count the (screws|boards) against the list.",
            ),
            (
                "Protect the floor",
                "Spread a blanket, so that neither the floor nor the {noun} gets "
                "(scratched|dented).",
            ),
            (
                "Lay out the parts",
                "Lay the parts of the {thing} (side by side|in the order of use) with the "
                "(drillings|labels) up.",
            ),
            (
                "Join the frame",
                "Join the (long|short) sides first. {person} holds them while you (turn|drive in) "
                "the screws (loosely|halfway).",
            ),
            (
                "Fit the back",
                "Slide the back panel into the groove and (knock|push) it home (gently|with the "
                "palm).",
            ),
            (
                "Square and tighten",
                "Measure both diagonals of the {noun}; (when they agree|if equal), tighten all "
                "screws.",
            ),
            (
                "Turn it upright",
                "Turn the {thing} upright together with {person}, (never over one leg|lifting at "
                "the base).",
            ),
            (
                "Move into place",
                "Move the {noun} to its place in the {room} and (level the feet|fix it to the "
                "wall).",
            ),
        ),
        frozenset({1, 4, 5}),
        _g(
            "Warning: the {noun} can (tip over|fall) until it is (fixed|tightened).",
            "Caution: (fingers|cables) can be (caught|pinched) between the boards.",
        ),
        _g(
            "The {thing} is complete when it stands (without rocking|firmly) and no parts are "
            "left.",
            "Finished: (re-tighten|check) the screws of the {thing} after (a week|a month).",
        ),
        ("thing", "code", "person"),
    ),
    HowTo(
        situations.repot,
        _ask(
            "How do I repot the {thing} in the {room} on {weekday}?",
            "The {thing} in the {room} has outgrown its pot. What do I do on {weekday}?",
            "Give me steps for repotting the {thing}. It lives in the {room}; I have time on "
            "{weekday}.",
            "Describe the repotting of the {thing} ({room}), planned for {weekday}.",
            "{weekday} is repotting day: how is the {thing} in the {room} done?",
            "What is the right way to move the {thing} in the {room} to a new pot this {weekday}?",
        ),
        _g(
            "You need: {soil}, a larger pot, (a trowel|a watering can) and old newspaper.",
            "Materials: {soil}, a clay pot, (pebbles|shards) and a watering can.",
        ),
        _steps(
            (
                "Water the day before",
                "Water the {thing} (the day before|a few hours before) {weekday}, so that the "
                "roots come out (whole|easily).",
            ),
            (
                "Cover the table",
                "Cover the table in the {room} with newspaper and (place|set) the new pot on it.",
            ),
            (
                "Lay the drainage",
                "Lay (pebbles|shards) over the hole and add (a hand's breadth|two fingers) of "
                "{soil}.",
            ),
            (
                "Lift out the {noun}",
                "(Tilt|Tap) the old pot and lift out the {noun} (by the root ball|with both "
                "hands).",
            ),
            (
                "Loosen the roots",
                "(Loosen|Tease) the outer roots and cut off (rotten|dry) ends with (clean|sharp) "
                "scissors.",
            ),
            (
                "Set it in",
                "Set the {noun} in the middle, fill up with {soil} and press (lightly|gently).",
            ),
            (
                "Water and drain",
                "Water the {noun} (well|slowly) and pour away what (runs through|stays in the "
                "saucer).",
            ),
            (
                "Choose the place",
                "Put the {thing} in {light} and water it {water} (from then on|after the first "
                "week).",
            ),
        ),
        frozenset({0, 1, 4}),
        _g(
            "Warning: (no fertiliser|no direct heat) in the first (month|weeks) after repotting.",
            "Caution: {a_noun} (rots|suffers) if its roots (stand in water|dry out).",
        ),
        _g(
            "The {thing} has settled when (new leaves|fresh shoots) appear.",
            "Success shows after (two|three) weeks: the {noun} (grows|stands upright).",
        ),
        ("thing", "soil", "light"),
    ),
    HowTo(
        situations.pack,
        _ask(
            "How do I pack the {thing} for {person}? It leaves on {weekday} with label {code}.",
            "The {thing} must go to {person} on {weekday}, label {code}. How is it packed?",
            "Explain the packing of the {thing}, shipment {code}, for {person}, pick-up {weekday}.",
            "Packing steps for {a_thing}: receiver {person}, label {code}, {weekday}?",
            "Write how to send the {thing} to {person} by {weekday} under number {code}.",
            "Shipment {code} to {person}, {weekday}: how should the {thing} be wrapped?",
        ),
        _g(
            "You need: a strong box, {padding}, (tape|string) and label {code}.",
            "Materials: {padding}, a box, (scissors|a marker), tape and the label {code}.",
        ),
        _steps(
            ("Check the {noun}", "Check that the {thing} is (clean|complete) and (dry|undamaged)."),
            (
                "Photograph the contents",
                "(Photograph|Note) the condition of the {noun} (from two sides|in good light) "
                "before it is (wrapped|closed in).",
            ),
            (
                "Choose the box",
                "Choose a box that is (three fingers|a hand) wider than the {noun} on (all|both) "
                "sides.",
            ),
            (
                "Wrap the {noun}",
                "Wrap the {thing} in {padding} (twice|in two layers) and (tape the ends|tie it).",
            ),
            (
                "Fill the gaps",
                "Fill all gaps with {padding} until nothing (rattles|moves) when you shake the "
                "box.",
            ),
            (
                "Close the box",
                "Close the box and tape (the seams|every edge) (crosswise|in the form of an H).",
            ),
            (
                "Attach the label",
                "Attach label {code} with the name {person} (on top|on the largest side) and "
                "(cross out|remove) old labels.",
            ),
            ("Hand it over", "Hand the box over on {weekday} and (keep|file) the receipt."),
        ),
        frozenset({1, 4}),
        _g(
            "Warning: (heavy|sharp) parts (belong at the bottom|must be covered).",
            "Caution: mark the box as fragile if (it may break|glass is inside).",
        ),
        _g(
            "The shipment is ready when {code} (is readable|can be scanned) and the box (is "
            "firm|does not give).",
            "Done: {person} (receives|gets) the {thing} under number {code}.",
        ),
        ("thing", "person", "code"),
    ),
)
