"""Compile Triton's kernels for GPUs that are not here: it finds what the interpreter lets pass.

``python triton_compiled.py CAPABILITY`` with the number of a compute capability, such as 90.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from collab_llm_nodes.engine import triton_kernels as kernels
from collab_llm_nodes.engine.paged_pass import NO_TREE

_INTEGERS = dict.fromkeys(
    ("count", "items", "pages", "limits", "lows", "bases", "words", "parts", "positions", "slots"),
    "*i32",
)
_NUMBERS = {"scale": "fp32", "epsilon": "fp32", "word_stride": "i32", "sums": "*fp32"}
_NUMBERS["tops"] = "*fp32"
HEADS = {"HEADS": 4, "DIM": 128, "WIDE": 128}
SHARED = {**HEADS, "SHARED": 7, "TILE": 64}


def compile_all(capability: int, dtype: str) -> int:
    """Compile every kernel in each of its forms; return how many there are."""
    attend = {**SHARED, "TOKENS": 9, "PAGE": 64, "NO_TREE": NO_TREE}
    rotate = {**HEADS, "QUERIES": 28, "PAGE": 64}
    forms: list[tuple[Any, dict[str, Any]]] = [
        *((kernels._attend, {**attend, "WINDOWED": windowed}) for windowed in (False, True)),
        (kernels._join, {**SHARED, "GROUP": 8}),
        *(
            (kernels._rotate_and_write, {**rotate, "ROTATES": rotates, "NORMS": norms})
            for rotates, norms in ((True, False), (True, True), (False, False))
        ),
        *((kernels._add_norm, {"ADDS": x, "WIDTH": 3584, "WIDE": 4096}) for x in (False, True)),
        *((kernels._gate, {"SILU": x, "WIDTH": 18944, "BLOCK": 1024}) for x in (False, True)),
    ]
    for kernel, constants in forms:
        _compile(kernel, constants, capability, dtype)
    return len(forms)


def _compile(kernel: Any, constants: Mapping[str, Any], capability: int, dtype: str) -> None:
    types = {**_INTEGERS, **_NUMBERS}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]


if __name__ == "__main__":
    print(sum(compile_all(int(sys.argv[1]), dtype) for dtype in ("bf16", "fp32")))
