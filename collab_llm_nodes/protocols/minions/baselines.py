"""Baselines of paper 000: one model answers alone, from the text or from retrieved passages."""

from __future__ import annotations

from collections.abc import Sequence

from collab_llm_nodes.chat.base import Finish, Reply
from collab_llm_nodes.errors import CollabError
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.minions import prompts
from collab_llm_nodes.protocols.minions.dialogue import (
    answer_in,
    check_input,
    reply_cut_off,
    retrieve_passages,
)
from collab_llm_nodes.protocols.minions.messages import (
    AskLocal,
    AskRemote,
    Kind,
    LocalPrompt,
    Machine,
    Outcome,
    Part,
    fill,
)
from collab_llm_nodes.protocols.minions.settings import DirectConfig

_BETWEEN = "\n\n"


def remote_only(question: str, documents: Sequence[str], config: DirectConfig) -> Machine:
    """Have the remote read everything and answer."""
    check_input(question, documents)
    return _asking_remote(question, Part(Kind.DOCUMENT, _BETWEEN.join(documents)), config)


def local_only(question: str, documents: Sequence[str], config: DirectConfig) -> Machine:
    """Have the local model read everything and answer; nothing leaves the robot."""
    check_input(question, documents)
    return _asking_local(question, _BETWEEN.join(documents), config)


def rag(question: str, documents: Sequence[str], config: DirectConfig) -> Machine:
    """Have the remote answer from the best passages for the question."""
    check_input(question, documents)
    return _retrieving(question, config)


def _retrieving(question: str, config: DirectConfig) -> Machine:
    passages = yield from retrieve_passages(question, config.retrieve)
    context = Part(Kind.PASSAGE, _BETWEEN.join(passages))
    return (yield from _asking_remote(question, context, config))


def _asking_remote(question: str, context: Part, config: DirectConfig) -> Machine:
    prompt = fill(prompts.DIRECT, context=context, question=Part(Kind.QUESTION, question))
    remote = config.remote
    reply: Reply = yield AskRemote("answer", 1, (prompt,), remote.temperature, remote.max_tokens)
    return Outcome(answer_in(reply, "remote"))


def _asking_local(question: str, context: str, config: DirectConfig) -> Machine:
    text = prompts.DIRECT.format(context=context, question=question)
    local = config.local
    prompt = LocalPrompt((Turn("user", text),), local.temperature, local.max_tokens)
    (reply,) = yield AskLocal("answer", 1, (prompt,))
    if isinstance(reply, CollabError):
        raise reply
    late = reply_cut_off() if reply.finish is Finish.DEADLINE else None
    return Outcome(answer_in(reply, "local"), error=late)
