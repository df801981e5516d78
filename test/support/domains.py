"""DDS domains of tests, none of which two processes of this machine use at the same time."""

from __future__ import annotations

import contextlib
import weakref

from collab_llm_nodes.ros.domain import own_domain


def hold_domain(user: object, first: int) -> int:
    """Return a domain that nobody else gets until ``user``, such as a context, is collected.

    A context that was shut down keeps its participant, with all services, until it is collected: in
    the same domain, the test of another process would find the servers of this one.
    """
    stack = contextlib.ExitStack()
    domain_id = stack.enter_context(own_domain(first))
    weakref.finalize(user, stack.close)
    return domain_id
