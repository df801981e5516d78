"""The garbage collector of a process that serves for days."""

import gc


def freeze_startup_objects() -> None:
    """Exclude all objects alive now from garbage collection.

    To be called once everything long-lived is there: modules, models, nodes. Otherwise each full
    collection walks all of these objects, which takes as long as several passes of a model. And it
    runs rarely, only after the number of new objects reaches a quarter of the old ones, which are
    the leftovers of thousands of answers.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # resets the count of old objects, a quarter of which the collector waits for
