"""Minion: the two models chat until the remote can answer (paper 000, section 4 and appendix D.1).

Only the local model reads the text. All that it says goes to the remote, unfiltered: that is the
protocol.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from collab_llm_nodes.errors import Cancelled, CollabError, ModelError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.dialogue import asked, check
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
    filled,
)
from collab_llm_nodes.protocols.minions.reading import Decision, decision
from collab_llm_nodes.protocols.minions.settings import MinionConfig


def minion(question: str, documents: Sequence[str], config: MinionConfig) -> Machine:
    """Answer ``question`` about ``documents``.

    Raises:
        InvalidInput: there is no question, or no text.
        ModelError: while it runs: the remote has no message for the local model.
        CollabError: while it runs: what was thrown in before there was any answer.
    """
    check(question, documents)
    return _Minion(question, "\n\n".join(documents), config).run()


class _Minion:
    """One chat under way.

    Attributes:
        said: the chat with the remote.
        heard: the chat with the local model.
        latest: the local model's last answer, the best there is when the time is over.
    """

    def __init__(self, question: str, context: str, config: MinionConfig) -> None:
        self.config = config
        self.style = style = prompts.STYLES[config.style]
        asked_for = Part(Kind.QUESTION, question)
        self.said = [filled(prompts.CHAT_BEGIN, document=style.document, question=asked_for)]
        system = prompts.CHAT_LOCAL.format(
            document=style.document, context=context, question=question
        )
        self.heard = [Turn("system", system)]
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
        decided = yield from self._hear_remote(message=True, answer=False)
        for number in range(1, self.config.rounds + 1):
            self.round = number
            yield from self._hear_local(decided.missing)
            forced = number == self.config.rounds and self.config.force_final
            template = prompts.CHAT_LAST if forced else prompts.CHAT_CONTINUE
            heard = Part(Kind.MESSAGE, self.latest)
            self.said.append(filled(template, reply=heard, answer=self.style.answer))
            decided = yield from self._hear_remote(message=not forced, answer=True)
            if decided.final:
                return self._outcome(decided.answer, *[Mark.FORCED] * forced)
        return self._outcome(self.latest, Mark.UNDECIDED)

    def _hear_remote(self, *, message: bool, answer: bool) -> Generator[Action, Any, Decision]:
        """Return the remote's reply.

        Args:
            message: it may be a message to the local model.
            answer: it may be the answer.
        """

        def read(text: str) -> Decision | None:
            found = decision(text)
            if found is None:
                return None
            return found if (answer if found.final else message and found.missing) else None

        repairs = self.config.remote.repairs
        decided = yield from asked(self._ask, self.said, read, repairs)
        if decided is None:
            raise ModelError(
                "the remote's replies have not the form asked for",
                field="remote",
                remedy="use a more capable remote",
            )
        return decided

    def _hear_local(self, message: str) -> Generator[Action, Any, None]:
        local = self.config.local
        self.heard.append(Turn("user", message))
        prompt = LocalPrompt(tuple(self.heard), local.temperature, local.max_tokens, self.round)
        (reply,) = yield AskLocal("answer", self.round, (prompt,))
        if isinstance(reply, CollabError):
            raise reply
        self.latest = reply.text.strip() or prompts.CHAT_SILENT
        self.heard.append(Turn("assistant", self.latest))

    def _ask(self) -> AskRemote:
        """The one place where something is sent to the remote."""
        remote = self.config.remote
        said = tuple(self.said)
        return AskRemote("message", self.round, said, remote.temperature, remote.max_tokens)

    def _outcome(self, answer: str, *marks: Mark) -> Outcome:
        return Outcome(answer, frozenset(marks), self.round)
