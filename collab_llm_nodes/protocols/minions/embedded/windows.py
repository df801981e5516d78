"""Windowed reading of texts that are longer than the context of a small chat model."""

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
    OnResult,
    Reply,
    Usage,
    ignore_result,
)
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts

NOTHING = "None"
_COUNTED = 8
"""Longest line that is counted as a whole, in characters per token of a window."""


def token_count(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Return a function from a text to its number of tokens."""
    encode = tokenizer.backend_tokenizer.encode  # type: ignore[attr-defined]
    return lambda text: len(encode(text).ids)


class WindowedChat:
    """``chat.base.ChatModel`` that asks each request about every window of its text.

    The reply has a line for each window that answers, in the order of the text, and is "None" if
    none does. No answer can combine two windows. Of a chat, a window gets only the last message,
    since the model is too small to follow more.

    Args:
        model: reads one window; closed with this. Also the attribute ``reader``.
        count: returns the number of tokens of a text.
        tokens: length of a window. Requests with a shorter text are passed on unchanged.
    """

    def __init__(self, model: ChatModel, count: Callable[[str], int], tokens: int = 640) -> None:
        self.reader = model
        self._count, self._tokens = count, tokens

    @property
    def name(self) -> str:
        return self.reader.name

    def ask(
        self,
        requests: Sequence[ChatRequest],
        control: Control,
        on_result: OnResult = ignore_result,
    ) -> list[Reply | CollabError]:
        """Answer ``requests``; see ``chat.base.ChatModel``."""
        parts = [self._windowed(request, control) for request in requests]
        replies = iter(self.reader.ask([each for part in parts for each in part], control))
        results = [_joined([next(replies) for _ in part]) for part in parts]
        for index, result in enumerate(results):
            on_result(index, result)
        return results

    def close(self) -> None:
        """Close the model."""
        self.reader.close()

    def _windowed(self, request: ChatRequest, control: Control) -> list[ChatRequest]:
        """Return the request once for each window of its text, or unchanged without a long text."""
        for place, turn in enumerate(request.turns):
            for template in (prompts.DIRECT, prompts.CHAT_LOCAL):
                values = prompts.read_back(template, turn.content, "context")
                if values is None:
                    continue
                windows = [*self._windows(values["context"], control)]
                if len(windows) == 1:
                    return [request]
                last = request.turns[-1:] if place < len(request.turns) - 1 else ()
                return [
                    replace(request, turns=(Turn(turn.role, content), *last))
                    for content in (
                        template.format(**{**values, "context": window}) for window in windows
                    )
                ]
        return [request]

    def _windows(self, text: str, control: Control) -> Iterator[str]:
        """Yield windows of whole lines of ``text``; overlong lines are divided.

        Tokens are counted line by line, since a long text takes seconds.
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
        """Yield ``line``, or parts of it that fit into a window, with their numbers of tokens."""
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
    """Return the replies of all windows as one, or the error of the first that failed."""
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
