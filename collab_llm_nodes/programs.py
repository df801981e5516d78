"""The functions that the console scripts (setup.cfg) start, each importing its module only then.

Imports take seconds. Ctrl-C meanwhile ends a program at once and without a traceback; nothing moves
and nothing is held yet. Each ``main()`` puts a handler of its own in place of this one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from collab_llm_nodes.ending import end_program


def _program(module: str, *arguments: str, function: str = "main") -> Callable[[], int]:
    """Return a console script that calls ``function`` of ``module`` with ``arguments``."""

    def start() -> int:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in a script's background
            signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
        status: object
        try:
            status = getattr(import_module(module), function)(*arguments)
        except SystemExit as end:
            status = end.code
        if isinstance(status, str):  # words for people, as sys.exit takes them
            print(status, file=sys.stderr)
        return end_program(status if isinstance(status, int) else int(bool(status)))

    return start


collab_llm = _program("collab_llm_nodes.cli")

camera_ingest = _program("collab_llm_nodes.nodes.camera_ingest")
cloud_verifier_bridge = _program("collab_llm_nodes.nodes.cloud_verifier_bridge")
dashboard = _program("collab_llm_nodes.nodes.dashboard")
# Named to be imported later: --help need not wait for torch.
draft_vlm = _program(
    "collab_llm_nodes.ros.program", "collab_llm_nodes.nodes.draft_vlm:DraftVlm", function="run"
)
generate_router = _program("collab_llm_nodes.nodes.generate_router")
go2_driver = _program("collab_llm_nodes.nodes.go2_driver")
graph = _program("collab_llm_nodes.nodes.graph")
instruct = _program("collab_llm_nodes.nodes.instruct")
markers = _program("collab_llm_nodes.nodes.markers")
motion = _program("collab_llm_nodes.nodes.motion")
motion_guard = _program("collab_llm_nodes.nodes.motion_guard")
motion_watchdog = _program("collab_llm_nodes.nodes.motion_watchdog")
navigation_action_parser = _program("collab_llm_nodes.nodes.navigation_action_parser")
navigator = _program("collab_llm_nodes.nodes.navigator")
predraft_cache = _program("collab_llm_nodes.nodes.predraft_cache")
protocol_server = _program("collab_llm_nodes.nodes.protocol_server")
recorder = _program("collab_llm_nodes.nodes.recorder")
sim_go2 = _program("collab_llm_nodes.nodes.sim_go2")
