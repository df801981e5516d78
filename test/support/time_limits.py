"""Time limits of tests: a test that takes too long fails, and the others still run.

pytest-timeout's method ``signal`` (pyproject.toml) raises in the main thread, and its limit ends
with the first failure. These hooks, which conftest.py imports, add a limit for the teardown after
that, and end the run, with the stacks of all threads, where the main thread serves no signals.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

TEARDOWN_S = 60.0
"""Limit of the teardown after a test that failed."""

GRACE_S = 60.0
"""Time after which a limit that had no effect ends the run."""

_stderr: list[int] = []  # the real one, which pytest's capture hides
_settings = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real standard error."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        _stderr.append(os.dup(2))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Watch over a limit from its start."""
    item.stash[_settings] = settings
    faulthandler.dump_traceback_later(settings.timeout + GRACE_S, exit=True, file=_stderr[-1])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """End the watch with the limit."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Give the teardown a limit of its own where the test's has ended with its failure."""
    settings = item.stash.get(_settings, None)
    if settings is not None and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0:
        settings = settings._replace(timeout=TEARDOWN_S)
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)
