"""Turns and raw text between robot and verifier."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_models import scene, tiny_folder, tiny_model

from collab_llm_nodes.decoding.sampling import SamplingConfig
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import InvalidInput
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt, encode
from collab_llm_nodes.models.turns import MAX_TURNS, Turn
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.protocols.edge_cloud import verifier_pb2 as pb
from collab_llm_nodes.protocols.edge_cloud.messages import Open, open_message
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.service import VerifierConfig, start_server
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient

TURNS = (Turn("system", "be brief"), Turn("user", "where is it"), Turn("assistant", "far left"))
CHAT = Prompt("go to it", turns=TURNS)
RAW = Prompt("the red ball is", raw=True)


def sent(prompt: Prompt) -> bytes:
    return codec.encode_client(open_message(prompt, SamplingConfig(), 8, "v"))


@pytest.mark.parametrize("prompt", [CHAT, RAW, Prompt("go", (b"jpeg",)), Prompt("", turns=TURNS)])
def test_a_prompt_crosses_the_wire(prompt: Prompt) -> None:
    opened = codec.decode_client(sent(prompt))
    assert isinstance(opened, Open)
    assert Prompt(opened.text, opened.images, (), opened.turns, opened.raw) == prompt


def test_more_turns_than_any_limit_allows_are_refused_unread() -> None:
    turns = [pb.Turn(role="user", content="go")] * (MAX_TURNS + 1)
    with pytest.raises(InvalidInput) as caught:
        codec.decode_client(pb.ClientMessage(open=pb.Open(turns=turns)).SerializeToString())
    assert caught.value.field == "turns"


def base_model(folder: Path, seed: int) -> Engine:
    shutil.copytree(tiny_folder("opt", seed), folder)
    (folder / "chat_template.jinja").unlink()
    return Engine(load(ModelConfig(str(folder))))


@pytest.mark.parametrize(
    ("architecture", "prompt"),
    [
        ("opt", CHAT),
        ("llama", RAW),
        ("qwen2_vl", RAW),
        ("qwen2_vl", Prompt("go to it", (scene(0),), turns=TURNS)),
    ],
)
def test_the_verifier_reads_what_the_robot_reads(architecture: str, prompt: Prompt) -> None:
    draft, target = (Engine(tiny_model(architecture, seed)) for seed in (0, 1))
    check_answer(draft, target, prompt)


def test_base_models_answer_raw_text(tmp_path: Path) -> None:
    check_answer(base_model(tmp_path / "draft", 0), base_model(tmp_path / "target", 1), RAW)


def check_answer(draft: Engine, target: Engine, prompt: Prompt) -> None:
    expected = InProcessRunner(draft, target).generate(prompt, max_tokens=12)
    without = InProcessRunner(draft, target).generate(Prompt("something else", raw=True))
    assert expected.tokens != without.tokens, (
        "the prompt must matter for this test to mean anything"
    )
    with start_server(VerifierConfig(address="127.0.0.1:0"), target) as server:
        link = ClientLinkConfig(address=f"127.0.0.1:{server.port}")
        with VerifierClient(link) as client:
            runner = RemoteRunner(draft, client)
            assert runner.generate(prompt, max_tokens=12).tokens == expected.tokens
            fine, turns = encode(prompt, draft.loaded), (*TURNS, *TURNS[1:] * 40)
            with pytest.raises(InvalidInput, match="83 turns"):
                RemoteRunner(draft, client, encode=lambda _: fine).generate(
                    Prompt("go", turns=turns)
                )
