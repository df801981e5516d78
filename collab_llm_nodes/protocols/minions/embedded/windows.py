"""A small chat model made to read texts that are longer than its context, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from transformers import PreTrainedTokenizerBase

from collab_llm_nodes.chat.base import (
    ChatModel,
    ChatRequest,
    Control,
    Finish,
    Reply,
    Told,
    Usage,
    tell_nobody,
)
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn

OPENING, CLOSING = "### Text\n", "\n\n### Question\n"
"""Marks of the text in the prompts of Minion and of the models that answer alone."""
NOTHING = "None"
_COUNTED = 8
"""Characters, for each token of a window, up to which a line is counted as a whole."""


def token_count(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Return a function from a text to its number of tokens."""
    encode = tokenizer.backend_tokenizer.encode  # type: ignore[attr-defined]
    return lambda text: len(encode(text).ids)


class WindowedChat:
    """A ``chat.base.ChatModel`` that puts each request to every window of its text.

    The reply has a line for each window that answers, in the order of the text, and is "None" if no
    window does. Nothing is left out, but no answer can draw on two windows. Of a talk, a window
    sees the last message only: the model is too small to follow more.

    Args:
        model: reads one window; closed with this. Also the attribute ``reader``.
        count: returns the number of tokens of a text.
        tokens: length of a window. Requests with a shorter text are passed on as they are.
    """

    def __init__(self, model: ChatModel, count: Callable[[str], int], tokens: int = 640) -> None:
        self.reader = model
        self._count, self._tokens = count, tokens

    @property
    def name(self) -> str:
        return self.reader.name

    def ask(
        self, requests: Sequence[ChatRequest], control: Control, told: Told = tell_nobody
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        parts = [self._windowed(request, control) for request in requests]
        replies = iter(self.reader.ask([each for part in parts for each in part], control))
        results = [_joined([next(replies) for _ in part]) for part in parts]
        for place, result in enumerate(results):
            told(place, result)
        return results

    def close(self) -> None:
        """Close the model."""
        self.reader.close()

    def _windowed(self, request: ChatRequest, control: Control) -> list[ChatRequest]:
        """Return the request once for each window, or as it is if there is but one."""
        turns = request.turns
        place = next((i for i, turn in enumerate(turns) if OPENING in turn.content), None)
        if place is None:
            return [request]
        before, _, rest = turns[place].content.partition(OPENING)
        text, _, behind = rest.rpartition(CLOSING)
        windows = [*self._windows(text, control)]
        if len(windows) == 1:
            return [request]
        last = (turns[-1],) if place < len(turns) - 1 else ()
        return [
            replace(
                request,
                turns=(
                    Turn(turns[place].role, f"{before}{OPENING}{window}{CLOSING}{behind}"),
                    *last,
                ),
            )
            for window in windows
        ]

    def _windows(self, text: str, control: Control) -> Iterator[str]:
        """Yield whole lines of ``text``, as many as fit into a window, and overlong ones in parts.

        To count the tokens of a long text takes seconds, so they are counted part by part.
        """
        lines: list[str] = []
        used = 0
        for line in text.splitlines():
            for part, tokens in self._parts(line):
                control.check()
                if lines and used + tokens + 1 > self._tokens:
                    yield "\n".join(lines).strip()
                    lines, used = [], 0
                lines.append(part)
                used += tokens + 1
        yield "\n".join(lines).strip()

    def _parts(self, line: str) -> Iterator[tuple[str, int]]:
        """Yield ``line`` and its number of tokens, or those of parts that fit into a window."""
        waiting = [line]
        while waiting:
            part = waiting.pop()
            tokens = self._count(part) if len(part) <= _COUNTED * self._tokens else math.inf
            if tokens <= self._tokens or len(part) == 1:
                yield part, int(tokens)
                continue
            middle = len(part) // 2
            middle = part.rfind(" ", 1, middle) + 1 or middle
            waiting += [part[middle:], part[:middle]]


def _joined(replies: Sequence[Reply | CollabError]) -> Reply | CollabError:
    """Return the replies of all windows as one; the error, if one has failed."""
    whole: list[Reply] = []
    for reply in replies:
        if isinstance(reply, CollabError):
            return reply
        whole.append(reply)
    if len(whole) == 1:
        return whole[0]
    ended = [reply for reply in whole if reply.finish is Finish.STOP]
    texts = [reply.text.strip() for reply in ended]
    found = dict.fromkeys(text for text in texts if text and text.lower() != NOTHING.lower())
    usage = reduce(add, (reply.usage or Usage() for reply in whole))
    late = any(reply.finish is Finish.DEADLINE for reply in whole)
    finish = Finish.DEADLINE if late else Finish.STOP
    seconds = max(reply.seconds for reply in whole)
    return Reply("\n".join(found) or NOTHING, finish, usage, seconds=seconds)
