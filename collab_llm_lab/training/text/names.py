"""Word lists of the robot's world. A tenth of each open list is held out of training."""

from __future__ import annotations

import zlib
from collections.abc import Iterable


def is_held_out(text: str) -> bool:
    """Return True for the tenth of all names, codes and pairs that training never shows."""
    return zlib.crc32(text.encode()) % 10 == 0


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Split:
    """A list in two parts: `parts[False]` for training, `parts[True]` held out."""

    def __init__(self, items: str | Iterable[str]) -> None:
        listed = items.split() if isinstance(items, str) else list(items)
        self.parts = {
            False: tuple(item for item in listed if not is_held_out(item)),
            True: tuple(item for item in listed if is_held_out(item)),
        }


FIRST_NAMES = Split(
    "Ada Adam Agnes Alan Albert Alice Alma Amir Amy Ana Andre Anna Anton Arthur Astrid Aya Basil "
    "Beatrice Ben Bertha Boris Bruno Carla Carlos Cecil Celine Chen Clara Claude Conrad Cora Daisy "
    "Daniel Daria David Delia Dennis Diego Dina Dora Edgar Edith Elena Eli Elisa Ella Emil Emma "
    "Enzo Erik Esther Ethan Eva Fatima Felix Fiona Flora Frank Frida Gemma George Gina Gloria "
    "Grace "
    "Greta Gustav Hana Hanna Harold Hassan Hazel Hector Helen Henry Hugo Ian Ida Igor Ines Ingrid "
    "Irene Iris Isaac Ivan Jack Jacob Jade James Jane Jasper Joan Joel Jonas Jorge Josef Judith "
    "Julia Kai Karim Karl Kate Kenji Klara Lara Laura Lea Leo Lewis Lily Linda Lola Louis Lucas "
    "Lucy Luis Lydia Mabel Magda Malik Marco Maria Mark Marta Martin Mary Max Maya Mei Mia Milan "
    "Mila Mona Nadia Nathan Nelly Nico Nina Noah Nora Olga Oliver Omar Oscar Otto Owen Pablo Paul "
    "Paula Pedro Peter Petra Philip Priya Rafael Ralph Ravi Rebecca Rita Robert Rosa Ruben Ruth "
    "Salma Sam Samir Sara Sasha Selma Simon Sofia Stella Stefan Sven Tara Theo Thomas Tilda Tim "
    "Tina Tom Uma Vera Victor Viola Walter Wendy Yara Yusuf Zoe"
)
FAMILY_NAMES = Split(
    "Abbott Adler Alvarez Archer Baker Barnes Becker Bell Bennett Berg Bishop Blake Bloom Bond "
    "Brandt Brooks Bryant Burke Burns Byrne Calder Carey Carter Castro Chandler Chase Clarke Cole "
    "Collins Conway Cooper Costa Crane Cruz Curtis Dalton Davies Dean Delgado Diaz Dixon Doyle "
    "Drake Duncan Dunn Eaton Edwards Ellis Evans Falk Farrell Ferrari Fischer Fleming Fletcher "
    "Flores Ford Foster Fox Frost Fuller Garcia Gardner Gibson Gill Gomez Goodwin Gordon Grant "
    "Graves Greene Griffin Haas Hale Hardy Harper Harris Hart Hayes Heller Henson Herrera Hill "
    "Hobbs Holt Hopkins Horn Howell Hughes Hunt Ibsen Jansen Jensen Jones Joyce Kane Keller Kemp "
    "Kent Kim King Klein Knight Koch Kumar Lambert Lane Larsen Lawson Lee Lind Little Logan Lopez "
    "Lowe Lund Lynch Marsh Mason Mendez Meyer Miles Miller Mills Mora Moreau Morgan Moss Murphy "
    "Nash Neal Newman Nolan Norris Novak Olsen Ortega Owens Page Palmer Park Parker Patel Payne "
    "Pearce Pena Perry Porter Potter Powell Price Quinn Ramos Reed Reyes Rhodes Rivera Rossi Rowe "
    "Ryan Salazar Sato Schmidt Sharp Shaw Silva Singh Snow Soto Stein Stone Tanaka Tate Taylor "
    "Torres Tucker Turner Vance Vargas Vega Wagner Walsh Ward Watts Weaver Webb Weiss West Wolf "
    "Wright Yates Young Zimmer"
)
ROBOT_NAMES = Split(
    "Pip Rolo Bolt Dot Tiko Zuri Nimo Bento Kiko Pixel Rusty Momo Luma Orbit Scout Ziggy Tofu "
    "Mopsy Bumble Chip Jojo Koda Lumo Nibs Pogo Quill Rumba Sprig Taro Vivo Wisp Yoyo Zeno Astro "
    "Biscuit Cosmo Dizzy Echo Fidget Gizmo"
)
ONSETS = _list("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t tr v w y z")
VOWELS = _list("a e i o u ai ea ei ia io oo")
ENDINGS = _list("n l r s m th ck nd ra la no ta vik son ley dan mir ska ber ton rin sel")

COLOURS = _list(
    "red blue green yellow white black grey brown orange purple pink silver golden beige "
    "turquoise violet navy cream maroon olive"
)
WEEKDAYS = _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _list(
    "January February March April May June July August September October November December"
)

DIRECTIONS = (
    "on the far left",
    "on the left",
    "straight ahead",
    "on the right",
    "on the far right",
)
DISTANCES = ("very close", "close", "near", "some way off", "distant")
"""The words of the navigation models for what they see."""

ROOMS = _list(
    "kitchen pantry bathroom bedroom hallway garage cellar attic office library workshop studio "
    "laundry nursery veranda greenhouse garden terrace lobby storeroom corridor classroom archive "
    "laboratory canteen showroom balcony playroom dining-room living-room"
)
ROOM_SIDES = _list("north south east west upper lower old new front back small large")
PLACES = _list(
    "shelf drawer cupboard table desk bench windowsill cabinet basket box chest rack hook counter "
    "stool locker trolley crate sideboard wardrobe"
)
PLACE_WORDS = {"drawer": "in", "cupboard": "in", "cabinet": "in", "basket": "in", "box": "in"}
PLACE_WORDS |= {"chest": "in", "locker": "in", "crate": "in", "wardrobe": "in"}

# Things by class, with the materials that the class is made of.
THINGS = {
    "kitchenware": (
        "mug plate bowl kettle teapot pan jug ladle tray spoon knife bottle jar grater saucer",
        "steel glass ceramic wooden copper plastic",
    ),
    "tool": (
        "hammer wrench drill saw screwdriver ladder toolbox chisel brush bucket clamp lamp shovel "
        "mallet torch",
        "steel plastic wooden rubber iron",
    ),
    "textile": (
        "towel blanket coat scarf curtain cushion apron jacket hat glove rug bag sweater pillow",
        "woollen cotton linen leather silk",
    ),
    "device": (
        "radio camera phone tablet charger keyboard speaker scanner printer laptop clock headset "
        "router projector fan",
        "plastic steel aluminium",
    ),
    "paper": (
        "book letter folder notebook parcel map calendar envelope magazine manual poster diary",
        "paper leather cardboard",
    ),
    "toy": (
        "ball puzzle kite doll puppet drum whistle train robot-dog teddy",
        "wooden plastic rubber cloth",
    ),
    "plant": ("fern cactus orchid rose ivy palm lemon-tree basil tulip", "potted young tall"),
    "furniture": (
        "chair table stool shelf bench cupboard desk wardrobe dresser bookcase",
        "oak pine steel plastic wicker",
    ),
}
SUPPLIES = _list(
    "candle battery bulb napkin towel plate cup screw bolt nail sponge brush filter glove bag "
    "bottle can jar box cable fuse hose bracket hinge pencil folder envelope tile plug switch "
    "blanket cushion lamp bucket mop"
)
_PLURALS = {"battery": "batteries", "brush": "brushes", "box": "boxes", "switch": "switches"}

EVENTS = _list(
    "meeting interview lunch concert lesson appointment rehearsal dinner inspection workshop "
    "delivery training picnic exam call party class visit match film"
)
JOBS = _list(
    "gardener electrician plumber cook teacher nurse accountant carpenter librarian driver painter "
    "cleaner technician secretary doctor baker tailor guard manager courier"
)
MACHINES = _list(
    "pump boiler fan heater lift freezer oven dishwasher dryer generator compressor furnace "
    "printer router alarm sprinkler ventilator washer projector charger"
)
PARTS = _list(
    "filter belt seal valve fuse motor bearing sensor nozzle gasket hose battery coil bracket "
    "spring cable hinge wheel relay gear"
)


def plural(noun: str) -> str:
    """Return the plural of one of the supplies."""
    return _PLURALS.get(noun, noun + "s")


def with_article(noun: str) -> str:
    """Return `noun` with "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
