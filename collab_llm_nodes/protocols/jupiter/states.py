"""Hidden states as bytes for the link between two workers, in one of three forms.

| form | bytes per number | error |
| --- | --- | --- |
| float32 | 4 | none |
| float16 | 2 | relative 2**-11 |
| int8 | 1, and 4 per row | 1/254 of the row's largest number |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from collab_llm_nodes.errors import ModelError, ProtocolError


def pack(states: Tensor, form: str) -> bytes:
    """Return hidden states [rows, width] as bytes, little endian.

    Raises:
        ModelError: they are not finite, or exceed the range of ``form``.
    """
    rows = states.detach().to("cpu", torch.float32)
    if not bool(rows.isfinite().all()):
        raise ModelError(
            "the hidden states are not finite",
            field="model.dtype",
            remedy="use float32 or bfloat16",
        )
    if form == "float16":
        rows = rows.half()
        if not bool(rows.isfinite().all()):
            raise ModelError(
                "hidden states exceed the range of float16",
                field="states",
                remedy="set it to float32",
            )
    if form != "int8":
        return rows.contiguous().numpy().tobytes()
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    whole = (rows / scale).round_().to(torch.int8)
    return scale.numpy().tobytes() + whole.numpy().tobytes()


def unpack(data: bytes, rows: int, width: int, form: str) -> Tensor:
    """Return the hidden states [rows, width], float32.

    Raises:
        ProtocolError: the number of bytes is wrong, or the states are not finite.
    """
    expected = packed_bytes(rows, width, form)
    if len(data) != expected:
        raise ProtocolError(
            f"{len(data)} bytes of hidden states, not {expected}",
            field="states",
            remedy="use the same form and model on all workers",
        )
    shape = (rows, width)
    if form == "int8":
        scale = np.frombuffer(data, "<f4", rows)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            found = np.frombuffer(data, np.int8, offset=4 * rows).reshape(shape) * scale
    else:
        kind = "<f2" if form == "float16" else "<f4"
        found = np.frombuffer(data, kind).reshape(shape).astype(np.float32)
    states = torch.from_numpy(found)
    if not bool(states.isfinite().all()):
        raise ProtocolError("hidden states are not finite", field="states")
    return states


def packed_bytes(rows: int, width: int, form: str) -> int:
    """Return the bytes of hidden states [rows, width] on the wire."""
    if form == "int8":
        return rows * (width + 4)
    return rows * width * (2 if form == "float16" else 4)
