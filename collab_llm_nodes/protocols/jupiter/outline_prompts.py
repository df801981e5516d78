"""Prompts of an answer along an outline, as a model's chat template forms them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from collab_llm_nodes.models.prompt import render
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.jupiter.outline import read_outline, read_point

_MARK = "the-answer-before"


class OutlinePrompts:
    """Reads outlines in tokens, and forms what is read behind them.

    Args:
        tokenizer: of the model, with a chat template.
        begun_thought: marker of a thought in which every answer begins; mostly none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begun_thought: str = "") -> None:
        self._tokenizer = tokenizer
        self._begun_thought = begun_thought

    def ended(self, tokens: Sequence[int]) -> bool:
        """Return True if no further point of the outline in ``tokens`` will count."""
        return read_outline(self._text(tokens)).ended

    def point_ended(self, tokens: Sequence[int]) -> bool:
        """Return True if no more of the point in ``tokens`` will count."""
        return read_point(self._text(tokens))[1]

    def requests(self, outline: Sequence[int]) -> list[list[int]]:
        """Return the ids that are read behind an outline, for each of its points.

        There are none if the outline has too few points.
        """
        read = read_outline(self._text(outline), complete=True)
        if not read.usable:
            return []
        eos = self._tokenizer.eos_token_id
        ended = bool(outline) and outline[-1] == eos
        return [self._behind(point.request, ended) for point in read.points]

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return f"{self._begun_thought}{text}"

    def _behind(self, content: str, ended: bool) -> list[int]:
        """Return the ids of a user's turn behind an answer, up to where the next answer begins.

        Args:
            ended: the answer's tokens include its end.
        """
        turns = [Turn("user", "x"), Turn("assistant", _MARK), Turn("user", content)]
        rest = chat_text(self._tokenizer, turns).partition(_MARK)[2]
        if ended:
            rest = rest.removeprefix(str(self._tokenizer.eos_token))
        return list(self._tokenizer(rest, add_special_tokens=False).input_ids)


def chat_text(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> str:
    """Return a chat in the model's form, up to where its answer begins."""
    chat = [{"role": turn.role, "content": turn.content} for turn in turns]
    return render(tokenizer, chat)
