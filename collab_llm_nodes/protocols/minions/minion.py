"""Minion: the two models chat until the remote can answer (paper 000, section 4, appendix D.1).

Only the local model reads the text. By the protocol, all its words go to the remote, unfiltered.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from collab_llm_nodes.errors import Cancelled, CollabError, ModelError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.dialogue import ask_until_readable, check_input
from collab_llm_nodes.protocols.minions.messages import (
    Action,
    AskLocal,
    AskRemote,
    Kind,
    LocalPrompt,
    Machine,
    Mark,
    Outcome,
    Part,
    fill,
)
from collab_llm_nodes.protocols.minions.reading import Decision, decision
from collab_llm_nodes.protocols.minions.settings import MinionConfig


def minion(question: str, documents: Sequence[str], config: MinionConfig) -> Machine:
    """Answer ``question`` about ``documents``.

    Raises:
        InvalidInput: there is no question or no text.
        ModelError: while it runs: the remote has no message for the local model.
        CollabError: while it runs: thrown in before there was any answer.
    """
    check_input(question, documents)
    return _Minion(question, "\n\n".join(documents), config).run()


class _Minion:
    """One running answer.

    Attributes:
        remote_chat, local_chat: the chat with each model.
        latest: the local model's last answer, used if the chat ends early.
    """

    def __init__(self, question: str, context: str, config: MinionConfig) -> None:
        self.config = config
        self.style = style = prompts.STYLES[config.style]
        part = Part(Kind.QUESTION, question)
        self.remote_chat = [fill(prompts.CHAT_BEGIN, document=style.document, question=part)]
        system = prompts.CHAT_LOCAL.format(
            document=style.document, context=context, question=question
        )
        self.local_chat = [Turn("system", system)]
        self.latest = ""
        self.round = 1

    def run(self) -> Machine:
        try:
            return (yield from self._chat())
        except CollabError as error:
            if not self.latest or isinstance(error, Cancelled):
                raise
            return Outcome(self.latest, frozenset(), self.round, error=error)

    def _chat(self) -> Machine:
        decided = yield from self._ask_remote(message=True, answer=False)
        for number in range(1, self.config.rounds + 1):
            self.round = number
            yield from self._ask_local(decided.missing)
            forced = number == self.config.rounds and self.config.force_final
            template = prompts.CHAT_LAST if forced else prompts.CHAT_CONTINUE
            reply = Part(Kind.MESSAGE, self.latest)
            self.remote_chat.append(fill(template, reply=reply, answer=self.style.answer))
            decided = yield from self._ask_remote(message=not forced, answer=True)
            if decided.final:
                return self._outcome(decided.answer, *[Mark.FORCED] * forced)
        return self._outcome(self.latest, Mark.UNDECIDED)

    def _ask_remote(self, *, message: bool, answer: bool) -> Generator[Action, Any, Decision]:
        """Return the remote's decision.

        Args:
            message: it may be a message to the local model.
            answer: it may be the answer.
        """

        def read(text: str) -> Decision | None:
            found = decision(text)
            if found is None:
                return None
            return found if (answer if found.final else message and found.missing) else None

        decided = yield from ask_until_readable(self._request, self.remote_chat, read)
        if decided is None:
            raise ModelError(
                "the remote's replies have the wrong form",
                field="remote",
                remedy="use a more capable remote",
            )
        return decided

    def _ask_local(self, message: str) -> Generator[Action, Any, None]:
        local = self.config.local
        self.local_chat.append(Turn("user", message))
        prompt = LocalPrompt(
            tuple(self.local_chat), local.temperature, local.max_tokens, self.round
        )
        (reply,) = yield AskLocal("answer", self.round, (prompt,))
        if isinstance(reply, CollabError):
            raise reply
        self.latest = reply.text.strip() or prompts.CHAT_SILENT
        self.local_chat.append(Turn("assistant", self.latest))

    def _request(self) -> AskRemote:
        """Return the action that sends the chat; the only place that creates one."""
        remote, chat = self.config.remote, tuple(self.remote_chat)
        return AskRemote("message", self.round, chat, remote.temperature, remote.max_tokens)

    def _outcome(self, answer: str, *marks: Mark) -> Outcome:
        return Outcome(answer, frozenset(marks), self.round)
