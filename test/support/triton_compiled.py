"""Compile Triton's kernels for GPUs that are not here: it finds what the interpreter lets pass.

``python triton_compiled.py CAPABILITY`` with the number of a compute capability, such as 90, prints
the kernels, and the most shared memory that one of them takes [bytes].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from collab_llm_nodes.engine import triton_kernels as kernels
from collab_llm_nodes.engine.paged_pass import NO_TREE

_TYPES = {
    **dict.fromkeys(("count", "items", "pages", "limits", "lows", "bases", "words"), "*i32"),
    **dict.fromkeys(("parts", "positions", "slots"), "*i32"),
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **{"scale": "fp32", "epsilon": "fp32", "word_stride": "i32"},
}
_BYTES = {"bf16": 2, "fp32": 4}
_HEADS = {"bf16": ((7, 128), (4, 256), (3, 96), (1, 64)), "fp32": ((7, 128),)}
"""By type of numbers: query heads of a key head, and width, of Qwen2-VL-7B, Gemma 3, and others.

In float32 heads of 256 take 192 KiB of shared memory, which only an H100 has: elsewhere plain torch
takes the kernels' place.
"""


def forms(dtype: str) -> Iterator[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Yield the kernels' forms: each with its constants, and options of the compiler."""
    for shared, dim in _HEADS[dtype]:
        heads = {"HEADS": 4, "DIM": dim, "WIDE": triton.next_power_of_2(dim)}
        tiles = {**heads, "SHARED": shared, "TILE": 64}
        read = {**tiles, "TOKENS": 64 // shared, "PAGE": 64, "NO_TREE": NO_TREE}
        options = kernels.attend_options(dim * _BYTES[dtype])
        yield kernels._attend, {**read, "WINDOWED": True}, options
        yield kernels._join, {**tiles, "GROUP": triton.next_power_of_2(shared)}, {}
        if (shared, dim) == _HEADS[dtype][0]:
            yield kernels._attend, {**read, "WINDOWED": False}, options
            for rotates, norms in ((True, False), (True, True), (False, False)):
                own = {"QUERIES": 4 * shared, "PAGE": 64, "ROTATES": rotates, "NORMS": norms}
                yield kernels._rotate_and_write, {**heads, **own}, {"num_warps": 1}
    for switch in (False, True):
        yield kernels._add_norm, {"ADDS": switch, "WIDTH": 3584, "WIDE": 4096}, {"num_warps": 8}
        yield kernels._gate, {"SILU": switch, "WIDTH": 18944, "BLOCK": 1024}, {}


def shared_memory(
    kernel: Any, constants: Mapping[str, Any], options: Any, capability: int, dtype: str
) -> int:
    """Compile a kernel, and return the bytes of shared memory that it takes."""
    signature = {
        name: "constexpr" if name in constants else _TYPES.get(name, f"*{dtype}")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    return int(made.metadata.shared)


if __name__ == "__main__":
    taken = [
        shared_memory(*form, int(sys.argv[1]), dtype)
        for dtype in ("bf16", "fp32")
        for form in forms(dtype)
    ]
    print(len(taken), max(taken))
