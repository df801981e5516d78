"""Plain questions about real documents that lie in two stores, with a shipped configuration.

Every other file is the device's, the others are the cloud's. Answers are greedy, by Equation 4 over
both sides (``greedy``), without a network between them: it changes no answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from collab_llm_lab.bench.dragon.answers import greedy
from collab_llm_lab.bench.rendering import show_rows
from collab_llm_lab.training.evidence.calibration import PLAN
from collab_llm_lab.training.evidence.questions import Question, read_questions
from collab_llm_nodes.config import from_mapping
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.knowledge.chunking import chunks
from collab_llm_nodes.knowledge.documents import DocumentLimits
from collab_llm_nodes.knowledge.files import Folders, read_document
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.protocols.dragon.generation import ModelSide, encoder_of
from collab_llm_nodes.protocols.dragon.settings import DragonConfig
from collab_llm_nodes.protocols.dragon.side_settings import FREE, QUOTE, SideConfig
from collab_llm_nodes.protocols.parameter_files import server_parameters

log = logging.getLogger(__name__)

_REFUSES = re.compile(
    r"\b(not (\w+ )?(mention|state|specif|provid|contain|say|given|found|known)|unknown"
    r"|no information|n't (know|mention|say|state|specify|provide)|cannot (answer|determine|find))",
    re.IGNORECASE,
)
"""Words of a free answer that says that the documents do not tell."""
_FREE_TOKENS, _QUOTE_TOKENS = 48, 160


@dataclass(frozen=True)
class Reality:
    """The material.

    Attributes:
        questions: file of JSON lines (``training/evidence/questions.py``).
        documents: folder of text files.
        config: parameters of ``dragon_server``, a file or the name of a shipped one.
        answers: ``free`` or ``quote``; empty: as ``config`` says.
        most: questions with an answer, and others, that are asked; 0: all.
        encoder: folder of the encoder; empty: that of ``config``.
    """

    questions: Path
    documents: Path
    config: str
    answers: str = ""
    most: int = 0
    encoder: str = ""

    def side(self) -> SideConfig:
        """Return the configuration of both sides."""
        given = server_parameters(self.config, "dragon_server", ("memory",))
        side = from_mapping(DragonConfig, given).side
        encoder = replace(side.encoder, path=self.encoder or side.encoder.path)
        return replace(side, encoder=encoder, answers=self.answers or side.answers)


def run_reality(engine: Engine, material: Reality, *, console: Console) -> dict[str, Any]:
    """Ask the questions, and print and return the shares.

    Returns:
        ``reality``: ``answers`` (free or quote), ``questions``, ``unseen``, ``skipped`` lines;
        ``right`` and ``false_refusals`` of the questions with an answer, ``refused_unseen`` of the
        others; ``said``: each question with what was said and its verdict.
    """
    questions, skipped = read_questions(material.questions)
    if skipped:
        log.warning("%d questions were skipped: %s", len(skipped), "; ".join(skipped[:3]))
    config = material.side()
    with _sides(engine, config, material.documents) as sides:
        said = []
        for question in _sample(questions, material.most):
            answer = _answer(engine, sides, question.question, config.answers)
            said.append(_judged(question, answer, config.answers))
    found = {"answers": config.answers, "skipped": len(skipped), **_shares(said), "said": said}
    columns = {name: f"{{{name}:.2f}}" for name in ("right", "false_refusals", "refused_unseen")}
    show_rows(
        console, "questions about real documents", ["answers"], {config.answers: found}, columns
    )
    return {"reality": found}


@contextlib.contextmanager
def _sides(engine: Engine, config: SideConfig, folder: Path) -> Iterator[Sequence[ModelSide]]:
    files = sorted(folder.resolve().rglob("*.txt"))
    if len(files) < 2:
        raise InvalidInput(
            f"{len(files)} text files in {folder}",
            field="--documents",
            remedy="two at least: collab-llm bench documents FOLDER",
        )
    encoder = encoder_of(config)
    with Store(None) as device, Store(None) as cloud:
        for number, file in enumerate(files):
            limits, folders = DocumentLimits(), Folders([folder.resolve()])
            document = read_document(file, folders, limits, str(file))
            (device, cloud)[number % 2].add(document, chunks(document, PLAN))
        if config.retrieval.method == "dense":
            for store in (device, cloud):
                while store.embed(encoder):
                    pass
        yield [ModelSide(engine, store, config, encoder) for store in (device, cloud)]


def _sample(questions: Sequence[Question], most: int) -> list[Question]:
    known = [question for question in questions if question.answers]
    unseen = [question for question in questions if not question.answers]
    return [*known[: most or None], *unseen[: most or None]]


def _answer(engine: Engine, sides: Sequence[ModelSide], question: str, answers: str) -> str:
    """Return the greedy answer of both sides; empty: no side has a sentence to quote."""
    most = _FREE_TOKENS if answers == FREE else _QUOTE_TOKENS
    decoders = [side.decoder(question, most) for side in sides]
    if answers == QUOTE and not any(decoder.found.hits for decoder in decoders):
        for decoder in decoders:
            decoder.close()
        return ""
    tokens = greedy(decoders, most, engine.eos)
    return engine.decode([token for token in tokens if token not in engine.eos]).strip()


def _judged(question: Question, said: str, answers: str) -> dict[str, Any]:
    refused = not said or (answers == FREE and bool(_REFUSES.search(said)))
    return {
        "question": question.question,
        "known": bool(question.answers),
        "said": said,
        "right": question.is_right(said) if question.answers else refused,
        "refused": refused,
    }


def _shares(said: Sequence[dict[str, Any]]) -> dict[str, float]:
    known = [each for each in said if each["known"]]
    unseen = [each for each in said if not each["known"]]
    return {
        "questions": len(known),
        "unseen": len(unseen),
        "right": sum(each["right"] for each in known) / max(1, len(known)),
        "false_refusals": sum(each["refused"] for each in known) / max(1, len(known)),
        "refused_unseen": sum(each["refused"] for each in unseen) / max(1, len(unseen)),
    }
