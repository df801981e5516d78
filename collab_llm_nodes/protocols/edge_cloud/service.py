"""The verifier as a gRPC server (paper 003, Algorithm 2): model, service and port."""

from __future__ import annotations

from collections.abc import Callable

from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.engine.interface import ServingEngine
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.models.loading import LoadedModel, load
from collab_llm_nodes.models.prompt import PromptLimits, encode, scaled_size
from collab_llm_nodes.models.threads import set_threads
from collab_llm_nodes.models.vocabulary import shared_size
from collab_llm_nodes.protocols.edge_cloud.info import Limits
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig, load_config
from collab_llm_nodes.protocols.edge_cloud.verifier import Encode, Verifier
from collab_llm_nodes.protocols.jupiter.staged_engine import StagedEngine
from collab_llm_nodes.transport.server import ServerHandle, serve_until_signal

__all__ = ["VerifierConfig", "load_config", "make_verifier", "serve", "start_server"]


def start_server(
    config: VerifierConfig,
    engine: ServingEngine | None = None,
    encode: Encode | None = None,
    draft: tuple[ServingEngine, Encode] | None = None,
) -> ServerHandle[Verifier]:
    """Run a verifier in the background; return once it listens.

    Args:
        engine: the target; by default loaded as configured.
        encode: turns prompts into token ids; by default as ``engine.loaded`` does.
        draft: the draft model beside it; by default loaded as configured.
    """
    engine = engine or load_engine(config)
    encode = encode or prompt_encoder(engine, config.limits)
    return ServerHandle(Verifier(config, engine, encode, draft or load_draft(config, engine)))


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
    set_threads(config.model, *([config.draft] if config.draft.path else []))
    engine = load_engine(config)
    encode = prompt_encoder(engine, config.limits)
    return Verifier(config, engine, encode, load_draft(config, engine))


def load_engine(config: VerifierConfig) -> ServingEngine:
    if config.stages.workers:
        return StagedEngine(config.model, config.stages, sessions=config.limits.max_sessions)
    return Engine(load(config.model), candidates=config.exit_candidates)


def load_draft(
    config: VerifierConfig, target: ServingEngine
) -> tuple[ServingEngine, Encode] | None:
    """Return the draft model beside ``target`` and the encoding of its prompts, if one is named.

    Raises:
        ModelError: it cannot be loaded.
        VocabularyMismatch: it has another tokenizer.
        ConfigError: it does not see pictures as the target does.
    """
    if not config.draft.path:
        return None
    draft, own = Engine(load(config.draft)), target.loaded
    path = config.draft.path
    shared_size(draft.vocabulary, own.shared_sizes, draft=path, target=own.config.path)
    if own.sees and not (draft.loaded.sees and _scales_alike(draft.loaded, own)):
        raise ConfigError(
            f"{path} does not read pictures in the size that {own.config.path} does",
            field="draft.path",
            remedy="name a draft model of the target's family, or none",
        )
    return draft, prompt_encoder(draft, config.limits)


def _scales_alike(one: LoadedModel, other: LoadedModel) -> bool:
    frames = ((640, 480), (1920, 1080))
    return all(
        scaled_size(*frame, one, "images") == scaled_size(*frame, other, "images")
        for frame in frames
    )


def prompt_encoder(engine: ServingEngine, limits: Limits) -> Encode:
    allowed = PromptLimits(
        max_characters=limits.max_prompt_chars,
        max_images=limits.max_images,
        max_pixels=limits.max_image_pixels,
        max_scans=limits.max_image_scans,
        max_turns=limits.max_turns,
    )
    return lambda prompt: encode(prompt, engine.loaded, allowed)
