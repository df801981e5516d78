"""Draws and proposals as lines of JSON, between this process and those of the draft models.

A prompt and its sampling settings travel once. float32 probabilities survive the decimal form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from collab_llm_nodes.decoding.sampling import SamplingConfig, SparseDistribution
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Proposal


def line(message: Mapping[str, Any]) -> bytes:
    """Return ``message`` as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def draw_to_json(draw: Draw, known: set[str]) -> dict[str, Any]:
    """Return a draw, without the prompts and settings of requests in ``known``."""
    asks = []
    for ask in draw.asks:
        fields: dict[str, Any] = {"id": ask.id, "answer": ask.answer, "count": ask.count}
        if ask.id not in known:
            known.add(ask.id)
            fields["first"] = {
                "prompt": ask.prompt,
                "sampling": asdict(ask.sampling),
                "send_q": ask.send_q,
            }
        asks.append(fields)
    return {"batch": draw.batch, "step": draw.step, "model": draw.model, "asks": asks}


def asks_from_json(message: Mapping[str, Any], known: dict[str, Ask]) -> list[Ask]:
    """Return the asks of a draw; ``known`` stores one of each request."""
    asks = []
    for fields in message["asks"]:
        id, answer, count = fields["id"], tuple(fields["answer"]), fields["count"]
        if "first" in fields:
            first = fields["first"]
            sampling = SamplingConfig(**first["sampling"])
            known[id] = Ask(id, tuple(first["prompt"]), answer, count, sampling, first["send_q"])
        asks.append(replace(known[id], answer=answer, count=count))
    return asks


def proposals_to_json(proposals: Sequence[Proposal | None]) -> list[Any]:
    """Return proposals; None stays None."""
    return [
        None
        if each is None
        else {
            "tokens": each.tokens,
            "q": None
            if each.q is None
            else [(row.ids.tolist(), row.probs.tolist()) for row in each.q],
        }
        for each in proposals
    ]


def proposals_from_json(rows: Sequence[Any]) -> list[Proposal | None]:
    """Return the proposals that :func:`proposals_to_json` has encoded."""
    return [None if row is None else _proposal(row) for row in rows]


def _proposal(row: Mapping[str, Any]) -> Proposal:
    tokens = tuple(row["tokens"])
    if row["q"] is None:
        return Proposal(tokens)
    q = tuple(
        SparseDistribution(np.array(ids, np.int32), np.array(probs, np.float32))
        for ids, probs in row["q"]
    )
    return Proposal(tokens, q)
