"""A link that can be made slow, narrow, lossy, dead or undead: for benchmarks and tests.

``LinkProxy`` emulates one TCP link in user space, without privileges. ``PacketLink`` emulates the
IP packets themselves between two network namespaces, and needs CAP_SYS_ADMIN (root).
"""

from collab_llm_lab.bench.link.lane import LinkProfile
from collab_llm_lab.bench.link.packets import PacketLink
from collab_llm_lab.bench.link.proxy import LinkProxy

__all__ = ["LinkProfile", "LinkProxy", "PacketLink"]
