"""The server of one protocol: ``protocol_server NAME`` runs the node ``NAME_server``.

It hosts the action ``NAME/generate`` for any protocol of ``protocols/registry.py``. A protocol with
more ROS interfaces has a node class of its own, which this program also starts. Only
``edge_cloud``, which needs further nodes, has another program, ``draft_vlm``.
"""

from __future__ import annotations

import sys

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols import registry
from collab_llm_nodes.ros.program import argument_parser, read_arguments, run
from collab_llm_nodes.ros.protocol_server import ProtocolServer

NODES = {
    "collective": "collab_llm_nodes.nodes.collective_server:CollectiveServer",
    "dragon": "collab_llm_nodes.nodes.dragon_server:DragonServer",
    "jupiter": "collab_llm_nodes.nodes.jupiter_server:JupiterServer",
    "minions": "collab_llm_nodes.nodes.minions_server:MinionsServer",
}
"""Node classes of protocols that offer more than the action, as ``module:Class``."""
_ELSEWHERE = ("edge_cloud",)
"""Protocols that this program cannot serve."""


def main() -> int:
    """Run the server of the protocol that the command line names."""
    parser = argument_parser(__doc__ or "")
    known = ", ".join(name for name in registry.PROTOCOLS if name not in _ELSEWHERE)
    parser.add_argument("protocol", metavar="NAME", help=f"the protocol: one of {known}")
    try:
        protocol = read_arguments(parser).protocol
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    return run(NODES.get(protocol, lambda: ProtocolServer(protocol)), args=sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
