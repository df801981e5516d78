"""The interface of every chat model: many requests in, one reply or error for each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from collab_llm_nodes.config import check_max_tokens
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import CollabError, InvalidInput
from collab_llm_nodes.models.thoughts import answer_of
from collab_llm_nodes.models.turns import Turn


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
        quotable: text with the lines that the reply may quote. Models in this process then copy
            them exactly (``chat.quoting``); others take no notice.
    """

    turns: tuple[Turn, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_tokens: int = 256
    quotable: str = ""

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
        text: the answer without the model's thoughts; so far, where ``finish`` is not STOP; the
            server's words on a refusal.
        usage: None where a server does not tell it, as of a reply that its deadline cut off.
        attempts: requests that were sent to a server, the failed ones included.
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
        due: ``time.monotonic()`` by which the replies are wanted; may be infinite.
    """

    @property
    def due(self) -> float: ...

    def check(self) -> None:
        """Raise Cancelled if the caller has given the call up, DeadlineExceeded if it is late."""

    def on_cancel(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake`` called, from any thread, on cancel; return a function that undoes this."""


Told = Callable[[int, "Reply | CollabError"], None]
"""Takes the place of a request among those of its call, and its result."""


def tell_nobody(place: int, result: Reply | CollabError) -> None:
    """Do nothing."""


class ChatModel(Protocol):
    """A model that answers chats. Several threads may ask it at the same time."""

    @property
    def name(self) -> str:
        """Name of the model, as in a price table."""

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``, as many at a time as the model serves.

        Args:
            told: called with each result as it comes, in a thread of the model's, which it must
                not keep waiting; it must not raise either.

        Returns:
            For each request, in order, its reply, or the error that ended it. At the deadline, the
            unfinished ones are replies with ``Finish.DEADLINE`` and the text there is.

        Raises:
            Busy: the model has no room for so many requests.
            Cancelled: the caller gave them up.
            DeadlineExceeded: the deadline passed before the model was asked, or the model does not
                react to it.
            Unavailable: the model was closed.
        """

    def close(self) -> None:
        """Free what the model holds; calls of ``ask`` under way end with an error."""
