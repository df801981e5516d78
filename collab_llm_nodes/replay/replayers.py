"""Answers to recorded questions: by both models here, by a verifier, or by the real nodes."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.config import check_ranges, setting
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import ModelConfig, load
from collab_llm_nodes.models.prompt import Prompt
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.processes import START_DEADLINE_S, free_port, run_process
from collab_llm_nodes.protocols.edge_cloud.client import EdgeClientConfig
from collab_llm_nodes.protocols.edge_cloud.process import verifier_process, wait_for_verifier
from collab_llm_nodes.protocols.edge_cloud.remote import RemoteRunner
from collab_llm_nodes.protocols.edge_cloud.runner import InProcessRunner
from collab_llm_nodes.protocols.edge_cloud.verifier_client import ClientLinkConfig, VerifierClient
from collab_llm_nodes.protocols.guides import AnswerConfig, guide_from
from collab_llm_nodes.replay.compare import Replayer, Reply
from collab_llm_nodes.replay.recording import Action, Recording, Step
from collab_llm_nodes.robot.grammar import GrammarConfig, parse
from collab_llm_nodes.ros.domain import isolate_ros

ANSWER_DEADLINE_S = 600.0
"""Longest time for one step."""
EMBEDDED = ("nav-draft", "nav-target")
"""The models of a recording that names none."""


@dataclass(frozen=True)
class Models:
    """The models that answer; an empty name means the recording's."""

    draft: str = setting("", "Draft model: folder, hub id or shipped one.")
    target: str = setting("", "Target model, unless a verifier is named.")
    verifier: str = setting("", "A verifier that runs, host:port.")
    device: str = setting("cpu", "cpu, cuda or cuda:N.")
    dtype: str = setting("float32", "Type of the weights.")

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.verifier and self.target:
            raise ConfigError(
                "a running verifier has its own target",
                field="target",
                remedy="give --verifier or --target-model, not both",
            )

    def named(self, recording: Recording) -> Models:
        """Return the models with the recording's names in place of empty ones."""
        draft = recording.parameters.get("draft_vlm", {}).get("model.path", "")
        return replace(
            self,
            draft=self.draft or _here(draft) or EMBEDDED[0],
            target="" if self.verifier else self.target or _here(recording.target) or EMBEDDED[1],
        )


def _here(recorded: str) -> str:
    """Return the local name of a recorded model: shipped ones lie in another folder here."""
    shipped = Path(recorded).name
    return shipped if shipped in EMBEDDED and not Path(recorded).is_dir() else recorded


@contextlib.contextmanager
def in_process(recording: Recording, models: Models) -> Iterator[Replayer]:
    """Answer without ROS: draft model here, target here or at ``models.verifier``.

    Raises:
        CollabError: a model cannot be loaded, the verifier cannot be reached.
    """
    grammar = recording.settings(GrammarConfig, "navigation_action_parser", "grammar")
    gamma = recording.settings(EdgeClientConfig, "draft_vlm", "client").gamma
    guide = guide_from(_recorded_answer(recording), order=True)
    here = [models.draft] if models.verifier else [models.draft, models.target]
    set_threads(*(_config(path, models) for path in here))
    draft = _engine(models.draft, models)
    with contextlib.ExitStack() as stack:
        runner: InProcessRunner | RemoteRunner
        if models.verifier:
            link = ClientLinkConfig(address=models.verifier)
            runner = RemoteRunner(draft, stack.enter_context(VerifierClient(link)), gamma=gamma)
        else:
            runner = InProcessRunner(draft, _engine(models.target, models), gamma=gamma)

        def replay(step: Step) -> Reply:
            assert step.picture is not None, "such steps are not asked"
            begun = time.monotonic()
            answer = runner.generate(
                Prompt(step.prompt, (step.picture,)),
                recording.sampling(step),
                recording.max_tokens,
                ANSWER_DEADLINE_S,
                guide=guide,
            )
            read = parse(answer.text, grammar)
            action = Action(read.kind, read.value, read.code)
            seconds = time.monotonic() - begun
            return Reply(answer.tokens, answer.text, action, answer.metrics.tau, seconds)

        yield replay


def _config(path: str, models: Models) -> ModelConfig:
    return ModelConfig(path=path, device=models.device, dtype=models.dtype)


def _engine(path: str, models: Models) -> Engine:
    return Engine(load(_config(path, models)))


@contextlib.contextmanager
def through_nodes(
    recording: Recording, models: Models, params: Path | None = None, *, base: Path | None = None
) -> Iterator[Replayer]:
    """Answer by the real nodes and a verifier, as processes of their own.

    Camera node, draft model, pre-draft cache, bridge and parser; without navigator and driver, so
    that a replay moves nothing.

    Args:
        params: ROS parameters read after those of the recording.
        base: ROS parameters read before them; by default the shipped pair's.

    Raises:
        CollabError: a process did not start or ended early.
        ImportError: ROS 2 is not there.
    """
    from collab_llm_nodes.replay.client import ReplayClient

    isolate_ros()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collab_llm_")))
        address = models.verifier or f"127.0.0.1:{free_port()}"
        link = stack.enter_context(VerifierClient(ClientLinkConfig(address=address)))
        if not models.verifier:
            target = {"path": models.target, "device": models.device, "dtype": models.dtype}
            file = _write(folder / "verifier.yaml", {"model": target})
            cloud = stack.enter_context(verifier_process(address, config=file))
            wait_for_verifier(link, cloud)
        file = _write(folder / "nodes.yaml", _node_parameters(recording, models, address))
        command = [sys.executable, "-m", "collab_llm_nodes.nodes.replay_graph", "--ros-args"]
        shaped = {"/**/camera_ingest": {"ros__parameters": {"field_of_view": 0.0}}}
        last = _write(folder / "pictures.yaml", shaped)  # they were brought to it before
        files = (base or config_file("embedded.yaml"), file, *([params] if params else []), last)
        for each in files:
            command += ["--params-file", str(each)]
        graph = stack.enter_context(run_process("graph", command))
        client = stack.enter_context(ReplayClient())
        client.wait_for_graph(START_DEADLINE_S, graph.check)

        def replay(step: Step) -> Reply:
            graph.check()
            return client.ask(step, recording.sampling(step), recording.max_tokens)

        yield replay


def _node_parameters(recording: Recording, models: Models, address: str) -> dict[str, Any]:
    """Return the recorded parameters for the replay's nodes, without those of the link."""
    client = recording.settings(EdgeClientConfig, "draft_vlm", "client")
    answer = _recorded_answer(recording)
    grammar = recording.settings(GrammarConfig, "navigation_action_parser", "grammar")
    values: dict[str, dict[str, Any]] = {
        "camera_ingest": {
            "source": "compressed",
            "max_rate": 0.0,
            "max_width": 0,
            # Each picture is shown once; a camera's best effort may lose it.
            "qos_overrides./image/compressed.subscription.reliability": "reliable",
        },
        "cloud_verifier_bridge": {"verifier.address": address},
        "draft_vlm": {
            "model.path": models.draft,
            "model.device": models.device,
            "model.dtype": models.dtype,
            "client.gamma": client.gamma,
            **{f"answer.{name}": value for name, value in vars(answer).items()},
            "deadline_s": ANSWER_DEADLINE_S,
            "link_loss.policy": "hold",
        },
        "navigation_action_parser": {
            **{f"grammar.{name}": _plain(value) for name, value in vars(grammar).items()},
            "max_age": ANSWER_DEADLINE_S,
            "streaming": False,
        },
    }
    return {f"/**/{node}": {"ros__parameters": each} for node, each in values.items()}


def _recorded_answer(recording: Recording) -> AnswerConfig:
    """Return the settings of guides; a recording that names none is older than they are."""
    if "answer.guide" not in recording.parameters.get("draft_vlm", {}):
        return AnswerConfig("none")
    return recording.settings(AnswerConfig, "draft_vlm", "answer")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file
