r"""The place of a document in a prompt: before the question, so that its KV can be computed first.

    chat models:   <|im_start|>user \n Document: ...  |  \n \n question <|im_end|> ...
    base models:                       Document: ...  |  \n \n question
                   ------- document(), its KV kept -  |  - after() ------------------

The blank line belongs to the question: BPE splitters join the characters at the end of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from collab_llm_nodes.errors import InvalidInput, ModelError
from collab_llm_nodes.knowledge.chunking import sentence_spans, sentences, windows
from collab_llm_nodes.models.loading import LoadedModel
from collab_llm_nodes.models.prompt import Prompt, encode, render
from collab_llm_nodes.models.turns import Turn

Ids = tuple[int, ...]
_TITLE = "Document: "
_BETWEEN = "\n"
_BLANK_LINE = "\n\n"
_MARK = "0"
"""Stands for the question while the template's own text around it is looked for."""


class Layout:
    """Token ids of documents and of the questions after them, for one model.

    Args:
        document_tokens: what a document has beyond them is left out.
        raw: leave the chat template out, as for a model without one.

    Raises:
        ModelError: the chat template does not show the user's text.
    """

    def __init__(self, loaded: LoadedModel, document_tokens: int, *, raw: bool = False) -> None:
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self._most = document_tokens
        self._chat = bool(loaded.tokenizer.chat_template) and not raw

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """Return the template's text before and after the first user turn."""
        if not self._chat:
            return "", ""
        shown = render(self._tokenizer, [{"role": "user", "content": _MARK}])
        before, found, after = shown.partition(_MARK)
        if not found:
            raise ModelError("the chat template does not show the user's text", field="model")
        return before, after

    @cached_property
    def begin(self) -> Ids:
        """The ids before the first document."""
        return self._encode(self._frame[0]) if self._chat else self._of_raw_text()

    def document(self, text: str) -> Ids:
        """Return the ids of a context that holds one document and, so far, no question.

        Control tokens in a document are left out: they would end the user's turn.
        """
        return self.documents([text])

    def documents(self, texts: Sequence[str]) -> Ids:
        """Return the ids of a context that holds several documents, one after the other.

        That is context aggregation, to which output aggregation is compared.
        """
        found = [*self.begin]
        for number, text in enumerate(texts):
            found += self._encode(_BETWEEN) if number else ()
            found += self._encode(_TITLE + self._without_control(text))[: self._most]
        return tuple(found)

    def sentence(self, text: str) -> Ids:
        """Return the ids of a sentence of a document, as an answer has them."""
        return self._encode(self._without_control(text))

    def repeatable(self, texts: Sequence[str]) -> Iterator[Ids]:
        """Yield the ids of documents, as contexts have them, and of each of their sentences."""
        for text in texts:
            yield self.document(text)
            yield from map(self.sentence, sentences(text))

    def fits(self, text: str) -> bool:
        """Return False if a document of this text would be cut."""
        return len(self._encode(_TITLE + self._without_control(text))) <= self._most

    def after(self, question: str) -> Ids:
        """Return the ids of the question after a document, up to the start of the answer.

        Raises:
            InvalidInput: the question holds one of the tokenizer's control tokens.
        """
        if any(token in question for token in self._loaded.control_tokens):
            raise InvalidInput(
                "contains a control token of the model", field="prompt", remedy="remove it"
            )
        return self._encode(_BLANK_LINE + question) + self._encode(self._frame[1])

    def alone(self, question: str) -> Ids:
        """Return the ids of the question without any document, as the model reads it otherwise.

        Raises:
            InvalidInput: as :func:`models.prompt.encode`.
        """
        return encode(Prompt(question, raw=not self._chat), self._loaded).ids

    @property
    def between(self) -> Ids:
        """The ids between the last document and the question."""
        return self._encode(_BLANK_LINE)

    def dialogue(self, turns: Sequence[Turn]) -> tuple[str, list[int]]:
        """Return the text of a chat after a document, and where each turn's content begins.

        It begins with the content of the first turn, which is the user's.
        """
        text = ""
        places = []
        for number, turn in enumerate(turns):
            if self._chat:
                chat = [{"role": t.role, "content": t.content} for t in turns[: number + 1]]
                shown = render(self._tokenizer, chat, open_end=False)
                whole = shown[len(self._frame[0]) :]
            else:
                whole = f"{text}{turn.content}\n"
            places.append(whole.index(turn.content, len(text)))
            text = whole
        return text, places

    def pieces(self, text: str) -> list[tuple[int, int]]:
        """Return first and last + 1 character of the parts of ``text`` that fit into a document.

        Sentences and lines stay whole where they fit. The parts of a longer one end at a space, if
        their second half has one.
        """
        found: list[tuple[int, int]] = []
        begin = end = 0
        for _, following in sentence_spans(text):
            if begin < end and not self.fits(text[begin:following]):
                found += self._windows(text, begin, end)
                begin = end
            end = following
        return [*found, *self._windows(text, begin, end)]

    def _windows(self, text: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the places of equal windows from ``begin`` to ``end`` that fit into a document."""
        size = max(1, end - begin)
        while True:
            found = [*windows(text, begin, end, size)]
            longest = max((len(self._encode(_TITLE + text[a:b])) for a, b in found), default=0)
            if longest <= self._most or size == 1:
                return found
            size = max(1, min(size - 1, int(0.9 * size * self._most / longest)))

    def _of_raw_text(self) -> Ids:
        """Return what the tokenizer itself puts before a text, such as the first token of OPT's."""
        empty = self._tokenizer("", add_special_tokens=True)["input_ids"]
        ends = {self._tokenizer.eos_token_id} - {self._tokenizer.bos_token_id}
        return tuple(token for token in empty if token not in ends)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _without_control(self, text: str) -> str:
        control = self._loaded.control_tokens
        while any(token in text for token in control):  # one may stand within another
            for token in control:
                text = text.replace(token, "")
        return text
