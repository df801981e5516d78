"""Settings of a server of Minion or MinionS, beyond those of its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from collab_llm_nodes.chat.in_process import InProcessConfig
from collab_llm_nodes.chat.remote import RemoteConfig as ServerConfig
from collab_llm_nodes.config import (
    ANY,
    check_ranges,
    fixed,
    from_mapping,
    merged,
    ranked,
    setting,
)
from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.knowledge.library import LibraryConfig
from collab_llm_nodes.knowledge.retrieval import RetrievalConfig
from collab_llm_nodes.knowledge.text_encoder import TextEncoderConfig
from collab_llm_nodes.models.loading import ModelConfig
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE
from collab_llm_nodes.protocols.minions.settings import (
    CHAT_PRESETS,
    PRESETS,
    MinionConfig,
    MinionsConfig,
)
from collab_llm_nodes.protocols.parameter_files import server_parameters

IN_PROCESS, SERVER = "in_process", "server"
PROTOCOL, REMOTE_ONLY, LOCAL_ONLY, RAG = "protocol", "remote_only", "local_only", "rag"
WAYS = (REMOTE_ONLY, RAG, PROTOCOL, LOCAL_ONLY)
WORDS = "words"
S = TypeVar("S", bound="ServedConfig")


@dataclass(frozen=True)
class ChatModelConfig:
    """One of the two models: in this process, or on a server."""

    at: str = setting(
        IN_PROCESS,
        "in_process: the model `model`; server: `server`, with OpenAI's API.",
        choices=(IN_PROCESS, SERVER),
        read_only=True,
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    role: str = setting(
        "",
        "planner: `model` plans with a low-rank change of that name beside it, as the embedded"
        " target does. Empty: it answers as it is. In process only.",
        choices=("", ROLE),
        read_only=True,
    )
    window: int = setting(
        0,
        "Texts of more tokens are read window by window, for models with a small context; the"
        " reply has a line per window that answers. 0: never. In process only.",
        low=0,
        high=1 << 20,
        read_only=True,
    )
    limits: InProcessConfig = field(default_factory=InProcessConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("role", "window"):
            if getattr(self, name) and self.at != IN_PROCESS:
                raise ConfigError(
                    f"needs a model in process, and at is {self.at}",
                    field=name,
                    remedy="leave it out",
                )


@dataclass(frozen=True)
class PrivacyConfig:
    """Bounds on the texts that the remote model reads, and their record."""

    max_bytes: int = fixed(
        0, "Texts sent to the remote per answer; 0: no limit [bytes].", low=0, high=1 << 40
    )
    audit_file: str = setting(
        "",
        "File to which a line of JSON, with size and hash, is added for each text before it is"
        " sent. If that fails, nothing is sent. Empty: none.",
        read_only=True,
    )


@dataclass(frozen=True)
class CostConfig:
    """Prices of the remote model."""

    prices: str = setting(
        "prices.yaml", "Price table: a file, or its name in the config folder.", read_only=True
    )
    priced_as: str = setting("", "Model of the table; empty: the remote's own name.")
    alpha: float = setting(
        4.0, "Price of a token of a reply, in prompt tokens (paper 000, section 3).", low=1, high=5
    )
    energy: bool = setting(
        False, "Measure the energy of this machine's processors, all processes together."
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class LargeConfig:
    """Documents that are too large to be read whole."""

    characters: int = fixed(
        2_000_000,
        "If all documents together are longer, only the best `passages` are read and the answer is"
        " marked as partial [characters].",
        low=1000,
        high=1 << 31,
    )
    passages: int = fixed(200, "Passages of longer documents that are read.", low=1, high=10_000)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ServedConfig:
    """Settings of a server of Minion or MinionS."""

    presets: ClassVar[Mapping[str, Any]] = {}
    """Settings of the machine, by preset."""

    preset: str = setting(
        "",
        "Defaults of the protocol's settings: those of an experiment of paper 000, or of the"
        " embedded models (docs/minions.md). Explicit values override them. Empty: none.",
        choices=("", *PRESETS),
        read_only=True,
    )
    way: str = setting(
        PROTOCOL,
        "remote_only: the remote reads everything; rag: the remote reads the best passages;"
        " protocol: Minion or MinionS; local_only: the local model alone.",
        choices=WAYS,
        per_request=ranked(*((way,) for way in WAYS)),
    )
    store: str = setting(
        "",
        "Store whose documents are read as well, by its name in library.stores.",
        per_request=ANY,
    )
    remote_model: ChatModelConfig = field(default_factory=ChatModelConfig)
    local_model: ChatModelConfig = field(default_factory=ChatModelConfig)
    library: LibraryConfig = field(default_factory=LibraryConfig)
    retrieval: RetrievalConfig = field(default_factory=lambda: RetrievalConfig(chunks=50))
    encoder: TextEncoderConfig = field(default_factory=lambda: TextEncoderConfig(path=WORDS))
    large: LargeConfig = field(default_factory=LargeConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    parallel: int = setting(4, "Concurrent answers.", low=1, high=64, read_only=True)

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def of_preset(cls: type[S], name: str) -> S:
        """Return the defaults of the preset ``name``; empty means those of the class.

        Raises:
            ConfigError: there is no such preset.
        """
        defaults = cls(preset=name)
        if not name:
            return defaults
        own = cls.presets[name]
        return replace(defaults, **{each.name: getattr(own, each.name) for each in fields(own)})


@dataclass(frozen=True)
class ServedMinion(MinionConfig, ServedConfig):
    """Settings of a server of Minion alone."""

    presets = CHAT_PRESETS

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)


@dataclass(frozen=True)
class ServedMinions(MinionsConfig, ServedConfig):
    """Settings of a server of MinionS, which may host Minion as well."""

    presets = PRESETS

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)


def served_minions(file: str) -> ServedMinions:
    """Read the parameters of ``minions_server`` from a ROS 2 parameter file, without ROS 2.

    Args:
        file: a path, or a name in the config folder.

    Raises:
        ConfigError: there is no such file, or it has no such parameters.
    """
    given = server_parameters(file, "minions_server", ("host_minion",))
    defaults = ServedMinions.of_preset(str(given.get("preset", "")))
    return from_mapping(ServedMinions, merged(asdict(defaults), given))
