"""A mark of tests that need a link of packets."""

from __future__ import annotations

import pytest

from collab_llm_lab.bench.link.packets import why_not

needs_packets = pytest.mark.skipif(bool(why_not()), reason=why_not())
