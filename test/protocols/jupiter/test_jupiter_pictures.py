"""Pictures through Jupiter: the coordinator encodes them, and answers are the whole model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from jupiter_bed import control, workers
from served_jupiter import served_config
from tiny_models import VISION, tiny_folder, tiny_model, tiny_prompt

from collab_llm_lab.reference import generate
from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.errors import ConfigError, InvalidInput
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.models.partial import read_facts
from collab_llm_nodes.models.prompt import EncodedPrompt, Prompt, encode
from collab_llm_nodes.models.turns import Turn
from collab_llm_nodes.protocols.base import Answer, Request, Resources
from collab_llm_nodes.protocols.jupiter.drafters import Draft
from collab_llm_nodes.protocols.jupiter.generation import answer, answer_in_points
from collab_llm_nodes.protocols.jupiter.lane import DecodeConfig
from collab_llm_nodes.protocols.jupiter.pictures import ShownPrompt, show
from collab_llm_nodes.protocols.jupiter.running import Jupiter, check, start

TOKENS = 16
SAMPLED = SamplingConfig(temperature=0.8, seed=5)


@contextmanager
def jupiter(architecture: str, count: int = 2, **changed: Any) -> Iterator[tuple[Jupiter, Any]]:
    """Run workers of a model that sees, and the protocol over them."""
    model = ModelConfig(str(tiny_folder(architecture)))
    with workers(count, model=model) as (handles, addresses):
        config = served_config(addresses, **{"model": model, "max_tokens": TOKENS, **changed})
        made = start(config, Resources())
        try:
            yield made, handles
        finally:
            made.close()


def ask(made: Jupiter, prompt: Prompt, **fields: Any) -> Answer:
    asked = Request(
        id="one",
        config=replace(made._config, **fields.pop("options", {})),
        turns=(Turn("user", prompt.text),),
        images=prompt.images,
        **fields,
    )
    check(asked)
    return made.run(asked, lambda progress: None, control())


def alone(
    architecture: str, prompt: EncodedPrompt, sampling: SamplingConfig | None = None
) -> tuple[int, ...]:
    """Return the answer of the whole model, by the slow reference loop."""
    loaded = tiny_model(architecture)
    eos = read_facts(loaded.config).eos
    return tuple(generate(loaded, prompt, sampling or SamplingConfig(), TOKENS, eos))


@cache
def encoded(architecture: str, images: int) -> EncodedPrompt:
    return encode(tiny_prompt(architecture, images=images), tiny_model(architecture))


@pytest.mark.parametrize("architecture", VISION)
def test_answers_about_pictures_are_those_of_the_whole_model(architecture: str) -> None:
    with jupiter(architecture, 3) as (made, _):
        for images in (0, 1, 2):
            prompt = tiny_prompt(architecture, images=images)
            for sampling in (SamplingConfig(), SAMPLED):
                found = ask(made, prompt, sampling=sampling)
                expected = alone(architecture, encoded(architecture, images), sampling)
                assert found.tokens == expected
        assert "MB" in str(made.health()["vision encoder"])


@dataclass(frozen=True)
class Knowing:
    """A drafter that knows the answer, and drafts it with wrong tokens beside it, as a tree."""

    prompt: int
    answer: tuple[int, ...]
    tree: bool
    guesses: int = 0

    def propose(self, known: Sequence[int], guesses: Sequence[int], room: int) -> Draft:
        right = self.answer[len(known) - self.prompt :][: min(2, room)]
        if len(right) < 2 or not self.tree:
            return Draft(tuple(right))
        return Draft((5, right[0], 7, right[1]), (0, 0, 2, 2))


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("architecture", VISION)
def test_drafts_after_pictures_stand(architecture: str, tree: bool) -> None:
    """Pictures take fewer positions than tokens; drafts and trees go on from the last one."""
    prompt = encoded(architecture, 2)
    assert prompt.position_delta < 0
    right = alone(architecture, prompt)
    drafter = Knowing(len(prompt.ids), right, tree)
    with jupiter(architecture) as (made, _):
        lane = answer(
            made.pipeline,
            prompt.ids,
            DecodeConfig(TOKENS, drafter=drafter, lengths=in_pieces),
            control(),
            shown=shown(made, prompt),
        )
    assert tuple(lane.tokens) == right
    assert sum(lane.accepted) > len(right) / 2


def in_pieces(tokens: int) -> list[int]:
    """Divide a prompt so that pictures are cut."""
    return [7] * (tokens // 7) + [tokens % 7] * (tokens % 7 > 0)


def shown(made: Jupiter, prompt: EncodedPrompt) -> ShownPrompt:
    return show(made._loaded, prompt, made._facts.placeholder, "float32")


def test_points_of_an_outline_see_the_pictures() -> None:
    prompt = encoded("qwen2_vl", 1)
    requests = [[9, 11, 12], [30], [31, 32]]
    with jupiter("qwen2_vl") as (made, _):
        outline, points = answer_in_points(
            made.pipeline,
            prompt.ids,
            DecodeConfig(3),
            lambda tokens: requests,
            DecodeConfig(TOKENS),
            control(),
            shown=shown(made, prompt),
        )
    for lane, request in zip(points, requests, strict=True):
        text = (*prompt.ids, *outline.tokens, *request)
        positions = prompt.positions(0, len(text))
        assert not isinstance(positions, int)
        whole = replace(prompt, ids=text, position_ids=positions)
        assert tuple(lane.tokens) == alone("qwen2_vl", whole)


def test_pictures_are_fed_again_when_a_worker_is_lost() -> None:
    prompt = encoded("qwen2_vl", 1)
    with jupiter("qwen2_vl", 3) as (made, handles):

        def lose(lanes: Sequence[Any]) -> None:
            if len(lanes[0].tokens) >= 2 and not made.pipeline.losses:
                handles[1].stop()

        decode = DecodeConfig(TOKENS)
        lane = answer(made.pipeline, prompt.ids, decode, control(), lose, shown(made, prompt))
        assert made.pipeline.losses
    assert tuple(lane.tokens) == alone("qwen2_vl", prompt)


def test_pictures_that_cannot_be_shown_are_refused() -> None:
    with jupiter("llama") as (made, _):
        with pytest.raises(InvalidInput, match="reads text only") as refused:
            ask(made, Prompt("What is this?", tiny_prompt("qwen2_vl").images))
        assert refused.value.field == "images"
    with jupiter("qwen2_vl") as (made, _):
        with pytest.raises(InvalidInput) as refused:
            ask(made, Prompt("What is this?", (b"no picture",)))
        assert refused.value.field == "images[0]"
        assert ask(made, tiny_prompt("qwen2_vl")).tokens == alone(
            "qwen2_vl", encoded("qwen2_vl", 1)
        )


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model.path", ModelConfig(str(tiny_folder("qwen2_vl", 1)))),
        ("model.dtype", ModelConfig(str(tiny_folder("qwen2_vl")), dtype="bfloat16")),
        ("model.quantization", ModelConfig(str(tiny_folder("qwen2_vl")), quantization="int8")),
    ],
)
def test_workers_with_other_weights_than_the_vision_encoder_s_are_refused(
    field: str, other: ModelConfig
) -> None:
    with pytest.raises(ConfigError) as refused, jupiter("qwen2_vl", model=other):
        pass
    assert refused.value.field == field
    assert refused.value.remedy
