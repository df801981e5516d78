"""A toy protocol: says the prompt back, word by word. A folder; its line is the test's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collab_llm_nodes.config import ANY, check_ranges, setting
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.metrics import GenerationMetrics
from collab_llm_nodes.protocols.base import Answer, Control, Entry, Progress, Request, Resources


@dataclass(frozen=True)
class EchoConfig:
    """Knobs of the echo."""

    pause_s: float = setting(0.0, "Before each word [s].", low=0.0, high=60.0, per_request=ANY)
    shout: bool = setting(False, "In capital letters.", per_request=ANY)
    voices: int = setting(1, "Answers at a time.", low=1, high=8)

    def __post_init__(self) -> None:
        check_ranges(self)


class Echo:
    """The echo, running."""

    def __init__(self, config: EchoConfig, resources: Resources) -> None:
        self.parallel = config.voices

    def run(self, request: Request, emit: Callable[[Progress], None], control: Control) -> Answer:
        """Say the prompt back; between words it can be cancelled."""
        config: EchoConfig = request.config
        given_up = threading.Event()
        forget = control.on_cancel(given_up.set)
        words, said = request.prompt.split(" "), Progress()
        words += [f"[{document.name}: {document.content}]" for document in request.documents]
        try:
            for i, word in enumerate(words, 1):
                given_up.wait(min(config.pause_s, max(0.0, control.due - time.monotonic())))
                control.check()
                told = f"{said.text} {word.upper() if config.shout else word}".lstrip(" ")
                metrics = GenerationMetrics(rounds=i, total_s=time.monotonic() - request.asked_at)
                said = Progress(told, stage="echo", share_done=i / len(words), metrics=metrics)
                emit(said)
        finally:
            forget()
        if "crash" in words:
            raise RuntimeError("as asked")
        return Answer(**vars(said))

    def health(self) -> Mapping[str, object]:
        """Return how many answers it gives at a time."""
        return {"voices": self.parallel}

    def close(self) -> None:
        """Free nothing."""


def _check(request: Request) -> None:
    if not request.prompt:
        raise InvalidInput("is empty", field="prompt", remedy="say something")


ENTRY = Entry(
    "echo",
    EchoConfig,
    Echo,
    takes=frozenset({"chat", "documents"}),
    check=_check,
    service="EdgeCloudGenerate",  # borrowed: a type of its own would be a file in srv/
)
