"""The common prefix of two contexts, which a KV cache of one holds for the other."""

from __future__ import annotations

Ids = tuple[int, ...]


def common_length(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix.

    A binary search over slices, which Python compares faster than single elements.
    """
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same
