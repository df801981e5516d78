"""Things to be done: materials, dirt, machines, dishes, walls and plants.

Which tool or place is right follows from tables that a model can learn. Each function draws one
situation: the fields of its sentences, and the numbers that decide how it is told.
"""

from __future__ import annotations

import zlib

from collab_llm_lab.training.text import names
from collab_llm_lab.training.text.world import World

Situation = tuple[dict[str, str], tuple[int, ...]]

# How each dirt is removed: agent, tool, waiting time.
_DIRT = {
    "dust": ("lukewarm water", "microfibre cloth", "one minute"),
    "grease": ("dish soap", "sponge", "five minutes"),
    "limescale": ("diluted vinegar", "soft brush", "twenty minutes"),
    "mud": ("clear water", "stiff brush", "ten minutes"),
    "rust": ("lemon juice and salt", "steel wool", "half an hour"),
    "ink": ("rubbing alcohol", "cotton pad", "two minutes"),
    "wax": ("hot water", "plastic scraper", "three minutes"),
    "coffee stains": ("baking soda paste", "damp cloth", "fifteen minutes"),
    "soot": ("washing soda", "paper towel", "ten minutes"),
    "glue": ("warm cooking oil", "wooden spatula", "forty minutes"),
}
# What each material must not meet, and how it is dried.
_MATERIAL = {
    "steel": ("scouring powder", "polish along the grain"),
    "glass": ("sudden heat", "buff with newspaper"),
    "ceramic": ("hard knocks", "wipe with a dry cloth"),
    "wooden": ("standing water", "let it dry in the air"),
    "copper": ("chlorine", "rub with a soft rag"),
    "plastic": ("boiling water", "shake off the drops"),
    "iron": ("long soaking", "dry at once and oil thinly"),
    "aluminium": ("strong lye", "wipe in circles"),
    "leather": ("soaking", "rub in a little balm"),
    "rubber": ("oil and petrol", "dust with talcum"),
    "oak": ("wet rags", "oil along the grain"),
    "pine": ("coarse sandpaper", "wax lightly"),
    "wicker": ("high pressure", "dry in the shade"),
}
_CLEANED = {
    "steel": "kettle sink tray pan ladle shelf locker",
    "glass": "vase jug bowl tabletop jar door",
    "ceramic": "plate mug basin tile teapot saucer",
    "wooden": "table spoon chest drawer chair floor",
    "copper": "pan kettle pot pipe jug lamp",
    "plastic": "bin crate chair bottle box stool",
    "iron": "railing pan grate stove hook gate",
    "aluminium": "ladder frame tray case rail",
    "leather": "chair bag sofa glove saddle",
    "rubber": "mat boot hose wheel seal",
    "oak": "desk table bench door sideboard",
    "pine": "shelf bed stool chest wardrobe",
    "wicker": "basket chair stool lampshade",
}
_FIX = {
    "pump": ("shut the inlet valve", "a steady flow"),
    "boiler": ("let the water cool down", "an even blue flame"),
    "fan": ("stop the blades by hand", "a quiet spin"),
    "heater": ("wait until the ribs are cold", "slowly rising warmth"),
    "freezer": ("move the food to a cool box", "a low hum"),
    "oven": ("open the door and let it cool", "a glowing coil"),
    "dishwasher": ("close the water tap", "a dry floor"),
    "dryer": ("empty the drum", "a smooth turn"),
    "generator": ("close the fuel cock", "a regular beat"),
    "compressor": ("release the pressure", "a stable gauge"),
    "printer": ("take out the paper", "a clean test page"),
    "alarm": ("inform the guard", "a green lamp"),
    "sprinkler": ("drain the pipe", "a fine spray"),
    "ventilator": ("cover the duct", "a soft breeze"),
    "washer": ("let the water out", "a calm rinse"),
    "projector": ("let the bulb cool", "a sharp picture"),
}
_PART = {
    "filter": ("two clips", "slide it along the rails"),
    "belt": ("the tension screw", "lay it over both wheels"),
    "seal": ("the clamping ring", "press it in all around"),
    "valve": ("the union nut", "turn it in by hand first"),
    "fuse": ("the glass cap", "push it in until it clicks"),
    "motor": ("four mounting screws", "set it square on the base"),
    "bearing": ("the circlip", "tap it in with a wooden block"),
    "sensor": ("the small plug", "point it to the front"),
    "nozzle": ("the sleeve", "screw it in finger-tight"),
    "gasket": ("six flange bolts", "lay it flat without folds"),
    "hose": ("both hose clips", "push it on with a little soap"),
    "battery": ("the minus lead", "set plus on plus"),
    "coil": ("the cable lugs", "centre it in the holder"),
    "bracket": ("the long bolts", "align it with a level"),
    "spring": ("the locking pin", "hook it in with pliers"),
    "relay": ("the retaining bar", "press it into the socket"),
    "gear": ("the hub cap", "grease the teeth"),
}
_DISHES = {
    "tomato soup": ("tomatoes, onions and stock", "simmer", "basil", "a deep pot"),
    "potato pancakes": ("potatoes, eggs and flour", "fry", "chives", "a wide pan"),
    "vegetable curry": ("carrots, peas and coconut milk", "stew", "ginger", "a heavy pan"),
    "apple cake": ("apples, butter and sugar", "bake", "cinnamon", "a round tin"),
    "cheese omelette": ("eggs, milk and cheese", "fry", "pepper", "a coated pan"),
    "bean salad": ("beans, onions and vinegar", "marinate", "parsley", "a large bowl"),
    "fish pie": ("fish, potatoes and leeks", "bake", "dill", "an oven dish"),
    "mushroom rice": ("rice, mushrooms and stock", "simmer", "thyme", "a flat pot"),
    "oat cookies": ("oats, honey and butter", "bake", "nutmeg", "a baking sheet"),
    "lentil stew": ("lentils, carrots and stock", "stew", "cumin", "a tall pot"),
    "plum jam": ("plums, sugar and lemon juice", "boil", "vanilla", "a wide pot"),
    "noodle bake": ("noodles, ham and cream", "bake", "nutmeg", "a greased dish"),
}
_HEAT = {
    "simmer": ("low heat", "twenty minutes", "small bubbles rise"),
    "fry": ("medium heat", "eight minutes", "both sides are golden"),
    "stew": ("gentle heat", "half an hour", "everything is soft"),
    "bake": ("two hundred degrees", "forty minutes", "the top is brown"),
    "marinate": ("room temperature", "one hour", "the taste has settled"),
    "boil": ("high heat", "fifteen minutes", "the mass thickens"),
}
_ROBOT_PARTS = {
    "wheels": ("hair and threads", "tweezers", "both wheels turn freely"),
    "camera": ("fingerprints", "lens cloth", "the picture is sharp"),
    "laser scanner": ("dust on the ring", "air blower", "the map has no gaps"),
    "gripper": ("sticky crumbs", "moist wipe", "the fingers close evenly"),
    "charging contacts": ("grey film", "glass-fibre pen", "charging starts at once"),
    "bumper": ("grit in the gap", "flat brush", "each push is felt"),
    "vacuum inlet": ("fluff and sand", "crevice tool", "the suction is full again"),
    "microphone": ("lint on the mesh", "soft toothbrush", "each word is understood"),
    "leg joints": ("old grease", "lint-free rag", "the gait is smooth"),
    "speaker": ("dust in the grille", "dry brush", "the voice is clear"),
}
_WALLS = {
    "brick": ("a hammer drill", "a nylon plug", "drill slowly in the joint-free part"),
    "concrete": ("a rotary hammer", "a steel anchor", "drill with full hammer"),
    "plaster": ("a hand drill", "a spreading plug", "drill without hammer"),
    "wood": ("a cordless screwdriver", "a wood screw", "drill a thin pilot hole"),
    "tile": ("a tile bit", "a nylon plug", "drill on crossed tape"),
    "drywall": ("a cordless drill", "a cavity fixing", "drill beside the stud"),
}
_HUNG = ("mirror", "shelf", "clock", "lamp", "rack", "cabinet", "poster")
_SOIL = {
    "fern": ("peat-free soil", "shade", "twice a week"),
    "cactus": ("sandy soil", "full sun", "twice a month"),
    "orchid": ("bark chips", "bright shade", "once a week"),
    "rose": ("rich loam", "morning sun", "every other day"),
    "ivy": ("plain compost", "half shade", "once a week"),
    "palm": ("loose soil", "bright light", "every three days"),
    "lemon-tree": ("citrus soil", "full sun", "every other day"),
    "basil": ("herb soil", "a warm window", "every day"),
    "tulip": ("light soil", "cool light", "every four days"),
}


def key(text: str) -> int:
    """Return a small number that stands for `text` among the keys of a voice."""
    return zlib.crc32(text.encode()) % 64


def clean(world: World) -> Situation:
    dirt, material = world.any(tuple(_DIRT)), world.any(tuple(_MATERIAL))
    noun = world.any(_CLEANED[material].split())
    agent, tool, wait = _DIRT[dirt]
    enemy, finish = _MATERIAL[material]
    fields = {"dirt": dirt, "thing": f"{material} {noun}", "noun": noun, "agent": agent}
    fields |= {"tool": tool, "a_tool": names.with_article(tool), "wait": wait, "enemy": enemy}
    return fields | {"finish": finish, "room": world.room()}, (key(dirt), key(material))


def replace(world: World) -> Situation:
    machine, part = world.any(tuple(_FIX)), world.any(tuple(_PART))
    prepare, sign = _FIX[machine]
    hold, insert = _PART[part]
    fields = {"machine": machine, "part": part, "prepare": prepare, "sign": sign, "hold": hold}
    fields |= {"insert": insert, "code": world.code(), "room": world.room()}
    return fields, (key(machine), key(part))


def cook(world: World) -> Situation:
    dish = world.any(tuple(_DISHES))
    ingredients, way, spice, vessel = _DISHES[dish]
    heat, time, sign = _HEAT[way]
    guests = world.whole(2, 12)
    fields = {"dish": dish, "ingredients": ingredients, "way": way, "spice": spice, "heat": heat}
    fields |= {"vessel": vessel, "time": time, "sign": sign, "guests": str(guests)}
    fields |= {"person": world.first_name(), "first": ingredients.split(",")[0]}
    return fields, (key(dish), guests)


def robot(world: World) -> Situation:
    part = world.any(tuple(_ROBOT_PARTS))
    soil, tool, sign = _ROBOT_PARTS[part]
    room = world.room()
    weekday = world.weekday()
    fields = {"part": part, "soil": soil, "tool": tool, "a_tool": names.with_article(tool)}
    fields |= {"sign": sign, "robot": world.robot(), "room": room, "weekday": weekday}
    if tool == "tweezers":
        fields["a_tool"] = "tweezers"
    return fields, (key(part), names.WEEKDAYS.index(weekday))


def hang(world: World) -> Situation:
    wall = world.any(tuple(_WALLS))
    drill, plug, how = _WALLS[wall]
    colour, thing = world.colour(), world.any(_HUNG)
    fields = {"wall": wall, "drill": drill, "plug": plug, "how": how, "noun": thing}
    fields |= {"thing": f"{colour} {thing}", "room": world.room()}
    return fields, (key(wall), key(thing))


def assemble(world: World) -> Situation:
    thing = world.thing("furniture")
    fields = {"thing": thing.name, "noun": thing.noun, "room": world.room(), "code": world.code()}
    return fields | {"person": world.first_name()}, (key(thing.noun), key(thing.name.split()[0]))


def repot(world: World) -> Situation:
    thing = world.thing("plant")
    soil, light, water = _SOIL[thing.noun]
    weekday = world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "soil": soil, "light": light}
    fields |= {"water": water, "room": world.room(), "weekday": weekday}
    return fields, (key(thing.noun), names.WEEKDAYS.index(weekday))


def pack(world: World) -> Situation:
    kind = world.any(("kitchenware", "device", "toy", "paper"))
    thing, weekday = world.thing(kind), world.weekday()
    fields = {"thing": thing.name, "noun": thing.noun, "person": world.person().name}
    fields |= {"code": world.code(), "weekday": weekday, "padding": _PADDING[kind]}
    return fields, (key(kind), names.WEEKDAYS.index(weekday))


_PADDING = {
    "kitchenware": "crumpled paper",
    "device": "bubble wrap",
    "toy": "tissue paper",
    "paper": "stiff cardboard",
}


_TABLES = (_DIRT, _MATERIAL, _FIX, _PART, _DISHES, _HEAT, _ROBOT_PARTS, _WALLS, _SOIL)
WORDS = (
    *(text for table in _TABLES for name, row in table.items() for text in (name, *row)),
    *_PADDING.values(),
)
"""All names and values that the tables give to answers."""
