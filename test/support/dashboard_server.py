"""A dashboard of a fake robot: in this process, or (run as a program) in one of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from collab_llm_nodes.dashboard.view import Motion, Snapshot

TOKEN = "a token that is long enough"


class FakeRobot:
    """The node as the web side sees it; remembers what it was asked for."""

    def __init__(self) -> None:
        self.stops = 0
        self.resets = 0
        self.confirmed = 0
        self.instructions: list[str] = []
        self.questions: list[str] = []
        self.documents: list[tuple[str, tuple[tuple[str, str], ...]]] = []
        self.cancels = 0
        self.picture = (0, b"")
        self.guarded = True  # motion_guard is there and obeys
        self.stopped: tuple[str, ...] = ("EMERGENCY_STOP",)  # its reasons then
        self.state = Motion(allowed=True, speed_limit=0.8)
        self.snapshot = Snapshot()

    def shown(self) -> Snapshot:
        return self.snapshot

    def frame(self) -> tuple[int, bytes]:
        return self.picture

    def motion(self) -> tuple[Motion | None, float]:
        return (self.state, 0.1) if self.guarded else (None, math.inf)

    def emergency_stop(self) -> int:
        self.stops += 1
        if self.guarded:
            self.state = Motion(emergency_stop=True, reasons=self.stopped, text="pressed")
        return int(self.guarded)

    def reset(self) -> Future[tuple[bool, str]]:
        self.resets += 1
        answer: Future[tuple[bool, str]] = Future()
        if self.guarded:
            self.state = Motion(allowed=True)
            answer.set_result((True, "reset"))
        else:
            answer.set_result((False, "motion_guard is not there"))
        return answer

    def instruct(self, instruction: str) -> None:
        self.instructions.append(instruction)

    def ask(self, question: str) -> None:
        self.questions.append(question)

    def confirm(self) -> None:
        self.confirmed += 1

    def ask_documents(self, question: str, documents: tuple[tuple[str, str], ...]) -> None:
        self.documents.append((question, documents))

    def is_stop(self, instruction: str) -> bool:
        return False

    def cancel(self) -> None:
        self.cancels += 1


class Server:
    """A dashboard of a fake robot, and requests to it."""

    def __init__(self, token: str = "", host: str = "127.0.0.1") -> None:
        from collab_llm_nodes.dashboard.server import DashboardServer

        self.robot = FakeRobot()
        self.served = DashboardServer(self.robot, host, 0, token, max_viewers=2, rate=10.0)
        self.own = f"127.0.0.1:{self.served.port}"

    def ask(
        self, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of one request; header names with _ for -."""
        link = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(link):
            link.request(method, path, body or None, given)
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def told(self, path: str, method: str = "GET") -> Any:
        """The JSON of an answer."""
        status, _, body = self.ask(path, method)
        assert status == 200
        return json.loads(body)


def main() -> None:
    """Serve until standard input ends; the first line of output is the port.

    Arguments: how many files may be open; how many of them to leave (-1: all); the token, if any.
    """
    files, left = int(sys.argv[1]), int(sys.argv[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    server = Server(token=sys.argv[3] if len(sys.argv) > 3 else "")
    server.robot.picture = (1, 1_000_000 * b"p")
    hoard: list[int] = []
    if left >= 0:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.open(os.devnull, os.O_RDONLY))
        for file in hoard[:left]:
            os.close(file)
    print(server.served.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
