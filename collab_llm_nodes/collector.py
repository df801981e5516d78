"""The garbage collector of a process that serves for days."""

import gc


def look_at_new_things_only() -> None:
    """Call it once all that stays to the process's end is there: modules, models, nodes.

    Left to itself the collector goes through all of that each time, for as long as some passes of a
    model take, and therefore seldom: after as much as a quarter of it has come anew, the leftovers
    of thousands of answers.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # without it the collector would wait for a quarter of what there was
