"""Quantised drafts through the engine: the same model, whichever backend runs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_folder, tiny_prompt

from collab_llm_lab.random_models import write_random_model
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.session import Feed
from collab_llm_nodes.errors import ModelError
from collab_llm_nodes.models import loading
from collab_llm_nodes.models.loading import LoadedModel, ModelConfig, load
from collab_llm_nodes.models.prompt import encode

CASES = [
    pytest.param(
        package,
        kind,
        marks=pytest.mark.skipif(
            not all(find_spec(p) for p in needs), reason=f"{package} is not installed"
        ),
    )
    for package, kind, needs in (
        ("torchao", "int8", ("torchao",)),
        ("bitsandbytes", "int8", ("bitsandbytes", "accelerate")),
        ("bitsandbytes", "int4", ("bitsandbytes", "accelerate")),
    )
]


def quantised(
    folder: Path, package: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> LoadedModel:
    monkeypatch.setattr(loading, "quantization_package", lambda *facts: package)
    return load(ModelConfig(str(folder), quantization=kind))


@pytest.mark.parametrize(("package", "kind"), CASES)
@pytest.mark.parametrize("architecture", ["qwen2_vl", "llama", "opt"])
def test_both_backends_run_the_same_quantised_model(
    architecture: str, package: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "bitsandbytes" and architecture == "qwen2_vl":
        pytest.skip("it quantises the vision part too, whose maps are too narrow here")
    # Wide enough for groups of 64 and 128; narrower maps are left alone or refused.
    folder = write_random_model(tmp_path / "model", architecture, hidden_size=128, layers=2)
    loaded, exact = quantised(folder, package, kind, monkeypatch), load(ModelConfig(str(folder)))
    prompt = encode(tiny_prompt(architecture), loaded)
    found = []
    for model, eager in ((loaded, False), (loaded, True), (exact, False)):
        session = Engine(model, eager=eager).open(prompt)
        session.feed(prompt.ids, last=0)
        found.append(session.feed([20, 21, 22]))
    torch.testing.assert_close(found[0], found[1], atol=1e-2, rtol=1e-2)
    assert not torch.allclose(found[0], found[2], atol=1e-2), "nothing was quantised"
    correlation = torch.corrcoef(torch.stack((found[0].flatten(), found[2].flatten())))[0, 1]
    assert correlation > (0.95 if kind == "int8" else 0.5)


@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
def test_trees_and_batches_of_a_quantised_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(quantised(tiny_folder("qwen2_vl"), "torchao", "int8", monkeypatch))
    assert not engine.eager
    prompts = [encode(tiny_prompt("qwen2_vl", i), engine.loaded) for i in range(2)]
    a, b = (engine.open(p) for p in prompts)
    engine.run([Feed(s, p.ids, last=0) for s, p in zip((a, b), prompts, strict=True)])
    together = engine.run([Feed(a, [20, 21]), Feed(b, [30, 31])])
    for session, ids, found in ((a, [20, 21], together[0]), (b, [30, 31], together[1])):
        assert isinstance(found, torch.Tensor)
        session.length -= 2
        end = session.length - 1
        torch.testing.assert_close(session.feed(ids), found, atol=1e-4, rtol=1e-4)
        session.length -= 2
        branched = session.grow([*ids, 9], [end, end + 1, end])
        torch.testing.assert_close(branched[:2], found, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
def test_a_model_that_cannot_be_quantised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao passes over maps narrower than its groups without a word."""
    with pytest.raises(ModelError, match="int4") as caught:
        quantised(tiny_folder("llama"), "torchao", "int4", monkeypatch)
    assert caught.value.field == "quantization"
