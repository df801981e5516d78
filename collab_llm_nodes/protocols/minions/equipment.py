"""Resources that all answers share: models, sandboxes, documents, prices, the audit log."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from collab_llm_nodes.assets import config_file
from collab_llm_nodes.chat.base import ChatModel
from collab_llm_nodes.chat.in_process import InProcessChat
from collab_llm_nodes.chat.ledger import EnergyMeter, Price, PriceTable
from collab_llm_nodes.chat.remote import RemoteChat
from collab_llm_nodes.config import from_yaml
from collab_llm_nodes.engine.engine import Engine
from collab_llm_nodes.errors import CollabError, ConfigError
from collab_llm_nodes.knowledge.encoders import Encoder, WordHashes
from collab_llm_nodes.knowledge.library import Library
from collab_llm_nodes.knowledge.text_encoder import TextEncoder, TextEncoderConfig
from collab_llm_nodes.models.loading import load
from collab_llm_nodes.protocols.base import Control, Resources
from collab_llm_nodes.protocols.minions.accounts import Accounts, AuditLog
from collab_llm_nodes.protocols.minions.embedded.remote import ROLE, open_planner
from collab_llm_nodes.protocols.minions.embedded.windows import WindowedChat, token_count
from collab_llm_nodes.protocols.minions.sandbox.host import Sandbox
from collab_llm_nodes.protocols.minions.served import (
    SERVER,
    WORDS,
    ChatModelConfig,
    CostConfig,
    ServedConfig,
    ServedMinions,
)
from collab_llm_nodes.protocols.minions.settings import FIELDS, SENTENCE

_SMALL = 10**9
"""Parameters below which a worker copies sentences better than it fills in fields."""
_MAX_WARNINGS = 20
"""Different warnings that are logged; requests may cause any number."""


class Equipment:
    """Resources of a server of Minion or MinionS. Thread-safe.

    Args:
        remote, local: models to use, and to close, instead of those that ``config`` names.

    Raises:
        ConfigError: a model, folder, price or file that does not exist.
        ModelError: a model cannot be loaded.
    """

    def __init__(
        self,
        config: ServedConfig,
        resources: Resources,
        *,
        remote: ChatModel | None = None,
        local: ChatModel | None = None,
    ) -> None:
        self._config = config
        self._log, self._warned = resources.log, set[str]()
        self._away = config.remote_model.at == SERVER
        self._prices = _prices(config.cost)
        with ExitStack() as opened:
            self.library = Library(config.library)
            opened.callback(self.library.close)
            self.audit = _audit_log(config, opened)
            self.encoder = _encoder(config.encoder)
            self.local = local or _chat(config.local_model, "local_model", opened)
            self.remote = remote or _chat(config.remote_model, "remote_model", opened)
            for given in filter(None, (remote, local)):
                opened.callback(given.close)
            self._sandboxes: queue.LifoQueue[Sandbox] = queue.LifoQueue()
            if isinstance(config, ServedMinions):
                for _ in range(config.parallel):
                    sandbox = Sandbox(config.limits)  # its first program starts its process
                    opened.callback(sandbox.close)
                    self._sandboxes.put(sandbox)
            self.warn(config)
            self._opened = opened.pop_all()
        self.parallel = config.parallel
        if config.cost.energy and EnergyMeter().joules() is None:
            resources.log.warning("cost.energy: this machine does not report its energy")

    def warn(self, config: ServedConfig) -> None:
        """Log each warning about ``config`` once, up to a limit."""
        for warning in config.warnings() if isinstance(config, ServedMinions) else ():
            self.warn_of(warning)

    def warn_of(self, warning: str) -> None:
        """Log a warning once, up to a limit of different ones."""
        if warning not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(warning)
            self._log.warning(warning)

    @property
    def worker_form(self) -> str:
        """Form of outputs that the local model manages: sentences for a small one in process."""
        model = self.local.reader if isinstance(self.local, WindowedChat) else self.local
        small = isinstance(model, InProcessChat) and model.parameters < _SMALL
        return SENTENCE if small else FIELDS

    def accounts(self, answer: str, config: ServedConfig) -> Accounts:
        """Return empty ledgers for the answer with this id."""
        return Accounts(
            answer,
            self.remote.name,
            self.local.name,
            away=self._away,
            max_bytes=config.privacy.max_bytes,
            audit=self.audit,
            price=self._price(config.cost),
            alpha=config.cost.alpha,
            meter=EnergyMeter() if config.cost.energy else None,
        )

    @contextmanager
    def sandbox(self, control: Control) -> Iterator[Sandbox]:
        """Lend a sandbox whose program is interrupted when the answer is cancelled.

        Raises:
            Cancelled, DeadlineExceeded: before a sandbox was free, or while it was in use.
        """
        left_s = min(max(0.0, control.due - time.monotonic()), threading.TIMEOUT_MAX)
        try:
            sandbox = self._sandboxes.get(timeout=left_s)
        except queue.Empty:
            control.check()
            raise
        lending = threading.Lock()
        lent = True

        def interrupt() -> None:
            with lending:
                if lent:  # at a late cancellation, another answer may have it
                    sandbox.interrupt()

        unregister = control.on_cancel(interrupt)
        try:
            control.check()
            yield sandbox
        finally:
            unregister()
            with lending:
                lent = False
            self._sandboxes.put(sandbox)
            control.check()  # an interrupted sandbox fails with other errors

    def health(self) -> Mapping[str, object]:
        """Return figures of the models for diagnostics."""
        figures: dict[str, object] = {"remote": self.remote.name, "local": self.local.name}
        for role, model in (("remote", self.remote), ("local", self.local)):
            if isinstance(model, WindowedChat):
                model = model.reader
            if isinstance(model, InProcessChat):
                figures |= {f"{role}_{name}": value for name, value in model.health().items()}
        return figures

    def close(self) -> None:
        """Free everything."""
        self._opened.close()

    def _price(self, config: CostConfig) -> Price | None:
        """Return the remote's price; None if the table has none."""
        name = config.priced_as or self.remote.name
        found = next((price for price in self._prices.prices if price.model == name), None)
        if found is None and self._away and not self._config.remote_model.server.local:
            self.warn_of(f"no price of {name}: costs are not counted; add it to {config.prices}")
        return found


def _chat(config: ChatModelConfig, field: str, opened: ExitStack) -> ChatModel:
    """Open one of the models; ``field`` is its place in the configuration."""
    try:
        if config.at == SERVER:
            chat: ChatModel = RemoteChat(config.server)
            opened.callback(chat.close)
            return chat
        if not config.model.path:
            raise ConfigError(
                "no model", field="path", remedy="name its folder, hub id or shipped name"
            )
        name = Path(config.model.path).name
        if config.role == ROLE:
            planner = open_planner(config.model, name, config.limits)
            opened.callback(planner.close)
            return planner
        loaded = load(config.model)
        engine = Engine(loaded)
        engine.warm_up()
        opened.callback(engine.close)
        chat = InProcessChat(engine, config.limits, name)
        opened.callback(chat.close)
        if config.window:
            return WindowedChat(chat, token_count(loaded.tokenizer), config.window)
        return chat
    except CollabError as error:
        branch = "server" if config.at == SERVER else "model"
        own = error.field if error.field == "role" else f"{branch}.{error.field}".rstrip(".")
        error.field = f"{field}.{own}"
        raise


def _encoder(config: TextEncoderConfig) -> Encoder:
    return WordHashes() if config.path == WORDS else TextEncoder(config)


def _audit_log(config: ServedConfig, opened: ExitStack) -> AuditLog | None:
    if not config.privacy.audit_file:
        return None
    log = AuditLog(config.privacy.audit_file)
    opened.callback(log.close)
    return log


def _prices(config: CostConfig) -> PriceTable:
    file = Path(config.prices).expanduser()
    table = from_yaml(PriceTable, file if file.is_file() else config_file(config.prices))
    if config.priced_as:
        table.of(config.priced_as)  # raises for a name that is not there
    return table
