"""The calibration as a whole: documents, questions, weights, and how well they do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab_llm_lab.training.evidence.calibration import Example, add_texts, examples, fit, shares
from collab_llm_lab.training.evidence.questions import DEVELOPMENT, HANDBOOK, read_questions
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.knowledge.evidence import Calibration
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.store import Store
from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    """Documents and questions.

    Attributes:
        documents: folders of text files, read together with those beside this module.
        questions: file of questions about them; None: the shipped one.
        held_out: folder of documents that are only tested on; None: no test.
        held_out_questions: file of questions about them; None: the shipped one.
    """

    documents: Sequence[Path]
    questions: Path | None = None
    held_out: Path | None = None
    held_out_questions: Path | None = None


def calibrate(
    material: Material, encoder_path: str, candidates: int, least: float
) -> tuple[Calibration, dict[str, Any]]:
    """Return the weights, and the shares of right answers in development and held out.

    Args:
        encoder_path: folder of an encoder; empty: words alone.
        candidates: pieces searched.
        least: probability that a quote needs in the shares.
    """
    encoder: Encoder = WordHashes()
    if encoder_path:
        encoder = TextEncoder(TextEncoderConfig(path=encoder_path))
    config = RetrievalConfig(method="rescored", candidates=candidates)

    def read(folders: Sequence[Path], file: Path) -> list[Example]:
        questions, skipped = read_questions(file)
        if skipped:
            log.warning("%d questions were skipped: %s", len(skipped), "; ".join(skipped[:3]))
        with Store(None) as store:
            add_texts(store, folders)
            similar = bool(encoder_path)
            return list(examples(store, questions, config, encoder, similarity=similar))

    own = Path(__file__).parent
    development = read([own, *material.documents], material.questions or DEVELOPMENT)
    found = fit(development)
    figures: dict[str, Any] = {"development": _figures(development, found, least)}
    if material.held_out is not None:
        held_out = read([material.held_out], material.held_out_questions or HANDBOOK)
        figures["held_out"] = _figures(held_out, found, least)
    return found, figures


def _figures(found: Sequence[Example], calibration: Calibration, least: float) -> dict[str, float]:
    known = [each for each in found if each.known]
    reachable = sum(bool(each.right.any()) for each in known) / max(1, len(known))
    counts = {"known": len(known), "unseen": len(found) - len(known), "reachable": reachable}
    return counts | shares(found, calibration, least)
