"""Interface of every chat model: many requests in, one reply or error for each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import Busy, CollabError, InvalidInput
from collab_llm_nodes.models.guide import Guide
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.models.turns import Turn

MAX_JOBS = 1 << 14
"""Requests that a chat model accepts at a time: two answers of MinionS' 4 times 2,048 jobs."""


def check_jobs(held: int, more: int, most: int) -> None:
    """Check that a model which answers ``held`` requests may accept ``more``.

    Raises:
        Busy: they would be above ``most``.
    """
    if held + more > most:
        raise Busy(
            f"{held} requests are being answered, {more} more are too many",
            field="requests",
            remedy=f"ask at most {most} at a time",
        )


class Finish(str, Enum):
    """The reason why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    REFUSAL = "refusal"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Usage:
    """Tokens of one reply, or of several.

    Attributes:
        prefill: prompt tokens that were computed.
        cached: prompt tokens that were taken from a cache; the prompt has ``prefill + cached``.
        decode: tokens of the reply.
    """

    prefill: int = 0
    cached: int = 0
    decode: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prefill + other.prefill, self.cached + other.cached, self.decode + other.decode
        )


@dataclass(frozen=True)
class ChatRequest:
    """One question.

    Attributes:
        turns: the chat; the last turn is the user's.
        max_tokens: length limit of the reply [tokens].
        quotable: text whose lines the reply may quote. Models in this process then copy them
            exactly (``chat.quoting``); others ignore it.
        guide: limit on the reply's text. Models in this process keep to it. A server is asked for a
            JSON schema, unless it refuses such requests; other kinds are ignored there.
    """

    turns: tuple[Turn, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_tokens: int = 256
    quotable: str = ""
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if not self.turns or self.turns[-1].role != "user":
            raise InvalidInput(
                "the last turn is not the user's", field="turns", remedy="end with a user's turn"
            )
        check_max_tokens(self.max_tokens)


@dataclass(frozen=True)
class Reply:
    """The answer to one request.

    Attributes:
        text: the answer without the model's reasoning; partial if ``finish`` is not STOP; the
            server's message on a refusal.
        usage: None if the server did not report it, as for a reply cut off by its deadline.
        attempts: requests that were sent to a server, failed ones included.
        seconds: time from the call to this reply [s].
    """

    text: str
    finish: Finish
    usage: Usage | None = None
    attempts: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", answer_of(self.text))


class Control(Protocol):
    """Deadline and cancellation of a call, such as ``protocols.base.Control``.

    Attributes:
        due: deadline on the clock of ``time.monotonic()``; may be infinite.
    """

    @property
    def due(self) -> float: ...

    def check(self) -> None:
        """Raise Cancelled or DeadlineExceeded if the call should end."""

    def on_cancel(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Register ``wake``, called from any thread on cancel; return its removal."""


OnResult = Callable[[int, "Reply | CollabError"], None]
"""Called with the index of a request in its call, and its result."""


def ignore_result(index: int, result: Reply | CollabError) -> None:
    """Do nothing with a result."""


class ChatModel(Protocol):
    """A model that answers chats. Several threads may ask it at the same time."""

    @property
    def name(self) -> str:
        """Name of the model, as in a price table."""

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``, as many at a time as the model serves.

        Args:
            on_result: called with each result as it arrives, in a thread of the model; it must not
                block or raise.

        Returns:
            For each request, in order, its reply or the error that ended it. At the deadline,
            unfinished requests give replies with ``Finish.DEADLINE`` and their partial text.

        Raises:
            Busy: the model has no room for so many requests.
            Cancelled: the caller cancelled the call.
            DeadlineExceeded: the deadline passed before the model was asked, or the model does not
                react to it.
            Unavailable: the model was closed.
        """

    def close(self) -> None:
        """Free the model's resources; running calls of ``ask`` end with an error."""


def ask_in_turn(
    requests: Sequence[ChatRequest],
    control: Control,
    on_result: OnResult,
    reply: Callable[[ChatRequest], Reply],
    *refusals: type[CollabError],
) -> list[Reply | CollabError]:
    """Answer ``requests`` one by one, as a model does that computes no batches.

    Args:
        reply: answers one request.
        refusals: errors of ``reply`` that are the result of its request; others end the call.
    """
    results: list[Reply | CollabError] = []
    for index, request in enumerate(requests):
        control.check()
        try:
            results.append(reply(request))
        except refusals as error:
            results.append(error)
        on_result(index, results[-1])
    return results
