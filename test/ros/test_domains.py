"""The DDS domains of tests."""

from __future__ import annotations

import gc

from domains import hold_domain

from collab_llm_nodes.ros.domain import DOMAINS, own_domain


class Context:
    """A context that was shut down, and is still known to somebody."""


def returns(first: int) -> bool:
    """Return True if a domain is taken as long as its context lives, and free afterwards."""
    context = Context()
    domain = hold_domain(context, first)
    with own_domain(DOMAINS.index(domain)) as other:
        assert other != domain
    del context
    gc.collect()
    with own_domain(DOMAINS.index(domain)) as again:
        return again == domain


def test_a_domain_is_not_given_away_while_a_context_may_still_be_heard_in_it() -> None:
    assert any(map(returns, range(40, 45))), "taken by other processes, five times over"
