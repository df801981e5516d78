"""Draws and proposals as lines of JSON: nothing is lost, and a prompt travels once."""

from __future__ import annotations

import json

import numpy as np

from collab_llm_nodes.decoding.sampling import Distribution, SamplingConfig, to_wire
from collab_llm_nodes.protocols.collective.messages import Ask, Draw, Proposal
from collab_llm_nodes.protocols.collective.wire import (
    asks_from_json,
    draw_to_json,
    line,
    proposals_from_json,
    proposals_to_json,
)

SAMPLING = SamplingConfig(0.7, top_k=5, top_p=0.9, seed=2**64 - 1, law="rejection")


def test_asks_arrive_as_they_were() -> None:
    known: set[str] = set()
    heard: dict[str, Ask] = {}
    first = Draw(1, 0, 2, (Ask("a", (1, 2), (), 4, SAMPLING, True),))
    later = Ask("a", (1, 2), (7, 8), 3, SAMPLING, True)
    second = Draw(2, 1, 2, (later, Ask("b", (9,), (), 1, SamplingConfig())))
    for draw in (first, second):
        text = line(draw_to_json(draw, known))
        assert text.endswith(b"\n")
        assert text.count(b"\n") == 1
        message = json.loads(text)
        assert (message["batch"], message["step"]) == (draw.batch, draw.step)
        assert asks_from_json(message, heard) == list(draw.asks)
    assert b'"prompt":[9]' in text
    assert b"[1,2]" not in text, "the prompt of a is known"


def test_proposals_arrive_bit_by_bit() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(50))
    q = (to_wire(Distribution.from_dense(p), 8), to_wire(Distribution.from_dense(p[::-1]), 50))
    sent = [Proposal((3, 4), q), None, Proposal(()), Proposal((5,))]
    found = proposals_from_json(json.loads(line({"rows": proposals_to_json(sent)}))["rows"])
    assert found == sent
