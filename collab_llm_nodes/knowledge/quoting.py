"""The sentences of a store that answer a question, by their evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.chunking import sentences
from collab_llm_nodes.knowledge.encoders import Encoder
from collab_llm_nodes.knowledge.evidence import Asked, Calibration, Features
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig, Retrieved, softmax
from collab_llm_nodes.knowledge.store import Hit, Store


@dataclass(frozen=True)
class EvidenceConfig:
    """The evidence that a sentence needs to be quoted."""

    calibration: str = setting(
        "evidence_words.yaml",
        "Weights of the evidence, a file or the name of a shipped one: evidence_words.yaml, or"
        " evidence_minilm.yaml beside the encoder all-MiniLM-L6-v2. Equal on both sides.",
        read_only=True,
    )
    least: float = setting(
        0.5,
        "A sentence is quoted only if it answers with at least this probability. Raise it where a"
        " wrong answer costs more than none.",
        low=0.0,
        high=1.0,
        read_only=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Quotable(Retrieved):
    """The pieces whose best sentences may be quoted; their scores are probabilities.

    Attributes:
        sentences: one of each hit, or two neighbours (``_with_value``).
        best: the greatest probability of all sentences, also if it is too small.
    """

    sentences: tuple[str, ...] = ()
    best: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A sentence of a piece, and what speaks for it.

    Attributes:
        number: of the sentence in the piece.
    """

    hit: Hit
    number: int
    sentence: str
    features: Features


def candidates(
    store: Store, question: str, config: RetrievalConfig, encoder: Encoder, *, similarity: bool
) -> list[Candidate]:
    """Return the sentences of the ``candidates`` best pieces by words, and with `dense` by vectors.

    Args:
        similarity: compare the vectors of question and sentences, too.

    Raises:
        ConfigError: the store's vectors are those of another encoder.
    """
    (vector,) = encoder.encode([question])
    hits = {hit.id: hit for hit in store.search(question, config.candidates)}
    if config.method == "dense":
        nearest = store.nearest(vector, encoder.fingerprint, config.candidates)
        hits |= {hit.id: hit for hit in nearest}
    read = [
        (hit, number, sentence)
        for hit in hits.values()
        for number, sentence in enumerate(sentences(hit.chunk.text))
    ]
    products = [0.0] * len(read)
    if similarity and read:
        products = (encoder.encode([sentence for *_, sentence in read]) @ vector).tolist()
    asked = Asked(question)
    return [
        Candidate(hit, number, sentence, asked.features(sentence, product))
        for (hit, number, sentence), product in zip(read, products, strict=True)
    ]


def quotable(
    store: Store,
    question: str,
    config: RetrievalConfig,
    calibration: Calibration,
    least: float,
    encoder: Encoder,
) -> Quotable:
    """Return the pieces of ``store`` with a sentence that answers ``question``, the best first.

    Args:
        least: probability that a sentence needs.

    Raises:
        ConfigError: the store's vectors are those of another encoder.
    """
    similarity = calibration.similarity != 0
    found = candidates(store, question, config, encoder, similarity=similarity)
    scored = [(calibration.probability(each.features), each) for each in found]
    scored.sort(key=lambda pair: (-pair[0], pair[1].hit.id))
    best: dict[int, tuple[float, Candidate]] = {}
    for score, each in scored:
        if score >= least and len(best) < config.chunks:
            best.setdefault(each.hit.id, (score, each))
    scores = [score for score, _ in best.values()]
    asked = Asked(question)
    return Quotable(
        tuple(replace(each.hit, score=score) for score, each in best.values()),
        *softmax(scores, config.temperature),
        scorer="",
        sentences=tuple(_with_value(asked, each, calibration) for _, each in best.values()),
        best=scored[0][0] if scored else 0.0,
    )


def _with_value(asked: Asked, found: Candidate, calibration: Calibration) -> str:
    """Return a sentence, with the neighbour that has the value asked for if it has none itself.

    Manuals write so: "Set the port of the listener. Defaults to 1883." Of two neighbours with a
    value it is the one that has more evidence together with the sentence.
    """
    if not asked.lacks_value(found.sentence):
        return found.sentence
    said = sentences(found.hit.chunk.text)
    before, after = max(0, found.number - 1), found.number + 1
    pairs = [said[found.number : after + 1], said[before:after]]  # most values follow
    joined = [
        " ".join(pair) for pair in pairs if len(pair) > 1 and not asked.lacks_value(" ".join(pair))
    ]
    product = found.features.similarity
    return max(
        joined,
        key=lambda pair: calibration.probability(asked.features(pair, product)),
        default=found.sentence,
    )


def check_evidence(config: EvidenceConfig, calibration: Calibration, has_encoder: bool) -> None:
    """Check that the calibration fits the side's encoder.

    Raises:
        ConfigError: it weighs the vectors of an encoder model, and there is none.
    """
    if calibration.similarity and not has_encoder:
        raise ConfigError(
            f"{config.calibration} weighs the vectors of an encoder, and none is named",
            field="evidence.calibration",
            remedy="name its folder in encoder.path, or use evidence_words.yaml",
        )
