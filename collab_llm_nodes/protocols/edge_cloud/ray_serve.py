"""The verifier as a Ray Serve application: replicas of the target at one address.

Ray's own processes import this module, so it must not import torch before a replica is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from collab_llm_nodes.errors import ConfigError
from collab_llm_nodes.protocols.edge_cloud import codec
from collab_llm_nodes.transport import ray_serve

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext

    from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig


class Replica(ray_serve.Replica):
    """One copy of the target in a process of its own."""

    factory = "collab_llm_nodes.protocols.edge_cloud.service:make_verifier"
    Session = ray_serve.Replica.accept

    async def Describe(
        self, request: bytes, grpc_context: RayServegRPCContext
    ) -> ray_serve.Encoded:
        """Describe this replica; all are alike but for their number of sessions."""
        return await self.answer("Describe", request, grpc_context)


def add_services(servicer: object, server: grpc.Server) -> None:
    """Declare the verifier's methods to Serve, which finds this function by its path."""
    ray_serve.add_methods(server, codec.SERVICE, "Session", ["Describe"])


def serve(config: VerifierConfig, on_listening: Callable[[int], None] = lambda port: None) -> None:
    """Serve replicas of the verifier; see ``transport.ray_serve.serve``.

    Raises:
        ConfigError: as there, or the model is for GPUs and no replica reserves one.
    """
    if config.model.device.startswith("cuda") and not config.ray.gpus_per_replica:
        raise ConfigError(
            f"Ray hides GPUs that a replica has not reserved, and the model is for"
            f" {config.model.device}",
            field="ray.gpus_per_replica",
            remedy="give 1, or a part of 1 where replicas share a GPU",
        )
    methods = f"{__name__}.{add_services.__name__}"
    application = ray_serve.Application("verifier", Replica, methods)
    ray_serve.serve(application, config, config.ray, on_listening)
