"""A mark of tests that need a link of packets."""

from __future__ import annotations

import pytest

from collab_llm_lab.bench.link.packets import unavailable_reason

needs_packets = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
