"""The verifier as a gRPC server (paper 003, Algorithm 2): model, service and port."""

from __future__ import annotations

from collections.abc import Callable

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import ServingEngine
from collab_llm_nodes.models.loading import load
from collab_llm_nodes.models.prompt import PromptLimits, encode
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig, load_config
from collab_llm_nodes.protocols.edge_cloud.verifier import Encode, Verifier
from collab_llm_nodes.protocols.jupiter.staged_engine import StagedEngine
from collab_llm_nodes.transport.server import ServerHandle, serve_until_signal

__all__ = ["VerifierConfig", "load_config", "make_verifier", "serve", "start_server"]


def start_server(
    config: VerifierConfig, engine: ServingEngine | None = None, encode: Encode | None = None
) -> ServerHandle[Verifier]:
    """Run a verifier in the background; return once it listens.

    Args:
        engine: the target; by default loaded as configured.
        encode: turns prompts into token ids; by default as ``engine.loaded`` does.
    """
    engine = engine or load_engine(config)
    encode = encode or prompt_encoder(engine, config.limits)
    return ServerHandle(Verifier(config, engine, encode))


def serve(config: VerifierConfig, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Load the model and serve like ``serve_until_signal``.

    Raises:
        ModelError: the model cannot be loaded.
    """
    serve_until_signal(config, lambda: make_verifier(config), on_listening)


def make_verifier(config: VerifierConfig) -> Verifier:
    """Load the model and return its verifier; also sets the number of threads of this process.

    Raises:
        ModelError: the model cannot be loaded.
    """
    set_threads(config.model)
    engine = load_engine(config)
    return Verifier(config, engine, prompt_encoder(engine, config.limits))


def load_engine(config: VerifierConfig) -> ServingEngine:
    if config.stages.workers:
        return StagedEngine(config.model, config.stages, sessions=config.limits.max_sessions)
    return Engine(load(config.model), candidates=config.exit_candidates)


def prompt_encoder(engine: ServingEngine, limits: Limits) -> Encode:
    allowed = PromptLimits(
        max_characters=limits.max_prompt_chars,
        max_images=limits.max_images,
        max_pixels=limits.max_image_pixels,
        max_scans=limits.max_image_scans,
        max_turns=limits.max_turns,
    )
    return lambda prompt: encode(prompt, engine.loaded, allowed)
