"""Stage workers on a fleet of machines: Ray places them, starts them, and restarts those that die.

    fleet = RayFleet(WorkerConfig(model=...), count=4, gpus=1.0)
    with Pipeline(PipelineConfig(), plan, fleet.addresses) as pipeline: ...

A worker that has been restarted listens at another address, perhaps on another machine. A pipeline
asks for the addresses whenever it arranges a chain. Ray is an optional dependency.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from collab_llm_nodes.errors import ConfigError, Unavailable
from collab_llm_nodes.protocols.jupiter.worker_settings import WorkerConfig
from collab_llm_nodes.transport.logs import QUIET

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray takes; nothing here is put into it
_ANSWER_S = 2.0  # for an actor that is there to say where
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "GRPC_VERBOSITY": QUIET}


class RayFleet:
    """See the module docstring. With ``RAY_ADDRESS`` it uses that cluster, else one of its own.

    Args:
        config: of each worker; its address is chosen on the machine where Ray puts it.
        cpus, gpus: that Ray sets aside for each.

    Raises:
        ConfigError: Ray is not installed.
        Unavailable: not all workers have started in time.
    """

    def __init__(
        self,
        config: WorkerConfig,
        count: int,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        start_s: float = 300.0,
    ) -> None:
        for name, value in _ENVIRONMENT.items():  # Ray reads them at import
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"Ray is not installed: {error}",
                field="ray",
                remedy="pip install 'collab_llm_nodes[ray]'",
            ) from error
        self._ray: Any = ray
        self._own = not ray.is_initialized()
        if self._own:
            _start(ray)
        host = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1)(WorkerHost)
        self._actors: list[Any] = [host.remote(config) for _ in range(count)]
        started, late = ray.wait(
            [actor.address.remote() for actor in self._actors], num_returns=count, timeout=start_s
        )
        if late:
            self.close()
            raise Unavailable(
                f"{len(started)} of {count} workers have started",
                field="workers",
                remedy="see Ray's logs, and whether the cluster has room for them",
            )

    def addresses(self) -> list[str]:
        """Return the addresses of the workers that are there now."""
        asked = [actor.address.remote() for actor in self._actors]
        answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        found: list[str] = []
        for answer in answered:
            try:
                found.append(self._ray.get(answer))
            except self._ray.exceptions.RayError as error:  # it is being restarted
                log.warning("a worker is away: %s", str(error).splitlines()[0])
        return found

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


class WorkerHost:
    """A worker in a process of Ray's."""

    def __init__(self, config: WorkerConfig) -> None:
        import ray

        from collab_llm_nodes.models.threads import set_threads
        from collab_llm_nodes.protocols.jupiter.worker import start_worker

        set_threads(config.model)
        self._host = ray.util.get_node_ip_address()
        self._worker = start_worker(replace(config, address=f"{self._host}:0"))

    def address(self) -> str:
        """Return where it listens."""
        return f"{self._host}:{self._worker.port}"

    def process(self) -> int:
        """Return the number of its process."""
        return os.getpid()


def _start(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS", "local")
    if address == "local":
        ray.init(
            "local",
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    else:
        ray.init(address, runtime_env={"env_vars": _ENVIRONMENT})
